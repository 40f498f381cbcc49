"""An optimizer's whole state, without sharding: for other tools, and into any other sharding.

stream_optimizer_state    one parameter at a time: ranks hold one whole parameter's state, rank 0 hands it out
full_optimizer_state      all of it on rank 0, on the CPU, by name or by torch's index
load_...                  the same two, back into a model of any wrapping
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from rescale_data.checkpoint.convert.values import fill
from rescale_data.checkpoint.devices import first_state
from rescale_data.checkpoint.optimizer import optimizers
from rescale_data.checkpoint.optimizer.entries import empty_like_saved, misfit
from rescale_data.checkpoint.optimizer.groups import complaint, matched, merged
from rescale_data.checkpoint.optimizer.load import apply
from rescale_data.checkpoint.ranks import Ranks

Item: TypeAlias = tuple[str, Any]
GROUPS = "param_groups"


def full_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    keyed_by: Literal["name", "index"] = "name",
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The whole state on rank 0, on the CPU; an empty dict on the other ranks. All ranks call it.

    Args:
        model: That has the optimizer's parameters: plain, DDP, FSDP1, FSDP2, or on any mesh.
        keyed_by: ``"name"`` of the parameter, or ``"index"``, which is the form of ``torch.optim.Optimizer.state_dict()`` of
            the same model without wrapping.

    Returns:
        ``{"state": {parameter: {entry: value}}, "param_groups": [{"params": [parameter, ...], "lr": ...}]}``.

    Raises:
        ValueError: ``keyed_by`` is neither, or a state tensor is shaped unlike its sharded parameter; the message names it.
    """
    if keyed_by not in ("name", "index"):
        raise ValueError(f'keyed_by={keyed_by!r}: choose "name" or "index".')
    full: dict[str, Any] = {"state": {}, GROUPS: []}
    for name, value in stream_optimizer_state(model, optimizer, process_group=process_group):
        if name == GROUPS:
            full[GROUPS] = value
        elif value:
            full["state"][name] = value
    if not Ranks(process_group).is_first:
        return {}
    return full if keyed_by == "name" else _by_index(full)


def load_full_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any] | None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load what ``full_optimizer_state`` returned, into any sharding. All ranks call it.

    Args:
        state: By name or by index, on rank 0; the other ranks give None or anything, which is not looked at.

    Raises:
        ValueError: parameters that the optimizer does not have, another grouping, or a state tensor that cannot be mapped; on
            all ranks, with the names.
    """
    ranks = Ranks(process_group)
    names = optimizers.names_of(optimizers.named_state(model, optimizer))
    items = ranks_first_items(state, names, ranks)
    load_optimizer_stream(model, optimizer, items, process_group=process_group)


def stream_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, process_group: dist.ProcessGroup | None = None
) -> Iterator[Item]:
    """``("param_groups", groups)`` and then ``(name, {entry: value})`` for each parameter that has a state.

    All ranks iterate to the end together. Values are whole and on the CPU on rank 0; the other ranks get empty dicts. No rank
    ever holds the whole state of more than one parameter.

    Raises:
        ValueError: a state tensor is shaped unlike its sharded parameter; the message names it.
    """
    ranks = Ranks(process_group)
    sharded = optimizers.named_state(model, optimizer)
    parameters = (
        {}
        if optimizers.is_flat(model)
        else dict(zip(optimizers.names_of(sharded), optimizers.parameters_of(optimizer), strict=True))
    )
    yield GROUPS, sharded[GROUPS] if ranks.is_first else []
    for name in _common_order(sharded["state"], ranks):
        entries = sharded["state"].get(name, {})
        _refuse_unmappable(name, parameters.get(name), entries)
        whole = {key: _whole(value, ranks) for key, value in entries.items()}
        yield name, whole if ranks.is_first else {}


def load_optimizer_stream(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    items: Iterable[Item] | None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load what ``stream_optimizer_state`` yields, one parameter at a time, into any sharding. All ranks call it.

    Args:
        items: On rank 0; None on the others.

    Raises:
        ValueError: as ``load_full_optimizer_state``.
    """
    ranks = Ranks(process_group)
    source = iter(items or ())
    target = _Target(model, optimizer)
    held: dict[str, Any] = {}

    def announce() -> Item | None:
        item = next(source, None)
        if item is None or item[0] == GROUPS:
            return item
        name, values = item
        held.clear()
        held.update(values)
        return name, {key: _Shape.of(value) for key, value in held.items()}

    while (item := ranks.on_first(announce)) is not None:
        name, values = item
        if name == GROUPS:
            ranks.on_each(lambda values=values: target.take_groups(values))
            continue
        ranks.on_each(lambda name=name, values=values: target.prepare(name, values))
        for key, shape in values.items():
            if isinstance(shape, _Shape):
                fill(target.state[name][key], _broadcast(held.get(key), shape, ranks))
    apply(model, optimizer, {"state": target.state, GROUPS: target.groups})


@dataclass(frozen=True)
class _Shape:
    """A tensor that follows."""

    size: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Any) -> Any:
        return cls(value.size(), value.dtype) if isinstance(value, torch.Tensor) else value


class _Target:
    """An optimizer's state as it is built up, sharded like the parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.state: dict[str, dict[str, Any]] = {}
        self.optimizer = optimizer
        self.flat = optimizers.is_flat(model)
        if self.flat:
            # FSDP1 alone knows how its flat parameters are cut: torch makes the state, by a step with zero gradients.
            current = cast(dict[str, Any], get_optimizer_state_dict(model, optimizer))
            self.live: dict[str, Any] = current["state"]
        else:
            current = optimizers.named_state(model, optimizer)
            self.live = current["state"]
            self.parameters = dict(zip(optimizers.names_of(current), optimizers.parameters_of(optimizer), strict=True))
        self.groups: list[dict[str, Any]] = current[GROUPS]

    @functools.cached_property
    def first(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        """Where a device's library has sharded the parameters: the state after a first step."""
        return first_state(self.optimizer, optimizers.parameters_of(self.optimizer))

    def take_groups(self, groups: list[dict[str, Any]]) -> None:
        """The values of ``groups``; ``ValueError`` where they have other parameters."""
        current, given = [group["params"] for group in self.groups], [group["params"] for group in groups]
        numbers = matched(current, given)
        if groups and (text := complaint(current, given, numbers)):
            raise ValueError(f"The state does not fit the optimizer: {text}.")
        self.groups = merged(self.groups, groups, numbers)

    def prepare(self, name: str, values: Mapping[str, Any]) -> None:
        if not self.flat and name not in self.parameters:
            raise ValueError(f"The optimizer has no parameter {name!r}. It has {list(self.parameters)[:5]} ...")
        live = self.live.get(name) or ({} if self.flat else self.first.get(self.parameters[name], {}))
        self.state[name] = {key: self._entry(name, key, live.get(key), value) for key, value in values.items()}

    def _entry(self, name: str, key: str, live: Any, value: Any) -> Any:
        if not isinstance(value, _Shape):
            return value
        if not self.flat:
            parameter = self.parameters[name]
            if text := misfit(self.optimizer, parameter, live, value.size):
                raise ValueError(f"{name}.{key} {text}.")
            return empty_like_saved(parameter, live, value.size, value.dtype)
        if isinstance(live, torch.Tensor) and live.size() == value.size:
            return live
        raise ValueError(f"{name}.{key} has the shape {list(value.size)}, which FSDP1 cannot map on its parameter.")


def ranks_first_items(state: Mapping[str, Any] | None, names: list[str], ranks: Ranks) -> list[Item] | None:
    """The items of a whole state on rank 0; every error on all ranks."""
    items: list[Item] = []

    def check() -> None:
        if not isinstance(state, Mapping) or not {"state", GROUPS} <= set(state):
            raise ValueError(f'state on rank 0 is {type(state).__name__}: give {{"state": ..., "param_groups": ...}}.')
        named = _by_name(state, names)
        if unknown := sorted(set(named["state"]) - set(names)):
            raise ValueError(
                f"The state has parameters that the optimizer has not: {unknown[:5]}. It has {names[:5]} ..."
            )
        items.extend([(GROUPS, named[GROUPS]), *named["state"].items()])

    ranks.on_first(check)
    return items if ranks.is_first else None


def _by_index(full: Mapping[str, Any]) -> dict[str, Any]:
    index = {name: number for number, name in enumerate(optimizers.names_of(full))}
    groups = [{**group, "params": [index[name] for name in group["params"]]} for group in full[GROUPS]]
    state = {index[name]: entries for name, entries in full["state"].items()}
    return {"state": dict(sorted(state.items())), GROUPS: groups}


def _by_name(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """The state by name, whichever form it has; indices count the parameters in the order of the groups."""
    keys = optimizers.names_of(state)
    if not all(isinstance(cast(object, key), int) for key in keys):
        return dict(state)
    if len(keys) != len(names):
        raise ValueError(
            f"The state has {len(keys)} parameters by index and the optimizer {len(names)}: they cannot be matched."
        )
    name_of = dict(zip(keys, names, strict=True))
    groups = [{**group, "params": [name_of[key] for key in group["params"]]} for group in state[GROUPS]]
    return {"state": {name_of[key]: entries for key, entries in state["state"].items()}, GROUPS: groups}


def _common_order(state: Mapping[str, Any], ranks: Ranks) -> list[str]:
    per_rank = ranks.on_each(lambda: list(state))
    if any(set(names) != set(per_rank[0]) for names in per_rank):
        odd = sorted(set.union(*map(set, per_rank)) - set.intersection(*map(set, per_rank)))
        raise ValueError(f"Only some ranks have a state for {odd[:5]}. Gather it among those that do: process_group=.")
    return per_rank[0]


def _refuse_unmappable(name: str, parameter: torch.Tensor | None, entries: Mapping[str, Any]) -> None:
    for key, value in entries.items():
        if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
            continue
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            raise ValueError(
                f"{name}.{key} is a plain tensor of shape {list(value.shape)} and its parameter of shape "
                f"{list(parameter.shape)} is sharded: which part of the whole it is cannot be known."
            )


def _whole(value: Any, ranks: Ranks) -> Any:
    """A value without sharding, on the CPU; all ranks take part."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if hasattr(value, "local_shards"):
        return _whole_of_shards(value, ranks)
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _whole_of_shards(value: Any, ranks: Ranks) -> torch.Tensor:
    """Of FSDP1's ShardedTensor: each shard from the rank that has it."""
    own = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in value.local_shards()}
    whole = torch.empty(value.size(), dtype=value.dtype)
    for shard in value.metadata().shards_metadata:
        shape = _Shape(torch.Size(shard.shard_sizes), value.dtype)
        piece = _broadcast(own.get(tuple(shard.shard_offsets)), shape, ranks, source=shard.placement.rank())
        whole[
            tuple(slice(start, start + n) for start, n in zip(shard.shard_offsets, shard.shard_sizes, strict=True))
        ] = piece
    return whole


def _broadcast(value: torch.Tensor | None, shape: _Shape, ranks: Ranks, source: int | None = None) -> torch.Tensor:
    """A tensor of one rank, on all; rank 0 of the group unless a global rank is given."""
    if not ranks.distributed:
        return cast(torch.Tensor, value)
    device = torch.accelerator.current_accelerator() if dist.get_backend(ranks.group) == "nccl" else torch.device("cpu")
    buffer = torch.empty(shape.size, dtype=shape.dtype, device=device)
    first = 0 if ranks.group is None else dist.get_global_rank(ranks.group, 0)
    source = first if source is None else source
    if value is not None and dist.get_rank() == source:
        buffer.copy_(value.detach())
    dist.broadcast(buffer, src=source, group=ranks.group)
    return buffer.cpu()
