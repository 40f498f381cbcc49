"""A table that is written when it is read is at every moment the one that is written at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rescale_data.engine.micro_batch import MicroBatch
from rescale_data.engine.recipe import SAMPLES
from rescale_data.engine.taken import Taken

SHARDS, COLUMNS = 12, 3
TURNS = [slice(first, SHARDS, 3) for first in range(3)]
acts = st.sampled_from(["read", "undo", "slice", "slice", "slice", "bytes", "bytes", "index", "slots"])


@given(st.lists(st.tuples(acts, st.integers(0, 2)), max_size=30))
def test_it_is_the_table_that_is_written_at_once(done: list[tuple[str, int]]) -> None:
    table = np.arange(SHARDS * COLUMNS, dtype=np.int64).reshape(SHARDS, COLUMNS)
    taken, value = Taken(table.copy()), 100
    for act, number in done:
        value += 100
        if act == "read":
            assert (taken.table == table).all()
        elif act == "undo":
            undo = taken.undoing(TURNS[number])
            taken.add(_made("slice", number, value, table.copy()))
            undo()
        else:
            taken.add(_made(act, number, value, table))
    assert (taken.table == table).all()


def _made(kind: str, number: int, value: int, table: np.ndarray) -> MicroBatch:
    """A micro batch, which is written into the table at once."""
    rows: Any = value + np.arange(4 * COLUMNS, dtype=np.int64).reshape(4, COLUMNS)
    if kind == "slots":
        slots = COLUMNS * np.array([number, number + 3]) + [0, 1]
        table.flat[slots] = value
        return MicroBatch(None, TURNS[number], np.array([value, value]), [], 0, slots)
    visited = np.array([1, 4, 6, 11]) if kind == "index" else TURNS[number]
    table[visited] = rows
    table[visited, SAMPLES] += number
    return MicroBatch(None, visited, rows.tobytes() if kind == "bytes" else rows, [], 0, None, number)
