"""How far ahead fragments are brought."""

from typing import Any

import numpy as np
import pytest

from rescale_data.nodes.reading.fetching import FragmentPrefetcher
from rescale_data.nodes.reading.share import ShardRowRanges
from rescale_data.sources.source import Source


class Counting(Source):
    """A source of fragments of one byte each, with room for some of them."""

    name, num_rows, fragment_bytes = "counting", 1, 1

    def __init__(self, cache_bytes: int) -> None:
        self.cache_bytes = cache_bytes

    def prepare(self, column: str | None, fragment: int, share: ShardRowRanges | None = None) -> None:
        raise AssertionError("nobody asked")

    def manifest(self) -> Any: ...
    def row(self, index: int) -> Any: ...
    def locate(self, index: int) -> Any: ...


@pytest.mark.parametrize(
    ("rows_a_fragment", "room_a_shard", "num_windows"),
    [
        (100, 1, 0),
        (100, 2, 1),  # the window that is read lies in two fragments
        (100, 3, 2),
        (100, 40, 5),
        (10, 10, 0),  # and here in eleven
        (10, 11, 1),
        (10, 30, 2),
        (1000, 1, 0),
        (1000, 2, 5),  # many windows in two fragments
    ],
)
def test_windows_that_have_room(rows_a_fragment: int, room_a_shard: int, num_windows: int) -> None:
    fragments = np.arange(0, 4001, dtype=np.int64) * rows_a_fragment
    num_shards = len(fragments) - 1  # all of them, where nobody has said which are here
    source = Counting(room_a_shard * num_shards)
    assert FragmentPrefetcher(source, fragments, source_key=-1, rows_per_window=100).num_windows == num_windows
