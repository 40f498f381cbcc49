"""Values in memory as something that DCP loads from: it knows which rows of a tensor each rank needs, in any sharding."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from typing import Any

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

from rescale_data.checkpoint.planner import load_plain


class ValuesReader(StorageReader):
    """Loads from values in memory; tensors may be views of anything, and are copied row by row where they are asked for.

    Args:
        tree: Gives the values, when they are first asked for.
        flat: They are by flattened name.
    """

    trusted = True  # they are here already

    def __init__(self, tree: Callable[[], Mapping[str, Any]], *, flat: bool = False) -> None:
        self.tree = tree
        self._flat = flat
        self._values: dict[str, Any] = {}
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader is for one set of values."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            tree = self.tree()
            self._values, paths = (dict(tree), {key: (key,) for key in tree}) if self._flat else flatten(tree)
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


def fill(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy into this rank's part of ``target``, however it is sharded, from the whole tensor; no communication."""
    # Flat as it is: DCP's way to flatten a state keeps its tensors alive until a garbage collection (torch 2.9).
    load_plain({"value": target}, ValuesReader(lambda: {"value": whole}, flat=True))


def _metadata_of(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(value, torch.Tensor):
        return BytesStorageMetadata()
    chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
    return TensorStorageMetadata(TensorProperties.create_from_tensor(value), value.size(), [chunk])
