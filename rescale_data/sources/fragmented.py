"""`FragmentedSource`: a source of files that have fragments; it finds them in footers or an index when it is opened."""

from __future__ import annotations

import errno
import os
import struct
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from rescale_data.errors import DataStateError, checks_argument_types
from rescale_data.sources.decoded.cache import DEFAULT_CACHE_BYTES
from rescale_data.sources.files.bundle import Bundle
from rescale_data.sources.files.local_store import local_store_for
from rescale_data.sources.files.paths import Files, Paths, StorageOptions, find_matching_files
from rescale_data.sources.files.ranges import ChangedFileError
from rescale_data.sources.files.remote import Remote, RemoteError
from rescale_data.sources.fragments import NO_FRAGMENTS, Footer, Fragments, join_footers
from rescale_data.sources.index import INDEX_FORMAT_VERSION, OPENING_THREADS, IndexFolder, digest, listed_files
from rescale_data.sources.source import BadRow, FiledSource
from rescale_data.state import Ints

INDEX_FOLDER = ".rescale_data"
"""Name of the folder beside local files that holds their index and copies of compressed files."""

FILES, FOLDERS = "files", "folders"
_MAX_FOLDERS = 64
_DAMAGE_ERRORS = (OSError, ValueError, LookupError, OverflowError, struct.error, pa.ArrowException)


@checks_argument_types
@dataclass(eq=False, repr=False)
class FragmentedSource(FiledSource):
    """Files that have fragments. A subclass for each format reads footers."""

    faults: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    FORMAT: ClassVar[str]
    SUFFIXES: ClassVar[tuple[str, ...]]
    FILES_A_PART: ClassVar[int] = 32
    """Number of files whose footers one process reads, as one part of an index."""
    _must_index = False
    """True if the source needs an index, even without ``index_dir``."""

    paths: Paths
    _: KW_ONLY
    cache_bytes: int = DEFAULT_CACHE_BYTES
    storage_options: Mapping[str, Any] | None = None
    remote: Remote | None = None
    index_dir: str | os.PathLike[str] | None = None
    cache_dir: str | os.PathLike[str] | None = None
    cache_dir_bytes: int = 2**36

    def __init_subclass__(cls) -> None:
        """Make a subclass that is a dataclass compare by identity; raise ``TypeError`` if arguments hide its members."""
        super().__init_subclass__()
        if "__eq__" not in vars(cls):
            cls.__eq__, cls.__hash__ = object.__eq__, object.__hash__
        hidden = sorted({field.name for field in fields(cls)} & vars(cls).keys() - cls.__annotations__.keys())
        if hidden:
            raise TypeError(
                f"{cls.__name__} defines {hidden}, which are arguments of its base class: name them otherwise."
            )

    def __post_init__(self) -> None:
        if self.cache_bytes < 1 or self.cache_dir_bytes < 1:
            raise ValueError(f"cache_bytes={self.cache_bytes}, cache_dir_bytes={self.cache_dir_bytes}: at least 1.")
        cache_dir = _absolute_folder("cache_dir", self.cache_dir)
        store = None if cache_dir is None else local_store_for(cache_dir, self.cache_dir_bytes)
        self.disk_bytes = 0 if store is None else self.cache_dir_bytes
        self._index_dir = _absolute_folder("index_dir", self.index_dir)
        self._files = replace(self.find_files(self.paths, self.storage_options, self.remote), store=store)
        self.reads_ahead = self._files.filesystem is not None and self._files.remote.read_ahead
        self._index, self._index_bundle = NO_FRAGMENTS, None
        self._folder = self._index_folder()
        if self._index_dir is not None or self._must_index:
            self._map_index(self._open_index())
        else:
            self._index = join_footers(self._read_footers(range(len(self._files.names))))
        self.name = self._files.root.rstrip("/").rpartition("/")[2] or self._files.root
        self.fragments = self._index.starts
        self.num_rows = int(self._index.starts[-1])
        self.fragment_bytes = int(np.median(self._index.nbytes)) if len(self._index) else 0
        self._check_files()

    def _map_index(self, bundle: Bundle) -> None:
        """Use files and fragments of a memory-mapped index on disk, which an unpickled source maps again."""
        self._files, self._index = listed_files(bundle, self._files), Fragments.load(bundle)
        self._index_bundle = bundle

    def _open_index(self) -> Bundle:
        """Return the memory-mapped index of the files; it is written first if it is missing."""
        if self._files.filesystem is not None and self._index_dir is None:
            raise ValueError(
                f"{self._files.root} is behind URLs, and an index of it must lie where all ranks can read it. Give "
                f"index_dir=, a folder that they share."
            )
        try:
            return self._folder.open_index(self._files, self._read_footers)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise PermissionError(
                    f"The index of {self._files.root} cannot be read or written: {error}. Give index_dir=, a folder that all "
                    f"ranks share and may write to."
                ) from error
            if error.errno in (errno.EEXIST, errno.ENOTDIR):
                raise ValueError(f"{self._folder.folder} cannot be a folder: {error}. Give index_dir=.") from error
            raise

    def _index_folder(self) -> IndexFolder:
        root, paths = self._files.root, self.paths
        path_list = [paths] if isinstance(paths, str | os.PathLike) else paths
        spec = {"version": INDEX_FORMAT_VERSION, "format": self.FORMAT, **self._index_arguments()}
        if self._index_dir is None:
            path_list = [os.path.relpath(os.path.expanduser(path), root) for path in path_list]
        else:
            filesystem_name = "" if self._files.filesystem is None else type(self._files.filesystem).__name__
            spec |= {"root": root, "filesystem": filesystem_name}
        folder = self._index_dir or os.path.join(root, INDEX_FOLDER)
        return IndexFolder(folder, spec, digest([os.fspath(path) for path in path_list]), self.FILES_A_PART)

    def _index_arguments(self) -> Mapping[str, Any]:
        """Return the arguments on which fragments depend, as JSON values."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        overrides = {} if self._index_bundle is None else {"_files": self._files.with_files((), (), ()), "_index": None}
        return {**vars(self), "fragments": None, "paths": (), "storage_options": None, **overrides}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._index_bundle is not None:
            self._map_index(self._index_bundle)
        self.fragments = self._index.starts

    @classmethod
    def find_files(cls, paths: Paths, storage_options: StorageOptions = None, remote: Remote | None = None) -> Files:
        """Return the files that a source of this class reads, given its arguments."""
        return find_matching_files(paths, cls.SUFFIXES, storage_options, remote)

    @abstractmethod
    def _footer(self, file: int) -> Footer:
        """Read the footer of a file. The caller turns most errors into one that calls the file damaged."""

    def _check_files(self) -> None:
        """Check all files together, from their footers; ``ValueError`` if they do not fit together or have no rows."""
        if not self.num_rows:
            raise ValueError(f"The {len(self._files.names)} files below {self._files.root} have no rows: give others.")

    def manifest(self) -> Mapping[str, Any]:
        """Return a manifest with the list of files, or with ``index_dir=`` digests of folders, since the index has the list."""
        files = manifest_entries(self._files, self._index)
        file_manifest = {"format": self.FORMAT, FILES: files, **self._index_arguments()}
        return file_manifest if self._index_dir is None else short_manifest(file_manifest)

    def file_manifest(self, manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if FILES in manifest:
            return manifest
        other_fields = {key: value for key, value in manifest.items() if key != FOLDERS}
        manifests = ({**other_fields, FILES: files} for files in self._current_and_indexed_file_lists())
        return next((file_manifest for file_manifest in manifests if short_manifest(file_manifest) == manifest), None)

    def _current_and_indexed_file_lists(self) -> Iterator[list[list[Any]]]:
        """Yield lists of files, as in manifests: the current one, then that of each index in ``index_dir``, newest first."""
        yield manifest_entries(self._files, self._index)
        for bundle in () if self._index_dir is None else self._folder.index_bundles():
            yield manifest_entries(listed_files(bundle, self._files), Fragments.load(bundle))

    def subset(self, manifest: Mapping[str, Any]) -> Ints:
        file_manifest = self.file_manifest(manifest)
        if file_manifest is None:
            raise DataStateError(
                f"{self.name}: some logical shards are in an epoch of fewer files than there are now, and the index that lists "
                f"those is no longer in index_dir={self._index_dir!r}: bring it back."
            )
        listed_names = {name for name, *_ in file_manifest[FILES]}
        is_listed = np.array([name in listed_names for name in self._files.names])
        return np.flatnonzero(np.repeat(is_listed, np.diff(self._index.files)))

    def rows_of_file(self, name: str) -> range:
        return self._index.rows_of(self._files.find_name(name))

    def rows_in_file(self, name: str, rows: Ints) -> Ints:
        file, unfiltered_rows = self._files.find_name(name, allow_ends=False), self._index.unfiltered_rows
        file_rows = self._index.rows_of(file)
        num_rows = len(file_rows) if unfiltered_rows is None else int(unfiltered_rows[file])
        min_row, max_row = (int(rows.min()), int(rows.max())) if len(rows) else (0, -1)
        if min_row < 0 or max_row >= num_rows:
            raise ValueError(
                f"{name} of {self.name} has the rows 0 to {num_rows - 1}: there are none from {min_row} to {max_row}."
            )
        if unfiltered_rows is None:
            return file_rows.start + rows
        return file_rows.start + np.flatnonzero(np.isin(self._index.kept_rows(file), rows))

    def file_row(self, index: int) -> tuple[str, int]:
        file, row = self._index.file_and_row(index)
        return self._files.names[file], row

    def locate(self, index: int) -> str:
        file, row = self._index.file_and_row(index)
        return f"{self._files.path(file)}, row {row}"

    @contextmanager
    def _name_file_in_errors(self, file: int) -> Generator[None]:
        """Make errors of reading a file name the file. Most errors become a ``ValueError`` that calls it damaged."""
        try:
            yield
        except (FileNotFoundError, PermissionError, RemoteError, BadRow):
            raise
        except _DAMAGE_ERRORS as error:
            if isinstance(error, OSError) and error.errno:  # a fault of the machine, such as a full disk
                error.add_note(f"This was met while {self._files.path(file)} was read.")
                raise
            kind = ChangedFileError if isinstance(error, ChangedFileError) else ValueError
            raise kind(
                f"{self._files.path(file)} cannot be read as {self.FORMAT}: {error}. It may be half-written or of another "
                f"format: write it again, or leave it out."
            ) from error

    def _read_footers(self, file_indices: Sequence[int]) -> list[Footer]:
        with ThreadPoolExecutor(OPENING_THREADS) as pool:
            return list(pool.map(self._try_footer, file_indices))

    def _try_footer(self, file: int) -> Footer:
        with self._name_file_in_errors(file):
            return self._footer(file)


def _absolute_folder(name: str, folder: str | os.PathLike[str] | None) -> str | None:
    """Return the absolute path of the folder that was given as the argument ``name``; `None` if none was given."""
    if folder is not None and not os.fspath(folder):
        raise ValueError(f"{name}='': give a folder, or None for no such folder.")
    return None if folder is None else os.path.abspath(os.fspath(folder))


def manifest_entries(files: Files, fragments: Fragments) -> list[list[Any]]:
    """Return ``[name, bytes, rows]`` for each file, as in a manifest."""
    entries = zip(files.names, map(int, files.sizes), fragments.file_row_counts, strict=True)
    return [list(entry) for entry in entries]


def short_manifest(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a manifest with a digest of each folder in place of its list of files; unchanged if it has no such list.

    Folders are the ones directly below the root. If there are more than 64, one digest stands for all files::

        {"format": ..., "files":   [[name, bytes, rows], ...]}                     in full
        {"format": ..., "folders": [[folder, files, digest, rows], ...]}           folded
    """
    if FILES not in manifest:
        return manifest
    by_folder: dict[str, list[Any]] = {}
    for file in manifest[FILES]:
        folder, slash, _ = file[0].partition("/")
        by_folder.setdefault(folder if slash else ".", []).append(file)
    if len(by_folder) > _MAX_FOLDERS:
        by_folder = {".": list(manifest[FILES])}
    table = [[name, len(files), digest(files), num_rows({FILES: files})] for name, files in sorted(by_folder.items())]
    return {**{key: value for key, value in manifest.items() if key != FILES}, FOLDERS: table}


def num_rows(manifest: Mapping[str, Any]) -> int:
    """Return the total number of rows in the files or folders of a manifest."""
    return sum(int(entry[-1]) for entry in manifest.get(FILES) or manifest.get(FOLDERS) or ())
