"""DCP's planners: a save with the tensors that a device has sharded, a load with every misfit found before a byte is read."""

from __future__ import annotations

import io
import math
from typing import Any, TypeAlias, cast

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.storage import StorageReader

from rescale_data.checkpoint.devices import Pieces, on_host, to_load, to_save
from rescale_data.checkpoint.entry import Entry
from rescale_data.checkpoint.ranks import Ranks, clear_error, quiet
from rescale_data.checkpoint.storage.progress import Progress


class CheckpointSavePlanner(DefaultSavePlanner):
    """Names, plain values and whole tensors as DCP has them, whatever the device: so any planner reads the checkpoint."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = on_host(self.state_dict, to_save)


Misfits: TypeAlias = dict[str, dict[str, str]]
"""What of a state and a checkpoint does not fit: by kind, and then by flattened name what it is."""
KINDS = {
    "missing": "missing in the checkpoint",
    "unexpected": "not asked for",  # under a name that is loaded
    "mismatched": "different",  # in shape, dtype or kind
}


def of_all_ranks(per_rank: list[Misfits]) -> Misfits:
    """Missing or different on any rank, not asked for by any of them."""
    merged = {kind: _on_any([found[kind] for found in per_rank]) for kind in KINDS}
    common = set.intersection(*(set(found["unexpected"]) for found in per_rank))
    return merged | {"unexpected": {name: text for name, text in merged["unexpected"].items() if name in common}}


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
        self.state_dict = on_host(self.state_dict, to_load)

    def check(self, plain: dict[str, Any], metadata: Metadata) -> Misfits:
        self.set_up_planner(plain, metadata, is_coordinator=False)
        wanted, saved = self.state_dict, metadata.state_dict_metadata
        asked = {entry.path[0] for entry in self.entries}
        refused = {name: text for entry in self.entries for name, text in entry.refused.items()}
        left_out = {name for entry in self.entries for name in entry.left_out}
        self.misfits = {
            "missing": {
                key: f"{_describe_wanted(value)} in the state" for key, value in wanted.items() if key not in saved
            },
            "unexpected": {
                key: describe(meta)
                for key, meta in saved.items()
                if key not in wanted and is_asked(metadata, key, asked) and not left_out & _and_above(key)
            },
            "mismatched": refused
            | {key: text for key, value in wanted.items() if key in saved and (text := _differs(value, saved[key]))},
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


def is_asked(metadata: Metadata, key: str, asked: set[str]) -> bool:
    """Whether a flattened name of the checkpoint is under one of these top-level names."""
    path = (metadata.planner_data or {}).get(key)
    return str(path[0]) in asked if path else bool(asked & _and_above(key))


def describe(meta: Any) -> str:
    if isinstance(meta, TensorStorageMetadata):
        return f"a {_dtype(meta.properties.dtype)} tensor of shape {list(meta.size)}"
    return "a plain value"


def _describe_wanted(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {_dtype(value.dtype)} tensor of shape {list(value.shape)}"
    return "a plain value"


def _differs(value: Any, meta: Any) -> str | None:
    """What the checkpoint holds and what is asked for, where the two differ."""
    if not isinstance(value, torch.Tensor) and not isinstance(meta, TensorStorageMetadata):
        return None
    given, wanted = describe(meta), _describe_wanted(value)
    return None if given == wanted else f"{given} in the checkpoint, {wanted} in the state"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    """DCP's load, whose errors say what was being done."""
    try:
        with quiet(ranks):
            load_state(
                plain, storage_reader=reader, planner=planner, process_group=ranks.group, no_dist=not ranks.distributed
            )
    except BaseException as error:
        raise clear_error(error, planner.progress.doing) from error


def load_plain(plain: dict[str, Any], reader: StorageReader, *, trusted: bool = False) -> None:
    """Read what ``plain`` has placeholders for, by flattened name.

    Args:
        trusted: Unpickle values that could run code.

    Raises:
        ValueError: a value that is refused with ``trusted=False``.
        OSError: files that cannot be read.
    """
    load_with(CheckingLoadPlanner([], trusted=trusted), plain, reader, Ranks.alone())


def read_values(names: list[str], reader: StorageReader, *, trusted: bool) -> dict[str, Any]:
    """Plain values by flattened name."""
    values: dict[str, Any] = dict.fromkeys(names)
    if values:
        load_plain(values, reader, trusted=trusted)
    return values
