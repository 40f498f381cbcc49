"""The index of a source on disk: where its fragments are, and the list of its files, made once for all processes and runs.

    <folder>/<what is indexed>-<listing>.rdindex        listing: a digest of names, sizes and times of the files

It is never changed: other files have another one, for which only those files are read that the last one does not name. Whoever
opens the source maps it. Processes that find none make it together, some files a part, each part by whoever comes first. A part
is named by the names, sizes and times of its files: what a killed process leaves is right for whoever finds it.

A local file with the bytes of the last index and another time, as on a host to which files were copied, counts as the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rescale_data.sources.files.bundle import Bundle, Strings, string_arrays, write_bundle
from rescale_data.sources.files.once import make_once
from rescale_data.sources.files.paths import Files
from rescale_data.sources.fragments import Footer, Fragments, gather

Read: TypeAlias = Callable[[Sequence[int]], list[Footer]]

_VERSION = 2
PART_FILES = 32
_SUFFIX, _OLD, _PARTS = ".rdindex", ".rdindex.old", ".parts"
_PROBES = "probes"
_SHOWN = 5
_log = logging.getLogger("rescale_data")


@dataclass(frozen=True)
class IndexFolder:
    """The folder of the indices of a source.

    Args:
        folder: Shared by all ranks.
        about: What is indexed, as JSON values: the format, and what of its arguments the fragments depend on.
        given: The paths that stand for the files, to know which earlier index was of these.
    """

    folder: str
    about: Mapping[str, Any]
    given: Sequence[str]

    @property
    def _about(self) -> dict[str, Any]:
        """``about`` with the version of this module: other versions make an index of their own."""
        return {"version": _VERSION, **self.about}

    def open(self, files: Files, read: Read) -> str:
        """The index of these files, made where there is none.

        Args:
            files: As they are now.
            read: Numbers of files -> what is known of each.

        Raises:
            ValueError: The index is damaged or of another format, or a file is not what it was; it is named.
        """
        path = self.path(files)
        if not os.path.exists(path):
            self._make(path, files, read)
        return path

    def path(self, files: Files) -> str:
        return os.path.join(self.folder, f"{_digest(self._about)}-{_listing_digest(files)}{_SUFFIX}")

    def all(self) -> Iterator[Bundle]:
        """All indices in the folder, also those put aside, the newest first."""
        for path in self._found("", (_SUFFIX, _OLD)):
            with suppress(ValueError):
                yield Bundle(path)

    def earlier(self) -> Iterator[str]:
        """The indices of this source, the newest first."""
        return self._found(f"{_digest(self._about)}-", (_SUFFIX,))

    def _found(self, begin: str, suffixes: tuple[str, ...]) -> Iterator[str]:
        try:
            entries = [entry for entry in os.scandir(self.folder) if entry.name.startswith(begin)]
        except OSError:
            return
        found = [entry for entry in entries if entry.name.endswith(suffixes)]  # others make something: that may be gone
        for entry in sorted(found, key=lambda entry: entry.stat().st_mtime_ns, reverse=True):
            yield entry.path

    def load(self, path: str) -> Bundle:
        """An index, mapped; ``ValueError`` where it is not one of this source."""
        try:
            bundle = Bundle(path)
        except ValueError as error:
            raise ValueError(f"{error}: it was cut short, or is none. Delete it, and it is made anew.") from None
        if bundle.facts.get("about") != json.loads(json.dumps(self._about)):
            raise ValueError(f"{path} is an index of {bundle.facts.get('about')}, not of {self._about}. Delete it.")
        if bundle.facts.get("listing", "") not in os.path.basename(path):
            raise ValueError(f"{path} is an index of other files, under a name that is not its own. Delete it.")
        return bundle

    def _make(self, path: str, files: Files, read: Read) -> None:
        known = self._known(files)
        os.makedirs(self.folder, exist_ok=True)
        todo = [file for file, name in enumerate(files.names) if name not in known]
        _log.info("%s: %d of %d files are read for its index, %s", files.root, len(todo), len(files.names), path)
        parts: dict[str, Sequence[int]] = {}
        if len(todo) > PART_FILES:
            chunks = (todo[at : at + PART_FILES] for at in range(0, len(todo), PART_FILES))
            parts = {os.path.join(path + _PARTS, _listing_digest(files.some(chunk))): chunk for chunk in chunks}

        def write(aside: str) -> None:
            read_now = [footer for part in parts for footer in _footers(part)] if parts else read(todo)
            found = {**known, **dict(zip((files.names[file] for file in todo), read_now, strict=True))}
            self._write(aside, files, gather([found[name] for name in files.names]))

        try:
            _make_parts(path, parts, read)
            make_once(path, lambda: os.path.exists(path), write)
        except (FileNotFoundError, FileExistsError):
            if not os.path.exists(path):  # else somebody has made the whole of it, and cleared the parts away
                raise
        shutil.rmtree(path + _PARTS, ignore_errors=True)

    def _known(self, files: Files) -> dict[str, Footer]:
        """Return what the last index of the same paths says of `files`; ``ValueError`` where one has changed since."""
        for path in self.earlier():
            bundle = self.load(path)
            if bundle.facts["given"] != list(self.given):
                continue
            then, fragments = listed(bundle, files), Fragments.of(bundle)
            old = {name: file for file, name in enumerate(then.names)}
            now = {name: file for file, name in enumerate(files.names)}
            both = [(now[name], file) for name, file in old.items() if name in now]
            probes = Strings(bundle, _PROBES)
            stale = [
                files.names[f]
                for f, g in both
                if files.sizes[f] != then.sizes[g]
                or (files.stamps[f] != then.stamps[g] and not files.is_copy(f, probes[g]))
            ]
            if stale:
                raise ValueError(
                    f"{_some(stale)} below {files.root} changed since the index {path} was made. Restore what was there, or "
                    f"rename the index to end in {_OLD}, so that all files are read anew (checkpoints may need its list)."
                )
            if gone := [name for name in old if name not in now]:
                _log.warning("%s: %s are in its index, and no longer there.", files.root, _some(gone))
            return {name: fragments.footer(file) for name, file in old.items() if name in now}
        return {}

    def _write(self, path: str, files: Files, index: Fragments) -> None:
        facts: dict[str, Any] = {"about": self._about, "given": list(self.given)}
        facts |= {"listing": _listing_digest(files), "kinds": list(index.kinds)}
        write_bundle(path, facts, {**index.arrays(), **_listing(files), **string_arrays(_PROBES, files.probes())})


def listed(bundle: Bundle, files: Files) -> Files:
    """The files that an index is of, in the place of those that were found."""
    return files.listed(Strings(bundle, "names"), bundle.array("sizes"), Strings(bundle, "stamps"))


def _listing(files: Files) -> dict[str, Any]:
    sizes = np.array(files.sizes, dtype=np.int64)
    return {**string_arrays("names", files.names), "sizes": sizes, **string_arrays("stamps", files.stamps)}


def _make_parts(path: str, parts: Mapping[str, Sequence[int]], read: Read) -> None:
    """Read files until all parts are there: first those that nobody has begun, then those that nobody has finished."""
    mixed = random.sample(list(parts), len(parts))
    if mixed:
        os.makedirs(path + _PARTS, exist_ok=True)
    for wait in (False, True):
        for part in mixed:

            def write(aside: str, files: Sequence[int] = parts[part]) -> None:
                index = gather(read(files))
                write_bundle(aside, {"kinds": list(index.kinds)}, index.arrays())

            make_once(part, lambda part=part: os.path.exists(path) or _is_whole(part), write, wait=wait)


def _is_whole(part: str) -> bool:
    try:
        Bundle(part)
    except (FileNotFoundError, ValueError):
        return False
    return True


def _footers(part: str) -> list[Footer]:
    index = Fragments.of(Bundle(part))
    return [index.footer(file) for file in range(len(index.files) - 1)]


def parts_done(folder: str) -> int:
    """Return the number of finished parts of all indices that are being made in a folder."""
    try:
        making = [entry.path for entry in os.scandir(folder) if entry.name.endswith(_PARTS)]
        return sum("." not in entry.name for path in making for entry in os.scandir(path))
    except FileNotFoundError:  # not begun, or just done
        return 0


def _listing_digest(files: Files) -> str:
    return _digest(list(files.names), [int(size) for size in files.sizes], list(files.stamps))


def _digest(*values: Any) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
