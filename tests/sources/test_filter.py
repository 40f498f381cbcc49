"""Sources of which an expression chooses the rows: as if only these had been written."""

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.sources import arrow
from rescale_data.testing import assert_source
from tests.formats import write_table
from tests.pipelines import as_samples
from tests.sources.corpora import loader_of

KINDS = ["parquet", "arrow", "compressed", "stream"]


def table_of(values):
    tokens = [[i] * (1 + i % 4) for i in range(len(values))]
    words = pa.array([[f"word {i}"] for i in range(len(values))], pa.list_(pa.string()))
    return pa.table(
        {"n": pa.array(values, pa.int64()), "tokens": pa.array(tokens, pa.list_(pa.int32())), "words": words}
    )


def write(folder, kind, tables, rows):
    for number, table in enumerate(tables):
        path = folder / f"{number}.{'parquet' if kind == 'parquet' else 'arrow'}"
        compression = "zstd" if kind == "compressed" else None
        write_table(path, table, rows, is_stream=kind == "stream", compression=compression)


def source_of(folder, kind, **kwargs):
    return (rd.ParquetSource if kind == "parquet" else rd.ArrowSource)(folder, **kwargs)


@pytest.fixture(autouse=True)
def small_fragments(monkeypatch):
    monkeypatch.setattr(arrow, "MAX_FRAGMENT_ROWS", 16)


@pytest.mark.parametrize("kind", KINDS)
@given(
    values=st.lists(st.lists(st.none() | st.integers(0, 9), max_size=40), min_size=1, max_size=3),
    size=st.integers(1, 20),
    bounds=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_those_that_match(kind, values, size, bounds, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write(folder, kind, [table_of(part) for part in values], size)
    low, high = sorted(bounds)
    matches = [[n is not None and low <= n <= high for n in part] for part in values]
    condition = (pc.field("n") >= low) & (pc.field("n") <= high)
    places = [(file, row) for file, part in enumerate(matches) for row, is_kept in enumerate(part) if is_kept]
    if not places:
        with pytest.raises(rd.DataStateError, match=r"no row of .* matches filter=\(\(n >= "):
            source_of(folder, kind, columns=["tokens"], filter=condition)
        return
    for _ in range(2):  # the second time from the index
        source = source_of(folder, kind, columns=["tokens"], filter=condition)
        assert [source.row(i)["tokens"].tolist() for i in range(source.num_rows)] == [
            [r] * (1 + r % 4) for _, r in places
        ]
    suffix = "parquet" if kind == "parquet" else "arrow"
    expected = [f"{file}.{suffix}, row {row}" for file, row in places]
    assert [source.locate(i).rpartition("/")[2] for i in range(source.num_rows)] == expected
    assert_source(source)
    assert sum(rows for *_, rows in source.manifest()["files"]) == source.num_rows == len(places)


def test_rows_that_are_not_a_number(tmp_path):
    """Statistics of row groups leave them out."""
    values = [float("nan") if i % 5 == 3 else float(i) for i in range(60)]
    table = pa.table({"f": values, "n": range(60), "s": [{"f": f} for f in values]})
    write_table(tmp_path / "0.parquet", table, 4)
    f, n, nested = pc.field("f"), pc.field("n"), pc.field("s", "f")
    whole = [
        ~(f < 50), f != 2.0, f.is_nan(), ~((f >= 0) | (n == 3)), (n == 13) & ~(f < 5), n.is_valid() & ~(f < 50), ~(nested < 50),
        (f > 50) | (n == 3), f.is_null(nan_is_null=True), ~(f.cast("float32") < 50),
    ]  # fmt: skip
    for condition in [*whole, f > 50, (f > 50) & (n < 58), ~(n < 50)]:
        source = rd.ParquetSource(tmp_path, filter=condition)
        found = [int(source.row(i)["n"]) for i in range(source.num_rows)]
        assert found == table.filter(condition)["n"].to_pylist(), condition


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_one_percent_of_a_corpus_costs_one_percent_of_the_reading(kind, far, tmp_path):
    values = np.random.default_rng(0).integers(0, 2**31, (200 * 64, 200))
    tokens = pa.ListArray.from_arrays(np.arange(0, values.size + 1, 200, dtype=np.int32), values.ravel())
    write(tmp_path / "data", kind, [pa.table({"n": np.arange(200).repeat(64), "tokens": tokens})], 64)
    total = sum(path.stat().st_size for path in (tmp_path / "data").iterdir())

    def open_and_read(read):
        far.forget()
        source = source_of(
            f"far://{tmp_path / 'data'}",
            kind,
            columns=["tokens"],
            filter=pc.field("n").isin([17, 101]),
            index_dir=tmp_path / "index",
            remote=rd.Remote(read_ahead=False),
        )
        assert source.num_rows == 128
        if read:
            assert sum(1 for _ in rd.Reader(source, rd.Shard(), shuffle=64)) == 128
        return far.num_bytes / total

    first = open_and_read(read=False)
    assert first < (0.05 if kind == "parquet" else 1.2)  # Arrow has no statistics: it is scanned
    assert open_and_read(read=False) == 0
    footer = 0.02 * (kind == "parquet")  # is read with its first rows
    assert 0.01 <= open_and_read(read=True) < 0.02 + footer


class TestWhatIsCompared:
    def test_a_checkpoint_is_of_one_filter(self, tmp_path):
        write(tmp_path, "parquet", [table_of([i % 10 for i in range(200)])], 20)
        open_it = partial(rd.ParquetSource, tmp_path)
        state = loader_of(open_it(filter=pc.field("n") < 5), 0, 1, 12, 0).state_dict()
        with pytest.raises(rd.DataStateError, match=r"filter.*n < 5"):
            loader_of(open_it(filter=pc.field("n") < 6), 0, 1, 12, 0).load_state_dict(state)
        with pytest.raises(rd.DataStateError, match="filter"):
            loader_of(open_it(), 0, 1, 12, 0).load_state_dict(state)

    def test_a_blocklist_with_another_id_in_its_middle_is_applied(self, tmp_path):
        """The index of the first one lies in the same folder."""
        write(tmp_path, "parquet", [table_of([*range(100)])], 20)
        for left_out in (50, 52, 50):
            condition = ~pc.field("n").isin([i for i in range(100) if i % 2 or i == left_out])
            source = rd.ParquetSource(tmp_path, filter=condition)
            kept = [source.row(i)["n"] for i in range(source.num_rows)]
            assert kept == [i for i in range(0, 100, 2) if i != left_out]


def test_files_that_are_added_join(tmp_path):
    write(tmp_path, "parquet", [table_of([i % 10 for i in range(200)])], 20)
    condition = pc.field("n") < 5
    loader = loader_of(rd.ParquetSource(tmp_path, filter=condition), 0, 1, 12, 0, collate_fn=as_samples)
    next(iter(loader))
    state = loader.state_dict()
    write_table(tmp_path / "9.parquet", table_of([i % 10 for i in range(100)]), 20)
    grown = rd.ParquetSource(tmp_path, filter=condition)
    assert grown.num_rows == 150
    again = loader_of(grown, 0, 1, 12, 0)
    again.load_state_dict(state)
    assert again.progress()["rows/" + grown.name] == 12
