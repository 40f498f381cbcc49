"""Folded manifests, which hold a digest of each folder in place of a list of many files.

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
_MAX_FOLDERS = 64


def fold(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a manifest with a digest of each folder in place of its list of files; unchanged if it has no such list."""
    if FILES not in manifest:
        return manifest
    by_folder: dict[str, list[Any]] = {}
    for file in manifest[FILES]:
        folder, slash, _ = file[0].partition("/")
        by_folder.setdefault(folder if slash else ".", []).append(file)
    if len(by_folder) > _MAX_FOLDERS:
        by_folder = {".": list(manifest[FILES])}
    folders = [[name, len(files), _digest(files), num_rows(files)] for name, files in sorted(by_folder.items())]
    return {**{key: value for key, value in manifest.items() if key != FILES}, FOLDERS: folders}


def manifest_entries(manifest: Mapping[str, Any]) -> list[Any]:
    """Return the entries of a manifest, for files or folders: lists that begin with a name and end with a number of rows."""
    return list(manifest.get(FILES) or manifest.get(FOLDERS) or ())


def num_rows(entries: list[Any]) -> int:
    """Return the total number of rows in a manifest's entries of files or folders (see `manifest_entries`)."""
    return sum(int(entry[-1]) for entry in entries)


def _digest(files: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(files).encode(), digest_size=12).hexdigest()
