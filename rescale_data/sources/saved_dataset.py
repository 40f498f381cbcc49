"""Finds the data files of a dataset that Hugging Face ``datasets`` wrote with ``save_to_disk``."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Mapping
from typing import Any

from rescale_data.sources.files.paths import Paths, read_if_exists
from rescale_data.sources.files.remote import Remote

_SPLITS_FILE, _STATE_FILE = "dataset_dict.json", "state.json"


def data_files(paths: Paths, storage_options: Mapping[str, Any] | None, remote: Remote | None) -> Paths:
    """Return the data files of a saved Hugging Face dataset. Its folder may hold other files, which transformations cached.

    Any other ``paths`` are returned as they are.

    Raises:
        ValueError: The folder holds several splits: give one of them.
    """
    if not isinstance(paths, str | os.PathLike):
        return paths
    folder = os.fspath(paths)
    split_list = read_if_exists(posixpath.join(folder, _SPLITS_FILE), storage_options, remote)
    if split_list is not None:
        splits: list[str] = json.loads(split_list)["splits"]
        raise ValueError(
            f"{folder} is a dataset that was saved with the splits {splits}. Give one of them, for example "
            f"{posixpath.join(folder, splits[0])!r}."
        )
    dataset_state = read_if_exists(posixpath.join(folder, _STATE_FILE), storage_options, remote)
    if dataset_state is None:
        return paths
    file_names = [item["filename"] for item in json.loads(dataset_state).get("_data_files") or ()]
    return [posixpath.join(folder, name) for name in file_names] or paths
