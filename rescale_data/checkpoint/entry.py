"""One value of a state: what DCP saves of it, what DCP loads into, and how that is taken over.

What of a state and a checkpoint does not fit is known from the metadata alone, all of it, before a byte is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from rescale_data.checkpoint.storage.dcp import Contents, Reader

Path: TypeAlias = tuple[str, ...]
Misfits: TypeAlias = dict[str, dict[str, str]]
"""What of a state and a checkpoint does not fit: by kind, and then by flattened name what it is."""
KINDS = {
    "missing": "missing in the checkpoint",
    "unexpected": "not asked for",  # under a name that is loaded
    "mismatched": "different",  # in shape, dtype or kind
}
NOT_ASKED = "not_asked"
"""A further kind, of top-level names; that is no misfit."""


@dataclass(eq=False)
class Entry:
    """One value of a state.

    Args:
        path: Keys from the root of the state down to the value.
        plain: Gives what DCP saves. Its tensors may be the live ones, which are then loaded in place.
        take: Takes what DCP has loaded.
        whole: Whether a part of it may not be loaded without the rest.
        steady: Gives tensors that only an optimizer's step changes.
        refused: What of the checkpoint does not fit although the names do, and why, by name; known with the placeholder.
        left_out: Names of the checkpoint that are not loaded for that, with all that is under them.
    """

    path: Path
    plain: Callable[[], Any]
    take: Callable[[Any], object]
    whole: bool = False
    steady: Callable[[], Iterable[torch.Tensor]] = tuple
    refused: dict[str, str] = field(default_factory=dict[str, str])
    left_out: set[str] = field(default_factory=set[str])

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def placeholder(self, reader: Reader) -> Any:
        """Return what DCP loads into, of the checkpoint that is read."""
        return self.plain()


def of_all_ranks(per_rank: list[Misfits]) -> Misfits:
    """Return the names that are missing or different on any rank, and the names that no rank requests."""
    merged = {kind: _on_any([differences[kind] for differences in per_rank]) for kind in per_rank[0]}
    for kind in ("unexpected", NOT_ASKED):
        common = set.intersection(*(set(differences[kind]) for differences in per_rank))
        merged[kind] = {name: text for name, text in merged[kind].items() if name in common}
    return merged


def compare(entries: list[Entry], wanted: dict[str, Any], saved: Contents) -> Misfits:
    """Return the misfits of one rank.

    Args:
        wanted: What the entries ask for, by flattened name.
    """
    asked = {entry.path[0] for entry in entries}
    refused = {name: text for entry in entries for name, text in entry.refused.items()}
    left_out = {name for entry in entries for name in entry.left_out}
    others = [name for name in saved.values if name not in wanted]
    beside = {name for name in others if _is_asked(saved, name, asked)}
    return {
        "missing": {
            name: f"{describe(value)} in the state" for name, value in wanted.items() if name not in saved.values
        },
        "unexpected": {name: describe(saved.values[name]) for name in beside if not left_out & _and_above(name)},
        "mismatched": refused
        | {
            name: text
            for name, value in wanted.items()
            if name in saved.values and (text := _differs(value, saved.values[name]))
        },
        NOT_ASKED: {str(saved.paths[name][0]): "" for name in others if name not in beside},
    }


def skipped(entries: list[Entry], misfits: Misfits) -> list[Entry]:
    """Return the entries that may not be loaded in part and do not fit."""
    odd = [name for names in misfits.values() for name in names]
    return [entry for entry in entries if entry.whole and any(entry.name in _and_above(name) for name in odd)]


def fitting(wanted: dict[str, Any], misfits: Misfits, skipped: list[Entry]) -> dict[str, Any]:
    """Return the wanted values that are to be loaded."""
    return {
        name: value
        for name, value in wanted.items()
        if not (name in misfits["missing"] or name in misfits["mismatched"])
        and not any(entry.name in _and_above(name) for entry in skipped)
    }


def _on_any(per_rank: list[dict[str, str]]) -> dict[str, str]:
    """Merge texts by name; where not all ranks have it, the text says which do."""
    merged: dict[str, str] = {}
    for key in sorted({key for names in per_rank for key in names}):
        ranks = [rank for rank, names in enumerate(per_rank) if key in names]
        where = "" if len(ranks) == len(per_rank) else f" (on rank {', '.join(map(str, ranks))})"
        merged[key] = per_rank[ranks[0]][key] + where
    return merged


def _is_asked(saved: Contents, name: str, asked: set[str]) -> bool:
    """True if a flattened name of the checkpoint is under one of these top-level names."""
    return bool(asked & _and_above(name)) if name in saved.unplaced else str(saved.paths[name][0]) in asked


def describe(value: Any) -> str:
    """Return a value of a state or of a checkpoint in words."""
    if not isinstance(value, torch.Tensor):
        return "a plain value"
    return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"


def _differs(value: Any, saved: Any) -> str:
    """Return in words what the checkpoint holds and the state asks for, if these differ; else nothing."""
    given, wanted = describe(saved), describe(value)
    return "" if given == wanted else f"{given} in the checkpoint, {wanted} in the state"


def _and_above(key: str) -> set[str]:
    """Return a name and the names that it is under."""
    return {key, *(key[:place] for place, letter in enumerate(key) if letter == ".")}
