"""Devices with tensors that DCP's own planners cannot cut: each has an adapter, imported when a state holds such a tensor.

    device type ──► module with an ``adapter`` ──► planners of that device's library ──► ``Pieces``, which DCP can cut

Everything else of a checkpoint (CPU tensors, the loader, plain values, names) goes the usual way, so that a checkpoint does
not tell on which device it was made.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, SavePlanner, TensorWriteData, WriteItem

from rescale_data.checkpoint.tree import leaves

_ADAPTERS = {"xla": "rescale_data.xla.adapter"}


class Adapter(Protocol):
    """What the checkpoint needs to know of a device."""

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is spread over devices in pieces, so that no host holds it whole."""
        ...

    def unwrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole tensor as itself, where the device's library has wrapped it into what DCP takes for something else."""
        ...

    def settle(self) -> None:
        """Return when tensors hold the values that the program has given them so far."""
        ...

    def save_planner(self) -> SavePlanner:
        """A planner for sharded tensors by name: ``SHARD`` items, and CPU tensors without padding for them."""
        ...

    def load_planner(self) -> LoadPlanner:
        """A planner that loads sharded tensors by name in place."""
        ...

    def first_state(self, optimizer: torch.optim.Optimizer) -> Mapping[torch.Tensor, dict[str, Any]]:
        """The state that the optimizer will have after its first step, in its shardings; the optimizer is left as it is."""
        ...


def adapter_of(values: Iterable[Any]) -> Adapter | None:
    """The adapter of the first tensor that needs one."""
    for value in values:
        if _has_adapter(value):
            return cast(Adapter, importlib.import_module(_ADAPTERS[value.device.type]).adapter)
    return None


class Pieces(torch.Tensor):
    """What this process has of a tensor that a device has cut, by the protocol through which DCP looks at a DTensor, too.

    It has the shape and the dtype of the whole, and no memory for it.

    Attributes:
        items: One of each piece, by the device; their name is that of no value yet.
        find: Gives the piece at a place, on the CPU.
        commit: Is told what was read into a piece.
    """

    items: list[WriteItem]
    find: Callable[[MetadataIndex], torch.Tensor]
    commit: Callable[[ReadItem, torch.Tensor], None]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [dataclasses.replace(item, index=_named(item.index, fqn)) for item in _distinct(self.items).values()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [cast(TensorWriteData, item.tensor_data).chunk for item in self.items]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.find(index)


def to_save(tensor: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """What DCP saves of a device's tensor: the live pieces, or the tensor where it is whole."""
    if not adapter.is_sharded(tensor):
        return adapter.unwrap(tensor)
    pieces, planner = _in_pieces(tensor, adapter)
    items = _distinct(pieces.items)
    pieces.find = lambda index: cast(torch.Tensor, planner.resolve_data(items[index.offset]))
    return pieces


def to_load(tensor: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """What DCP loads into a device's tensor: CPU tensors, which go to the device when all of them are read."""
    if not adapter.is_sharded(tensor):
        return adapter.unwrap(tensor)
    pieces, _ = _in_pieces(tensor, adapter)
    planner: Any = adapter.load_planner()
    planner.set_up_planner({"": tensor}, Metadata({}), is_coordinator=False)
    pieces.find = lambda index: planner.lookup_tensor(_named(index, ""))
    pieces.commit = lambda item, read: planner.commit_tensor(
        dataclasses.replace(item, dest_index=_named(item.dest_index, "")), read
    )
    return pieces


def host_copy(tensor: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """A copy on the host that nothing changes any more, of what this process has of the tensor."""
    live = to_save(tensor, adapter)
    if not isinstance(live, Pieces):
        return live.detach().cpu()
    copies = {place: live.find(item.index) for place, item in _distinct(live.items).items()}
    live.find = lambda index: copies[index.offset]
    return live


def on_host(flat: dict[str, Any], make: Callable[[torch.Tensor, Adapter], torch.Tensor]) -> dict[str, Any]:
    """A flat state with what ``make`` makes of each tensor of a device that has an adapter."""
    adapter = adapter_of(flat.values())
    if adapter is None:
        return flat
    adapter.settle()
    return {name: make(value, adapter) if _has_adapter(value) else value for name, value in flat.items()}


def _in_pieces(tensor: torch.Tensor, adapter: Adapter) -> tuple[Pieces, SavePlanner]:
    planner = adapter.save_planner()
    planner.set_up_planner({"": tensor}, is_coordinator=False)
    pieces = torch.empty((), dtype=tensor.dtype).expand(tensor.shape).as_subclass(Pieces)
    pieces.items = planner.create_local_plan().items
    return pieces, planner


def _distinct(items: list[WriteItem]) -> dict[Any, WriteItem]:
    """Each piece that holds something once, by its place, however many devices of this host have it.

    A planner's own removal of duplicates would drop a piece altogether that occurs twice in one plan.
    """
    return {item.index.offset: item for item in items if cast(TensorWriteData, item.tensor_data).chunk.sizes.numel()}


def _named(index: MetadataIndex, name: str) -> MetadataIndex:
    return dataclasses.replace(index, fqn=name)


def settle(state: Any) -> None:
    """Return when the tensors of a nested state hold the values that the program has given them so far."""
    adapter = adapter_of(leaf for _, leaf in leaves(state))
    if adapter is not None:
        adapter.settle()


def refuse_pickled(state: Any) -> None:
    """``TypeError`` where a tensor that has an adapter is in what DCP pickles: on another device nobody could read it."""
    for path, value in leaves(state):
        if (
            not isinstance(value, torch.Tensor)
            and (tensor := next(filter(_has_adapter, _inside(value)), None)) is not None
        ):
            raise TypeError(
                f"{'.'.join(path)} is a {type(value).__name__} with a tensor on {tensor.device}: DCP would pickle it whole, "
                f"and only the same device could load it. Put the tensors into a list or a dict."
            )


def first_state(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]
) -> Mapping[torch.Tensor, dict[str, Any]]:
    """State to load into, where parameters have none and their device alone knows how it is sharded; else nothing."""
    adapter = adapter_of(parameter for parameter in parameters if not optimizer.state.get(parameter))
    return {} if adapter is None else adapter.first_state(optimizer)


def _has_adapter(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type in _ADAPTERS


def _inside(value: Any) -> Iterator[Any]:
    """What is in a pickled value, as far as it can be seen."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(cast(Mapping[Any, Any], value).values())
    if isinstance(value, list | tuple | set | frozenset):
        for inner in cast("list[Any]", value):
            yield from _inside(inner)
    else:
        yield value
