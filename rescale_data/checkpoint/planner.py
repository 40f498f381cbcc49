"""DCP's planner of a load, which finds every misfit before a byte is read; and the load by it."""

from __future__ import annotations

import io
import math
from typing import Any, TypeAlias, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.storage import StorageReader

from rescale_data.checkpoint.devices import Pieces, cut
from rescale_data.checkpoint.entry import Entry
from rescale_data.checkpoint.ranks import Ranks, clear_error, quiet
from rescale_data.checkpoint.storage.dcp import CheckpointReader, ReplacedError
from rescale_data.checkpoint.storage.metadata import paths_of
from rescale_data.checkpoint.storage.progress import Progress

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


class CheckingLoadPlanner(DefaultLoadPlanner):
    """Reads what fits. ``check`` tells the rest, from the metadata alone.

    Args:
        entries: Of the state. Without any it is flat already: DCP's own way to flatten one keeps its tensors alive until a
            garbage collection (torch 2.9), which a stream of them cannot afford.
        doing: "Loading /runs/step-100".
    """

    def __init__(self, entries: list[Entry], *, trusted: bool, doing: str = "Reading the checkpoint") -> None:
        nested = bool(entries)
        super().__init__(flatten_state_dict=nested, flatten_sharded_tensors=nested, allow_partial_load=True)
        self.entries = entries
        self.trusted = trusted
        self.misfits: Misfits = {kind: {} for kind in KINDS}
        self.progress = Progress(doing)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = cut(self.state_dict, "to_load")

    def check(self, plain: dict[str, Any], metadata: Metadata) -> Misfits:
        self.set_up_planner(plain, metadata, is_coordinator=False)
        wanted, saved = self.state_dict, metadata.state_dict_metadata
        asked = {entry.path[0] for entry in self.entries}
        refused = {name: text for entry in self.entries for name, text in entry.refused.items()}
        left_out = {name for entry in self.entries for name in entry.left_out}
        others = {key: meta for key, meta in saved.items() if key not in wanted}
        beside = {key: meta for key, meta in others.items() if _is_asked(metadata, key, asked)}
        paths = paths_of(metadata)
        self.misfits = {
            "missing": {key: f"{describe(value)} in the state" for key, value in wanted.items() if key not in saved},
            "unexpected": {key: describe(meta) for key, meta in beside.items() if not left_out & _and_above(key)},
            "mismatched": refused
            | {key: text for key, value in wanted.items() if key in saved and (text := _differs(value, saved[key]))},
            NOT_ASKED: {str(paths[key][0]): "" for key in others if key not in beside},
        }
        return self.misfits

    def skipped(self) -> list[Entry]:
        """Entries that may not be loaded in part and do not fit."""
        odd = [key for names in self.misfits.values() for key in names]
        return [entry for entry in self.entries if entry.whole and any(_is_under(key, entry.name) for key in odd)]

    def create_local_plan(self) -> LoadPlan:
        skipped = [entry.name for entry in self.skipped()]
        fitting = {
            key: value
            for key, value in self.state_dict.items()
            if not (key in self.misfits["missing"] or key in self.misfits["mismatched"])
            and not any(_is_under(key, name) for name in skipped)
        }
        # Not super(): it looks for the names of torch 2.3 where some are missing, and so finds again what was left out here.
        return create_default_local_load_plan(fitting, cast(Metadata, self.metadata), strict=False)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.progress.add(math.prod(read_item.lengths) * tensor.element_size())
        target = self.state_dict[read_item.dest_index.fqn]
        if isinstance(target, Pieces):
            target.commit(read_item, tensor)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        super().load_bytes(read_item, value if self.trusted else _harmless(read_item.dest_index.fqn, value))


def _on_any(per_rank: list[dict[str, str]]) -> dict[str, str]:
    """Texts by name; where not all ranks have it, the text says which do."""
    merged: dict[str, str] = {}
    for key in sorted({key for found in per_rank for key in found}):
        ranks = [rank for rank, found in enumerate(per_rank) if key in found]
        where = "" if len(ranks) == len(per_rank) else f" (on rank {', '.join(map(str, ranks))})"
        merged[key] = per_rank[ranks[0]][key] + where
    return merged


def _is_asked(metadata: Metadata, key: str, asked: set[str]) -> bool:
    """Whether a flattened name of the checkpoint is under one of these top-level names."""
    path = (metadata.planner_data or {}).get(key)
    return str(path[0]) in asked if path else bool(asked & _and_above(key))


def describe(value: Any) -> str:
    """A value of a state, or what a checkpoint's metadata says of one."""
    if isinstance(value, TensorStorageMetadata):
        dtype, size = value.properties.dtype, value.size
    elif isinstance(value, torch.Tensor):
        dtype, size = value.dtype, value.shape
    else:
        return "a plain value"
    return f"a {str(dtype).removeprefix('torch.')} tensor of shape {list(size)}"


def _differs(value: Any, meta: Any) -> str:
    """What the checkpoint holds and what is asked for, where the two differ."""
    given, wanted = describe(meta), describe(value)
    return "" if given == wanted else f"{given} in the checkpoint, {wanted} in the state"


def _is_under(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _and_above(key: str) -> set[str]:
    """A name and the names that it is under."""
    return {key, *(key[:place] for place, letter in enumerate(key) if letter == ".")}


def _harmless(name: str, value: io.BytesIO) -> io.BytesIO:
    """The same value, written anew from what an unpickler without code made of it."""
    try:
        content = torch.load(value, weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{name} is refused with trusted=False: {error}. "
            f"Save plain numbers, strings and tensors (item() of numpy's), or give load trusted=True if you would run code "
            f"from whoever wrote it."
        ) from error
    clean = io.BytesIO()
    torch.save(cast(object, content), clean)
    clean.seek(0)
    return clean


def load_with(planner: CheckingLoadPlanner, plain: dict[str, Any], reader: StorageReader, ranks: Ranks) -> None:
    """DCP's load, whose errors say what was being done, or that another checkpoint took the place of this one."""
    try:
        quiet(ranks)
        load_state(
            plain, storage_reader=reader, planner=planner, process_group=ranks.group, no_dist=not ranks.distributed
        )
    except (Exception, CheckpointException) as error:
        _refuse_replaced(reader, ranks)
        raise clear_error(error, planner.progress.doing) from error
    _refuse_replaced(reader, ranks)


def _refuse_replaced(reader: StorageReader, ranks: Ranks) -> None:
    if isinstance(reader, CheckpointReader) and ranks.on_first(reader.is_replaced):
        raise ReplacedError(reader.path)


def load_plain(plain: dict[str, Any], reader: StorageReader) -> dict[str, Any]:
    """``plain`` with what it has placeholders for, by flattened name, read by this process alone."""
    if plain:
        load_with(CheckingLoadPlanner([], trusted=is_trusted(reader)), plain, reader, Ranks.alone())
    return plain


def is_trusted(reader: StorageReader) -> bool:
    """Whether what is read may be unpickled by code."""
    return getattr(reader, "trusted", False)
