"""An optimizer that is about to be loaded: tensors to load into, differences, and all state assigned at once.

Parameters that have no state in the checkpoint (unused, frozen, never stepped) are left without one: nothing here steps an
optimizer, but what torch_xla needs.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from rescale_data.checkpoint.devices import first_state
from rescale_data.checkpoint.optimizer.named import GROUPS, named_state, names_of, parameters_of
from rescale_data.checkpoint.tree import keys_of, mapped

Names = Sequence[str]


class Target:
    """One load of an optimizer.

    Attributes:
        current: Its state by name, live.
        parameters: By name.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.current = named_state(model, optimizer)
        self.parameters = dict(zip(names_of(self.current), parameters_of(optimizer), strict=True))
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
        queues = [places[frozenset(names)] for names in self.groups]
        self.numbers = [numbers.popleft() if numbers else None for numbers in queues]
        alone = [f"group {n} of the state, {_some(names)}" for n, names in enumerate(self.groups) if self._lacks(n)]
        alone += [f"group {n} of the checkpoint, {_some(saved[n])}" for n in set(range(len(saved))) - {*self.numbers}]
        if not alone:
            return ""
        return (
            f"{len(self.groups)} parameter groups in the state and {len(saved)} in the checkpoint. Without a match: "
            f"{'; '.join(alone[:4])}. Group the parameters as in the run that saved"
        )

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
        parameter, misfits = self.parameters[name], dict[str, str]()
        live = self.optimizer.state.get(parameter) or self._first.get(parameter, {})

        def place(path: tuple[Any, ...], leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            old = live.get(path[0])
            if text := misfit(self.optimizer, parameter, old, leaf.shape):
                misfits[".".join(map(str, path))] = text
            return old if text else empty_like_saved(parameter, old, leaf)

        return mapped(saved, place), misfits

    def apply(self, states: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizer these states by name, and its groups the values of the saved groups that match them."""
        values = [{} if number is None else groups[number] for number in self.numbers]
        merged = [
            {**group, **new, "params": group["params"]} for group, new in zip(self.current[GROUPS], values, strict=True)
        ]
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

    @functools.cached_property
    def _first(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        """State of parameters that have none, where a device alone knows how it will be sharded."""
        return first_state(self.optimizer, parameters_of(self.optimizer))


def _some(names: Names) -> str:
    return f"{list(names[:3])}{' ...' if len(names) > 3 else ''}"


def is_like_parameters(optimizer: optim.Optimizer) -> bool:
    """True for torch's optimizers whose tensors are of the shape and dtype of their parameter, or without dimension."""
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    return is_torchs and not isinstance(optimizer, optim.Adafactor | optim.LBFGS)


def misfit(optimizer: optim.Optimizer, parameter: torch.Tensor, live: Any, shape: torch.Size) -> str:
    """Why a saved tensor of this shape is not the parameter's; else nothing.

    Args:
        live: The same entry of the optimizer as it is, or None.
    """
    known = live.shape if isinstance(live, torch.Tensor) else None
    if len(shape) == 0 or shape in (parameter.shape, known):
        return ""
    text = f"has the shape {list(shape)} and its parameter {list(parameter.shape)}"
    if is_like_parameters(optimizer) or known == parameter.shape:
        return f"{text}; they are to be the same"
    if isinstance(parameter, DTensor):
        return (
            f"{text}: how to shard it cannot be known. Run one optimizer step before the load, so that the state exists in "
            f"its sharding, or load without a mesh"
        )
    return ""


def empty_like_saved(parameter: torch.Tensor, live: Any, saved: torch.Tensor) -> torch.Tensor:
    """A tensor of the saved shape and dtype, sharded like its parameter; the live one where it is of the same."""
    if isinstance(live, torch.Tensor) and live.shape == saved.shape and live.dtype == saved.dtype:
        return live
    if parameter.shape == saved.shape:
        return torch.zeros_like(parameter, dtype=saved.dtype, requires_grad=False)
    return torch.zeros(saved.shape, dtype=saved.dtype, device=parameter.device if saved.dim() else None)


def as_saved(current: Any, saved: Any) -> Any:
    """``current``, which torch has cast to the parameter's dtype, with the values in the dtype in which they were saved."""
    if isinstance(current, torch.Tensor) and isinstance(saved, torch.Tensor):
        return current if current.dtype == saved.dtype else saved.to(current.device)
    if isinstance(current, dict) and isinstance(saved, Mapping):
        pairs = cast(Mapping[Any, Any], saved)
        return {key: as_saved(value, pairs.get(key)) for key, value in cast(dict[Any, Any], current).items()}
    if isinstance(current, list) and isinstance(saved, list):
        return [as_saved(*pair) for pair in zip(cast("list[Any]", current), cast("list[Any]", saved), strict=False)]
    return current


def lacking(optimizer: optim.Optimizer, keys: set[str]) -> list[str]:
    """The numbers that the optimizer is built with and a group with these keys does not have: it is another optimizer's.

    Flags do not count: torch adds some from release to release.
    """
    return sorted(key for key, value in optimizer.defaults.items() if key not in keys and _is_number(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | tuple | torch.Tensor) and not isinstance(value, bool)
