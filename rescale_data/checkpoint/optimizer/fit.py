"""Whether a saved optimizer's state is this one's: its groups, and each parameter's entries (``exp_avg``, ``step``)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import optim
from torch.distributed.tensor import DTensor

Names = Sequence[str]

_LIKE_PARAMETERS = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.Muon,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
    optim.SparseAdam,
)
"""torch's optimizers whose tensors are of the shape and dtype of their parameter, or without dimension."""


def is_like_parameters(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) in _LIKE_PARAMETERS


def misfit(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, live: Any, shape: torch.Size) -> str | None:
    """Why a saved tensor of this shape is not the parameter's.

    Args:
        live: The same entry of the optimizer as it is, or None.
    """
    known = live.shape if isinstance(live, torch.Tensor) else None
    if len(shape) == 0 or shape in (parameter.shape, known):
        return None
    text = f"has the shape {list(shape)} and its parameter {list(parameter.shape)}"
    if is_like_parameters(optimizer) or known == parameter.shape:
        return f"{text}; they are to be the same"
    if isinstance(parameter, DTensor):
        return (
            f"{text}: how to shard it cannot be known. Run one optimizer step before the load, so that the state exists in "
            f"its sharding, or load without a mesh"
        )
    return None


def empty_like_saved(parameter: torch.Tensor, live: Any, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the saved shape and dtype, sharded like its parameter; the live one where it is of the same."""
    if isinstance(live, torch.Tensor) and live.shape == shape and live.dtype == dtype:
        return live
    if parameter.shape == shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(shape, dtype=dtype, device=parameter.device if len(shape) else None)


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


def matched(current: Sequence[Names], saved: Sequence[Names]) -> list[int | None]:
    """For each group of the optimizer the number of the checkpoint's; groups with equal parameters (none) go in order."""
    places: defaultdict[frozenset[str], deque[int]] = defaultdict(deque)
    for number, names in enumerate(saved):
        places[frozenset(names)].append(number)
    found = [places[frozenset(names)] for names in current]
    return [numbers.popleft() if numbers else None for numbers in found]


def complaint(current: Sequence[Names], saved: Sequence[Names], numbers: Sequence[int | None]) -> str | None:
    """What is different where not each group has its match."""
    if len(current) == len(saved) and None not in numbers:
        return None
    alone = [
        f"group {place} of the state, {_some(current[place])}" for place, number in enumerate(numbers) if number is None
    ]
    alone += [
        f"group {place} of the checkpoint, {_some(saved[place])}" for place in set(range(len(saved))) - {*numbers}
    ]
    return (
        f"{len(current)} parameter groups in the state and {len(saved)} in the checkpoint. Without a match: "
        f"{'; '.join(alone[:4])}. Group the parameters as in the run that saved"
    )


def merged(
    current: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], numbers: Sequence[int | None]
) -> list[dict[str, Any]]:
    """The optimizer's groups with the values of those that match them."""
    found = [{} if number is None else saved[number] for number in numbers]
    return [{**group, **values, "params": group["params"]} for group, values in zip(current, found, strict=True)]


def lacking(optimizer: torch.optim.Optimizer, keys: set[str]) -> list[str]:
    """The numbers that the optimizer is built with and a group with these keys does not have: it is another optimizer's.

    Flags do not count: torch adds some from release to release.
    """
    return sorted(key for key, value in optimizer.defaults.items() if key not in keys and _is_number(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | tuple | torch.Tensor) and not isinstance(value, bool)


def _some(names: Names) -> str:
    return f"{list(names[:3])}{' ...' if len(names) > 3 else ''}"
