"""Load a checkpoint into a state: compare the two, read and check the files, then assign the values.

All differences between the two are found in the metadata, before a byte of data is read.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from rescale_data.checkpoint.devices import adapt_tensors, wait_for_device
from rescale_data.checkpoint.entry import Entry, for_each
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
Mismatches: TypeAlias = dict[str, dict[str, str]]
"""Differences between a state and a checkpoint, in words, by kind and then by flattened name."""
_MISMATCH_KINDS = {
    "missing": "missing in the checkpoint",
    "unexpected": "not asked for",  # under a name that is loaded
    "mismatched": "different",  # in shape, dtype or kind
}
_NOT_REQUESTED = "not_asked"
"""Kind of the top-level names that only the checkpoint has, which is no mismatch."""


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
        state: The same as for ``save``. Names of the checkpoint that it leaves out are not loaded, and logged.
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
    local_mismatches = _find_mismatches(entries, wanted_values, reader.contents)
    differences = _merge_mismatches(ranks.on_each(lambda: local_mismatches))
    report = LoadReport(**{kind: tuple(sorted(names)) for kind, names in differences.items()})
    if strict and any(differences[kind] for kind in _MISMATCH_KINDS):
        raise ValueError(_mismatch_message(reader.name, differences, reader.contents))
    if report.not_asked:
        logger.info("%s also holds %s, which the state does not ask for.", reader.name, ", ".join(report.not_asked))
    loaded_entries, values = _fitting_values(entries, wanted_values, paths, local_mismatches, reader.contents)
    try:
        loaded_values = ranks.on_all(lambda: reader.load(adapt_tensors(values, "to_load")))
        values_by_path = {paths[name]: value for name, value in loaded_values.items()}

        def assign(entry: Entry) -> None:
            entry.assign(with_loaded(live_values[entry], values_by_path, entry.path))

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
        f"{_MISMATCH_KINDS[kind]}: {key}, {text}"
        for kind in _MISMATCH_KINDS
        for key, text in sorted(mismatches[kind].items())
    )
    return (
        f"The checkpoint {path} does not fit the state; nothing was loaded:\n  {lines}\n"
        f"The checkpoint holds {_summarize_contents(saved)}.\n"
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


def _summarize_contents(saved: Contents) -> str:
    values_per_name = Counter(str(path[0]) for path in saved.paths.values())
    return ", ".join(f"{name!r} ({count} values)" for name, count in sorted(values_per_name.items())) or "nothing"


# Differences between a state and a checkpoint


def _merge_mismatches(all_mismatches: list[Mismatches]) -> Mismatches:
    """Merge the mismatches of all ranks: names missing or different on any rank, names that no rank requests."""
    merged = {kind: _merge_texts([differences[kind] for differences in all_mismatches]) for kind in all_mismatches[0]}
    for kind in ("unexpected", _NOT_REQUESTED):
        names_of_all = set.intersection(*(set(differences[kind]) for differences in all_mismatches))
        merged[kind] = {name: text for name, text in merged[kind].items() if name in names_of_all}
    return merged


def _find_mismatches(entries: list[Entry], wanted_values: dict[str, Any], saved: Contents) -> Mismatches:
    """Return the differences between the state of one rank and the checkpoint, as `Mismatches`.

    Args:
        wanted_values: The values that the entries ask for, by flattened name.
    """
    requested_names = {entry.path[0] for entry in entries}
    refusal_texts = {name: text for entry in entries for name, text in entry.refusal_texts.items()}
    left_out_names = {name for entry in entries for name in entry.names_left_out}
    other_names = [name for name in saved.values if name not in wanted_values]
    unexpected = {name for name in other_names if _is_requested(saved, name, requested_names)}
    return {
        "missing": {
            name: f"{_describe(value)} in the state"
            for name, value in wanted_values.items()
            if name not in saved.values
        },
        "unexpected": {
            name: _describe(saved.values[name]) for name in unexpected if not left_out_names & _key_prefixes(name)
        },
        "mismatched": refusal_texts
        | {
            name: text
            for name, value in wanted_values.items()
            if name in saved.values and (text := _difference(value, saved.values[name]))
        },
        _NOT_REQUESTED: {str(saved.paths[name][0]): "" for name in other_names if name not in unexpected},
    }


def _fitting_values(
    entries: list[Entry],
    wanted_values: dict[str, Any],
    paths: Mapping[str, tuple[Any, ...]],
    mismatches: Mismatches,
    saved: Contents,
) -> tuple[list[Entry], dict[str, Any]]:
    """Return the entries that are loaded, in part or whole, and their values that fit, by flattened name.

    Args:
        paths: The path in the state of each wanted value.
    """

    def is_in_entry(name: str, entry: Entry) -> bool:
        if name not in paths and name in saved.pathless:
            return f"{name}.".startswith(f"{entry.name}.")
        return (paths.get(name) or saved.paths.get(name, ()))[: len(entry.path)] == entry.path

    mismatch_names = {name for kind in _MISMATCH_KINDS for name in mismatches[kind]}
    skipped_entries = {
        entry for entry in entries if entry.must_load_whole and any(is_in_entry(name, entry) for name in mismatch_names)
    }
    values = {
        name: value
        for name, value in wanted_values.items()
        if name not in mismatch_names and not any(is_in_entry(name, entry) for entry in skipped_entries)
    }
    return [entry for entry in entries if entry not in skipped_entries], values


def _merge_texts(texts_per_rank: list[dict[str, str]]) -> dict[str, str]:
    """Merge texts of all ranks by name; add the rank numbers to a text that only some ranks have."""
    merged_texts: dict[str, str] = {}
    for key in sorted({key for rank_texts in texts_per_rank for key in rank_texts}):
        ranks = [rank for rank, rank_texts in enumerate(texts_per_rank) if key in rank_texts]
        ranks_text = "" if len(ranks) == len(texts_per_rank) else f" (on rank {', '.join(map(str, ranks))})"
        merged_texts[key] = texts_per_rank[ranks[0]][key] + ranks_text
    return merged_texts


def _is_requested(saved: Contents, name: str, requested: set[str]) -> bool:
    """True if a flattened name of the checkpoint is under one of the requested top-level names."""
    return bool(requested & _key_prefixes(name)) if name in saved.pathless else str(saved.paths[name][0]) in requested


def _describe(value: Any) -> str:
    """Describe a value of a state or a checkpoint: dtype and shape of a tensor, "a plain value" for all else."""
    if not isinstance(value, torch.Tensor):
        return "a plain value"
    return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"


def _difference(value: Any, saved_value: Any) -> str:
    """Return a text with the saved and the wanted kind, dtype and shape if they differ; else an empty text."""
    saved_text, state_text = _describe(saved_value), _describe(value)
    return "" if saved_text == state_text else f"{saved_text} in the checkpoint, {state_text} in the state"


def _key_prefixes(key: str) -> set[str]:
    """Return a dotted name and its prefixes: ``{"a", "a.b", "a.b.c"}`` for ``"a.b.c"``."""
    return {key, *(key[:index] for index, letter in enumerate(key) if letter == ".")}
