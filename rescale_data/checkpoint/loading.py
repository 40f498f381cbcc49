"""Load a checkpoint into a state: compare the two, read and check the files, then assign the values."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rescale_data.checkpoint.devices import adapt_tensors, wait_for_device
from rescale_data.checkpoint.entry import (
    MISMATCH_KINDS,
    Entry,
    Mismatches,
    find_mismatches,
    fitting_values,
    for_each,
    merge_mismatches,
)
from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.state import State, entries_of, refuse_unsavable
from rescale_data.checkpoint.storage.dcp import Contents, StateReader, ValuesReader, flatten
from rescale_data.checkpoint.storage.open import damaged_error, memory_mappable_path, open_store, read_checkpoint
from rescale_data.checkpoint.storage.store import StrPath
from rescale_data.checkpoint.tree import with_loaded
from rescale_data.engine.states.codec import TABLE, data_state_paths
from rescale_data.errors import DamagedCheckpointError, checks_argument_types
from rescale_data.state import nest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Names that ``load`` did not load.

    Args:
        missing: Names that the state asks for and the checkpoint does not hold: they keep their values.
        unexpected: Names that the checkpoint holds beside those asked for, in what was loaded.
        mismatched: Names in both with another shape, dtype or kind, and what does not fit of an optimizer (its name, or that of
            its groups or of an entry): they keep their values.
        not_asked: Top-level names of the checkpoint that the state does not mention.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save(f"{folder}/step-1", {"a": torch.ones(2)})
        ...     checkpoint.load(f"{folder}/step-1", {"a": torch.ones(2), "b": torch.ones(2)}, strict=False).missing
        ('b',)
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    not_asked: tuple[str, ...] = ()


@checks_argument_types
def load(
    path: StrPath,
    state: State,
    *,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Load the checkpoint at ``path`` into ``state``; all ranks call it.

    Modules, optimizers and tensors are loaded in place, a ``Stateful`` by its ``load_state_dict``, plain values are replaced in
    the dict that holds them. Names and the sizes of files are checked before anything is loaded, checksums where a piece is
    read. The sharding is that of ``state``, whatever it was in the run that saved.

    Args:
        path: A checkpoint of ``save``, any DCP folder, or a local file that ``torch.save`` wrote.
        state: As for ``save``. Names of the checkpoint that it leaves out are not loaded, and logged.
        strict: False loads what fits and reports the rest; a ``Stateful``, or an optimizer's state of one parameter, that does
            not fit whole is left as it is.
        process_group: The ranks that load; default all.
        storage_options: Passed on to fsspec.

    Raises:
        FileNotFoundError: no checkpoint at ``path``.
        DamagedCheckpointError: a ``ValueError``; the message says if the state is half loaded. Load another checkpoint over it.
        ValueError: a value could run code, names, shapes or dtypes do not fit, or a
            tensor is on the meta device, quantized, sparse, nested or partial; the message lists them all.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> state = {"weight": torch.zeros(2)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save(f"{folder}/step-1", {"weight": torch.ones(2)})
        ...     report = checkpoint.load(f"{folder}/step-1", state)
        >>> state["weight"]
        tensor([1., 1.])
    """
    ranks = Ranks(process_group)
    store, folder = open_store(path, storage_options)
    if ranks.run_on_first(lambda: store.is_file(folder)):
        from rescale_data.checkpoint.convert.torch_save import memory_map_file

        file_path = memory_mappable_path(path)
        return _restore(ranks.on_all(lambda: ValuesReader(file_path, memory_map_file(file_path))), state, ranks, strict)
    return load_folder(path, state, ranks, strict=strict, storage_options=storage_options)


def load_folder(path: StrPath, state: State, ranks: Ranks, *, strict: bool, **options: Any) -> LoadReport:
    """Load the checkpoint folder at ``path`` into a state; ``options`` are passed on to ``read_checkpoint``."""
    return read_checkpoint(path, lambda reader: _restore(reader, state, ranks, strict), ranks, **options)


def _restore(reader: StateReader, state: State, ranks: Ranks, strict: bool) -> LoadReport:
    """Load a state through a reader; return the names that were not loaded."""
    # Twice: sharded modules have collectives in their get_value(), which all ranks must reach or none.
    entries = ranks.on_all(lambda: entries_of(state, ranks.rank, reader.contents))
    live_values, wanted_values, paths = ranks.on_all(lambda: _placeholders(entries, reader))
    own_mismatches = find_mismatches(entries, wanted_values, reader.contents)
    differences = merge_mismatches(ranks.on_each(lambda: own_mismatches))
    report = LoadReport(**{kind: tuple(sorted(names)) for kind, names in differences.items()})
    if strict and any(differences[kind] for kind in MISMATCH_KINDS):
        raise ValueError(_mismatch_message(reader.name, differences, reader.contents))
    if report.not_asked:
        logger.info("%s also holds %s, which the state does not ask for.", reader.name, ", ".join(report.not_asked))
    loaded_entries, values = fitting_values(entries, wanted_values, paths, own_mismatches, reader.contents)
    try:
        loaded_values = ranks.on_all(lambda: reader.load(adapt_tensors(values, "to_load")))
        by_path = {paths[name]: value for name, value in loaded_values.items()}

        def assign(entry: Entry) -> None:
            entry.assign(with_loaded(live_values[entry], by_path, entry.path))

        ranks.on_all(lambda: for_each(loaded_entries, assign))
    except DamagedCheckpointError as error:
        raise damaged_error(reader.name, error.problems, _HALF_LOADED) from error
    except Exception as error:
        error.add_note(_HALF_LOADED)
        raise
    wait_for_device(live_values)
    return report


_HALF_LOADED = "The state is half loaded: load another checkpoint, over all of it, before you go on."


def _placeholders(
    entries: list[Entry], reader: StateReader
) -> tuple[dict[Entry, Any], dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Return the values that DCP loads into by entry, the same values by flattened name, and the path of each name."""
    live_values = dict(for_each(entries, lambda entry: (entry, entry.placeholder(reader))))
    state_dict = nest([(entry.path, value) for entry, value in live_values.items()])
    refuse_unsavable(state_dict)
    return live_values, *flatten(state_dict)


def _mismatch_message(path: str, mismatches: Mismatches, saved: Contents) -> str:
    lines = "\n  ".join(
        f"{MISMATCH_KINDS[kind]}: {key}, {msg}"
        for kind in MISMATCH_KINDS
        for key, msg in sorted(mismatches[kind].items())
    )
    return (
        f"The checkpoint {path} does not fit the state; nothing was loaded:\n  {lines}\n"
        f"The checkpoint holds {_summary(saved)}.\n"
        f"Build the state as in the run that saved, or pass strict=False to load what fits.{_advice(mismatches, saved)}"
    )


def _advice(mismatches: Mismatches, saved: Contents) -> str:
    """Return the advice to restore ``num_logical_shards`` if a loader's table has another shape; else an empty text."""
    if mismatches["mismatched"].keys() & {".".join((*root, TABLE)) for root in data_state_paths(saved.paths.values())}:
        return (
            " num_logical_shards is fixed for a whole run, and its default follows global_batch_size: give the loader the "
            "saved one, the first number of those shapes (the world size, the workers, the micro batch and the global batch "
            "may all change)."
        )
    return ""


def _summary(saved: Contents) -> str:
    values_per_name = Counter(str(path[0]) for path in saved.paths.values())
    return ", ".join(f"{name!r} ({count} values)" for name, count in sorted(values_per_name.items())) or "nothing"
