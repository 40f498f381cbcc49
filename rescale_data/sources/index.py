"""Index of a source on disk: the locations of its fragments and the list of its files, written once for all processes and runs.

    <folder>/<identity>-<files>.rdpart      some files: their fragments, and other arrays that their format keeps
    <folder>/<identity>-<files>.rdindex     all files: their fragments and their list, joined from parts

identity: a digest of the format and of the arguments on which fragments depend. files: a digest of names, sizes and times. So
no index is ever changed: other files have another index, and a part that a killed process left is good for the next one.
Processes that find no index make it together: the first process that comes to a part makes it. Every process maps the index.

A local file may have another time than in an earlier index, as on a host to which files were copied. It counts as unchanged if
its size and its probed bytes (`Files.probe_digest`) are the same.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np

from rescale_data.sources.files.bundle import Bundle, Strings, string_arrays, write_bundle
from rescale_data.sources.files.once import open_or_create
from rescale_data.sources.files.paths import Files
from rescale_data.sources.fragments import Footer, Fragments, join_footers

ReadFooters: TypeAlias = Callable[[Sequence[int]], list[Footer]]

INDEX_FORMAT_VERSION = 6
OPENING_THREADS = 16
_INDEX_SUFFIX, _PART_SUFFIX = ".rdindex", ".rdpart"
_FILE_DIGESTS_ARRAY, _PARTS_ARRAY = "probes", "parts"
ARRAY_PREFIX = "own."
"""Prefix of the names of `Footer.arrays`, in a part of an index that describes one file."""
_MAX_SHOWN_NAMES = 5
_log = logging.getLogger("rescale_data")


@dataclass(frozen=True)
class IndexFolder:
    """The folder that holds the indices of a source.

    Args:
        folder: Path of the folder, which all ranks share.
        identity: Version of the index, format, and the arguments on which fragments depend, as JSON values.
        paths_digest: Digest of the paths that the source was given. An earlier index for them shows which files are gone.
        files_a_part: Number of files that one process reads, as one part.
    """

    folder: str
    identity: Mapping[str, Any]
    paths_digest: str
    files_a_part: int

    def open_index(self, files: Files, read_footers: ReadFooters) -> Bundle:
        """Return the index of these files, memory-mapped; it is written first if it is missing or damaged.

        Args:
            files: The files, as they are now.
            read_footers: Reads the footers of files, given their numbers.

        Raises:
            ValueError: The index under that name is of other files, or of another format or arguments.
        """
        path = self._path(_listing_digest(files), _INDEX_SUFFIX)
        try:
            bundle = Bundle(path)
        except (FileNotFoundError, ValueError):
            bundle = self._make_index(path, files, read_footers)
        if reason := self._why_unusable(bundle):
            raise ValueError(f"{bundle.path} is {reason}. Delete it.")
        return bundle

    def index_bundles(self, prefix: str = "") -> Iterator[Bundle]:
        """Yield the indices in the folder whose names begin with ``prefix``, the newest first, except damaged ones."""
        write_times: dict[str, int] = {}
        for path in glob.glob(os.path.join(glob.escape(self.folder), f"{prefix}*{_INDEX_SUFFIX}")):
            with suppress(OSError):  # deleted after it was listed
                write_times[path] = os.stat(path).st_mtime_ns
        for path in sorted(write_times, key=write_times.__getitem__, reverse=True):
            with suppress(FileNotFoundError, ValueError):
                yield Bundle(path)

    def _why_unusable(self, bundle: Bundle) -> str:
        """Return why a bundle is not this source's index, or not under its own name, as text for an error; empty if it is."""
        about = bundle.json_metadata.get("about")
        if about != json.loads(json.dumps(self.identity)):
            return f"an index of {about}, not of {self.identity}"
        has_own_name = bundle.json_metadata.get("listing", "") in os.path.basename(bundle.path)
        return "" if has_own_name else "an index of other files, under a name that is not its own"

    def part_path(self, files: Files) -> str:
        """Return the path of the part of an index that describes these files."""
        return self._path(_listing_digest(files), _PART_SUFFIX)

    def part_of_file(self, index: Bundle, file: int) -> str:
        """Return the path of the part from which an index took the fragments of a file."""
        return self._path(Strings(index, _PARTS_ARRAY)[file], _PART_SUFFIX)

    def _path(self, listing: str, suffix: str) -> str:
        return os.path.join(self.folder, f"{digest(self.identity)}-{listing}{suffix}")

    def _make_index(self, path: str, files: Files, read_footers: ReadFooters) -> Bundle:
        footers = self._unchanged_footers(files)
        os.makedirs(self.folder, exist_ok=True)
        new_files = [file for file, name in enumerate(files.names) if name not in footers]
        _log.info("%s: %d of %d files are read for its index, %s", files.root, len(new_files), len(files.names), path)
        chunks = [new_files[start : start + self.files_a_part] for start in range(0, len(new_files), self.files_a_part)]
        files_by_part = {_listing_digest(files.select(chunk)): chunk for chunk in chunks}
        self._make_parts({self._path(part, _PART_SUFFIX): chunk for part, chunk in files_by_part.items()}, read_footers)
        for part, chunk in files_by_part.items():
            # a copy: too many parts to map them all
            index = Fragments.load(Bundle(self._path(part, _PART_SUFFIX)), copy=True)
            footers |= {files.names[file]: (index.footer(i), part) for i, file in enumerate(chunk)}
        return cast(Bundle, open_or_create(path, Bundle, lambda temporary: self._write(temporary, files, footers)))

    def _make_parts(self, files_by_part: Mapping[str, Sequence[int]], read_footers: ReadFooters) -> None:
        """Write the missing parts of an index: first the ones that no other process is writing, then the unfinished ones."""
        shuffled_parts = random.sample(list(files_by_part), len(files_by_part))
        with ThreadPoolExecutor(max(1, OPENING_THREADS // self.files_a_part)) as pool:
            for wait in (False, True):
                make = partial(make_part, read_footers=read_footers, wait=wait)
                list(pool.map(make, shuffled_parts, map(files_by_part.__getitem__, shuffled_parts)))

    def _unchanged_footers(self, files: Files) -> dict[str, tuple[Footer, str]]:
        """Return, by file name, the footer of each file that is as in an earlier index, and the index part that holds it.

        Warnings name files that have changed and files that are gone.
        """
        footers, changed_file_names = dict[str, tuple[Footer, str]](), set[str]()
        warns_of_missing = True
        for bundle in self.index_bundles(f"{digest(self.identity)}-"):
            if self._why_unusable(bundle):
                continue
            earlier_files, index = listed_files(bundle, files), Fragments.load(bundle)
            parts, digests = Strings(bundle, _PARTS_ARRAY), Strings(bundle, _FILE_DIGESTS_ARRAY)
            ids = {name: file for file, name in enumerate(earlier_files.names)}
            if warns_of_missing and bundle.json_metadata["given"] == self.paths_digest:
                warns_of_missing = False
                if missing_names := sorted(ids.keys() - {*files.names}):
                    _log.warning("%s: %s are in its index, and no longer there.", files.root, _first_few(missing_names))
            for file, name in enumerate(files.names):
                if (earlier := ids.get(name)) is None or name in footers:
                    continue
                has_same_size = int(files.sizes[file]) == int(earlier_files.sizes[earlier])
                has_same_stamp = files.stamps[file] == earlier_files.stamps[earlier]
                if has_same_size and (has_same_stamp or files.is_unchanged_copy(file, digests[earlier])):
                    footers[name] = (index.footer(earlier), parts[earlier])
                else:
                    changed_file_names.add(name)
            if len(footers) == len(files.names):
                break
        if changed := sorted(changed_file_names - footers.keys()):
            _log.warning("%s: %s changed since they were indexed, and are read anew.", files.root, _first_few(changed))
        return footers

    def _write(self, path: str, files: Files, footers: Mapping[str, tuple[Footer, str]]) -> None:
        fragments = join_footers([footers[name][0] for name in files.names])
        parts = string_arrays(_PARTS_ARRAY, [footers[name][1] for name in files.names])
        facts: dict[str, Any] = {"about": self.identity, "given": self.paths_digest}
        facts |= {"listing": _listing_digest(files), "kinds": list(fragments.kinds)}
        with ThreadPoolExecutor(OPENING_THREADS) as pool:
            digests = string_arrays(_FILE_DIGESTS_ARRAY, list(pool.map(files.probe_digest, range(len(files.names)))))
        sizes = np.array(files.sizes, dtype=np.int64)
        listing = {**string_arrays("names", files.names), "sizes": sizes, **string_arrays("stamps", files.stamps)}
        write_bundle(path, facts, {**fragments.to_arrays(), **listing, **digests, **parts})


def make_part(index_part: str, files: Sequence[int], read_footers: ReadFooters, *, wait: bool = True) -> Bundle | None:
    """Return a part of an index, memory-mapped; it is written first if it is missing or damaged.

    Args:
        index_part: Path of the part.
        files: Numbers of the files in it.
        read_footers: Reads the footers of files, given their numbers.
        wait: Whether to wait for a process that is making the part. If not, return `None` in that case.
    """

    def write(temporary_path: str) -> None:
        footers = read_footers(files)
        fragments = join_footers(footers)
        format_arrays = {ARRAY_PREFIX + name: array for footer in footers for name, array in footer.arrays.items()}
        write_bundle(temporary_path, {"kinds": list(fragments.kinds)}, {**fragments.to_arrays(), **format_arrays})

    return open_or_create(index_part, Bundle, write, wait=wait)


def listed_files(bundle: Bundle, files: Files) -> Files:
    """Return ``files`` with the names, sizes and version stamps that an index lists."""
    return files.with_files(Strings(bundle, "names"), bundle.array("sizes"), Strings(bundle, "stamps"))


def count_parts(folder: str) -> int:
    """Count the finished parts of all indices in a folder."""
    return len(glob.glob(os.path.join(glob.escape(folder), f"*{_PART_SUFFIX}")))


def _listing_digest(files: Files) -> str:
    return digest(list(files.names), [int(size) for size in files.sizes], list(files.stamps))


def digest(*json_values: Any) -> str:
    """Return a short digest of JSON values."""
    return hashlib.blake2b(json.dumps(json_values, sort_keys=True).encode(), digest_size=8).hexdigest()


def _first_few(names: Sequence[str]) -> str:
    suffix = f" and {len(names) - _MAX_SHOWN_NAMES} more" if len(names) > _MAX_SHOWN_NAMES else ""
    return ", ".join(names[:_MAX_SHOWN_NAMES]) + suffix
