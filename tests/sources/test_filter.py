"""Sources of which an expression chooses the rows: as if only these had been written."""

import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.sources import arrow
from rescale_data.sources.condition import RowFilter
from rescale_data.testing import assert_rescalable, assert_source

KINDS = ["parquet", "arrow", "compressed", "stream", "documents"]
CHAIN = [(1, 4, 0), (2, 3, 0), (3, 2, 0), (1, 6, 0)]


def table_of(values: list[int | None]) -> pa.Table:
    tokens = [[i] * (1 + i % 4) for i in range(len(values))]
    return pa.table({"n": pa.array(values, pa.int64()), "tokens": pa.array(tokens, pa.list_(pa.int32()))})


def write(folder: Path, kind: str, tables: list[pa.Table], rows: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, table in enumerate(tables):
        path = folder / f"{number}.{'parquet' if kind == 'parquet' else 'arrow'}"
        if kind == "parquet":
            pq.write_table(table, path, row_group_size=rows)
            continue
        options = pa.ipc.IpcWriteOptions(compression="zstd" if kind == "compressed" else None)
        make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        with make(path, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=rows)


def source_of(folder: Path, kind: str, **kwargs: Any) -> Any:
    return (rd.ParquetSource if kind == "parquet" else rd.ArrowSource)(folder, **kwargs)


@pytest.fixture(autouse=True)
def small_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "MAX_FRAGMENT_ROWS", 16)


@pytest.mark.parametrize("kind", KINDS[:4])
@given(
    values=st.lists(st.lists(st.none() | st.integers(0, 9), max_size=40), min_size=1, max_size=3),
    size=st.integers(1, 20),
    bounds=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_those_that_match(
    kind: str, values: Any, size: int, bounds: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("data")
    tables = [table_of(part) for part in values]
    write(folder, kind, tables, size)
    low, high = sorted(bounds)
    wanted = [r for t in tables for r in t.to_pylist() if r["n"] is not None and low <= r["n"] <= high]
    condition = (pc.field("n") >= low) & (pc.field("n") <= high)
    if not wanted:
        with pytest.raises(rd.DataStateError, match=r"no row of .* matches filter=\(\(n >= "):
            source_of(folder, kind, columns=["tokens"], filter=condition)
        return
    for _ in range(2):  # the second time from the index
        source = source_of(folder, kind, columns=["tokens"], filter=condition)
        assert [source.row(i)["tokens"].tolist() for i in range(source.num_rows)] == [r["tokens"] for r in wanted]
    assert_source(source)
    assert sum(rows for *_, rows in source.manifest()["files"]) == source.num_rows == len(wanted)


def packed(shard: rd.Shard, source: Any) -> rd.BaseNode[Any]:
    return rd.TokenPacker(rd.Reader(source, shard, shuffle=8), column="tokens", seq_len=8, eos_id=7)


def loader_of(pipeline: Any, rank: int, world: int, micro: int, workers: int, **kwargs: Any) -> rd.DataLoader:
    kwargs = {"num_logical_shards": 24, "repeat": True, **kwargs}
    return rd.DataLoader(
        pipeline, global_batch_size=12, micro_batch_size=micro, dp_rank=rank, dp_world_size=world, num_workers=workers,
        **kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS[:4])
def test_over_rescales_it_is_the_source_of_these_rows(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 10, 600).tolist()
    table, condition = table_of(values), pc.field("n") < 3
    write(tmp_path / "all", kind, [table.slice(0, 350), table.slice(350)], 23)
    write(tmp_path / "some", kind, [table.filter(condition)], 23)
    source = source_of(tmp_path / "all", kind, columns=["tokens"], filter=condition)
    same = source_of(tmp_path / "some", kind, columns=["tokens"])
    chain = [*CHAIN, (2, 6, 2)] if kind == "parquet" else CHAIN
    assert_rescalable(partial(loader_of, partial(packed, source=source)), chain, steps=2)
    assert_rescalable(partial(loader_of, source, repeat=False, tail="pad", collate_fn=as_samples), CHAIN, steps=5)
    rows, expected = ([each.row(i)["tokens"].tolist() for i in range(each.num_rows)] for each in (source, same))
    assert rows == expected


def as_samples(samples: list[Any]) -> dict[str, Any]:
    return {"samples": samples}


class Counting(LocalFileSystem):
    protocol = "counting"
    cachable = False
    nbytes: ClassVar[int] = 0

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        data = super().cat_file(path, start, end, **kwargs)
        Counting.nbytes += len(data)
        return data


def test_rows_that_are_not_a_number(tmp_path: Path) -> None:
    """Statistics of row groups leave them out."""
    values = [float("nan") if i % 5 == 3 else float(i) for i in range(60)]
    table = pa.table({"f": values, "n": range(60), "s": [{"f": f} for f in values]})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=4)
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
def test_one_percent_of_a_corpus_costs_one_percent_of_the_reading(kind: str, tmp_path: Path) -> None:
    fsspec.register_implementation("counting", Counting, clobber=True)
    values = np.random.default_rng(0).integers(0, 2**31, (200, 64, 200))
    tables = [
        pa.table({"n": [group] * 64, "tokens": pa.array(list(values[group]), pa.list_(pa.int64()))})
        for group in range(200)
    ]
    write(tmp_path / "data", kind, [pa.concat_tables(tables)], 64)
    total = sum(path.stat().st_size for path in (tmp_path / "data").iterdir())

    def open_and_read(read: bool) -> float:
        Counting.nbytes = 0
        source = source_of(
            f"counting://{tmp_path / 'data'}",  # type: ignore[arg-type]
            kind,
            columns=["tokens"],
            filter=pc.field("n").isin([17, 101]),
            index_dir=tmp_path / "index",
            remote=rd.Remote(read_ahead=False),
        )
        assert source.num_rows == 128
        if read:
            assert sum(1 for _ in rd.Reader(source, rd.Shard(), shuffle=64)) == 128
        return Counting.nbytes / total

    first = open_and_read(read=False)
    assert first < (0.05 if kind == "parquet" else 1.2)  # Arrow has no statistics: it is scanned
    assert open_and_read(read=False) == 0
    assert (
        0.01 <= open_and_read(read=True) < 0.02 + 0.02 * (kind == "parquet")
    )  # its footer is read with its first rows


def test_is_part_of_what_a_checkpoint_compares(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [table_of([i % 10 for i in range(200)])], 20)
    open_it = partial(rd.ParquetSource, tmp_path)
    state = loader_of(open_it(filter=pc.field("n") < 5), 0, 1, 12, 0).state_dict()
    with pytest.raises(rd.DataStateError, match=r"filter.*n < 5"):
        loader_of(open_it(filter=pc.field("n") < 6), 0, 1, 12, 0).load_state_dict(state)
    with pytest.raises(rd.DataStateError, match="filter"):
        loader_of(open_it(), 0, 1, 12, 0).load_state_dict(state)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pc.field("n").isin([*range(40)]), pc.field("n").isin([*range(20), 77, *range(21, 40)])),
        (pc.field("n").isin(["a" * 300 + "b" + "a" * 300]), pc.field("n").isin(["a" * 300 + "c" + "a" * 300])),
        (pc.field("n") == pa.scalar(0.1, pa.float32()), pc.field("n") == pa.scalar(0.1)),
    ],
)
def test_filters_of_one_text_are_told_apart(one: Any, other: Any) -> None:
    assert str(one) == str(other)
    assert RowFilter(one).identity != RowFilter(other).identity
    assert RowFilter(one).identity == RowFilter(pickle.loads(pickle.dumps(one))).identity


def test_a_blocklist_with_another_id_in_its_middle_is_applied(tmp_path: Path) -> None:
    """The index of the first one lies in the same folder."""
    write(tmp_path, "parquet", [table_of([*range(100)])], 20)
    for left_out in (50, 52, 50):
        condition = ~pc.field("n").isin([i for i in range(100) if i % 2 or i == left_out])
        source = rd.ParquetSource(tmp_path, filter=condition)
        kept = [source.row(i)["n"] for i in range(source.num_rows)]
        assert kept == [i for i in range(0, 100, 2) if i != left_out]


def test_files_that_are_added_join(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [table_of([i % 10 for i in range(200)])], 20)
    condition = pc.field("n") < 5
    loader = loader_of(rd.ParquetSource(tmp_path, filter=condition), 0, 1, 12, 0, collate_fn=as_samples)
    next(iter(loader))
    state = loader.state_dict()
    pq.write_table(table_of([i % 10 for i in range(100)]), tmp_path / "9.parquet", row_group_size=20)
    grown = rd.ParquetSource(tmp_path, filter=condition)
    assert grown.num_rows == 150
    again = loader_of(grown, 0, 1, 12, 0)
    again.load_state_dict(state)
    assert again.progress()["rows/" + grown.name] == 12


class TestErrors:
    def test_a_column_that_is_not_there(self, tmp_path: Path) -> None:
        write(tmp_path, "parquet", [table_of([1, 2])], 20)
        said = r"0\.parquet: filter=\(lang == \"de\"\) .* \['n', 'tokens'\]: No match for FieldRef.Name\(lang\)\. Ask"
        for _ in range(2):  # an index is not left behind
            with pytest.raises(ValueError, match=said):
                rd.ParquetSource(tmp_path, filter=pc.field("lang") == "de")

    def test_a_question_that_the_column_cannot_answer(self, tmp_path: Path) -> None:
        write(tmp_path, "parquet", [table_of([1, 2])], 20)
        for wrong in (pc.field("n") == "de", pc.field("n").isin(["de"]), pc.field("n", "x") == 1):
            with pytest.raises(
                ValueError, match=r"(?s)0\.parquet: filter=.*cannot be asked of the columns .* its type\.$"
            ):
                rd.ParquetSource(tmp_path, filter=wrong)
        with pytest.raises(ValueError, match="name the columns"):
            rd.ParquetSource(tmp_path, filter=pc.field(0) == 1)

    def test_no_question(self, tmp_path: Path) -> None:
        write(tmp_path, "parquet", [table_of([1, 2])], 20)
        with pytest.raises(ValueError, match="is of type int64, not true or false"):
            rd.ParquetSource(tmp_path, filter=pc.field("n") + 1)
        with pytest.raises(TypeError, match="give an expression"):
            rd.ParquetSource(tmp_path, filter="n == 1")  # type: ignore[arg-type]

    def test_nowhere_to_keep_the_index(self, tmp_path: Path) -> None:
        write(tmp_path, "parquet", [table_of([1, 2])], 20)
        with pytest.raises(ValueError, match="Give index_dir="):
            rd.ParquetSource(f"file://{tmp_path}", filter=pc.field("n") == 1)
        if os.getuid():
            tmp_path.chmod(0o500)
            with pytest.raises(PermissionError, match="Give index_dir="):
                rd.ParquetSource(tmp_path, filter=pc.field("n") == 1)

    def test_a_row_is_named_by_its_place_in_the_file(self, tmp_path: Path) -> None:
        write(tmp_path, "parquet", [table_of([i % 10 for i in range(60)])], 20)
        source = rd.ParquetSource(tmp_path, filter=pc.field("n") == 7)
        assert [source.locate(i).rpartition("/")[2] for i in range(3)] == [f"0.parquet, row {i}" for i in (7, 17, 27)]
