"""Which parameter groups of a checkpoint are those of an optimizer: the ones with the same parameters."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Names = Sequence[str]


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
