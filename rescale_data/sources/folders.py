"""Folded manifests: a digest of each folder instead of a list of many files.

    {"format": ..., "files":   [[name, bytes, rows], ...]}                     in full
    {"format": ..., "folders": [[folder, files, digest, rows], ...]}           folded

Folders are the ones directly below the root. If there are more than 64, one digest stands for all files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

FILES, FOLDERS = "files", "folders"
_MOST = 64


def fold(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a manifest with digests of folders instead of its list of files, if it has such a list."""
    if FILES not in manifest:
        return manifest
    by_folder: dict[str, list[Any]] = {}
    for file in manifest[FILES]:
        folder, below, _ = file[0].partition("/")
        by_folder.setdefault(folder if below else ".", []).append(file)
    if len(by_folder) > _MOST:
        by_folder = {".": list(manifest[FILES])}
    folders = [[name, len(files), _digest(files), num_rows(files)] for name, files in sorted(by_folder.items())]
    return {**{key: value for key, value in manifest.items() if key != FILES}, FOLDERS: folders}


def listed_in(manifest: Mapping[str, Any]) -> list[Any]:
    """Return the files of a manifest, or its folders: lists that begin with a name and end with a number of rows."""
    return list(manifest.get(FILES) or manifest.get(FOLDERS) or ())


def num_rows(listed: list[Any]) -> int:
    """Return the number of rows of files or folders."""
    return sum(int(entry[-1]) for entry in listed)


def _digest(files: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(files).encode(), digest_size=12).hexdigest()
