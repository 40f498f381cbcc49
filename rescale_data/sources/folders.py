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


def short_manifest(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a manifest with a digest of each folder in place of its list of files; unchanged if it has no such list."""
    if FILES not in manifest:
        return manifest
    files_by_folder: dict[str, list[Any]] = {}
    for file in manifest[FILES]:
        folder, slash, _ = file[0].partition("/")
        files_by_folder.setdefault(folder if slash else ".", []).append(file)
    if len(files_by_folder) > _MAX_FOLDERS:
        files_by_folder = {".": list(manifest[FILES])}
    folders = [
        [name, len(files), _digest(files), num_rows({FILES: files})] for name, files in sorted(files_by_folder.items())
    ]
    return {**{key: value for key, value in manifest.items() if key != FILES}, FOLDERS: folders}


def num_rows(manifest: Mapping[str, Any]) -> int:
    """Return the total number of rows in the files or folders of a manifest."""
    return sum(int(entry[-1]) for entry in manifest.get(FILES) or manifest.get(FOLDERS) or ())


def _digest(files: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(files).encode(), digest_size=12).hexdigest()
