"""The sources of examples/sources, on data that the real packages wrote.

The shards of tests/sources/mds were written by mosaicml-streaming 0.10.0: `write_mds`, with and without compression="zstd".
Where the package is installed (benchmarks/README.md) it writes the others.
"""

import importlib
from pathlib import Path

import numpy as np
import pytest

import rescale_data as rd
from rescale_data.testing import assert_source

HERE = Path(__file__).parent
ROWS = [
    {"id": i, "text": f"row {i} \N{LATIN SMALL LETTER U WITH DIAERESIS}" * (i % 3), "raw": bytes([i]), "facts": {"i": i},
     "tokens": np.arange(i % 5 + 1, dtype=np.uint16), "flat": np.arange(i % 4 + 1, dtype=np.int32),
     "table": np.full((2, 3), i, np.float32), "half": i / 2}
    for i in range(60)
]  # fmt: skip
COLUMNS = {
    "id": "int", "text": "str", "raw": "bytes", "facts": "json", "tokens": "ndarray", "flat": "ndarray:int32",
    "table": "ndarray:float32:2,3", "half": "float32",
}  # fmt: skip


def write_mds(folder, compression):
    streaming = importlib.import_module("streaming")
    with streaming.MDSWriter(out=str(folder), columns=COLUMNS, compression=compression, size_limit=1500) as writer:
        for row in ROWS:
            writer.write({**row, "half": np.float32(row["half"])})


def example(name, monkeypatch):
    monkeypatch.syspath_prepend(HERE.parents[1] / "examples" / "sources")
    return importlib.import_module(name)


def check(source, rows=ROWS):
    for index, written in enumerate(rows):
        row = source.row(index)
        assert row.keys() == written.keys()
        assert all(np.array_equal(row[name], written[name]) for name in row)
    assert_source(source)
    loader = rd.DataLoader(source, global_batch_size=6, collate_fn=list)
    assert sorted(row["id"] for batch in loader for row in batch) == list(range(60))


@pytest.mark.parametrize("compression", ["", "zstd", "zstd:9", "gz", "bz2", "br", "snappy"])
def test_mds(compression, tmp_path, monkeypatch):
    folder = HERE / "mds" / (compression or "plain")
    if not folder.exists():
        pytest.importorskip("streaming", exc_type=(ImportError, RuntimeError))
        folder = tmp_path / "shards"
        write_mds(folder, compression or None)
    source = example("mds_source", monkeypatch).MdsSource(folder)
    assert len(source.fragments) > 3
    check(source)


def test_mds_that_needs_code(monkeypatch):
    with pytest.raises(ValueError, match="encoded as 'pkl': write bytes, json, a number or an ndarray"):
        example("mds_source", monkeypatch).decoded("pkl", np.zeros(3, np.uint8))


def test_lance(tmp_path, monkeypatch):
    """At the version that it was opened at, whatever is written later."""
    lance = pytest.importorskip("lance")
    pa = importlib.import_module("pyarrow")
    rows = [{**row, "table": row["table"].ravel()} for row in ROWS]
    table = pa.Table.from_pylist(rows)
    folder = str(tmp_path / "rows.lance")
    lance.write_dataset(table, folder, max_rows_per_file=25)
    module = example("lance_source", monkeypatch)
    source = module.LanceSource(folder)
    check(source, rows)
    lance.write_dataset(table, folder, mode="append")
    assert (module.LanceSource(folder).num_rows, module.LanceSource(folder, version=1).num_rows) == (120, 60)
    check(module.LanceSource(folder, version=1), rows)
