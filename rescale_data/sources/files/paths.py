"""Finds the files that paths stand for (globs, folders, lists, URLs), in the same order on every machine."""

from __future__ import annotations

import errno
import glob
import hashlib
import logging
import os
import posixpath
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from rescale_data.errors import require_type
from rescale_data.sources.files.local_store import LocalStore
from rescale_data.sources.files.ranges import ChangedFileError, MappedFile, RangeReader
from rescale_data.sources.files.remote import Remote, RemoteFile, attempt, reconnected, wait_random_time
from rescale_data.state import Ints

_NUM_PROBES = 16
_PROBE_BYTES = 2**12
_VERSION_KEYS = ("ETag", "etag", "mtime", "LastModified", "Last-Modified", "created")
_HIDDEN_NAME = re.compile(r"(?<=/)(_|[.][^/])")
_warned_roots: set[str] = set()
_log = logging.getLogger("rescale_data")

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
StorageOptions: TypeAlias = Mapping[str, Any] | None
"""Arguments of a filesystem of fsspec."""


@dataclass(frozen=True)
class Files:
    """The files of a source, sorted by path.

    Args:
        root: The folder above all files.
        names: Paths of the files below the root, with forward slashes.
        sizes: Bytes of each file.
        filesystem: Filesystem of fsspec; `None` for the local one.
        remote: Options for reading files that are not local.
        stamps: For each file, a text that changes with it: its time of writing or its ETag; "" if the filesystem has neither.
        store: Store on a local disk for data that was read; `None` to keep nothing on disk.
    """

    root: str
    names: Sequence[str]
    sizes: Sequence[int] | Ints
    filesystem: AbstractFileSystem | None = None
    remote: Remote = field(default_factory=Remote)
    stamps: Sequence[str] = ()
    store: LocalStore | None = None

    def path(self, file: int) -> str:
        return _prefix(self.root) + self.names[file]

    def find_name(self, name: str, *, allow_ends: bool = True) -> int:
        """Find a file by its name below the root, its path, its URL, or the end of its path; return its index.

        Args:
            name: The name.
            allow_ends: False if the end of a path is an error: it could become the name of another file, which joins later.
        """
        names, path_end = self.names, name.rpartition("://")[2]
        files: list[int] = []
        for end in (path_end, posixpath.normpath(path_end)):  # in a bucket, a//b is not a/b
            index = bisect_left(names, end)
            if index < len(names) and names[index] == end:
                return index
            files = files or [file for file in range(len(names)) if f"/{self.path(file)}".endswith(f"/{end}")]
        if len(files) != 1:
            raise ValueError(f"{len(files)} of the files below {self.root} are named {name!r}: give the path of one.")
        path = self.path(files[0])
        if not allow_ends and path.rpartition("://")[2] not in (path_end, posixpath.normpath(path_end)):
            raise ValueError(
                f"{name!r} is the end of {path}, and may become the name of another file: give {names[files[0]]!r}."
            )
        return files[0]

    def with_files(self, names: Sequence[str], sizes: Sequence[int] | Ints, version_stamps: Sequence[str]) -> Files:
        """Return a copy of this `Files` with other files, below the same root."""
        return replace(self, names=names, sizes=sizes, stamps=version_stamps)

    def select(self, file_indices: Sequence[int]) -> Files:
        """Return a `Files` with only the files of the given numbers."""
        names, sizes = [self.names[file] for file in file_indices], [int(self.sizes[file]) for file in file_indices]
        return self.with_files(names, sizes, [self.stamps[file] for file in file_indices])

    def probe_digest(self, file: int) -> str:
        """Return a digest of sampled bytes of a local file; empty for a remote file, which has an ETag.

        The samples are the head, the tail and 16 places between them.
        """
        if self.filesystem is not None:
            return ""
        last_probe, digest = max(0, int(self.sizes[file]) - _PROBE_BYTES), hashlib.blake2b(digest_size=8)
        with open(self.path(file), "rb", buffering=0) as opened:
            for offset in np.linspace(0, last_probe, _NUM_PROBES + 2, dtype=np.int64).tolist():
                digest.update(os.pread(opened.fileno(), _PROBE_BYTES, offset))
        return digest.hexdigest()

    def is_unchanged_copy(self, file: int, earlier_digest: str) -> bool:
        """True if a local file still has the given digest of sampled bytes.

        Then only its time has changed, as by a copy. Warns once.
        """
        if not earlier_digest or self.probe_digest(file) != earlier_digest:
            return False
        if self.root not in _warned_roots:
            _warned_roots.add(self.root)
            _log.warning(
                "Files below %s, %s among them, have other times than when their index was made. Their heads, their tails and "
                "%d places of each hold the same bytes, and they count as the same.", self.root, self.names[file], _NUM_PROBES,
            )  # fmt: skip
        return True

    def open(self, file: int) -> Any:
        """Open a file for random access, as a file of pyarrow."""
        return pa.OSFile(self._local_path(file), "rb") if self.filesystem is None else self.reader_of(file).as_arrow()

    def reader_of(self, file: int) -> RangeReader:
        """Return an object that reads byte ranges of a file."""
        if self.filesystem is None:
            return MappedFile(self._local_path(file))
        size, version_stamp = int(self.sizes[file]), self.stamps[file]
        return RemoteFile(self.filesystem, self.path(file), self.remote, size, version_stamp, self.store)

    def _local_path(self, file: int) -> str:
        """Return the path of a local file; raise `ChangedFileError` if its size has changed since it was listed."""
        path, listed_size = self.path(file), int(self.sizes[file])
        if (size := os.stat(path).st_size) != listed_size:
            raise ChangedFileError(f"it has changed: it had {listed_size} bytes when it was listed and has {size}")
        return path

    def other_file_reader(self, path: str) -> RangeReader:
        """Return an object that reads byte ranges of another file in the same filesystem, given its path."""
        if self.filesystem is None:
            return MappedFile(path)
        filesystem = reconnected(self.filesystem)
        info = attempt(self.remote, filesystem.unstrip_protocol(path), partial(_info_with_size, filesystem, path), 0)
        return RemoteFile(filesystem, path, self.remote, int(info["size"]), _version_stamp(info), self.store)


def find_matching_files(
    paths: Paths, suffixes: Sequence[str], options: StorageOptions = None, remote: Remote | None = None
) -> Files:
    """Return the files that paths, globs, folders or URLs stand for, sorted by path.

    Args:
        paths: A glob (``**`` for any folders; it leaves out names that begin with a dot, unless it has one itself), a folder
            (all files below it that end in one of ``suffixes``, except names that begin with a dot or an underscore), a file,
            or a list of these; each local or any fsspec URL.
        suffixes: Ends of file names; other files in a folder are left out.
        options: Arguments of the fsspec filesystem.
        remote: Options for reading files behind URLs.

    Raises:
        FileNotFoundError: One of the paths stands for no file.
        TypeError: ``paths`` is neither a path nor a list of paths.
        ValueError: Local paths and URLs, or URLs of different filesystems, are in one list; a symbolic link leads in a circle;
            or a server gives no size of a file.
    """
    if remote is not None:
        require_type(Remote, "an rd.Remote", remote=remote)
    items = [paths] if isinstance(paths, str | os.PathLike) else paths
    items = list(items) if isinstance(items, Iterable) else [items]  # pyright: ignore[reportUnnecessaryIsInstance]
    if not all(isinstance(path, str | os.PathLike) for path in items):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"paths={paths!r} is a {type(paths).__name__}: give a glob, a folder, a file, or a list.")
    items = [os.fspath(path) for path in items]
    if not items or "" in items:
        raise FileNotFoundError(f"No paths were given, {items}: give a glob, a folder or a list of files.")
    urls = [path for path in items if "://" in path]
    if not urls:
        pairs = [_find_local_files(item, suffixes) for item in items]
        stats = {path: os.stat(path) for _, matches in pairs for path in matches}
        stamps = {path: (stat.st_size, str(stat.st_mtime_ns)) for path, stat in stats.items()}
        return _build_files([folder for folder, _ in pairs], stamps)
    if len(urls) != len(items):
        raise ValueError(f"Local paths and URLs in one list, {items}: give a source for each.")
    return _remote(items, suffixes, options or {}, remote or Remote())


def _build_files(given_folders: Iterable[str], size_stamp_by_path: Mapping[str, tuple[int, str]]) -> Files:
    """Return files named from the common folder of ``given_folders``, so that names stay if files join in any of these."""
    folders = [path.split("/") for path in given_folders] + [path.split("/")[:-1] for path in size_stamp_by_path]
    shared = posixpath.commonprefix(folders)
    root = "/".join(shared).rstrip("/") or "/"[: len(shared)]  # not normalized: in a bucket, a//b is not a/b
    infos_by_name = {path.removeprefix(_prefix(root)): info for path, info in size_stamp_by_path.items()}
    names = tuple(sorted(infos_by_name))
    sizes, version_stamps = zip(*(infos_by_name[name] for name in names), strict=True)
    return Files(root, names, sizes, stamps=version_stamps)


def _folder_of(pattern: str) -> str:
    """Return the folder that a glob names before its first wildcard; ``[*]`` is a star, as `glob.escape` writes it."""
    fixed_part = re.match(r"([^*?[]|\[[*?[]\])*", pattern)[0]  # pyright: ignore[reportOptionalSubscript]
    return posixpath.dirname(re.sub(r"\[(.)\]", r"\1", fixed_part))


def _prefix(root: str) -> str:
    """Return the part of a file's path before its relative name: the root folder of all files, with a slash."""
    return root if root in ("", "/") else f"{root}/"


def _find_local_files(user_input: str, suffixes: Sequence[str]) -> tuple[str, list[str]]:
    """Return the folder that a path, a folder or a glob names, and the files that it stands for."""
    pattern = os.path.expanduser(user_input)
    path = os.path.abspath(pattern)
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        folder = path
        try:
            matches = _filter_names(_walk_local(path), path, suffixes)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ValueError(
                f"{error.filename} is a symbolic link that leads in a circle, back to itself or to a folder above it. Remove "
                f"it, or give a glob or a list of files that leaves it out."
            ) from None
    elif os.path.exists(path):
        matches = [path]
    else:
        folder = os.path.abspath(_folder_of(pattern))
        matches = [file for file in map(os.path.abspath, glob.glob(pattern, recursive=True)) if not os.path.isdir(file)]
    _require_matches(matches, user_input, suffixes, os.path.isdir(path))
    return folder, matches


def _walk_local(folder: str, parent_stats: Sequence[os.stat_result] = ()) -> Iterator[str]:
    """Yield the paths of all files below a folder, except in folders whose names begin with a dot or an underscore."""
    folder_stat = os.stat(folder)
    if any(os.path.samestat(folder_stat, parent) for parent in parent_stats):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), folder)
    for entry in os.scandir(folder):  # os.walk would skip folders that it cannot list
        if not entry.is_dir():
            yield entry.path
        elif not entry.name.startswith((".", "_")):
            yield from _walk_local(entry.path, (*parent_stats, folder_stat))


def read_if_exists(path: str, options: StorageOptions, remote: Remote | None) -> bytes | None:
    """Return the bytes of a small file, local or behind a URL; `None` if there is no such file."""
    try:
        if "://" not in path:
            return Path(path).expanduser().read_bytes()
        filesystem, inner_path = url_to_fs(path, **(options or {}))
        return attempt(remote or Remote(), path, partial(filesystem.cat_file, inner_path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _remote(user_input: Sequence[str], suffixes: Sequence[str], options: Mapping[str, Any], remote: Remote) -> Files:
    wait_random_time("listing")
    infos_by_path: dict[str, Any] = {}
    folders: list[str] = []
    filesystem: Any = None
    for url in user_input:
        previous_filesystem = filesystem
        filesystem, path = url_to_fs(url, **options)
        if isinstance(filesystem, LocalFileSystem):
            path = os.path.abspath(path)  # a file that is given twice, as a//b and a/b, would be read twice
        if filesystem is not previous_filesystem:
            filesystem.invalidate_cache()  # a listing that this process made earlier may be out of date
        if previous_filesystem is not None and type(previous_filesystem) is not type(filesystem):
            raise ValueError(f"URLs of different filesystems in one list, {list(user_input)}: give a source for each.")
        is_folder, matches = attempt(remote, url, partial(_list_files_at, filesystem, path, suffixes))
        if is_folder:
            matches = {match: matches[match] for match in _filter_names(matches, path, suffixes)}
        _require_matches(matches, url, suffixes, is_folder)
        if path not in matches:  # else it is a file, whose name may have a star
            folders.append(path.rstrip("/") if is_folder else _folder_of(path))
        infos_by_path.update(matches)
    for path, info in infos_by_path.items():
        if info["size"] is None:  # a web page that lists files has no sizes
            infos_by_path[path] = attempt(remote, path, partial(_info_with_size, filesystem, path))
    stamps = {path: (int(info["size"]), _version_stamp(info)) for path, info in infos_by_path.items()}
    return replace(_build_files(folders, stamps), filesystem=filesystem, remote=remote)


def _list_files_at(filesystem: Any, path: str, suffixes: Sequence[str]) -> tuple[bool, dict[str, Any]]:
    """Return ``(True, all files below it)`` if a path is a folder, else ``(False, the files that the path stands for)``."""
    try:
        if glob.has_magic(path) and not filesystem.isdir(path) and (matches := _expand_glob(filesystem, path)):
            num_dots = path.count("/.")  # of names that begin with a dot
            return False, {match: info for match, info in matches.items() if match.count("/.") <= num_dots}
        # The filesystem of http calls each path a file, even a folder
        if path.endswith(tuple(suffixes)) or not filesystem.isdir(path):
            info = filesystem.info(path)
            if info["type"] == "file":
                return False, {path: info}
        has_own_find = not _uses_default_find(filesystem)
        return True, filesystem.find(path, detail=True) if has_own_find else _find_files_below(filesystem, path)
    except FileNotFoundError as error:
        http_error: Any = error.__cause__
        if type(http_error).__module__.startswith("aiohttp") and getattr(http_error, "status", None) not in (404, 410):
            raise http_error from None  # fsspec raises FileNotFoundError for any failed answer of http
        return False, {}


def _info_with_size(filesystem: Any, path: str) -> Any:
    info = _list_files_at(filesystem, path, (path,))[1].get(path)
    if info is None:
        raise FileNotFoundError("it was listed")
    if info["size"] is None:
        raise ValueError(f"{path}: the server does not say how many bytes it has, and no part of it can be asked for.")
    return info


def _expand_glob(filesystem: Any, pattern: str) -> dict[str, Any]:
    """Return the files that match a glob, with their details, by path."""
    if not _uses_default_find(filesystem):
        matches: dict[str, Any] = filesystem.glob(pattern, detail=True)
        return {match: info for match, info in matches.items() if info["type"] == "file"}
    root = posixpath.dirname(pattern[: re.search(r"[*?[]", pattern).start()])  # pyright: ignore[reportOptionalMemberAccess]
    levels = None if "**" in pattern else pattern.count("/", len(root) + 1)
    matcher = re.compile(glob_translate(pattern))
    return {match: info for match, info in _find_files_below(filesystem, root, levels).items() if matcher.match(match)}


def _uses_default_find(filesystem: Any) -> bool:
    """True if a filesystem finds files by fsspec's default code, which silently skips folders that it fails to list."""
    if isinstance(filesystem, AsyncFileSystem):
        return type(filesystem)._find is AsyncFileSystem._find  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    return type(filesystem).find is AbstractFileSystem.find


def _find_files_below(filesystem: Any, folder: str, max_depth: int | None = None) -> dict[str, Any]:
    """Return all files below a folder, or down to ``max_depth`` levels of folders below it.

    A folder that cannot be listed is an error. fsspec's ``walk(on_error="raise")`` raises for the first folder only, and leaves
    out folders below it that fail.
    """
    matches: dict[str, Any] = {}
    for info in filesystem.ls(folder, detail=True):
        name = info["name"].rstrip("/")
        if info["type"] != "directory":
            matches[name] = info
        elif name != folder.rstrip("/") and max_depth != 0:
            matches |= _find_files_below(filesystem, name, None if max_depth is None else max_depth - 1)
    return matches


def _version_stamp(info: Mapping[str, Any]) -> str:
    return str(next((info[key] for key in _VERSION_KEYS if key in info), ""))


def _filter_names(paths: Iterable[str], root: str, suffixes: Sequence[str]) -> list[str]:
    """Return the paths that end in one of the suffixes, and have no name below the root that begins with "." or "_"."""
    start = len(root.rstrip("/")) + 1
    return [path for path in paths if path.endswith(tuple(suffixes)) and not _HIDDEN_NAME.search(path, start)]


def _require_matches(matches: Iterable[str], user_input: str, suffixes: Sequence[str], is_folder: bool) -> None:
    if not list(matches):
        problem = f"is a folder without files that end in {', '.join(suffixes)}" if is_folder else "matches no file"
        raise FileNotFoundError(
            f"{user_input!r} {problem} (seen from {os.getcwd()}). Give a glob such as 'corpus/*{suffixes[0]}' in quotes, a "
            f"folder, a list of files, or an fsspec URL."
        )
