"""Folders that Hugging Face ``datasets`` wrote with ``save_to_disk``: which of their files are the data."""

from __future__ import annotations

import json
import os
from typing import Any

from rescale_data.sources.paths import Paths

_SPLITS, _STATE = "dataset_dict.json", "state.json"


def data_files(paths: Paths) -> Paths:
    """The files of a saved dataset, of which there may be others in its folder (what its transformations cached).

    Anything else that is given comes back as it is.

    Raises:
        ValueError: The folder holds several splits, which nobody wants to read as one.
    """
    if not isinstance(paths, str | os.PathLike):
        return paths
    folder = os.path.expanduser(os.fspath(paths))
    if os.path.exists(os.path.join(folder, _SPLITS)):
        splits: list[str] = _read(folder, _SPLITS)["splits"]
        raise ValueError(
            f"{folder} is a dataset that was saved with the splits {splits}. Give one of them, for example "
            f"{os.path.join(folder, splits[0])!r}."
        )
    if not os.path.exists(os.path.join(folder, _STATE)):
        return paths
    names = [item["filename"] for item in _read(folder, _STATE).get("_data_files") or ()]
    return [os.path.join(folder, name) for name in names] or paths


def _read(folder: str, name: str) -> dict[str, Any]:
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        return json.load(file)
