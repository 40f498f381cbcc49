"""Checkpoints in an object store: anything that fsspec reaches by URL."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, BinaryIO, cast

import fsspec

from rescale_data.checkpoint.storage.store import Store


class ObjectStore(Store):
    """A bucket. Objects appear whole or not at all; a folder is what its objects' names have in common.

    Listings are never cached: what another rank or another job wrote must be seen.
    """

    renames = False

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        options = {"use_listings_cache": False, **(storage_options or {})}
        try:
            super().__init__(fsspec.core.url_to_fs(url, **options)[0])
        except (ValueError, ImportError) as error:
            raise ValueError(
                f"{url!r} cannot be opened: {error}. "
                f"Install the fsspec package for it (s3fs, gcsfs, adlfs), or give a local path."
            ) from error

    def discard(self, stream: BinaryIO, path: str) -> None:
        # close() would commit the part that was written: abort the upload, and mark the file as closed.
        with contextlib.suppress(Exception):
            cast(Any, stream).discard()
        with contextlib.suppress(Exception):
            cast(Any, stream).closed = True
