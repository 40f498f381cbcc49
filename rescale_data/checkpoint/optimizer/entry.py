"""An optimizer in a state: the parts of a saved optimizer that it loads, and the parts that it refuses."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from rescale_data.checkpoint.devices import first_state
from rescale_data.checkpoint.entry import Entry, Path
from rescale_data.checkpoint.optimizer.named import GROUPS, named_parameters, named_state
from rescale_data.checkpoint.optimizer.room import as_saved, is_like_parameters, lacking, room
from rescale_data.checkpoint.storage.dcp import Contents, Reader
from rescale_data.checkpoint.tree import keys_of, mapped, tree_of

Names = Sequence[str]


class OptimizerEntry(Entry):
    """An optimizer in a state, by parameter name. What of a checkpoint fits goes into the live tensors, the rest stays.

    another optimizer's state, or one by number   ──► nothing is taken
    a group with other parameters                 ──► it keeps its values, and its parameters their state
    an entry that is not shaped as it must be     ──► the parameter keeps its state

    Parameters that have no state in the checkpoint (unused, frozen, never stepped) are left without one: nothing here steps an
    optimizer, but what torch_xla needs.

    Args:
        model: That has its parameters.
    """

    def __init__(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(path, partial(named_state, model, optimizer), self._take, steady=partial(_shaped, optimizer))
        self.optimizer = optimizer

    def placeholder(self, reader: Reader) -> dict[str, Any]:
        """Return room for the state of exactly the parameters that have some in the checkpoint."""
        self._live: dict[str, Any] = self.plain()
        self._parameters = named_parameters(self._live, self.optimizer)
        states, self._groups = _layout(reader.contents, self.path)
        names = self._saved_names(reader)
        if text := _of_another(self.optimizer, self._groups, names):
            self.refused, self.left_out, self._groups = {self.name: text}, {self.name}, []
            return {}
        if not self._groups:
            return {"state": {}, GROUPS: [{"params": group["params"]} for group in self._live[GROUPS]]}
        self._numbers, different = match([group["params"] for group in self._live[GROUPS]], names)
        alone = (group["params"] for group, n in zip(self._live[GROUPS], self._numbers, strict=True) if n is None)
        self.refused = {f"{self.name}.{GROUPS}": different} if different else {}
        self._kept = {*chain(*alone)}  # parameters whose state is not taken
        matched = dict(zip(self._numbers, self._live[GROUPS], strict=True))
        groups = [_group_room(saved, matched.get(number, {})) for number, saved in enumerate(self._groups)]
        content = {"state": self._room(states), GROUPS: groups}
        self.left_out = {*self.refused, *(f"{self.name}.state.{name}" for name in self._kept)}
        return content

    def _saved_names(self, reader: Reader) -> list[Names]:
        """Return the parameters of each saved group, which have to be read: they are plain values."""
        prefix = f"{self.name}.{GROUPS}"
        values = reader.values(f"{prefix}.{n}.params" for n, group in enumerate(self._groups) if "params" in group)
        return [values.get(f"{prefix}.{number}.params") or [] for number in range(len(self._groups))]

    def _room(self, states: Mapping[str, Any]) -> dict[str, Any]:
        first, rooms = first_state(self.optimizer, [*self._parameters.values()]), dict[str, Any]()
        for name in (name for name in states if name in self._parameters and name not in self._kept):
            parameter = self._parameters[name]
            live = self.optimizer.state.get(parameter) or first.get(parameter, {})
            rooms[name], misfits = room(self.optimizer, parameter, live, states[name])
            if misfits:
                del rooms[name]
                self._kept.add(name)
                self.refused |= {f"{self.name}.state.{name}.{entry}": text for entry, text in misfits.items()}
        return rooms

    def _take(self, loaded: Any) -> None:
        """Assign all state at once; parameters whose state is not taken keep theirs."""
        if not self._groups:
            return
        live, index = self._live["state"], {name: number for number, name in enumerate(self._parameters)}
        kept = {name: entries for name, entries in live.items() if name in self._kept}
        states = {index[name]: keys_of(live.get(name), new) for name, new in {**loaded["state"], **kept}.items()}
        groups = [
            {
                **group,
                **({} if number is None else loaded[GROUPS][number]),
                "params": [index[name] for name in group["params"]],
            }
            for group, number in zip(self._live[GROUPS], self._numbers, strict=True)
        ]
        self.optimizer.load_state_dict({"state": states, GROUPS: groups})
        if is_like_parameters(self.optimizer):
            return
        for number, parameter in enumerate(self._parameters.values()):
            if saved := states.get(number):  # torch knows the dtype of a step
                values = {key: value for key, value in saved.items() if key != "step"}
                self.optimizer.state[parameter] = as_saved(self.optimizer.state[parameter], values)


def match(groups: Sequence[Names], saved: Sequence[Names]) -> tuple[list[int | None], str]:
    """Return for each group the number of the saved one that has its parameters, or None; and in words what differs.

    Groups with equal parameters (none) go in order.
    """
    places: defaultdict[frozenset[str], deque[int]] = defaultdict(deque)
    for number, names in enumerate(saved):
        places[frozenset(names)].append(number)
    queues = [places[frozenset(names)] for names in groups]
    numbers = [queue.popleft() if queue else None for queue in queues]
    alone = [f"group {n} of the state, {_some(names)}" for n, names in enumerate(groups) if numbers[n] is None]
    alone += [f"group {n} of the checkpoint, {_some(saved[n])}" for n in set(range(len(saved))) - {*numbers}]
    different = (
        f"{len(groups)} parameter groups in the state and {len(saved)} in the checkpoint. Without a match: "
        f"{'; '.join(alone[:4])}. Group the parameters as in the run that saved"
    )
    return numbers, different if alone else ""


def _of_another(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], names: list[Names]) -> str:
    """Return in words why saved groups are of another optimizer, or by number; else nothing."""
    if any(names) and all(isinstance(name, int) for name in chain(*names)):
        return _BY_NUMBER
    if not (lacks := sorted({key for group in groups for key in lacking(optimizer, set(group))})):
        return ""
    has = ", ".join(sorted({key for group in groups for key in group} - {"params"}))
    kind = type(optimizer).__name__
    return f"of another optimizer in the checkpoint: its groups lack {', '.join(lacks)} of {kind}; they have {has}"


def _group_room(saved: dict[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Return room for a group's own tensors (a learning rate), each in the shape that was saved; None for a plain value."""

    def place(path: tuple[Any, ...], leaf: torch.Tensor | None) -> torch.Tensor | None:
        device = getattr(live.get(path[0]), "device", None)
        return None if leaf is None else torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)

    return mapped(saved, place)


def _some(names: Names) -> str:
    return f"{list(names[:3])}{' ...' if len(names) > 3 else ''}"


def _shaped(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Return the tensors of its state, but those without a dimension."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0]


def _layout(saved: Contents, path: tuple[str, ...]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what a checkpoint holds of the optimizer under ``path``: by parameter, and of each group."""
    inner = saved.under(path)
    layout = tree_of(inner.paths, {name: value for name, value in inner.values.items() if len(inner.paths[name]) > 2})
    groups = layout.get(GROUPS)
    return layout.get("state", {}), groups if isinstance(groups, list) else []


_BY_NUMBER = (
    "by number and not by name in the checkpoint, as torch.optim.Optimizer.state_dict() makes it. Give this part of it to "
    "load_state_dict of the optimizer of the same model without wrapping, save that one, and load it"
)
