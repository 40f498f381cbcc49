"""What nodes report of an epoch, summed over logical shards: `DataLoader.progress`."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

import rescale_data as rd
from tests.nodes.zoo import fails_on_some

ROWS = rd.DatasetSource([{"id": i, "tokens": [i] * n} for i, n in enumerate([5, 1, 20, 5] * 6)], name="rows")


def ids(node: rd.BaseNode[Any]) -> rd.BaseNode[Any]:
    return rd.Map(node, lambda row: {"id": row["id"]})


def masked(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "loss_mask": [row["id"] % 3 > 0] * len(row["tokens"])}


def cut(node: rd.BaseNode[Any], **given: Any) -> rd.BaseNode[Any]:
    return rd.TokenPacker(node, column="tokens", seq_len=4, **{"eos_id": None, **given})


def whole(node: rd.BaseNode[Any], long: Any) -> rd.BaseNode[Any]:
    return rd.WholeDocumentPacker(node, column="tokens", seq_len=8, window=6, long=long)


REPORTS: dict[str, tuple[Callable[[rd.Reader], rd.BaseNode[Any]], Mapping[str, float]]] = {
    "Reader": (ids, {"rows/rows": 24, "epoch_min/rows": 1, "epoch_max/rows": 1, "skipped_rows": 0}),
    "Filter": (lambda rows: ids(rd.Filter(rows, lambda row: row["id"] % 3 != 1)), {"filtered_rows": 8}),
    "Map": (lambda rows: ids(rd.Map(rows, fails_on_some, on_error="skip")), {"skipped_rows": 5}),
    "CleanDocuments": (lambda rows: cut(rd.CleanDocuments(rows, "tokens", min_length=2)), {"short_documents": 6}),
    "TokenPacker": (cut, {"tokens/rows": 2 * 92, "rows/rows": 24}),
    "untrained": (
        lambda rows: cut(rd.Map(rows, masked), columns={"loss_mask": torch.bool}),
        {"untrained_documents": 8, "cut_documents": 18},
    ),
    "truncating": (
        lambda rows: whole(rows, "truncate"),
        {"truncated_documents": 6, "tokens/rows": 12 * 5 + 6 * 8 + 6, "padding_share/rows": 1 - 114 / (18 * 8)},
    ),
    "splitting": (lambda rows: whole(rows, "split"), {"split_documents": 6, "tokens/rows": 186}),
    "dropping": (lambda rows: whole(rows, "drop"), {"dropped_documents": 6, "tokens/rows": 66}),
}


@pytest.mark.parametrize("name", REPORTS)
def test_an_epoch_is_reported(name: str) -> None:
    pipeline, expected = REPORTS[name]
    loader = rd.DataLoader(
        lambda shard: pipeline(rd.Reader(ROWS, shard)), global_batch_size=2, num_logical_shards=2, tail="pad"
    )
    list(loader)
    progress = loader.progress()
    assert {key: progress[key] for key in expected} == pytest.approx(expected)


def test_epochs_and_rows_of_shards_that_stand_apart() -> None:
    reader = rd.Reader(ROWS, rd.Shard(0, 2))
    progress = reader.progress(np.array([[0, 3, 0], [2, 1, 5]]), np.arange(2), np.array([3, 11]))
    assert progress == {"rows/rows": 28.0, "epoch_min/rows": 0.0, "epoch_max/rows": 2.0, "skipped_rows": 5.0}
