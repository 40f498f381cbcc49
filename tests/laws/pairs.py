"""Covering arrays: few cases in which every allowed pair of values of every two dimensions occurs.

Written here since allpairspy leaves out pairs where a function says which cases are allowed.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]
"""Two dimensions, and the numbers of their values."""


def cases(dimensions: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Return cases such that each pair of values that an allowed case can have occurs in one of them.

    Args:
        dimensions: The values of each dimension, by its name.
        allowed: False for a case that makes no sense. It looks values up with ``case[name]``.

    Raises:
        ValueError: A value occurs in no case, so that nothing about it would be tested.
    """
    if len(dimensions) < 2:
        return [{name: value} for name, values in dimensions.items() for value in values]
    missing: dict[Pair, None] = dict.fromkeys(_every_pair(dimensions))
    found: list[dict[str, int]] = []
    while missing:
        pair = next(iter(missing))
        case = _completed(dict(pair), dimensions, allowed, missing)
        if case is None:
            del missing[pair]
            continue
        found.append(case)
        for covered in combinations(case.items(), 2):
            missing.pop(covered, None)
    for name, values in dimensions.items():
        absent = [value for i, value in enumerate(values) if not any(case[name] == i for case in found)]
        if absent:
            raise ValueError(f"No case has {name} in {absent}: `allowed` excludes every case with it.")
    return [_values(case, dimensions) for case in found]


def _every_pair(dimensions: Mapping[str, Sequence[Any]]) -> list[Pair]:
    return [
        ((a, i), (b, j))
        for a, b in combinations(dimensions, 2)
        for i in range(len(dimensions[a]))
        for j in range(len(dimensions[b]))
    ]


def _completed(
    part: dict[str, int],
    dimensions: Mapping[str, Sequence[Any]],
    allowed: Callable[[Case], bool],
    missing: Mapping[Pair, None],
) -> dict[str, int] | None:
    """Return an allowed case with the values of `part` that covers many missing pairs, in the order of `dimensions`."""
    if not _may_be(part, dimensions, allowed):
        return None
    if len(part) == len(dimensions):
        return {name: part[name] for name in dimensions}
    name = next(name for name in dimensions if name not in part)

    def gain(i: int) -> int:
        return sum(((name, i), other) in missing or (other, (name, i)) in missing for other in part.items())

    for i in sorted(range(len(dimensions[name])), key=gain, reverse=True):
        case = _completed({**part, name: i}, dimensions, allowed, missing)
        if case is not None:
            return case
    return None


def _may_be(part: dict[str, int], dimensions: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool]) -> bool:
    """True if `allowed` holds, or asks for a value that `part` has not yet."""
    try:
        return allowed(_values(part, dimensions))
    except KeyError:
        return True


def _values(case: Mapping[str, int], dimensions: Mapping[str, Sequence[Any]]) -> Case:
    return {name: dimensions[name][i] for name, i in case.items()}


def name_of(case: Case) -> str:
    """Return the name of a test for `case`."""
    return "-".join(f"{value}" for value in case.values())
