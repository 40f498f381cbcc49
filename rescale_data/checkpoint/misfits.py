"""What of a state and a checkpoint does not fit: all of it, from the metadata alone, before a byte is read."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from rescale_data.checkpoint.entry import Entry
from rescale_data.checkpoint.storage.dcp import Contents

Misfits: TypeAlias = dict[str, dict[str, str]]
"""What of a state and a checkpoint does not fit: by kind, and then by flattened name what it is."""
KINDS = {
    "missing": "missing in the checkpoint",
    "unexpected": "not asked for",  # under a name that is loaded
    "mismatched": "different",  # in shape, dtype or kind
}


NOT_ASKED = "not_asked"
"""A further kind, of top-level names; that is no misfit."""


def of_all_ranks(per_rank: list[Misfits]) -> Misfits:
    """Missing or different on any rank, not asked for by any of them."""
    merged = {kind: _on_any([found[kind] for found in per_rank]) for kind in per_rank[0]}
    for kind in ("unexpected", NOT_ASKED):
        common = set.intersection(*(set(found[kind]) for found in per_rank))
        merged[kind] = {name: text for name, text in merged[kind].items() if name in common}
    return merged


def compare(entries: list[Entry], wanted: dict[str, Any], saved: Contents) -> Misfits:
    """The misfits of one rank.

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
    """Entries that may not be loaded in part and do not fit."""
    odd = [name for names in misfits.values() for name in names]
    return [entry for entry in entries if entry.whole and any(_is_under(name, entry.name) for name in odd)]


def fitting(wanted: dict[str, Any], misfits: Misfits, skipped: list[Entry]) -> dict[str, Any]:
    """What is to be loaded."""
    return {
        name: value
        for name, value in wanted.items()
        if not (name in misfits["missing"] or name in misfits["mismatched"])
        and not any(_is_under(name, entry.name) for entry in skipped)
    }


def _on_any(per_rank: list[dict[str, str]]) -> dict[str, str]:
    """Texts by name; where not all ranks have it, the text says which do."""
    merged: dict[str, str] = {}
    for key in sorted({key for found in per_rank for key in found}):
        ranks = [rank for rank, found in enumerate(per_rank) if key in found]
        where = "" if len(ranks) == len(per_rank) else f" (on rank {', '.join(map(str, ranks))})"
        merged[key] = per_rank[ranks[0]][key] + where
    return merged


def _is_asked(saved: Contents, name: str, asked: set[str]) -> bool:
    """Whether a flattened name of the checkpoint is under one of these top-level names."""
    return bool(asked & _and_above(name)) if name in saved.unplaced else str(saved.paths[name][0]) in asked


def describe(value: Any) -> str:
    """A value of a state or of a checkpoint."""
    if not isinstance(value, torch.Tensor):
        return "a plain value"
    return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"


def _differs(value: Any, saved: Any) -> str:
    """What the checkpoint holds and what is asked for, where the two differ."""
    given, wanted = describe(saved), describe(value)
    return "" if given == wanted else f"{given} in the checkpoint, {wanted} in the state"


def _is_under(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _and_above(key: str) -> set[str]:
    """A name and the names that it is under."""
    return {key, *(key[:place] for place, letter in enumerate(key) if letter == ".")}
