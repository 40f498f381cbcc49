"""Make an `Entry` of each value of a state: modules, optimizers, ``Stateful`` objects, tensors and plain values.

DCP knows tensors and plain values, and expands what is Stateful at the top level alone. An ``Entry`` turns one value of the
user's state into what DCP knows, at any depth, and takes back what DCP has loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel

from rescale_data.checkpoint.devices import adapt_tensors, is_dtensor, refuse_pickled
from rescale_data.checkpoint.entry import Entry, Path, for_each
from rescale_data.checkpoint.optimizer.entry import OptimizerEntry
from rescale_data.checkpoint.optimizer.named import owning_module
from rescale_data.checkpoint.rank_values import PerRank, rank_key, source_rank
from rescale_data.checkpoint.storage.dcp import Contents, StateReader
from rescale_data.checkpoint.storage.values import is_plain
from rescale_data.checkpoint.tree import iterate_leaves
from rescale_data.engine.states.codec import TABLE, with_columns_of
from rescale_data.state import nest

State: TypeAlias = Mapping[str, Any]


class _StatefulEntry(Entry):
    """Saves and loads a ``Stateful`` object; a loader's state also loads if the columns of its table have changed."""

    def placeholder(self, reader: StateReader) -> Any:
        return with_columns_of(self.get_value(), reader.contents.values.get(f"{self.name}.{TABLE}"))


def entries_of(state: State, rank: int = 0, saved: Contents | None = None) -> list[Entry]:
    """Return an `Entry` for each value of a state, also of nested mappings.

    Args:
        rank: The rank whose values a ``PerRank`` stands for.
        saved: The contents of the checkpoint that is to be loaded.
    """
    if not isinstance(cast(object, state), Mapping):
        raise TypeError(f'state maps names to values, {{"model": model, ...}}; it is a {type(state).__name__}.')
    state_values = _collect_values(state, ())
    modules = [(path, value) for path, value, _ in state_values if isinstance(value, nn.Module)]
    return [
        _per_rank_entry(path, value, rank, saved)
        if isinstance(value, PerRank)
        else _make_entry(path, value, container, modules)
        for path, value, container in state_values
    ]


def state_dict_of(entries: list[Entry]) -> dict[str, Any]:
    """Return the entries as nested dicts of values that DCP can save. Tensors may be the live ones."""
    state_dict = nest(for_each(entries, lambda entry: (entry.path, entry.get_value())))
    refuse_pickled(state_dict)
    refuse_unsavable(state_dict)
    return adapt_tensors(state_dict, "to_save")


def _collect_values(state: Mapping[Any, Any], path: Path) -> list[tuple[Path, Any, Mapping[str, Any]]]:
    collected_values: list[tuple[Path, Any, Mapping[str, Any]]] = []
    for key, value in state.items():
        if not isinstance(key, str):
            raise TypeError(
                f"{'.'.join((*path, str(key)))!r}: the key {key!r} is a {type(key).__name__}; keys are strings."
            )
        inner_path = (*path, key)
        if isinstance(value, Mapping) and value and not isinstance(value, Stateful) and _has_string_keys(value):
            collected_values.extend(_collect_values(cast(Mapping[Any, Any], value), inner_path))
        else:
            collected_values.append((inner_path, value, state))
    return collected_values


def _has_string_keys(value: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in value)


def _per_rank_entry(path: Path, per_rank: PerRank, rank: int, saved: Contents | None) -> Entry:
    """Return the entry of a `PerRank` value, saved under the rank's key; saved values of other ranks are ignored."""
    rank_keys = {str(inner_path[0]) for inner_path in saved.subtree(path).paths.values()} if saved else set[str]()
    key = rank_key(source_rank(rank_keys, rank))
    entry = _make_entry((*path, key), per_rank.value, vars(per_rank), [], key="value")
    entry.names_left_out = {".".join((*path, name)) for name in rank_keys - {key}}
    return entry


def _make_entry(
    path: Path, value: Any, container: Mapping[str, Any], modules: list[tuple[Path, nn.Module]], key: str | None = None
) -> Entry:
    if isinstance(value, nn.Module):
        get_value, assign = partial(get_model_state_dict, value), partial(set_model_state_dict, value)
        return Entry(path, get_value, assign, get_optimizer_tensors=value.parameters)
    if isinstance(value, torch.optim.Optimizer):
        model = owning_module(".".join(path), value, modules)
        if not FullyShardedDataParallel.fsdp_modules(model):
            return OptimizerEntry(path, model, value)
        # FSDP1 alone knows how its flat parameters are cut: as DCP gives and takes them, all or nothing.
        get_value, assign = partial(get_optimizer_state_dict, model), partial(set_optimizer_state_dict, model)
        return Entry(path, partial(get_value, value), partial(assign, value), must_load_whole=True)
    if not isinstance(value, torch.Tensor) and isinstance(value, Stateful):  # to ask a protocol takes 20 us
        return _StatefulEntry(path, value.state_dict, value.load_state_dict, must_load_whole=True)
    _refuse_nested_stateful(path, value)
    return Entry(path, lambda: value, lambda loaded: _replace_value(path, value, container, key or path[-1], loaded))


def _replace_value(path: Path, value: Any, container: Mapping[str, Any], container_key: str, loaded_value: Any) -> None:
    """Put a loaded plain value into the mapping that holds it; do nothing for a tensor, which is loaded in place."""
    if isinstance(value, torch.Tensor):
        return
    if not isinstance(container, MutableMapping):
        raise TypeError(f"{'.'.join(path)!r} is a plain value in a {type(container).__name__}; load into a dict.")
    container[container_key] = loaded_value


def _refuse_nested_stateful(path: Path, value: Any) -> None:
    """Raise ``TypeError`` if a plain value contains a ``Stateful`` object, or keys that are equal as text."""
    if isinstance(value, Mapping):
        items = list(cast(Mapping[Any, Any], value).items())
        bad_keys = [key for key, _ in items if not isinstance(key, str | int | float | None)]
        if bad_keys or len({str(key) for key, _ in items}) < len(items):
            raise TypeError(
                f"{'.'.join(path)!r} has the keys {[key for key, _ in items][:5]}: give strings or numbers that differ as text."
            )
    elif isinstance(value, list | tuple):
        items = list(enumerate(cast("list[Any] | tuple[Any, ...]", value)))
    else:
        return
    for key, item in items:
        if isinstance(item, Stateful):
            name = ".".join(path)
            raise TypeError(
                f"{name}[{key!r}] is a {type(item).__name__} in a {type(value).__name__}: it would be pickled whole and "
                f'replaced at load. Give it a name of its own: {{"{name}_{key}": ...}}, or a dict of them.'
            )
        _refuse_nested_stateful((*path, str(key)), item)


def refuse_unsavable(state_dict: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` with a cure for equal names, and tensors that cannot be saved or loaded (meta, sparse, partial)."""
    name_counts = Counter(".".join(path) for path, _ in iterate_leaves(state_dict, is_plain))
    if shared_names := [name for name, count in name_counts.items() if count > 1]:
        raise ValueError(
            f"The names {shared_names[:5]} are each those of two values of the state: give keys without dots."
        )
    tensors = {".".join(path): leaf for path, leaf in iterate_leaves(state_dict) if isinstance(leaf, torch.Tensor)}
    refusals = [f"{name} {reason}" for name, tensor in tensors.items() if (reason := _refusal_reason(tensor))]
    if refusals:
        refusal_text = "\n  ".join(refusals)
        raise ValueError(f"These tensors can be neither saved nor loaded; nothing was done:\n  {refusal_text}")


def _refusal_reason(tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta":
        return "is on the meta device and has no memory: call module.to_empty(device=...) before."
    # Not is_quantized and is_nested: FSDP1's ShardedTensor knows neither.
    if str(tensor.dtype).startswith(("torch.qint", "torch.quint")):
        return "is quantized: put int_repr(), scale and zero point into the state instead."
    if is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements):
        return "is a DTensor of partial values, of which DCP saves one rank's: put x.redistribute(...) into the state instead."
    if tensor.layout != torch.strided:
        layout_name = str(tensor.layout).removeprefix("torch.")
        return f"is {layout_name}: put the dense tensors that it is made of into the state instead."
    return ""
