"""Find the files that paths stand for (globs, folders, lists, URLs), in the same order on every machine."""

from __future__ import annotations

import errno
import glob
import hashlib
import logging
import os
import posixpath
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.utils import glob_translate

from rescale_data.errors import require
from rescale_data.sources.arrow_types import ArrowFile
from rescale_data.sources.files.local_store import LocalStore
from rescale_data.sources.files.ranges import Mapped, Ranges
from rescale_data.sources.files.remote import Remote, RemoteFile, attempt, of_this_process, spread_out
from rescale_data.state import Ints

_NUM_PROBES = 16
_PROBE_BYTES = 2**12
_PROBING_THREADS = 16
_warned: set[str] = set()
_log = logging.getLogger("rescale_data")

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Files:
    """The files of a source, sorted by path.

    Args:
        root: The folder above all of them.
        names: Paths from the root, with forward slashes.
        sizes: Bytes of each.
        filesystem: Of fsspec; `None` for the local one.
        remote: How to read them, where they are not local.
        stamps: What changes when each of them does: when it was written, as far as its filesystem tells.
        store: Where what was read of them is kept on a local disk; `None` for nowhere.
    """

    root: str
    names: Sequence[str]
    sizes: Sequence[int] | Ints
    filesystem: AbstractFileSystem | None = None
    remote: Remote = field(default_factory=Remote)
    stamps: Sequence[str] = ()
    store: LocalStore | None = None

    def path(self, file: int) -> str:
        return posixpath.join(self.root, self.names[file])

    def listed(self, names: Sequence[str], sizes: Sequence[int] | Ints, stamps: Sequence[str]) -> Files:
        """Others, below the same folder."""
        return replace(self, names=names, sizes=sizes, stamps=stamps)

    def some(self, files: Sequence[int]) -> Files:
        """Return the files of these numbers."""
        names, sizes = [self.names[file] for file in files], [int(self.sizes[file]) for file in files]
        return self.listed(names, sizes, [self.stamps[file] for file in files])

    def probes(self) -> list[str]:
        """Return `probe` of each file."""
        with ThreadPoolExecutor(_PROBING_THREADS) as pool:
            return list(pool.map(self.probe, range(len(self.names))))

    def probe(self, file: int) -> str:
        """Return a digest of the head, the tail and 16 places of a local file; of a remote one, whose ETag tells, ""."""
        if self.filesystem is not None:
            return ""
        return _probe(self.path(file), int(self.sizes[file]), self.stamps[file])

    def is_copy(self, file: int, probe: str) -> bool:
        """True if a local file has this probe: it was copied, with another time, and not changed. One warning says so."""
        if not probe or self.probe(file) != probe:
            return False
        if self.root not in _warned:
            _warned.add(self.root)
            _log.warning(
                "Files below %s, %s among them, have other times than when their index was made. Their heads, their tails and "
                "%d places of each hold the same bytes, and they count as the same.", self.root, self.names[file], _NUM_PROBES,
            )  # fmt: skip
        return True

    def open(self, file: int) -> ArrowFile:
        """The file, to be read at random."""
        return pa.OSFile(self._local(file), "rb") if self.filesystem is None else self.ranges(file).whole()

    def ranges(self, file: int) -> Ranges:
        """The same, a range at a time."""
        if self.filesystem is None:
            return Mapped(self._local(file))
        size, stamp = int(self.sizes[file]), self.stamps[file]
        return RemoteFile(self.filesystem, self.path(file), self.remote, size, stamp, self.store)

    def _local(self, file: int) -> str:
        """The path of a file that is still as large as it was listed."""
        path, listed = self.path(file), int(self.sizes[file])
        if (size := os.stat(path).st_size) != listed:
            raise OSError(f"it has changed: it had {listed} bytes when it was listed and has {size}")
        return path

    def beside(self, path: str) -> Ranges:
        """Another file where these are."""
        if self.filesystem is None:
            return Mapped(path)
        filesystem = of_this_process(self.filesystem)
        info = attempt(self.remote, filesystem.unstrip_protocol(path), partial(filesystem.info, path), 0)
        return RemoteFile(filesystem, path, self.remote, int(info["size"]), _stamp(info), self.store)


@lru_cache(maxsize=2**16)
def _probe(path: str, size: int, stamp: str) -> str:
    del stamp  # what is cached is of this time
    digest = hashlib.blake2b(digest_size=8)
    with open(path, "rb", buffering=0) as file:
        for offset in np.linspace(0, max(0, size - _PROBE_BYTES), _NUM_PROBES + 2, dtype=np.int64).tolist():
            digest.update(os.pread(file.fileno(), _PROBE_BYTES, offset))
    return digest.hexdigest()


def find(
    paths: Paths,
    suffixes: Sequence[str],
    storage_options: Mapping[str, Any] | None = None,
    remote: Remote | None = None,
) -> Files:
    """The files that ``paths`` stands for.

    Args:
        paths: A glob (``**`` for any folders), a folder (all files below it that end in one of ``suffixes``, except names
            that begin with a dot or an underscore), a file, or a list of these; each local or any fsspec URL.
        suffixes: What a file in a folder must end in.
        storage_options: For the fsspec filesystem.
        remote: How to read files of URLs.

    Raises:
        FileNotFoundError: One of the paths stands for no file.
        TypeError: ``paths`` is neither a path nor a list of them.
    """
    if remote is not None:
        require(Remote, "an rd.Remote", remote=remote)
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    given = list(given) if isinstance(given, Iterable) else [given]  # pyright: ignore[reportUnnecessaryIsInstance]
    if not all(isinstance(path, str | os.PathLike) for path in given):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"paths={paths!r} is a {type(paths).__name__}: give a glob, a folder, a file, or a list of these."
        )
    given = [os.fspath(path) for path in given]
    if not given or "" in given:
        raise FileNotFoundError(f"No paths were given, {given}: give a glob, a folder or a list of files.")
    urls = [path for path in given if "://" in path]
    if not urls:
        return _files({path: info for item in given for path, info in _local(item, suffixes)})
    if len(urls) != len(given):
        raise ValueError(f"Local paths and URLs in one list, {given}: give a source for each.")
    return _remote(given, suffixes, storage_options or {}, remote or Remote())


def _files(found: Mapping[str, tuple[int, str]]) -> Files:
    scheme = next(iter(found)).rpartition("://")[
        :2
    ]  # which some filesystems leave to their paths, as that of http does
    below = {path.removeprefix("".join(scheme)): info for path, info in found.items()}
    root = posixpath.commonpath([posixpath.dirname(path) for path in below])
    by_name = {posixpath.relpath(path, root): info for path, info in below.items()}
    names = tuple(sorted(by_name))
    sizes, stamps = zip(*(by_name[name] for name in names), strict=True)
    return Files("".join(scheme) + root, names, sizes, stamps=stamps)


def _local(given: str, suffixes: Sequence[str]) -> list[tuple[str, tuple[int, str]]]:
    path = os.path.abspath(os.path.expanduser(given))
    if os.path.isdir(path):
        with _no_circle():
            found = _wanted(_local_below(path), path, suffixes)
    elif os.path.exists(path):
        found = [path]
    else:
        found = [match for match in glob.glob(path, recursive=True) if os.path.isfile(match)]
    _refuse_none(found, given, suffixes, os.path.isdir(path))
    return [(Path(match).as_posix(), _facts(os.stat(match))) for match in found]


@contextmanager
def _no_circle() -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(
            f"{error.filename} is a symbolic link that leads in a circle, back to itself or to a folder above it. Remove it, "
            f"or give a glob or a list of files that leaves it out."
        ) from None


def _facts(info: os.stat_result) -> tuple[int, str]:
    return info.st_size, str(info.st_mtime_ns)


def _local_below(folder: str, above: Sequence[os.stat_result] = ()) -> Iterator[str]:
    """All files below a folder, except in folders whose names begin with a dot or an underscore."""
    here = os.stat(folder)
    if any(os.path.samestat(here, each) for each in above):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), folder)
    for entry in os.scandir(folder):  # os.walk would leave out what it cannot list
        if not entry.is_dir():
            yield entry.path
        elif not entry.name.startswith((".", "_")):
            yield from _local_below(entry.path, (*above, here))


def read_if_there(path: str, options: Mapping[str, Any] | None, remote: Remote | None) -> bytes | None:
    """A small file, local or behind a URL; `None` where there is none."""
    try:
        if "://" not in path:
            return Path(path).expanduser().read_bytes()
        filesystem, inner = url_to_fs(path, **(options or {}))
        return attempt(remote or Remote(), path, partial(filesystem.cat_file, inner))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _remote(given: Sequence[str], suffixes: Sequence[str], options: Mapping[str, Any], remote: Remote) -> Files:
    spread_out("listing")
    infos: dict[str, Any] = {}
    filesystem: Any = None
    for url in given:
        before = filesystem
        filesystem, path = url_to_fs(url, **options)
        if before is not None and type(before) is not type(filesystem):
            raise ValueError(f"URLs of different filesystems in one list, {list(given)}: give a source for each.")
        folder, found = attempt(remote, url, partial(_look, filesystem, path, suffixes))
        if folder:
            found = {match: found[match] for match in _wanted(found, path, suffixes)}
        _refuse_none(found, url, suffixes, folder)
        infos.update(found)
    for path, info in infos.items():
        if info["size"] is None:  # a page that lists files does not say it
            infos[path] = attempt(remote, path, partial(_sized, filesystem, path))
    files = _files({path: (int(info["size"]), _stamp(info)) for path, info in infos.items()})
    return replace(files, filesystem=filesystem, remote=remote)


def _look(filesystem: Any, path: str, suffixes: Sequence[str]) -> tuple[bool, dict[str, Any]]:
    """Return True for a folder, with all files below it; else False, with the files that the path stands for."""
    try:
        if glob.has_magic(path) and not filesystem.isdir(path):
            return False, _matches(filesystem, path)
        if path.endswith(tuple(suffixes)) or not filesystem.isdir(
            path
        ):  # of http each path is a file, a folder as well
            info = filesystem.info(path)
            if info["type"] == "file":
                return False, {path: info}
        return True, _below(filesystem, path) if _walks(filesystem) else filesystem.find(path, detail=True)
    except FileNotFoundError as error:
        cause: Any = error.__cause__
        if type(cause).__module__.startswith("aiohttp") and getattr(cause, "status", None) not in (404, 410):
            raise cause from None  # fsspec says of each answer of http that there is no such file
        return False, {}


def _sized(filesystem: Any, path: str) -> Any:
    info = _look(filesystem, path, (path,))[1].get(path)
    if info is None:
        raise FileNotFoundError("it was listed")
    if info["size"] is None:
        raise ValueError(f"{path}: the server does not say how many bytes it has, and no part of it can be asked for.")
    return info


def _matches(filesystem: Any, pattern: str) -> dict[str, Any]:
    """The files that a glob stands for."""
    if not _walks(filesystem):
        found: dict[str, Any] = filesystem.glob(pattern, detail=True)
        return {match: info for match, info in found.items() if info["type"] == "file"}
    root = posixpath.dirname(pattern[: re.search(r"[*?[]", pattern).start()])  # pyright: ignore[reportOptionalMemberAccess]
    depth = None if "**" in pattern else pattern.count("/", len(root) + 1)
    chosen = re.compile(glob_translate(pattern))
    return {match: info for match, info in _below(filesystem, root, depth).items() if chosen.match(match)}


def _walks(filesystem: Any) -> bool:
    """True if it finds files as fsspec does by default, folder by folder, and leaves out those that it fails to list."""
    if isinstance(filesystem, AsyncFileSystem):
        return type(filesystem)._find is AsyncFileSystem._find  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    return type(filesystem).find is AbstractFileSystem.find


def _below(filesystem: Any, folder: str, depth: int | None = None) -> dict[str, Any]:
    """Return all files below a folder, or in it and ``depth`` levels of folders below. A folder that cannot be listed is an
    error: fsspec's ``walk(on_error="raise")`` raises for the first folder alone, and leaves out those below that fail."""
    found: dict[str, Any] = {}
    for info in filesystem.ls(folder, detail=True):
        name = info["name"].rstrip("/")
        if info["type"] != "directory":
            found[name] = info
        elif name != folder.rstrip("/") and depth != 0:
            found |= _below(filesystem, name, None if depth is None else depth - 1)
    return found


def _stamp(info: Mapping[str, Any]) -> str:
    return str(next((info[key] for key in ("ETag", "etag", "mtime", "LastModified", "created") if key in info), ""))


def _wanted(paths: Iterable[str], root: str, suffixes: Sequence[str]) -> list[str]:
    """Return the paths that end in one of the suffixes and have no hidden part below the root."""
    below = len(root.rstrip("/")) + 1
    return [
        path
        for path in paths
        if path.endswith(tuple(suffixes)) and not any(part.startswith((".", "_")) for part in Path(path[below:]).parts)
    ]


def _refuse_none(found: Iterable[str], given: str, suffixes: Sequence[str], folder: bool) -> None:
    if not list(found):
        what = f"is a folder without files that end in {', '.join(suffixes)}" if folder else "matches no file"
        raise FileNotFoundError(
            f"{given!r} {what} (seen from {os.getcwd()}). Give a glob such as 'corpus/*{suffixes[0]}' in quotes, a folder, "
            f"a list of files, or an fsspec URL."
        )
