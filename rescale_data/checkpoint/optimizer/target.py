"""An optimizer that is about to be loaded: the tensors for what was saved, what of it does not fit, and then all of it at once.

Saved groups and entries come from a checkpoint's metadata or from a stream. Parameters that have no state there (unused,
frozen, never stepped) are left without one: nothing here steps an optimizer, but what FSDP1 and torch_xla need.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rescale_data.checkpoint.devices import first_state
from rescale_data.checkpoint.optimizer.fit import as_saved, empty_like_saved, is_like_parameters, misfit
from rescale_data.checkpoint.optimizer.named import (
    GROUPS,
    flat_state,
    is_flat,
    named_state,
    names_of,
    parameters_of,
    set_flat_state,
)
from rescale_data.checkpoint.tree import keys_of, mapped

Names = Sequence[str]


class Target:
    """One load of an optimizer.

    Attributes:
        current: Its state by name, live.
        parameters: By name; none where FSDP1 keeps them in flat pieces.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.flat = is_flat(model)
        self.current = named_state(model, optimizer)
        self.parameters = {} if self.flat else dict(zip(names_of(self.current), parameters_of(optimizer), strict=True))
        self.groups: list[Names] = [group["params"] for group in self.current[GROUPS]]
        self.numbers: list[int | None] = [None] * len(self.groups)

    def match(self, saved: Sequence[Names]) -> str:
        """Find for each group the saved one that has its parameters; groups with equal ones (none) go in order.

        Returns:
            What is different where not each has its match; else nothing.
        """
        places: defaultdict[frozenset[str], deque[int]] = defaultdict(deque)
        for number, names in enumerate(saved):
            places[frozenset(names)].append(number)
        found = [places[frozenset(names)] for names in self.groups]
        self.numbers = [numbers.popleft() if numbers else None for numbers in found]
        alone = [f"group {n} of the state, {_some(names)}" for n, names in enumerate(self.groups) if self._lacks(n)]
        alone += [f"group {n} of the checkpoint, {_some(saved[n])}" for n in set(range(len(saved))) - {*self.numbers}]
        if not alone:
            return ""
        return (
            f"{len(self.groups)} parameter groups in the state and {len(saved)} in the checkpoint. Without a match: "
            f"{'; '.join(alone[:4])}. Group the parameters as in the run that saved"
        )

    def has(self, name: str) -> bool:
        return name in (self._flat if self.flat else self.parameters)

    def unmatched(self) -> set[str]:
        """Parameters of groups that no saved group matches."""
        return {name for n, names in enumerate(self.groups) if self._lacks(n) for name in names}

    def room(self, name: str, saved: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Tensors for the saved entries of a parameter, sharded like it and live where they can be.

        Args:
            saved: With a tensor on the meta device for each tensor.

        Returns:
            The same with room for each tensor; and why that is not the parameter's, by its place in the entries.
        """
        live, misfits = self._live(name), dict[str, str]()

        def place(path: tuple[Any, ...], leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            old: Any = live.get(path[0])
            if self.flat:
                text = "" if hasattr(old, "size") and old.size() == leaf.shape else _UNMAPPED.format(list(leaf.shape))
            else:
                text = misfit(self.optimizer, self.parameters[name], old, leaf.shape)
            if text:
                misfits[".".join(map(str, path))] = text
            return old if self.flat or text else empty_like_saved(self.parameters[name], old, leaf)

        return mapped(saved, place), misfits

    def apply(self, states: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizer these states by name, and its groups the values of those that match them."""
        values = [{} if number is None else groups[number] for number in self.numbers]
        merged = [
            {**group, **new, "params": group["params"]} for group, new in zip(self.current[GROUPS], values, strict=True)
        ]
        if self.flat:
            set_flat_state(self.model, self.optimizer, {"state": dict(states), GROUPS: merged})
            return
        index = {name: number for number, name in enumerate(self.parameters)}
        by_index = {index[name]: keys_of(self.current["state"].get(name), new) for name, new in states.items()}
        numbered = [{**group, "params": [index[name] for name in group["params"]]} for group in merged]
        self.optimizer.load_state_dict({"state": by_index, GROUPS: numbered})
        if is_like_parameters(self.optimizer):
            return
        for name, parameter in self.parameters.items():
            if saved := by_index.get(index[name]):  # torch knows the dtype of a step
                kept = {key: value for key, value in saved.items() if key != "step"}
                self.optimizer.state[parameter] = as_saved(self.optimizer.state[parameter], kept)

    def _lacks(self, group: int) -> bool:
        return self.numbers[group] is None

    def _live(self, name: str) -> Mapping[str, Any]:
        """Entries of a parameter as they are, or where a library alone knows their sharding as they will be."""
        if self.flat:
            return self._flat.get(name, {})
        parameter = self.parameters[name]
        return self.optimizer.state.get(parameter) or self._first.get(parameter, {})

    @functools.cached_property
    def _flat(self) -> dict[str, Any]:
        return flat_state(self.model, self.optimizer)["state"]

    @functools.cached_property
    def _first(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        return first_state(self.optimizer, parameters_of(self.optimizer))


_UNMAPPED = "has the shape {}, which FSDP1 cannot map on its parameter"


def _some(names: Names) -> str:
    return f"{list(names[:3])}{' ...' if len(names) > 3 else ''}"
