"""The format of a state: one tensor (the table) and one JSON string (the header), for any pipeline.

    {"table": int64[N, columns], "header": str}

    table    row i is the position of logical shard i, with a stamp for the shard and the sample: ``-1 - (samples * N + i)``
    header   ``version``, the counts of the run, the topology, and ``columns``, ``pipeline`` and ``sources``

``columns`` names the fields of the table in its order, with dtype and shape. A number takes one column (a float64 as its bits);
a tensor takes its bytes. A load finds columns by name, so sources may come and go. Source: docs/design.md, 8.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch

from rescale_data.engine.cursor import Cursor
from rescale_data.engine.ends import EpochEndFinder
from rescale_data.engine.recipe import EPOCH_ENDED, LOADER_FIELDS, NO_REMAINDER, REMAINDER_COLUMN, STAMP, STAMP_LIMIT
from rescale_data.engine.schema import Schema, to_json
from rescale_data.engine.states.change import ChangedChild
from rescale_data.errors import DataStateError
from rescale_data.layout.clock import Clock
from rescale_data.state import Field, Ints, field_from_description, slot_offsets, to_tensors

StatePath: TypeAlias = tuple[str, ...]
VERSION = 1
TABLE, HEADER = "table", "header"
BALANCED = "balanced"
"""The key that the header of a loader with balanced steps has in addition."""
_SIZE_KEYS = ("global_batch_size", "dp_world_size", "micro_batch_size", "num_logical_shards")
_COUNT_KEYS = ("samples", "origin", "step", "epoch", "in_step", "dropped_samples", "padded_samples", "num_workers")
_OTHER_KEYS = ("seed", "skipped", "columns", "pipeline", "sources")
_REMEDY = "Give what loader.state_dict() returned, or DCP loaded into it."
_DAMAGE_ADVICE = "it was changed or damaged. Load another checkpoint."


@dataclass(frozen=True)
class SavedState:
    """The checked header and table of a saved state.

    Args:
        header: The values of the header, by name.
        table: ``int64[N, columns]``, with the stamps; a copy.
    """

    header: Mapping[str, Any]
    table: Ints

    @cached_property
    def fields(self) -> list[Field]:
        """The fields of the table, in the order of its columns."""
        return fields_in(self.header)

    @cached_property
    def values(self) -> dict[str, torch.Tensor]:
        """The table split into fields: a tensor with N rows for each field, by name."""
        return to_tensors(self.fields, self.table)

    @property
    def state(self) -> dict[str, Any]:
        """The state as `load_state_dict` takes it."""
        return {TABLE: torch.from_numpy(self.table), HEADER: json.dumps(self.header)}

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The global batch size O, dp world size W and micro batch size b with which the state was saved."""
        o, w, b, _ = (self.header[name] for name in _SIZE_KEYS)
        return o, w, b

    @property
    def clock(self) -> Clock:
        """The counts of samples, steps and epochs of the run at the save."""
        clock_fields: dict[str, Any] = {field.name: self.header[field.name] for field in dataclasses.fields(Clock)}
        clock_fields["skipped"] = tuple((start, stop) for start, stop in clock_fields["skipped"])
        clock_fields["step"] -= (clock_fields["samples"] - clock_fields["origin"]) // self.header["global_batch_size"]
        if clock_fields["step"] < 0:
            raise DataStateError(f"The state counts {self.header['step']!r} step: {_DAMAGE_ADVICE}")
        return Clock(**clock_fields)


# A state is written


def header_of(cursor: Cursor, ends: EpochEndFinder) -> str:
    """Return the header of a state as JSON, the same on every rank; the schema keeps the long parts of it as texts."""
    layout, schema, clock = ends.layout, ends.schema, cursor.clock_now(ends.layout)
    step = clock.global_step(layout.global_batch_size)
    run_counts = {**vars(clock), "step": step, "num_workers": layout.num_workers}
    if ends.setup.options.balance is not None:
        run_counts[BALANCED] = True
    layout_sizes = {name: getattr(layout, name) for name in _SIZE_KEYS}
    header_text = to_json({"version": VERSION, "seed": ends.setup.recipe.seed, **run_counts, **layout_sizes})[:-1]
    return header_text + "".join(f',"{name}":{json_text}' for name, json_text in schema.header_texts.items()) + "}"


def encode_state(table: Ints, samples: int, header: str) -> dict[str, Any]:
    """Return a state: the header, and the table ``int64[N, slots]`` with a column of stamps, which identify rows, in front."""
    stamped_table = np.concatenate([_expected_row_stamps(len(table), samples)[:, None], table], axis=1)
    return {TABLE: torch.from_numpy(stamped_table), HEADER: header}


def at_next_epoch(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state at the end of an epoch moved to the start of the next epoch; any other state unchanged."""
    table, header = state[TABLE], json.loads(state[HEADER])
    (remainder_column,) = _slots_by_key(fields_in(header))[LOADER_FIELDS[REMAINDER_COLUMN].key]
    if not bool((table[:, remainder_column] == EPOCH_ENDED).all()):
        return dict(state)
    table = table.clone()
    table[:, remainder_column] = NO_REMAINDER
    return {**state, TABLE: table, HEADER: json.dumps({**header, "epoch": header["epoch"] + 1})}


def _expected_row_stamps(num_logical_shards: int, samples: int) -> Ints:
    return -1 - samples * num_logical_shards - np.arange(num_logical_shards, dtype=np.int64)


# A state is read


def is_state(value: Any) -> bool:
    """True if a value looks like the saved state of a loader: a mapping with a table and a header."""
    return isinstance(value, Mapping) and {TABLE, HEADER} <= value.keys()


def decode(state: Mapping[str, Any]) -> SavedState:
    """Return the checked header and table of a state; raise ``DataStateError`` if it is not the state of a loader."""
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"The state is a {type(state).__name__}. {_REMEDY}")
    _require_keys(state, (TABLE, HEADER), "state")
    header, table = read_header(state[HEADER]), state[TABLE]
    if not isinstance(table, torch.Tensor):
        raise DataStateError(f"The table of the state is a {type(table).__name__}, not a tensor. {_REMEDY}")
    declared = (header["num_logical_shards"], slot_offsets(fields_in(header))[-1]), torch.int64
    if (tuple(table.shape), table.dtype) != declared:
        raise DataStateError(
            f"The table of the state has shape and dtype {(tuple(table.shape), table.dtype)}; by its header it has {declared}."
        )
    return SavedState(header, table.detach().cpu().numpy().copy())


def read_header(text: Any) -> dict[str, Any]:
    """Return the values of a header; raise ``DataStateError`` if it is damaged, or of another format version."""
    try:
        header = json.loads(text)
    except (TypeError, ValueError) as error:
        raise DataStateError(f"The header of the state is not the JSON that was saved: {error}. {_REMEDY}") from error
    _require_keys(header, ("version",), "header of the state")
    if header["version"] != VERSION:
        raise DataStateError(
            f"The state has format version {header['version']}, this rescale_data reads the version {VERSION}. Load it with "
            f"the release that saved it."
        )
    _require_keys(header, (*_SIZE_KEYS, *_COUNT_KEYS, *_OTHER_KEYS), "header of the state")
    for name in (*_SIZE_KEYS, *_COUNT_KEYS):
        if not isinstance(header[name], int) or not (name in _SIZE_KEYS) <= header[name] < STAMP_LIMIT:
            raise DataStateError(f"The state counts {header[name]!r} {name}: {_DAMAGE_ADVICE}")
    if not all(isinstance(header[name], dict) for name in ("pipeline", "sources")):
        raise DataStateError(f"The header of the state has no pipeline and sources: {_DAMAGE_ADVICE}")
    _require_ranges(header["skipped"], header["samples"])
    fields_in(header)
    return header


def fields_in(header: Mapping[str, Any]) -> list[Field]:
    """Return the table fields that a header describes, in the order of the columns."""
    try:
        return [field_from_description(column["name"], column) for column in header["columns"]]
    except (AttributeError, LookupError, TypeError) as error:
        raise DataStateError(f"The header of the state does not describe its columns: {_DAMAGE_ADVICE}") from error


def table_of(schema: Schema, saved: SavedState, added: Sequence[ChangedChild]) -> Ints:
    """Return the positions of a state for the current pipeline, ``int64[N, slots]``; check the stamps that identify rows.

    Columns are found by name.

    Args:
        added: The children that have come since the save: they begin at their first row.
    """
    saved_slots, to_slots = _slots_by_key(saved.fields), _slots_by_key(schema.fields)
    (stamp,) = saved_slots[STAMP.key]
    _require_valid_row_stamps(saved.table[:, stamp], saved.header["samples"])
    if [*saved_slots] == [STAMP.key, *to_slots]:  # the same columns, as at most loads
        return saved.table[:, 1:].copy()
    table, kept_keys = schema.fresh_table(len(saved.table)), [key for key in to_slots if key in saved_slots]
    added_keys = [
        key for key in to_slots if key not in saved_slots and any(key in child.kept_fields for child in added)
    ]
    table[:, [slot for key in added_keys for slot in to_slots[key]]] = 0
    old_slots, new_slots = ([slot for key in kept_keys for slot in slots[key]] for slots in (saved_slots, to_slots))
    table[:, new_slots] = saved.table[:, old_slots]
    return table


def has_remainder(table: Ints) -> bool:
    """True if a remainder is being redistributed, so that the shards of a rank need not be one block."""
    return bool((table[:, REMAINDER_COLUMN] > NO_REMAINDER).any())


def _slots_by_key(fields: Sequence[Field]) -> dict[str, range]:
    return {f.key: range(start, start + f.num_slots) for f, start in zip(fields, slot_offsets(fields), strict=False)}


def _require_keys(saved_values: Any, names: Iterable[str], container: str) -> None:
    missing_keys = sorted(set(names).difference(saved_values)) if isinstance(saved_values, Mapping) else list(names)
    if missing_keys:
        raise DataStateError(f"The {container} lacks {missing_keys}. {_REMEDY}")


def _require_ranges(skipped_ranges: Any, num_samples: int) -> None:
    """Raise ``DataStateError`` unless the skipped samples are ascending ranges within the samples of the state."""
    saved_ranges = skipped_ranges if isinstance(skipped_ranges, list) else [skipped_ranges]
    bounds = [value for item in saved_ranges for value in (item if isinstance(item, list) else [item])]
    are_pairs = all(isinstance(item, list) and len(item) == 2 for item in saved_ranges)
    are_ints = all(type(value) is int for value in bounds)
    if not are_pairs or not are_ints or [0, *bounds, num_samples] != sorted([0, *bounds, num_samples]):
        raise DataStateError(f"The state leaves out the samples {skipped_ranges!r:.200}: {_DAMAGE_ADVICE}")


def _require_valid_row_stamps(saved_row_stamps: Ints, samples: int) -> None:
    """Raise ``DataStateError`` if a row's stamp is of another logical shard or another sample count."""
    n = len(saved_row_stamps)
    wrong_rows = np.flatnonzero(saved_row_stamps != _expected_row_stamps(n, samples)).tolist()
    if wrong_rows:
        saved_sample, saved_shard = divmod(-1 - int(saved_row_stamps[wrong_rows[0]]), n)
        raise DataStateError(
            f"{len(wrong_rows)} of {n} rows of the state are not those of their logical shards at sample {samples}: row "
            f"{wrong_rows[0]} is that of shard {saved_shard} at sample {saved_sample}. One rank's rows were kept for all, rows "
            f"changed places, some rank did not save its rows, or ranks saved at different steps. Load another checkpoint, and "
            f"keep what loader.state_dict() returns, or use torch.distributed.checkpoint."
        )


# States in a checkpoint


def data_state_paths(paths: Iterable[Sequence[Any]]) -> list[StatePath]:
    """Return the paths of the data-loader states in a checkpoint, given the paths of all its values."""
    all_paths = {tuple(map(str, path)) for path in paths}
    return sorted(path[:-1] for path in all_paths if path[-1] == TABLE and (*path[:-1], HEADER) in all_paths)


def find_data_state(paths: Iterable[Sequence[Any]], state_name: str | None, origin: object) -> StatePath:
    """Return the path of the data-loader state with this name; without a name, the path of the only one.

    Raises:
        DataStateError: There is none, none with this name, or several and no name was given.
    """
    states = {".".join(root): root for root in data_state_paths(paths)}
    if state_name is None and len(states) == 1:
        return next(iter(states.values()))
    if state_name is not None and state_name in states:
        return states[state_name]
    suffix = "" if state_name is None else f", and none is named {state_name!r}"
    raise DataStateError(
        f"The checkpoint {origin} holds {len(states)} data states of rescale_data loaders, {sorted(states)}{suffix}. Name one "
        f"of them, or save the loader in the state, under a key."
    )


def with_columns_of(state: Any, saved: torch.Tensor | None) -> Any:
    """Return a state to load into, with as many table columns as the checkpoint has; a load finds columns by name.

    Args:
        state: The result of some ``state_dict()``; unless it is the state of a loader, it is returned unchanged.
        saved: The table in the checkpoint, on the meta device.
    """
    table = state[TABLE] if is_state(state) else None
    if not isinstance(table, torch.Tensor) or saved is None or saved.ndim != 2 or len(saved) != len(table):
        return state
    return {**state, TABLE: torch.empty(saved.shape, dtype=table.dtype, device="cpu")}
