"""One load of an optimizer's state: what of the checkpoint it takes, into which tensors, and what it refuses.

What torch would do to an optimizer without state, a step with zero gradients that leaves ``step`` at 1, is prevented here:
placeholders follow what the checkpoint holds, so that parameters without state (unused, frozen, never stepped) load as they
were saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rescale_data.checkpoint.devices import first_state
from rescale_data.checkpoint.optimizer.fit import (
    as_saved,
    complaint,
    empty_like_saved,
    is_like_parameters,
    lacking,
    matched,
    merged,
    misfit,
)
from rescale_data.checkpoint.optimizer.named import (
    flat_state,
    is_flat,
    named_state,
    names_of,
    parameters_of,
    set_flat_state,
)
from rescale_data.checkpoint.storage.dcp import Saved
from rescale_data.checkpoint.tree import keys_of, tree_of

Leaves: TypeAlias = dict[tuple[Any, ...], Any]
"""Metadata by path below a parameter or a group."""


class OptimizerLoad:
    """What of a checkpoint goes into an optimizer. What fits is loaded into the live tensors, the rest is left as it is.

        another optimizer's state, or one by number   ──► nothing is taken
        a group with other parameters                 ──► it keeps its values, and its parameters their state
        an entry that is not shaped as it must be     ──► the parameter keeps its state

    Args:
        path: Of the optimizer in the state.

    Attributes:
        refused: What does not fit and why, by name: an entry, ``param_groups``, or the optimizer as a whole.
        left_out: Names of what is not taken for that.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, saved: Saved, path: tuple[str, ...]) -> None:
        self.model = model
        self.optimizer = optimizer
        self.name = ".".join(path)
        self.states, self.groups = _layout(saved.metadata, path)
        self.current = named_state(model, optimizer)
        self.refused: dict[str, str] = {}
        self._kept: set[str] = set()
        self._match(saved)

    @property
    def left_out(self) -> set[str]:
        return {*self.refused, *(f"{self.name}.state.{name}" for name in self._kept)}

    def placeholder(self) -> dict[str, Any]:
        """What DCP loads into: state for exactly the parameters that have some in the checkpoint."""
        if self.name in self.refused:
            return {}
        if not self.groups:
            return {
                "state": {},
                "param_groups": [{"params": group["params"]} for group in self.current["param_groups"]],
            }
        states = self._flat_states() if is_flat(self.model) else self._states()
        return {"state": states, "param_groups": [self._group(*numbered) for numbered in enumerate(self.groups)]}

    def apply(self, loaded: dict[str, Any]) -> None:
        """Take what was loaded. Parameters that the checkpoint does not know keep their state, too."""
        if self.name in self.refused or not self.groups:
            return
        live = self.current["state"]
        kept = {name: entries for name, entries in live.items() if name in self._kept or name not in self._known}
        groups = merged(self.current["param_groups"], loaded["param_groups"], self._numbers)
        apply(self.model, self.optimizer, {"state": {**loaded["state"], **kept}, "param_groups": groups})

    def _match(self, saved: Saved) -> None:
        """Match the groups by their parameters' names, which have to be read: they are plain values."""
        prefix = f"{self.name}.param_groups"
        keys = [f"{prefix}.{number}.params" for number, group in enumerate(self.groups) if ("params",) in group]
        values = saved.values(keys)
        names = [values.get(f"{prefix}.{number}.params") or [] for number in range(len(self.groups))]
        current = [group["params"] for group in self.current["param_groups"]]
        self._numbers = matched(current, names)
        self._known = {*self.states, *(name for group in names for name in group)}
        if _are_numbers(names):
            self.refused = {self.name: _BY_NUMBER}
        elif text := self._of_another_optimizer():
            self.refused = {self.name: text}
        elif self.groups and (text := complaint(current, names, self._numbers)):
            self.refused = {prefix: text}
            pairs = zip(current, self._numbers, strict=True)
            self._kept = {name for group, number in pairs if number is None for name in group}

    def _of_another_optimizer(self) -> str | None:
        groups = [{path[0] for path in group} for group in self.groups]
        lacks = sorted({key for keys in groups for key in lacking(self.optimizer, keys)})
        if not lacks:
            return None
        kind, has = type(self.optimizer).__name__, ", ".join(sorted(set.union(*groups) - {"params"}))
        return f"of another optimizer in the checkpoint: its groups lack {', '.join(lacks)} of {kind}; they have {has}"

    def _states(self) -> dict[str, Any]:
        by_name = dict(zip(names_of(self.current), parameters_of(self.optimizer), strict=True))
        wanted = {name: self.states[name] for name in self.states if name in by_name and name not in self._kept}
        first = first_state(self.optimizer, [by_name[name] for name in wanted])
        states: dict[str, Any] = {}
        for name, leaves in wanted.items():
            parameter = by_name[name]
            live = self.optimizer.state.get(parameter) or first.get(parameter, {})
            misfits = self._misfits(name, parameter, live, leaves)
            if misfits:
                self._kept.add(name)
                self.refused |= misfits
            else:
                states[name] = _entries(parameter, live, leaves)
        return states

    def _misfits(self, name: str, parameter: torch.Tensor, live: Mapping[str, Any], saved: Leaves) -> dict[str, str]:
        prefix, tensors = f"{self.name}.state.{name}", {path: meta for path, meta in saved.items() if _is_tensor(meta)}
        found = {
            path: misfit(self.optimizer, parameter, live.get(path[0]), meta.size) for path, meta in tensors.items()
        }
        return {".".join(map(str, (prefix, *path))): text for path, text in found.items() if text}

    def _flat_states(self) -> dict[str, Any]:
        wanted = self.states.keys() - self._kept
        state = flat_state(self.model, self.optimizer)["state"] if wanted else {}
        return {name: entries for name, entries in state.items() if name in wanted}

    def _group(self, number: int, saved: Leaves) -> dict[str, Any]:
        live = self.current["param_groups"][self._numbers.index(number)] if number in self._numbers else {}
        return _nested({path: _group_value(live.get(path[0]), meta) for path, meta in saved.items()})


def apply(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give an optimizer a whole state by name, with its own groups in their order."""
    if is_flat(model):
        set_flat_state(model, optimizer, state)
        return
    named = named_state(model, optimizer)
    index = {name: number for number, name in enumerate(names_of(named))}
    by_index = {index[name]: keys_of(named["state"].get(name), entries) for name, entries in state["state"].items()}
    groups = [{**group, "params": [index[name] for name in group["params"]]} for group in state["param_groups"]]
    optimizer.load_state_dict({"state": by_index, "param_groups": groups})
    if is_like_parameters(optimizer):
        return
    for number, parameter in enumerate(parameters_of(optimizer)):
        if number in by_index:
            saved = {key: value for key, value in by_index[number].items() if key != "step"}  # torch knows its dtype
            optimizer.state[parameter] = as_saved(optimizer.state[parameter], saved)


def _layout(metadata: Metadata, path: tuple[str, ...]) -> tuple[dict[str, Leaves], list[Leaves]]:
    """What a checkpoint holds of the optimizer that was saved under ``path``: by parameter, and of each group."""
    layout: dict[str, dict[Any, Leaves]] = {"state": {}, "param_groups": {}}
    for key, saved in metadata.state_dict_metadata.items():
        where = tuple((metadata.planner_data or {}).get(key, ()))
        if where[: len(path)] != path or len(where) < len(path) + 3 or where[len(path)] not in layout:
            continue
        part, owned_by, *entry = where[len(path) :]
        layout[part].setdefault(owned_by, {})[tuple(entry)] = saved
    groups = layout["param_groups"]
    return layout["state"], [groups.get(number, {}) for number in range(len(groups))]


def _entries(parameter: torch.Tensor, live: Mapping[str, Any], saved: Leaves) -> dict[str, Any]:
    """What the state of one parameter is loaded into; None for what is no tensor."""
    return _nested({path: _entry(parameter, live.get(path[0]), meta) for path, meta in saved.items()})


def _entry(parameter: torch.Tensor, live: Any, meta: Any) -> torch.Tensor | None:
    return empty_like_saved(parameter, live, meta.size, meta.properties.dtype) if _is_tensor(meta) else None


def _group_value(live: Any, meta: Any) -> torch.Tensor | None:
    """A group's own tensor (a learning rate) is empty in the shape that was saved; None for a plain value."""
    if not _is_tensor(meta):
        return None
    device = live.device if isinstance(live, torch.Tensor) else None
    return torch.zeros(meta.size, dtype=meta.properties.dtype, device=device)


def _nested(leaves: Leaves) -> dict[str, Any]:
    return tree_of({str(path): path for path in leaves}, {str(path): leaf for path, leaf in leaves.items()})


def _is_tensor(meta: Any) -> bool:
    return isinstance(meta, TensorStorageMetadata)


def _are_numbers(names: list[list[Any]]) -> bool:
    found = [name for group in names for name in group]
    return bool(found) and all(isinstance(name, int) for name in found)


_BY_NUMBER = (
    "by number and not by name in the checkpoint, as torch.optim.Optimizer.state_dict() makes it. Read the file with "
    "torch.load and give this part of it to checkpoint.load_full_optimizer_state"
)
