"""Parquet and Arrow files: the same rows from every layout, nothing read twice, an error for whatever is wrong."""

import errno
import itertools
import os
import pickle
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rescale_data.nodes.map import Map
from rescale_data.nodes.packing.packer import TokenPacker
from rescale_data.nodes.reader import Reader
from rescale_data.shard import Shard
from rescale_data.sources import arrow, file_source, ipc, megatron, parquet
from rescale_data.sources.arrow import ArrowSource
from rescale_data.sources.decoded.cache import cache, open_files
from rescale_data.sources.files.ranges import MappedFile
from rescale_data.sources.fragments import cumulative_sums, group_pieces
from rescale_data.sources.jsonl import JsonlSource
from rescale_data.sources.megatron import MegatronSource
from rescale_data.sources.parquet import ParquetSource
from rescale_data.sources.source import TokenSource
from rescale_data.sources.webdataset import WebDatasetSource
from tests.corpus import LAYOUTS, documents, write
from tests.formats import write_jsonl, write_megatron, write_tar

pytestmark = pytest.mark.usefixtures("own_cache")

FILE_LAYOUTS = [layout for layout in LAYOUTS if layout != "dataset"]
ROWS: list[dict[str, Any]] = [
    {"ids": [1, 2, 3], "text": "ä", "raw": b"\0x", "n": 1, "x": 0.5, "pair": [1.0, 2.0], "meta": {"a": [1], "b": None}},
    {"ids": [], "text": "", "raw": b"", "n": None, "x": 1.5, "pair": [3.0, 4.0], "meta": {"a": [], "b": "c"}},
    {"ids": [70000], "text": None, "raw": None, "n": 3, "x": None, "pair": [5.0, 6.0], "meta": None},
]
SCHEMA = pa.schema(
    [
        ("ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("raw", pa.binary()),
        ("n", pa.int64()),
        ("x", pa.float64()),
        ("pair", pa.list_(pa.float32(), 2)),
        ("meta", pa.struct([("a", pa.list_(pa.int8())), ("b", pa.string())])),
    ]
)


@pytest.fixture(params=FILE_LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["parquet", "arrow", "stream"])
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A source of `ROWS`, twice, in fragments of two rows."""
    table = pa.Table.from_pylist(ROWS * 2, SCHEMA)
    if request.param == "parquet":
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
        return ParquetSource(tmp_path)
    new = pa.ipc.new_stream if request.param == "stream" else pa.ipc.new_file
    with new(tmp_path / "a.arrow", SCHEMA) as writer:
        writer.write_table(table, max_chunksize=2)
    return ArrowSource(tmp_path)


def save(path: Path, columns: Any, max_chunksize: int | None = None) -> None:
    table = pa.table(columns) if isinstance(columns, dict) else columns
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=max_chunksize)


def source_of(path: Path, suffix: str, **kwargs: Any) -> Any:
    return (ParquetSource if suffix == ".parquet" else ArrowSource)(path, **kwargs)


suffixes = pytest.mark.parametrize("suffix", [".parquet", ".arrow"])


class TestRows:
    @suffixes
    def test_tensors_have_their_shape(self, suffix: str, tmp_path: Path) -> None:
        values = [[1, 2, 3, 4, 5, 6], None, [7, 8, None, 10, 11, 12], [1, 0, 0, 0, 0, 2]]
        kind = pa.fixed_shape_tensor(pa.float32(), (2, 3))
        column = pa.ExtensionArray.from_storage(kind, pa.array(values, pa.list_(pa.float32(), 6)))
        save(tmp_path / f"a{suffix}", {"image": column}, max_chunksize=3)
        source = source_of(tmp_path, suffix)
        first = source.row(0)["image"]
        assert (first.tolist(), first.dtype, first.flags.writeable) == ([[1, 2, 3], [4, 5, 6]], np.float32, True)
        assert source.row(1)["image"] is None
        with pytest.raises(ValueError, match=r"row 2.*null"):
            source.row(2)
        assert source.row(3)["image"].tolist() == [[1, 0, 0], [0, 0, 2]]

    def test_every_layout_gives_the_same_rows(self, layout: str, tmp_path: Path) -> None:
        docs = documents([3, 0, 7, 1, 5, 9, 2, 2, 0, 4])
        source = write(layout, tmp_path, docs)
        assert source.num_rows == len(docs)
        rows = [source.row(i) for i in range(len(docs))]
        assert [list(row) for row in rows] == [["tokens"]] * len(docs)
        assert [row["tokens"].tolist() for row in rows] == docs
        assert all(row["tokens"].dtype == np.uint16 for row in rows)

    def test_tokens_are_the_rows_of_a_fragment(self, layout: str, tmp_path: Path) -> None:
        docs = documents([3, 0, 7, 1, 5, 9, 2, 2, 0, 4])
        source = write(layout, tmp_path, docs)
        assert isinstance(source, TokenSource)
        found = []
        for fragment in range(len(source.fragments) - 1):
            tokens = source.tokens("tokens", fragment)
            assert len(tokens.offsets) - 1 == source.fragments[fragment + 1] - source.fragments[fragment]
            found += [tokens.values[a:b].tolist() for a, b in zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)]
        assert found == docs

    @pytest.mark.parametrize("kind", [pa.list_(pa.uint16()), pa.large_list(pa.int64()), pa.list_(pa.int32(), 3)])
    @pytest.mark.parametrize("others", [False, True])
    def test_tokens_that_are_read_again_are_the_same(self, kind: Any, others: bool, tmp_path: Path) -> None:
        docs = documents([3] * 20 if pa.types.is_fixed_size_list(kind) else [3, 0, 7, 1] * 5)
        table = pa.table({**({"n": range(20)} if others else {}), "ids": pa.array(docs, kind)})
        with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table.slice(0, 5).combine_chunks())  # fragments are cut at neither of these
            writer.write_table(table.slice(5).combine_chunks())
        source = ArrowSource(tmp_path)
        for _ in range(3):
            cache().clear()
            tokens = source.tokens("ids", 0)
            assert np.split(tokens.values, tokens.offsets[1:-1])[-1].tolist() == docs[-1]
            assert [tokens.values[a:b].tolist() for a, b in itertools.pairwise(tokens.offsets)] == docs

    def test_what_is_mapped_is_looked_into_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(tmp_path / "a.arrow", {"ids": [[1, 2], [], [3]], "n": [1, 2, 3]})
        source = ArrowSource(tmp_path)
        first = source.tokens("ids", 0)
        cache().clear()
        monkeypatch.setattr(ArrowSource, "_decode", None)
        again = source.tokens("ids", 0)
        assert again is not first
        assert (again.values.tolist(), again.offsets.tolist()) == ([1, 2, 3], [0, 2, 2, 3])
        assert (again.values.dtype, again.values.ctypes.data) == (first.values.dtype, first.values.ctypes.data)
        os.truncate(tmp_path / "a.arrow", 100)
        cache().clear()
        with pytest.raises(ValueError, match=r"a\.arrow was cut off while it was read"):
            source.tokens("ids", 0)

    def test_what_was_prepared_is_what_is_read(self, layout: str, tmp_path: Path) -> None:
        source = write(layout, tmp_path, documents([3, 0, 7, 1, 5, 9, 2, 2, 0, 4]))
        assert isinstance(source, TokenSource)
        expected = [source.tokens("tokens", i).values.tolist() for i in range(len(source.fragments) - 1)]
        cache().clear()
        for i in range(len(expected)):
            source.prepare("tokens", i)
            source.prepare("tokens", i)
        assert [source.tokens("tokens", i).values.tolist() for i in range(len(expected))] == expected

    def test_an_error_in_what_was_prepared_is_raised_where_it_is_read(self, tmp_path: Path) -> None:
        save(tmp_path / "a.parquet", {"ids": [[1], [None]]})
        source = ParquetSource(tmp_path)
        source.prepare("ids", 0)
        with pytest.raises(ValueError, match=r"a\.parquet, row 1"):
            source.tokens("ids", 0)

    def test_values_are_python_and_numpy_ones(self, mixed: Any) -> None:
        for index in range(6):
            row, expected = mixed.row(index), ROWS[index % 3]
            assert list(row) == list(expected)
            assert row["ids"].dtype == np.int32
            assert row["pair"].dtype == np.float32
            assert {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()} == expected
            assert all(type(v).__module__ in ("builtins", "numpy") for v in row.values())

    def test_some_columns(self, mixed: Any) -> None:
        some = type(mixed)(mixed._files.path(0), columns=["n", "ids"])
        assert some.columns == ["n", "ids"]
        assert [list(some.row(i)) for i in range(2)] == [["n", "ids"]] * 2
        assert some.row(2)["ids"].tolist() == [70000]

    def test_dictionaries(self, tmp_path: Path) -> None:
        table = pa.table({"kind": pa.array(["a", "b", "a"]).dictionary_encode()})
        with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        source = ArrowSource(tmp_path)
        assert [source.row(i)["kind"] for i in range(3)] == ["a", "b", "a"]
        with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(ValueError, match="stream with dictionaries"):
            ArrowSource(tmp_path)

    def test_urls(self, layout: str, tmp_path: Path) -> None:
        import fsspec

        docs = documents([3, 0, 7, 1, 5, 9, 2, 2])
        local = write(layout, tmp_path / layout, docs)
        fsspec.filesystem("memory").put(str(tmp_path / layout), f"/{layout}", recursive=True)
        source = type(local)(f"memory://{layout}")
        assert [source.row(i)["tokens"].tolist() for i in range(8)] == docs
        assert source.manifest() == local.manifest()

    def test_locate(self, layout: str, tmp_path: Path) -> None:
        source = write(layout, tmp_path, documents([1] * 9))
        suffix = "parquet" if layout == "parquet" else "arrow"
        assert source.locate(6) == f"{tmp_path}/000.{suffix}, row 6"
        assert source.locate(8) == f"{tmp_path}/001.{suffix}, row 1"


class TestFragments:
    def test_are_row_groups(self, tmp_path: Path) -> None:
        assert write("parquet", tmp_path, documents([1] * 10)).fragments.tolist() == [0, 3, 6, 7, 10]

    @given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 60))
    @settings(max_examples=60)
    def test_are_batches_that_fit(self, rows: list[int], limit: int) -> None:
        before = cumulative_sums(np.array(rows, dtype=np.int64))
        cuts = group_pieces(before, before * 10, limit, 400).tolist()
        assert cuts[0] == 0
        assert cuts[-1] == len(rows)
        for a, b in itertools.pairwise(cuts):
            assert b == a + 1 or sum(rows[a:b]) <= min(limit, 40)
            assert b == len(rows) or sum(rows[a : b + 1]) > min(limit, 40)

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("compression", [None, "zstd"])
    def test_batches_are_found_where_pyarrow_finds_them(
        self, stream: bool, compression: str | None, tmp_path: Path
    ) -> None:
        table, path = pa.Table.from_pylist(ROWS * 40, SCHEMA), tmp_path / "a.arrow"
        new = pa.ipc.new_stream if stream else pa.ipc.new_file
        with new(path, SCHEMA, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            for start in range(0, 120, 17):
                writer.write_batch(
                    table.slice(start, start // 10).combine_chunks().to_batches()[0] if start > 9 else _none()
                )
        file = MappedFile(str(path))
        blocks = ipc.read_blocks(file)
        rows = ipc.read_row_counts(file, blocks).tolist()
        batches = list(pa.ipc.open_stream(path)) if stream else _batches(pa.ipc.open_file(path))
        assert rows == [batch.num_rows for batch in batches]
        assert blocks.body_size.tolist()[1:] == [
            pa.ipc.read_message(path.read_bytes()[a:b]).body.size
            for a, b in zip(blocks.offset[1:], blocks.stop[1:], strict=True)
        ]


def _none() -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], SCHEMA)


def _batches(reader: pa.ipc.RecordBatchFileReader) -> list[pa.RecordBatch]:
    return [reader.get_batch(i) for i in range(reader.num_record_batches)]


class TestIndex:
    def test_moving_the_folder_changes_nothing(self, layout: str, tmp_path: Path) -> None:
        first = write(layout, tmp_path / "one", documents([1] * 9))
        shutil.move(tmp_path / "one", tmp_path / "two")
        second = type(first)(tmp_path / "two")
        assert second.manifest() == first.manifest()
        assert [file[0::2] for file in first.manifest()["files"]] == [
            [f"00{i}.{'parquet' if layout == 'parquet' else 'arrow'}", rows] for i, rows in enumerate((7, 2))
        ]

    def test_other_data_is_seen(self, layout: str, tmp_path: Path) -> None:
        manifests = [dict(write(layout, tmp_path / str(n), documents([1] * n)).manifest()) for n in (8, 9)]
        assert manifests[0] != manifests[1]

    def test_pickles_with_its_index(self, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        docs = documents([3, 0, 7, 1, 5, 9, 2, 2])
        source = write(layout, tmp_path, docs)
        source.row(0)
        blob = pickle.dumps(source)

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("a footer was read again")

        for where, name in ((file_source.FileSource, "_read_footers"), (pq, "read_metadata"), (ipc, "read_blocks")):
            monkeypatch.setattr(where, name, refuse)
        monkeypatch.setattr(pa.ipc, "open_file", refuse)
        other = pickle.loads(blob)
        assert [other.row(i)["tokens"].tolist() for i in range(8)] == docs
        assert other.manifest() == source.manifest()
        assert b"tokens" in blob
        assert len(blob) < 20_000

    def test_footers_are_all_that_opening_reads(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write("parquet", tmp_path / "p", documents([1] * 30))
        write("arrow", tmp_path / "a", documents([1] * 30))
        for kind in (ParquetSource, ArrowSource):
            monkeypatch.setattr(kind, "_table", None)
        assert parquet.ParquetSource(tmp_path / "p").num_rows == 30
        assert ArrowSource(tmp_path / "a").num_rows == 30


class TestMemory:
    def test_the_cache_stays_within_its_budget(
        self, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(arrow, "MAX_FRAGMENT_ROWS", 4)
        docs = documents([40] * 60)
        written = write(layout, tmp_path, docs)
        source = type(written)(tmp_path, cache_bytes=2000)
        cache().clear()
        for index in np.random.default_rng(0).permutation(60).tolist():
            assert source.row(index)["tokens"].tolist() == docs[index]
            assert cache().nbytes <= max(2000, cache().budget)
        assert cache().nbytes > 0

    @pytest.mark.parametrize("cache_bytes", [2**20, 1])  # where they were decoded, copied out of it
    def test_tokens_are_kept_as_narrow_as_they_are(self, cache_bytes: int, tmp_path: Path) -> None:
        """Each row group in memory of its own; packed they are what the rows are."""
        ends = [0, 255, 256, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**62, -1]
        kept = [np.uint8, np.uint8, np.uint16, np.uint16, np.int32, np.int32, np.int64, np.int64, np.int64]
        docs = [[end, 3, 7, end][:size] for end in ends for size in (4, 0, 1)]
        pq.write_table(pa.table({"tokens": pa.array(docs, pa.list_(pa.int64()))}), tmp_path / "a.parquet", 3)
        source = ParquetSource(tmp_path, cache_bytes=cache_bytes)
        found = [source.tokens("tokens", fragment).values for fragment in range(len(ends))]
        assert [array.dtype for array in found] == kept
        assert [array.tolist() for array in found] == [[end, 3, 7, end, end] for end in ends]
        assert all(array.base is None for array in found)
        first, second = (Reader(source, Shard(), shuffle=5) for _ in range(2))
        ours, rows = (
            TokenPacker(node, column="tokens", seq_len=2, eos_id=2) for node in (first, Map(second, lambda row: row))
        )
        for _ in range(23):
            assert next(ours)["tokens"].tolist() == next(rows)["tokens"].tolist()

    def test_a_fragment_larger_than_the_budget(self, layout: str, tmp_path: Path) -> None:
        docs = documents([400] * 7)
        write(layout, tmp_path, docs, per_fragment=7)
        source = (ParquetSource if layout == "parquet" else ArrowSource)(tmp_path, cache_bytes=10)
        assert [source.row(i)["tokens"].tolist() for i in range(7)] == docs

    @pytest.mark.parametrize("kind", ["arrow", "megatron"])
    def test_some_of_a_mapped_source_larger_than_the_budget_stays(
        self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(arrow, "MAX_FRAGMENT_ROWS", 64)
        monkeypatch.setattr(megatron, "FRAGMENT_ROWS", 64)
        docs = (np.arange(24 * 64 * 800) % 60_000).reshape(-1, 800).tolist()
        if kind == "arrow":
            save(tmp_path / "a.arrow", {"tokens": pa.array(docs, pa.list_(pa.uint16()))}, max_chunksize=64)
        else:
            write_megatron(tmp_path / "a", docs)
        source_kind = ArrowSource if kind == "arrow" else MegatronSource
        size = source_kind(tmp_path).fragment_bytes
        source = source_kind(tmp_path, cache_bytes=14 * size)
        read: list[int] = []
        name = "_load_tokens" if kind == "arrow" else "_load"
        load = getattr(source_kind, name)
        monkeypatch.setattr(source_kind, name, lambda self, *args: (read.append(args[-1]), load(self, *args))[1])
        packer = TokenPacker(Reader(source, Shard(repeat=True), shuffle=64), column="tokens", seq_len=5000, eos_id=None)
        an_epoch = 24 * 64 * 800 // 5000
        next(packer)
        packer.skip(an_epoch)
        of_epoch = [(read.clear(), packer.skip(an_epoch), len(set(read)))[-1] for _ in range(4)]
        assert len(source.fragments) == 25
        assert max(of_epoch) <= 15  # of 24: there is room for 12 beside those that are read; by age 20 and more
        assert min(of_epoch) >= 9

    @pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
    def test_resident_memory_is_bounded_by_the_budget(self, layout: str, tmp_path: Path) -> None:
        rows_a_fragment, docs = 500, 2**24 // 1000
        values = np.arange(docs * 2000, dtype=np.int32) // 7
        offsets = np.arange(0, len(values) + 1, 2000)
        _write_large(layout, tmp_path, values, offsets, rows_a_fragment)
        del values
        source = (ParquetSource if layout == "parquet" else ArrowSource)(tmp_path, cache_bytes=2**23)
        source.tokens("tokens", 0)
        before = _resident()
        peak = before
        for fragment in range(len(source.fragments) - 1):
            source.tokens("tokens", fragment).values.sum()
            peak = max(peak, _resident())
        assert peak - before < 2**23 + 4 * source.fragment_bytes < values_bytes(docs) / 3

    def test_the_estimate_is_about_what_decoding_takes(self, layout: str, tmp_path: Path) -> None:
        source = write(layout, tmp_path, documents([300] * 14), per_fragment=7)
        actual = source.tokens("tokens", 0).nbytes
        assert 0.5 * actual < source.fragment_bytes < 3 * actual

    def test_few_files_are_open(self, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(open_files(), "_max_files", 3)
        source = write(layout, tmp_path, documents([2] * 20), per_file=2)
        for index in range(20):
            source.row(index)
        assert open_files().nbytes <= 3


def values_bytes(docs: int) -> int:
    return docs * 2000 * 4


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _write_large(layout: str, folder: Path, values: np.ndarray, offsets: np.ndarray, per_fragment: int) -> None:
    table = pa.table({"tokens": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))})
    if layout == "parquet":
        pq.write_table(table, folder / "a.parquet", row_group_size=per_fragment, use_dictionary=False)
        return
    new = pa.ipc.new_stream if layout == "stream" else pa.ipc.new_file
    with new(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=per_fragment)


class TestErrors:
    @suffixes
    def test_an_empty_glob(self, suffix: str, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/.{suffix}' matches no file"):
            source_of(tmp_path / f"*{suffix}", suffix)

    @suffixes
    def test_a_missing_column(self, suffix: str, tmp_path: Path) -> None:
        save(tmp_path / f"a{suffix}", {"ids": [[1]], "text": ["a"]})
        with pytest.raises(ValueError, match=f"a{suffix} has no column 'tokens'. It has 'ids', 'text'"):
            source_of(tmp_path, suffix, columns=["tokens"])
        with pytest.raises(ValueError, match="no column 'tokens'"):
            source_of(tmp_path, suffix).token_dtype("tokens")

    @suffixes
    @pytest.mark.parametrize("column", ["text", "x", "n"])
    def test_a_column_that_is_not_tokens(self, suffix: str, column: str, tmp_path: Path) -> None:
        save(tmp_path / f"a{suffix}", {"text": ["a"], "x": [[0.5]], "n": [1]})
        with pytest.raises(TypeError, match=f"column '{column}' .* is of type .*, which is not tokens"):
            source_of(tmp_path, suffix).token_dtype(column)

    @suffixes
    @pytest.mark.parametrize("kept", [0, 3, 100, 0.5, -1, -8])
    def test_a_truncated_file(self, suffix: str, kept: float, tmp_path: Path) -> None:
        save(tmp_path / f"a{suffix}", {"ids": [list(range(500))]})
        save(tmp_path / f"b{suffix}", {"ids": [list(range(500))]})
        whole = (tmp_path / f"b{suffix}").read_bytes()
        (tmp_path / f"b{suffix}").write_bytes(whole[: int(len(whole) * kept) if isinstance(kept, float) else kept])
        with pytest.raises(ValueError, match=rf"b{suffix} cannot be read as .*half-written"):
            source_of(tmp_path, suffix)

    @pytest.mark.parametrize("columns", [None, ["ids"]])
    def test_a_file_that_is_cut_off_while_it_is_read(self, columns: list[str] | None, tmp_path: Path) -> None:
        path = tmp_path / "a.arrow"
        save(path, {"ids": [list(range(100))] * 5000, "row": list(range(5000))}, max_chunksize=500)
        source = ArrowSource(tmp_path, columns=columns)
        source.row(0)
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(ValueError, match=r"a\.arrow was cut off while it was read: it had \d+ bytes and has \d+"):
            source.row(4999)
        with pytest.raises(OSError, match=r"a\.arrow was cut off while it was read"):
            list(Reader(source, Shard(), shuffle=False, on_error="skip"))

    def test_a_file_that_is_replaced_while_it_is_read(self, tmp_path: Path) -> None:
        save(tmp_path / "a.arrow", {"row": list(range(9000))})
        source = ArrowSource(tmp_path)
        source.row(0)
        save(tmp_path / "b.arrow", {"row": [0]})
        os.replace(tmp_path / "b.arrow", tmp_path / "a.arrow")
        assert source.row(8999)["row"] == 8999

    @suffixes
    def test_a_file_that_is_replaced_before_a_worker_opens_it(self, suffix: str, tmp_path: Path) -> None:
        """What the index knows of the old one would find other rows in the new one."""
        save(tmp_path / f"a{suffix}", {"row": list(range(90))})
        sent = pickle.dumps(source_of(tmp_path, suffix))
        save(tmp_path / f"a{suffix}", {"row": [2**40 + i for i in range(90)], "more": [None] * 90})
        with pytest.raises(
            ValueError, match=rf"a{suffix} cannot be read .*it has changed: it had \d+ bytes .* and has"
        ):
            pickle.loads(sent).row(0)
        with pytest.raises(OSError, match="it has changed"):  # no bad row
            next(Reader(pickle.loads(sent), Shard(), on_error="skip"))

    @pytest.mark.parametrize("name", ["a.jsonl", "a.tar", "a.bin"])
    def test_a_file_without_a_schema_that_is_replaced_before_a_worker_opens_it(self, name: str, tmp_path: Path) -> None:
        if name == "a.jsonl":
            write_jsonl(tmp_path / name, [{"n": 1}])
        elif name == "a.tar":
            write_tar(tmp_path / name, [{"txt": b"1"}])
        else:
            write_megatron(tmp_path / "a", [[1, 2]])
        kinds: Any = {"a.jsonl": JsonlSource, "a.tar": WebDatasetSource, "a.bin": MegatronSource}
        sent = pickle.dumps(kinds[name](tmp_path))
        with (tmp_path / name).open("ab") as file:
            file.write(bytes(512))
        with pytest.raises(
            ValueError, match=rf"{name} cannot be read .*it has changed: it had \d+ bytes .* write it again"
        ):
            pickle.loads(sent).row(0)

    @suffixes
    def test_what_is_not_the_fault_of_a_file(
        self, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(tmp_path / f"a{suffix}", {"row": [1]})
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(ParquetSource if suffix == ".parquet" else ArrowSource, "_footer", Mock(side_effect=full))
        with pytest.raises(OSError, match="No space left") as raised:
            source_of(tmp_path, suffix)
        assert f"a{suffix} was read" in raised.value.__notes__[0]

    def test_a_truncated_stream(self, tmp_path: Path) -> None:
        write("stream", tmp_path, documents([100] * 7))
        path = tmp_path / "000.arrow"
        whole = path.read_bytes()
        for kept in (30, 600, len(whole) - 100):
            path.write_bytes(whole[:kept])
            with pytest.raises(ValueError, match=r"000\.arrow cannot be read"):
                ArrowSource(tmp_path)

    @suffixes
    def test_a_file_of_another_kind(self, suffix: str, tmp_path: Path) -> None:
        (tmp_path / f"a{suffix}").write_text("a,b\n1,2\n" * 50)
        with pytest.raises(ValueError, match=f"a{suffix} cannot be read"):
            source_of(tmp_path, suffix)

    @suffixes
    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"ids": pa.array([[1]], pa.list_(pa.int16())), "text": ["a"]}, "differ in 'ids'.*int64.*a.*int16.*b"),
            ({"ids": [[1]]}, "differ in 'text': string in .*a.*missing in .*b"),
            ({"ids": [[1]], "text": ["a"], "more": [1]}, "differ in 'more': missing in .*a.*int64 in .*b"),
        ],
    )
    def test_files_with_different_columns(
        self, suffix: str, other: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        save(tmp_path / f"a{suffix}", {"ids": [[1]], "text": ["a"]})
        save(tmp_path / f"b{suffix}", other)
        with pytest.raises(ValueError, match=message):
            source_of(tmp_path, suffix)
        if "int16" not in message:
            assert source_of(tmp_path, suffix, columns=["ids"]).num_rows == 2

    @suffixes
    def test_columns_in_another_order_are_the_same(self, suffix: str, tmp_path: Path) -> None:
        save(tmp_path / f"a{suffix}", {"ids": [[1]], "text": ["a"]})
        save(tmp_path / f"b{suffix}", {"text": ["b"], "ids": [[2]]})
        source = source_of(tmp_path, suffix)
        assert [(row["ids"].tolist(), row["text"]) for row in map(source.row, range(2))] == [([1], "a"), ([2], "b")]

    @suffixes
    def test_columns_of_one_name(self, suffix: str, tmp_path: Path) -> None:
        twice = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["a", "a", "b"])
        save(tmp_path / f"a{suffix}", twice)
        with pytest.raises(ValueError, match=rf"a{suffix} has several columns 'a'"):
            source_of(tmp_path, suffix)
        for condition in (None, pc.scalar(True), pc.field("b") == 3):
            assert source_of(tmp_path, suffix, columns=["b"], filter=condition).row(0) == {"b": 3}
        with pytest.raises(ValueError, match=r"filter=\(a == 1\).* Multiple matches"):
            source_of(tmp_path, suffix, columns=["b"], filter=pc.field("a") == 1)
        save(tmp_path / f"0{suffix}", {"a": [1], "b": [2]})
        with pytest.raises(ValueError, match=r"differ in 'a': int64 in .*, int64 and int64 in"):
            source_of(tmp_path, suffix)

    @suffixes
    def test_tokens_beside_columns_of_one_name(self, suffix: str, tmp_path: Path) -> None:
        columns = [pa.array([1]), pa.array([2]), pa.array([[3, 4]]), pa.array(["x"]).dictionary_encode()]
        save(tmp_path / f"a{suffix}", pa.Table.from_arrays(columns, ["a", "a", "ids", "d"]))
        assert source_of(tmp_path, suffix, columns=["ids"]).tokens("ids", 0).values.tolist() == [3, 4]

    @suffixes
    def test_a_dot_in_a_name_is_no_path(self, suffix: str, tmp_path: Path) -> None:
        save(tmp_path / f"a{suffix}", {"a.b": [1], "a": [{"b": 2}]})
        assert source_of(tmp_path, suffix, columns=["a.b"]).row(0) == {"a.b": 1}
        assert source_of(tmp_path, suffix, columns=["a"]).row(0) == {"a": {"b": 2}}

    @suffixes
    def test_no_rows(self, suffix: str, tmp_path: Path) -> None:
        save(tmp_path / f"a{suffix}", {"ids": pa.array([], pa.list_(pa.int32()))})
        with pytest.raises(ValueError, match="have no rows"):
            source_of(tmp_path, suffix)

    @suffixes
    @pytest.mark.parametrize("hole", [[1, None], None])
    def test_a_null_among_tokens(self, suffix: str, hole: Any, tmp_path: Path) -> None:
        save(tmp_path / f"a{suffix}", {"ids": [[1], [2]], "n": [1, 2]})
        save(tmp_path / f"b{suffix}", {"ids": [[1], hole, [3]], "n": [1, 2, 3]})
        source = source_of(tmp_path, suffix)
        fragment = len(source.fragments) - 2
        with pytest.raises(ValueError, match=rf"b{suffix}, row 1: a list of numbers is null"):
            source.tokens("ids", fragment)
        assert source.row(4)["ids"].tolist() == [3]
        if hole is None:
            assert source.row(3)["ids"] is None
        else:
            with pytest.raises(ValueError, match=rf"b{suffix}, row 1"):
                source.row(3)

    @suffixes
    def test_a_budget_of_nothing(self, suffix: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="cache_bytes=0"):
            source_of(tmp_path, suffix, cache_bytes=0)
