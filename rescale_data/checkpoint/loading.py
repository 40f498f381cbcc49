"""Load a checkpoint into a state: checked first, then read, then taken over."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.storage import StorageReader

from rescale_data.checkpoint.devices import settle
from rescale_data.checkpoint.entries import Entry, State, entries_of, nested, value_at
from rescale_data.checkpoint.failures import DamagedCheckpointError, clear_error
from rescale_data.checkpoint.plain import read_values
from rescale_data.checkpoint.planner import CheckingLoadPlanner, Misfits, is_asked
from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.saved import Saved
from rescale_data.checkpoint.saving import quiet
from rescale_data.checkpoint.storage.commit import replaced_by_a_killed_save
from rescale_data.checkpoint.storage.integrity import problems
from rescale_data.checkpoint.storage.lease import reading
from rescale_data.checkpoint.storage.reader import CheckpointReader
from rescale_data.checkpoint.storage.store import Store, StrPath, open_store
from rescale_data.checkpoint.unfit import refuse_unfit

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What ``load`` did not load.

    Args:
        missing: Names that the state asks for and the checkpoint does not hold: they keep their values.
        unexpected: Names that the checkpoint holds beside those asked for, in what was loaded.
        mismatched: Names in both with another shape, dtype or kind, and what does not fit of an optimizer (its name, or that of
            its groups or of an entry): they keep their values.
        not_asked: Top-level names of the checkpoint that the state does not mention.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    not_asked: tuple[str, ...] = ()


def load(
    path: StrPath,
    state: State,
    *,
    strict: bool = True,
    checksums: bool = True,
    trusted: bool = True,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Load the checkpoint at ``path`` into ``state``, with all ranks.

    Modules, optimizers and tensors are loaded in place, a ``Stateful`` by its ``load_state_dict``, plain values are replaced in
    the dict that holds them. Files and names are checked before anything is loaded. The sharding is that of ``state``,
    whatever it was in the run that saved.

    Args:
        path: A checkpoint of ``save``, any DCP folder, or a local file that ``torch.save`` wrote.
        state: As for ``save``. Names of the checkpoint that it leaves out are not loaded, and logged.
        strict: False loads what fits and reports the rest; a ``Stateful``, or an optimizer's state of one parameter, that does
            not fit whole is left as it is.
        checksums: False compares the sizes of the files alone.
        trusted: False reads the checkpoint without ever running code from it: see the README of this module.
        process_group: The ranks that load; default all.
        storage_options: Passed on to fsspec.

    Raises:
        FileNotFoundError: no checkpoint at ``path``.
        ValueError: files are damaged, or names, shapes or dtypes do not fit, or a tensor is on the meta device, quantized,
            sparse or nested; the message lists them all.
    """
    ranks = Ranks(process_group)
    store, folder = open_store(path, storage_options)
    if ranks.on_first(lambda: store.is_file(folder)):
        from rescale_data.checkpoint.convert.torch_save import map_file
        from rescale_data.checkpoint.convert.values import ValuesReader

        if not store.renames:
            raise ValueError(
                f"{folder} is a file in an object store, and is mapped to be read. Copy it to a local disk first."
            )
        return read(ValuesReader(lambda: map_file(folder)), folder, state, ranks, strict=strict, trusted=trusted)
    folder = ranks.on_first(lambda: replaced_by_a_killed_save(store, folder) or folder)
    with reading(store, folder, wanted=ranks.is_first):
        refuse_damaged(store, folder, ranks, checksums=checksums)
        reader = CheckpointReader(store, folder, trusted=trusted)
        return read(reader, folder, state, ranks, strict=strict, trusted=trusted)


def refuse_damaged(store: Store, path: str, ranks: Ranks, *, checksums: bool) -> None:
    """``DamagedCheckpointError`` naming every file that is not what was saved."""
    found = problems(store, path, ranks, checksums=checksums)
    if found:
        listed = "\n  ".join(found)
        raise DamagedCheckpointError(
            f"The checkpoint {path} is damaged:\n  {listed}\nNothing was loaded. Load an earlier checkpoint."
        )


def read(reader: StorageReader, path: str, state: State, ranks: Ranks, *, strict: bool, trusted: bool) -> LoadReport:
    """Load from a reader whose files are in order."""
    entries = ranks.together(lambda: entries_of(state))
    planner = CheckingLoadPlanner(entries, trusted=trusted)
    plain: dict[str, Any] = {}

    def check() -> tuple[Misfits, set[str]]:
        metadata = reader.read_metadata()
        saved = Saved(metadata, lambda names: read_values(names, reader, trusted=trusted))
        plain.update(nested([(entry.path, entry.placeholder(saved)) for entry in entries]))
        refuse_unfit(plain)
        return planner.check(plain, metadata), _not_asked(metadata, entries)

    found = ranks.on_each(check)
    metadata, misfits = reader.read_metadata(), Misfits.of_ranks([of_rank for of_rank, _ in found])
    not_asked = tuple(sorted(set.intersection(*(names for _, names in found))))
    if misfits and strict:
        raise ValueError(_complaint(path, misfits, metadata))
    if not_asked:
        logger.info("%s also holds %s, which the state does not ask for.", path, ", ".join(not_asked))
    try:
        with quiet(ranks):
            load_state(
                plain, storage_reader=reader, planner=planner, process_group=ranks.group, no_dist=not ranks.distributed
            )
    except BaseException as error:
        raise clear_error(error, f"Loading {path}") from error
    skipped = planner.skipped()
    ranks.on_each(lambda: [entry.apply(value_at(plain, entry.path)) for entry in entries if entry not in skipped])
    settle(plain)
    return LoadReport(
        missing=tuple(sorted(misfits.missing)),
        unexpected=tuple(sorted(misfits.unexpected)),
        mismatched=tuple(sorted(misfits.mismatched)),
        not_asked=not_asked,
    )


def _not_asked(metadata: Metadata, entries: list[Entry]) -> set[str]:
    asked = {entry.path[0] for entry in entries}
    return {top_level(metadata, key) for key in metadata.state_dict_metadata if not is_asked(metadata, key, asked)}


def top_level(metadata: Metadata, key: str) -> str:
    """The name in the saved state that a flattened name is under."""
    return str((metadata.planner_data or {}).get(key, (key,))[0])


def _complaint(path: str, misfits: Misfits, metadata: Metadata) -> str:
    lines = [
        *(f"missing in the checkpoint: {name}, {what}" for name, what in sorted(misfits.missing.items())),
        *(f"not asked for: {name}, {what}" for name, what in sorted(misfits.unexpected.items())),
        *(f"different: {name}, {what}" for name, what in sorted(misfits.mismatched.items())),
    ]
    listed = "\n  ".join(lines)
    return (
        f"The checkpoint {path} does not fit the state; nothing was loaded:\n  {listed}\n"
        f"The checkpoint holds {_summary(metadata)}.\n"
        f"Build the state as in the run that saved, or pass strict=False to load what fits.{_hint(misfits)}"
    )


def _hint(misfits: Misfits) -> str:
    """On what names alone tell: torch_xla's FSDP wraps a module under this name."""
    if not any("_orig_module" in name.split(".") for name in (*misfits.missing, *misfits.unexpected)):
        return ""
    return (
        " SpmdFullyShardedDataParallel of torch_xla puts _orig_module into the names of parameters: to go from or to a model "
        "without it put its .module into the state, and do without auto_wrap_policy, whose names are those of its wrapping."
    )


def _summary(metadata: Metadata) -> str:
    counts: dict[str, int] = {}
    for key in metadata.state_dict_metadata:
        name = top_level(metadata, key)
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{name!r} ({count} values)" for name, count in sorted(counts.items())) or "nothing"
