"""A file of ``torch.save`` as something that DCP loads from, on any ranks.

Every rank maps the file and copies its own rows out of it. The pages are read from disk once a host, however many ranks it has;
there is no communication, so nothing hangs where ranks ask for different names.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future


class TorchFileReader(StorageReader):
    """Reads a file of ``torch.save``, memory-mapped and without running code from it."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._values: dict[str, Any] = {}
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader is for one file."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._values, paths = flatten(map_file(self.file))
            saved = {key: _metadata_of(value) for key, value in self._values.items()}
            self._metadata = Metadata(saved, planner_data=paths, storage_meta=StorageMeta())
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: all is known from ``read_metadata``."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            self._read(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.path.isfile(checkpoint_id)

    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        value = self._values[item.storage_index.fqn]
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, as_bytes(value))
            return
        rows = tuple(slice(start, start + n) for start, n in zip(item.storage_offsets, item.lengths, strict=True))
        target = planner.resolve_tensor(item).detach()
        target.copy_(value[rows])
        planner.commit_tensor(item, target)


def map_file(file: str) -> dict[str, Any]:
    """What ``torch.save`` wrote, with tensors that are read when they are used.

    Raises:
        ValueError: it is no such file, holds code, or is not a dict.
    """
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(
            f"{file} cannot be read: {error}. It must be a file of torch.save in its zip format (the default since 1.6) that "
            f"holds tensors and plain values only."
        ) from error
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{file} holds a {type(cast(object, content)).__name__}; a checkpoint is a dict of names to values."
        )
    return dict(cast(Mapping[str, Any], content))


def flatten(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values by flattened name, and each name's path, by DCP's own rule."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tree))
    return dict(planner.state_dict), dict(planner.mappings)


def as_bytes(value: Any) -> io.BytesIO:
    """A plain value as DCP stores it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def _metadata_of(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(value, torch.Tensor):
        return BytesStorageMetadata()
    chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
    return TensorStorageMetadata(TensorProperties.create_from_tensor(value), value.size(), [chunk])
