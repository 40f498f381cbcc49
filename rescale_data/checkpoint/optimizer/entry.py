"""An optimizer in a state: the parts of a saved optimizer that it loads, and the parts that it refuses."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from rescale_data.checkpoint.entry import Entry, Path
from rescale_data.checkpoint.optimizer.named import GROUPS, named_state
from rescale_data.checkpoint.optimizer.target import Target, lacking
from rescale_data.checkpoint.storage.dcp import Contents, Reader
from rescale_data.checkpoint.tree import mapped, tree_of


class OptimizerEntry(Entry):
    """An optimizer in a state, by parameter name. What of a checkpoint fits goes into the live tensors, the rest stays.

    another optimizer's state, or one by number   ──► nothing is taken
    a group with other parameters                 ──► it keeps its values, and its parameters their state
    an entry that is not shaped as it must be     ──► the parameter keeps its state

    Args:
        model: That has its parameters.
    """

    def __init__(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(path, partial(named_state, model, optimizer), self._take, steady=partial(_shaped, optimizer))
        self.model, self.optimizer = model, optimizer
        self._kept: set[str] = set()  # parameters whose state is not taken

    def placeholder(self, reader: Reader) -> dict[str, Any]:
        """State for exactly the parameters that have some in the checkpoint."""
        self.states, self.groups = _layout(reader.contents, self.path)
        self.target = Target(self.model, self.optimizer)
        self._match(reader)
        content = {} if self.name in self.refused else self._content()
        self.left_out = {*self.refused, *(f"{self.name}.state.{name}" for name in self._kept)}
        return content

    def _take(self, loaded: Any) -> None:
        """Parameters that the checkpoint does not know keep their state, too."""
        if self.name in self.refused or not self.groups:
            return
        live = self.target.current["state"]
        kept = {name: entries for name, entries in live.items() if name in self._kept or name not in self._known}
        self.target.apply({**loaded["state"], **kept}, loaded[GROUPS])

    def _content(self) -> dict[str, Any]:
        if not self.groups:
            return {"state": {}, GROUPS: [{"params": names} for names in self.target.groups]}
        states: dict[str, Any] = {}
        for name in (name for name in self.states if name not in self._kept and name in self.target.parameters):
            room, misfits = self.target.room(name, self.states[name])
            if misfits:
                self._kept.add(name)
                self.refused |= {f"{self.name}.state.{name}.{entry}": text for entry, text in misfits.items()}
            else:
                states[name] = room
        return {"state": states, GROUPS: [self._group(*numbered) for numbered in enumerate(self.groups)]}

    def _match(self, reader: Reader) -> None:
        """Match the groups by their parameters' names, which have to be read: they are plain values."""
        prefix = f"{self.name}.{GROUPS}"
        asked = [f"{prefix}.{n}.params" for n, group in enumerate(self.groups) if "params" in group]
        values = reader.values(asked)
        names = [values.get(f"{prefix}.{number}.params") or [] for number in range(len(self.groups))]
        all_names = [name for group in names for name in group]
        self._known = {*self.states, *all_names}
        different = self.target.match(names)
        if all_names and all(isinstance(name, int) for name in all_names):
            self.refused = {self.name: _BY_NUMBER}
        elif text := self._of_another_optimizer():
            self.refused = {self.name: text}
        elif self.groups and different:
            self.refused = {prefix: different}
            self._kept = self.target.unmatched()

    def _of_another_optimizer(self) -> str:
        lacks = sorted({key for group in self.groups for key in lacking(self.optimizer, set(group))})
        if not lacks:
            return ""
        kind, has = (
            type(self.optimizer).__name__,
            ", ".join(sorted({key for group in self.groups for key in group} - {"params"})),
        )
        return f"of another optimizer in the checkpoint: its groups lack {', '.join(lacks)} of {kind}; they have {has}"

    def _group(self, number: int, saved: dict[str, Any]) -> dict[str, Any]:
        """A group's own tensor (a learning rate) is empty in the shape that was saved; None for a plain value."""
        numbers = self.target.numbers
        live = self.target.current[GROUPS][numbers.index(number)] if number in numbers else {}

        def room(path: tuple[Any, ...], leaf: torch.Tensor | None) -> torch.Tensor | None:
            device = getattr(live.get(path[0]), "device", None)
            return None if leaf is None else torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)

        return mapped(saved, room)


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
