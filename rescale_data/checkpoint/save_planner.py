"""DCP's save planner for all that it knows, and a device's own planner for the tensors that the device has sharded."""

from __future__ import annotations

import dataclasses
from io import BytesIO
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from rescale_data.checkpoint.devices import Adapter, adapter_of, divided


class HostCopy(torch.Tensor):
    """The pieces that this process has of a sharded tensor, copied to the host: what an async save writes later.

    A tensor, without elements, since DCP looks into a list for tensors alone.

    Attributes:
        items: One of each piece; their name is that of no value yet.
        pieces: CPU tensors without padding.
    """

    items: list[WriteItem]
    pieces: list[torch.Tensor]

    @classmethod
    def of(cls, items: list[WriteItem], pieces: list[torch.Tensor]) -> HostCopy:
        copy = torch.empty(0).as_subclass(cls)
        copy.items, copy.pieces = items, pieces
        return copy


def host_copy(tensor: torch.Tensor, adapter: Adapter) -> HostCopy | torch.Tensor:
    """A copy on the host that nothing changes any more, of what this process has of the tensor."""
    if not adapter.is_sharded(tensor):
        return adapter.unwrap(tensor).detach().cpu()
    planner = adapter.save_planner()
    planner.set_up_planner({"": tensor}, is_coordinator=False)
    items = _distinct(planner.create_local_plan().items)
    return HostCopy.of(items, [cast(torch.Tensor, planner.resolve_data(item)) for item in items])


class CheckpointSavePlanner(DefaultSavePlanner):
    """Names, plain values and whole tensors as DCP has them, whatever the device: so any planner reads the checkpoint."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.items: dict[MetadataIndex, WriteItem] = {}
        self.copies: dict[MetadataIndex, torch.Tensor] = {}
        copies = {name: value for name, value in self.state_dict.items() if isinstance(value, HostCopy)}
        for name, copy in copies.items():
            self._add_copy(name, copy)
            del self.state_dict[name]
        adapter = adapter_of(self.state_dict.values())
        if adapter is not None:
            self._add_sharded(adapter)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[*plan.items, *self.items.values()])

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | BytesIO:
        if write_item.index in self.copies:
            return self.copies[write_item.index]
        # The planner of the device knows its pieces by the number that it gave them, and DCP numbers them anew.
        item = self.items.get(write_item.index)
        return super().resolve_data(write_item) if item is None else self.sharded.resolve_data(item)

    def _add_copy(self, name: str, copy: HostCopy) -> None:
        for item, data in zip(copy.items, copy.pieces, strict=True):
            index = dataclasses.replace(item.index, fqn=name)
            self.items[index] = dataclasses.replace(item, index=index)
            self.copies[index] = data

    def _add_sharded(self, adapter: Adapter) -> None:
        adapter.settle()
        sharded, whole = divided(self.state_dict, adapter)
        self.state_dict = {name: value for name, value in self.state_dict.items() if name not in sharded} | whole
        self.sharded = adapter.save_planner()
        self.sharded.set_up_planner(cast(Any, sharded), is_coordinator=False)
        self.items.update({item.index: item for item in _distinct(self.sharded.create_local_plan().items)})


def _distinct(items: list[WriteItem]) -> list[WriteItem]:
    """Each piece that holds something once, however many devices of this host have it.

    A planner's own removal of duplicates would drop a piece altogether that occurs twice in one plan.
    """
    found = {item.index: item for item in items if item.tensor_data is None or item.tensor_data.chunk.sizes.numel()}
    return list(found.values())
