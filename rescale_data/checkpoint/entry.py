"""`Entry`: one value of a training state, with the functions that give it to DCP and take back what DCP has loaded.

What of a state and a checkpoint does not fit is known from the metadata alone, all of it, before a byte is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch

from rescale_data.checkpoint.storage.dcp import Contents, StateReader

T = TypeVar("T")
R = TypeVar("R")
Path: TypeAlias = tuple[str, ...]
Mismatches: TypeAlias = dict[str, dict[str, str]]
"""Differences between a state and a checkpoint, in words, by kind and then by flattened name."""
MISMATCH_KINDS = {
    "missing": "missing in the checkpoint",
    "unexpected": "not asked for",  # under a name that is loaded
    "mismatched": "different",  # in shape, dtype or kind
}
NOT_REQUESTED = "not_asked"
"""Kind of the top-level names that only the checkpoint has, which is no mismatch."""


@dataclass(eq=False)
class Entry:
    """One value of a training state (a module, an optimizer, a tensor, ...), with the functions that save it and load it.

    Args:
        path: Keys from the root of the state down to the value.
        get_value: Gives what DCP saves. Its tensors may be the live ones, which are then loaded in place.
        assign: Takes what DCP has loaded.
        all_or_nothing: Whether a part of it may not be loaded without the rest.
        get_optimizer_tensors: Gives tensors that only an optimizer's step changes.
        refusal_texts: What of the checkpoint does not fit although the names do, and why, by name; known with the placeholder.
        names_left_out: Names of the checkpoint that are not loaded for that, with all that is under them.
    """

    path: Path
    get_value: Callable[[], Any]
    assign: Callable[[Any], object]
    all_or_nothing: bool = False
    get_optimizer_tensors: Callable[[], Iterable[torch.Tensor]] = tuple
    refusal_texts: dict[str, str] = field(default_factory=dict[str, str])
    names_left_out: set[str] = field(default_factory=set[str])

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def placeholder(self, reader: StateReader) -> Any:
        """Return the value whose tensors DCP loads into, for the checkpoint of ``reader``."""
        return self.get_value()


def for_each(entries: Iterable[T], work: Callable[[T], R]) -> list[R]:
    """Return ``work(entry)`` of each entry; raise an error only at the end, as later entries may have collectives."""
    results: list[R] = []
    errors: list[Exception] = []
    for entry in entries:
        try:
            results.append(work(entry))
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def merge_mismatches(all_mismatches: list[Mismatches]) -> Mismatches:
    """Merge the mismatches of all ranks: names missing or different on any rank, names that no rank requests."""
    merged_mismatches = {
        kind: _merge_texts([differences[kind] for differences in all_mismatches]) for kind in all_mismatches[0]
    }
    for kind in ("unexpected", NOT_REQUESTED):
        common_names = set.intersection(*(set(differences[kind]) for differences in all_mismatches))
        merged_mismatches[kind] = {name: text for name, text in merged_mismatches[kind].items() if name in common_names}
    return merged_mismatches


def find_mismatches(entries: list[Entry], wanted_values: dict[str, Any], saved: Contents) -> Mismatches:
    """Return the differences between the state of one rank and the checkpoint, as `Mismatches`.

    Args:
        wanted_values: What the entries ask for, by flattened name.
    """
    requested_names = {entry.path[0] for entry in entries}
    refusals = {name: text for entry in entries for name, text in entry.refusal_texts.items()}
    left_out = {name for entry in entries for name in entry.names_left_out}
    other_names = [name for name in saved.values if name not in wanted_values]
    unexpected = {name for name in other_names if _is_requested(saved, name, requested_names)}
    return {
        "missing": {
            name: f"{describe(value)} in the state" for name, value in wanted_values.items() if name not in saved.values
        },
        "unexpected": {name: describe(saved.values[name]) for name in unexpected if not left_out & _key_prefixes(name)},
        "mismatched": refusals
        | {
            name: text
            for name, value in wanted_values.items()
            if name in saved.values and (text := _difference(value, saved.values[name]))
        },
        NOT_REQUESTED: {str(saved.paths[name][0]): "" for name in other_names if name not in unexpected},
    }


def fitting_values(
    entries: list[Entry],
    wanted_values: dict[str, Any],
    paths: Mapping[str, tuple[Any, ...]],
    mismatches: Mismatches,
    saved: Contents,
) -> tuple[list[Entry], dict[str, Any]]:
    """Return the entries that are loaded, in part or whole, and their values that fit, by flattened name.

    Args:
        paths: Path in the state of each wanted value.
    """

    def is_part(name: str, entry: Entry) -> bool:
        if name not in paths and name in saved.pathless:
            return f"{name}.".startswith(f"{entry.name}.")
        return (paths.get(name) or saved.paths.get(name, ()))[: len(entry.path)] == entry.path

    mismatch_names = {name for kind in MISMATCH_KINDS for name in mismatches[kind]}
    skipped = {
        entry for entry in entries if entry.all_or_nothing and any(is_part(name, entry) for name in mismatch_names)
    }
    values = {
        name: value
        for name, value in wanted_values.items()
        if name not in mismatch_names and not any(is_part(name, entry) for entry in skipped)
    }
    return [entry for entry in entries if entry not in skipped], values


def _merge_texts(texts_per_rank: list[dict[str, str]]) -> dict[str, str]:
    """Merge texts of all ranks by name; add the rank numbers to a text that only some ranks have."""
    merged: dict[str, str] = {}
    for key in sorted({key for rank_texts in texts_per_rank for key in rank_texts}):
        ranks = [rank for rank, rank_texts in enumerate(texts_per_rank) if key in rank_texts]
        rank_note = "" if len(ranks) == len(texts_per_rank) else f" (on rank {', '.join(map(str, ranks))})"
        merged[key] = texts_per_rank[ranks[0]][key] + rank_note
    return merged


def _is_requested(saved: Contents, name: str, requested: set[str]) -> bool:
    """True if a flattened name of the checkpoint is under one of the requested top-level names."""
    return bool(requested & _key_prefixes(name)) if name in saved.pathless else str(saved.paths[name][0]) in requested


def describe(value: Any) -> str:
    """Describe a value of a state or a checkpoint: dtype and shape of a tensor, "a plain value" for all else."""
    if not isinstance(value, torch.Tensor):
        return "a plain value"
    return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"


def _difference(value: Any, saved_value: Any) -> str:
    """Return a text with the saved and the wanted kind, dtype and shape if they differ; else an empty text."""
    saved_text, state_text = describe(saved_value), describe(value)
    return "" if saved_text == state_text else f"{saved_text} in the checkpoint, {state_text} in the state"


def _key_prefixes(key: str) -> set[str]:
    """Return a dotted name and its prefixes: ``{"a", "a.b", "a.b.c"}`` for ``"a.b.c"``."""
    return {key, *(key[:index] for index, letter in enumerate(key) if letter == ".")}
