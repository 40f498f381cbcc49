"""An optimizer's whole state, without sharding: for other tools, and into any other sharding.

stream_optimizer_state    one parameter at a time: ranks hold one whole parameter's state, rank 0 hands it out
full_optimizer_state      all of it on rank 0, on the CPU, by name or by torch's index
load_...                  the same two, back into a model of any wrapping
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rescale_data.checkpoint.optimizer.named import GROUPS, names_of, numbered
from rescale_data.checkpoint.optimizer.target import Target
from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.storage.dcp import ValuesReader
from rescale_data.checkpoint.storage.open import load_values
from rescale_data.checkpoint.tree import mapped

Item: TypeAlias = tuple[str, Any]


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

    Example:
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> checkpoint.full_optimizer_state(model, optimizer)["param_groups"][0]["params"]
        ['weight', 'bias']
    """
    if keyed_by not in ("name", "index"):
        raise ValueError(f'keyed_by={keyed_by!r}: choose "name" or "index".')
    items = dict(stream_optimizer_state(model, optimizer, process_group=process_group))
    names = numbered(model, optimizer) if keyed_by == "index" else []
    if not Ranks(process_group).is_first:
        return {}
    groups = items.pop(GROUPS)
    full = {"state": {name: entries for name, entries in items.items() if entries}, GROUPS: groups}
    return _renamed(full, {name: number for number, name in enumerate(names)}) if names else full


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

    Example:
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> model = torch.nn.Linear(2, 1)
        >>> old, new = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.5, 0.1))
        >>> checkpoint.load_full_optimizer_state(model, new, checkpoint.full_optimizer_state(model, old))
        >>> new.param_groups[0]["lr"]
        0.5
    """
    ranks = Ranks(process_group)
    names = numbered(model, optimizer)
    items = ranks.together(lambda: _items(state, names) if ranks.is_first else None)
    load_optimizer_stream(model, optimizer, items, process_group=process_group)


def stream_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, process_group: dist.ProcessGroup | None = None
) -> Iterator[Item]:
    """``("param_groups", groups)`` and then ``(name, {entry: value})`` for each parameter that has a state.

    All ranks iterate to the end together. Values are whole and on the CPU on rank 0; the other ranks get empty dicts. No rank
    ever holds the whole state of more than one parameter.

    Raises:
        ValueError: a state tensor is shaped unlike its sharded parameter; the message names it.

    Example:
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        >>> model(torch.ones(2)).backward()
        >>> optimizer.step()
        >>> [name for name, value in checkpoint.stream_optimizer_state(model, optimizer)]
        ['param_groups', 'weight', 'bias']
    """
    ranks = Ranks(process_group)
    live = Target(model, optimizer)
    yield GROUPS, live.current[GROUPS] if ranks.is_first else []
    for name in _common_order(live.current["state"], ranks):
        entries = live.current["state"].get(name, {})
        _refuse_unmappable(name, live.parameters.get(name), entries)
        whole = _each_tensor(entries, functools.partial(_whole, ranks=ranks))
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

    Example:
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> model = torch.nn.Linear(2, 1)
        >>> old, new = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.5, 0.1))
        >>> checkpoint.load_optimizer_stream(model, new, checkpoint.stream_optimizer_state(model, old))
        >>> new.param_groups[0]["lr"]
        0.5
    """
    ranks = Ranks(process_group)
    source = iter(items or ())
    target = Target(model, optimizer)
    held: list[torch.Tensor] = []
    states: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []

    def announce() -> Item | None:
        held.clear()
        item = next(source, None)
        if item is None or item[0] == GROUPS:
            return item
        return item[0], _each_tensor(item[1], lambda tensor: held.append(tensor) or tensor.detach().to("meta"))

    while (item := ranks.on_first(announce)) is not None:
        name, saved = item
        if name == GROUPS:
            groups = saved
            ranks.on_each(lambda saved=saved: _match(target, saved))
            continue
        states[name] = ranks.together(lambda name=name, saved=saved: _room(target, name, saved))
        following = iter(held)
        for place, shape in zip(_tensors(states[name]), _tensors(saved), strict=True):
            whole = _broadcast(next(following, None), shape, ranks)
            # Into this rank's part, however it is sharded; no communication.
            load_values({"": place}, ValuesReader({"": whole}, {"": ("",)}))
    target.apply(states, groups)


def _match(target: Target, groups: list[dict[str, Any]]) -> None:
    text = target.match([group["params"] for group in groups])
    if groups and text:
        raise ValueError(f"The state does not fit the optimizer: {text}.")


def _room(target: Target, name: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    if not target.has(name):
        raise ValueError(f"The optimizer has no parameter {name!r}. It has {names_of(target.current)[:5]} ...")
    room, misfits = target.room(name, saved)
    for entry, text in misfits.items():
        raise ValueError(f"{name}.{entry} {text}.")
    return room


def _each_tensor(value: Any, work: Callable[[torch.Tensor], Any]) -> Any:
    return mapped(value, lambda _, leaf: work(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _each_tensor(value, found.append)
    return found


def _items(state: Any, names: list[str]) -> list[Item]:
    """The items of a whole state, by name whichever form it has."""
    if not isinstance(state, Mapping) or not {"state", GROUPS} <= set(cast("Mapping[str, Any]", state)):
        raise ValueError(f'state on rank 0 is {type(state).__name__}: give {{"state": ..., "param_groups": ...}}.')
    named = cast("Mapping[str, Any]", state)
    keys: list[Any] = names_of(named)
    if all(isinstance(key, int) for key in keys):  # in the order of the groups
        if len(keys) != len(names):
            raise ValueError(
                f"The state has {len(keys)} parameters by index and the optimizer {len(names)}: they cannot be matched."
            )
        named = _renamed(named, dict(zip(keys, names, strict=True)))
    if unknown := sorted(set(named["state"]) - set(names)):
        raise ValueError(f"The state has parameters that the optimizer has not: {unknown[:5]}. It has {names[:5]} ...")
    return [(GROUPS, named[GROUPS]), *named["state"].items()]


def _renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """A state with its parameters under other names, or numbers, and in their order."""
    place = {old: number for number, old in enumerate(names)}
    groups = [
        {**group, "params": [names[old] for old in sorted(group["params"], key=place.__getitem__)]}
        for group in state[GROUPS]
    ]
    return {"state": {new: state["state"][old] for old, new in names.items() if old in state["state"]}, GROUPS: groups}


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


def _whole(value: Any, ranks: Ranks) -> torch.Tensor:
    """A tensor without sharding, on the CPU of the first rank; all ranks take part."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if not hasattr(value, "local_shards"):
        return value.detach().cpu().clone()
    shards = value.local_shards()  # of FSDP1's ShardedTensor
    device = shards[0].tensor.device if shards else "cpu"
    whole = torch.empty(value.size(), dtype=value.dtype, device=device) if ranks.is_first else None
    value.gather(0, whole, dtype=value.dtype)
    return torch.empty(0, device="cpu") if whole is None else whole.cpu()


def _broadcast(value: torch.Tensor | None, shape: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """A tensor of the first rank, on all."""
    if not ranks.distributed:
        return cast(torch.Tensor, value)
    device = torch.accelerator.current_accelerator() if dist.get_backend(ranks.group) == "nccl" else torch.device("cpu")
    buffer = torch.empty(shape.size(), dtype=shape.dtype, device=device)
    if value is not None:
        buffer.copy_(value.detach())
    dist.broadcast(buffer, src=0 if ranks.group is None else dist.get_global_rank(ranks.group, 0), group=ranks.group)
    return buffer.cpu()
