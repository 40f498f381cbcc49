"""The table of all logical shards as the tensors of a state, and back.

Every rank plans every tensor of a save. So a mixture, which may have hundreds of sources, keeps what its nodes do in one:

    format version 2   stamp, samples, dealt: [N]   and of each field of the pipeline one, ``source.row``: [N, ...]
    format version 3   stamp, samples, dealt: [N]   and of a mixture ``rows``: int64[N, slots], in the order of "fields"

Every row says whose it is: ``stamp`` of row i is ``-1 - (samples * N + i)``. Source: docs/design.md, 8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rescale_data.engine.recipe import DEALT, OWN_FIELDS, STAMP, UNDEALT
from rescale_data.engine.schema import Schema
from rescale_data.engine.states.change import Changed
from rescale_data.engine.states.state_paths import ROWS
from rescale_data.errors import DataStateError
from rescale_data.state import Field, Ints, field_described, from_tensors, offsets, to_tensors

BY_FIELD, IN_ONE = 2, 3
"""Format versions."""


def version_of(schema: Schema) -> int:
    return IN_ONE if schema.is_mixture else BY_FIELD


def tensors_of(schema: Schema, table: Ints, stamps: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows of the table, ``int64[M, columns]``, and their stamps as they stand in a state; copies."""
    return {STAMP.key: stamps, **to_tensors(stored(version_of(schema), schema.fields, table.shape[1]), table)}


def stamps_of(shards: range, samples: int, num_logical_shards: int) -> torch.Tensor:
    return -1 - samples * num_logical_shards - torch.arange(shards.start, shards.stop, dtype=torch.int64, device="cpu")


def stored(version: int, fields: Sequence[Field], num_slots: int = 0) -> tuple[Field, ...]:
    """What is a tensor of its own in a state, of the columns of a table, of which there are so many if they were counted."""
    of_nodes = (num_slots or offsets(fields)[-1]) - offsets(OWN_FIELDS)[-1]
    return (*OWN_FIELDS, Field((ROWS,), torch.int64, (of_nodes,))) if version == IN_ONE else tuple(fields)


def fields_in(state: Mapping[str, Any]) -> list[Field]:
    """The columns of the table that a state was saved with."""
    own = {field.key for field in (*OWN_FIELDS, STAMP)}
    saved = json.loads(state["fields"]).items()
    return [*OWN_FIELDS, *(field_described(key, about) for key, about in saved if key not in own)]


def by_field(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as one of format version 2, with a tensor a field."""
    if state.get("version") != IN_ONE:
        return dict(state)
    shards = {STAMP.key: state["shards"][STAMP.key], **to_tensors(fields_in(state), _saved(state))}
    return {**state, "version": BY_FIELD, "shards": shards}


def table_of(schema: Schema, state: Mapping[str, Any], added: Sequence[Changed]) -> Ints:
    """The table of a state, every value checked, its columns found by their names.

    Args:
        added: The children that have come since: they begin.
    """
    saved = _saved(state)
    _require_own_rows(state["shards"][STAMP.key], int(state["samples"]))
    before, now = _slots(fields_in(state)), _slots(schema.fields)
    own = {key for key in now.keys() - before.keys() if any(key in child.own for child in added)}
    kept = [key for key in now if key in before]
    source, target = ([slot for key in kept for slot in slots[key]] for slots in (before, now))
    if source == target == list(range(saved.shape[1])) and len(kept) == len(now):
        return saved
    table = schema.fresh_table(len(saved))
    table[:, [slot for key in own for slot in now[key]]] = 0
    table[:, target] = saved[:, source]
    return table


def _slots(fields: Sequence[Field]) -> dict[str, range]:
    return {f.key: range(a, a + f.num_slots) for f, a in zip(fields, offsets(fields), strict=False)}


def _saved(state: Mapping[str, Any]) -> Ints:
    """The table as a state has it, a copy: its columns are `fields_in` it."""
    tensors, n = state["shards"], int(state["num_logical_shards"])
    fields = stored(state["version"], fields_in(state))
    missing = sorted({field.key for field in (*fields, STAMP)} - set(tensors))
    if missing:
        raise DataStateError(f"The table of the state lacks the fields {missing}.")
    for field in (*fields, STAMP):
        want = (n, *(field.shape or ())), field.dtype
        got = tuple(tensors[field.key].shape), tensors[field.key].dtype
        if got != want:
            raise DataStateError(
                f"The field {field.key!r} of the state has shape and dtype {got}; the pipeline that was saved has {want}."
            )
    return from_tensors(fields, tensors)


def is_dealt(table: Ints) -> bool:
    """Whether rows are spread over ranks by a deal at the end of an epoch, no longer in one block a rank."""
    return bool((table[:, DEALT] > UNDEALT).any())


def _require_own_rows(stamp: torch.Tensor, samples: int) -> None:
    """``DataStateError`` where rows are not those of their logical shards at that sample.

    Args:
        stamp: ``int64[N]``; one that is not negative is of format version 1, and says the sample alone.
    """
    n = len(stamp)
    wrong = torch.nonzero((stamp != stamps_of(range(n), samples, n)) & (stamp != samples)).flatten().tolist()
    if not wrong:
        return
    found = [divmod(-1 - value, n) for value in stamp[wrong].tolist()]
    others = [(row, shard) for row, (at, shard) in zip(wrong, found, strict=True) if at == samples]
    if others:
        raise DataStateError(
            f"{len(others)} of {n} rows of the state are those of other logical shards (the first: row {others[0][0]} is that "
            f"of shard {others[0][1]}): one rank's rows were kept for all, or rows changed places. Keep what "
            f"loader.state_dict() returns, or use torch.distributed.checkpoint; load another checkpoint."
        )
    raise DataStateError(
        f"The rows of {len(wrong)} of {n} logical shards (the first: {wrong[:5]}) are not of sample {samples}, at which the "
        f"state was saved: some rank did not save its rows, or ranks saved at different steps. Load another checkpoint."
    )
