"""The table of all logical shards as the tensors of a state, and back.

Every rank plans every tensor of a save. So a mixture, which may have hundreds of sources, keeps what its nodes do in one:

    format version 2   stamp, samples, dealt: [N]   and of each field of the pipeline one, ``source.row``: [N, ...]
    format version 3   stamp, samples, dealt: [N]   and of a mixture ``rows``: int64[N, slots], in the order of "fields"

Every row says whose it is: ``stamp`` of row i is ``-1 - (samples * N + i)``. Source: DESIGN, "State in the checkpoint".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rescale_data.engine.recipe import DEALT, FIRST_SLOT, OWN_FIELDS, STAMP, UNDEALT, Schema
from rescale_data.errors import DataStateError
from rescale_data.state import Field, Ints, field_described, from_tensors, offsets, to_tensors

BY_FIELD, IN_ONE = 2, 3
"""Format versions."""
ROWS = "rows"
_OWN = (*OWN_FIELDS, STAMP)


def version_of(schema: Schema) -> int:
    return IN_ONE if schema.is_mixture else BY_FIELD


def tensors_of(schema: Schema, table: Ints, stamps: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows of the table, ``int64[M, columns]``, and their stamps as they stand in a state; copies."""
    own = {STAMP.key: stamps}
    if not schema.is_mixture:
        return {**own, **to_tensors(schema.fields, table)}
    return {**own, **to_tensors(OWN_FIELDS, table), ROWS: torch.from_numpy(table[:, FIRST_SLOT:].copy())}


def stamps_of(shards: range, samples: int, num_logical_shards: int) -> torch.Tensor:
    return -1 - samples * num_logical_shards - torch.arange(shards.start, shards.stop, dtype=torch.int64)


def row_shapes(schema: Schema) -> dict[str, tuple[int, ...]]:
    """The tensors of a state, each without its dim of N."""
    if not schema.is_mixture:
        return {field.key: field.shape or () for field in (*schema.fields, STAMP)}
    return {**{field.key: () for field in _OWN}, ROWS: (offsets(schema.root.fields)[-1],)}


def by_field(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as one of format version 2, with a tensor a field."""
    if state["version"] != IN_ONE:
        return dict(state)
    shards = dict(state["shards"])
    if shards:
        shards.update(_columns(fields_in(state), shards.pop(ROWS, None)))
    return {**state, "version": BY_FIELD, "shards": shards}


def fields_in(state: Mapping[str, Any]) -> list[Field]:
    """The fields of the pipeline that a state was saved with, in the order of their slots."""
    own = {field.key for field in _OWN}
    return [field_described(key, about) for key, about in json.loads(state["fields"]).items() if key not in own]


def _columns(fields: list[Field], rows: torch.Tensor | None) -> dict[str, torch.Tensor]:
    width = offsets(fields)[-1]
    if rows is None or rows.dim() != 2 or rows.dtype is not torch.int64 or rows.shape[1] != width:
        found = "is missing" if rows is None else f"has shape and dtype {tuple(rows.shape), rows.dtype}"
        raise DataStateError(
            f"The table {ROWS!r} of the state {found}; by its fields it is int64[N, {width}]: the state was changed. Load "
            f"another checkpoint."
        )
    return to_tensors(fields, rows.detach().cpu().numpy())


def table_of(schema: Schema, tensors: Mapping[str, torch.Tensor], num_rows: int, samples: int) -> Ints:
    """The table of a state by field, every value checked."""
    fields = (*schema.fields, STAMP)
    missing = sorted({field.key for field in fields} - set(tensors))
    if missing:
        raise DataStateError(f"The table of the state lacks the fields {missing}.")
    for field in fields:
        want = (num_rows, *(field.shape or ())), field.dtype
        got = tuple(tensors[field.key].shape), tensors[field.key].dtype
        if got != want:
            raise DataStateError(
                f"The field {field.key!r} of the state has shape and dtype {got}; the pipeline has {want}."
            )
    _require_own_rows(tensors[STAMP.key], samples)
    return np.ascontiguousarray(from_tensors(schema.fields, tensors))


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
