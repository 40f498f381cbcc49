"""Parquet and Arrow files: the same rows from every layout, nothing read twice, memory within bounds."""

import errno
import itertools
import os
import pickle
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.nodes.below import skip
from rescale_data.sources import arrow, fragments
from rescale_data.sources.decoded.cache import cache, open_files
from rescale_data.sources.file_source import FileSource
from rescale_data.sources.fragments import cumulative_sums, group_pieces
from rescale_data.testing import assert_source
from tests.corpus import LAYOUTS, documents, write
from tests.formats import write_megatron, write_table
from tests.nodes.resume import plain

pytestmark = pytest.mark.usefixtures("own_cache")

FILE_LAYOUTS = [layout for layout in LAYOUTS if layout != "dataset"]
ROWS = [
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
def layout(request):
    return request.param


def source_of(path, suffix, **kwargs):
    return (rd.ParquetSource if suffix == ".parquet" else rd.ArrowSource)(path, **kwargs)


suffixes = pytest.mark.parametrize("suffix", [".parquet", ".arrow"])


def tokens_in(source, fragment=0, column="ids"):
    tokens = source.tokens(column, fragment)
    return [tokens.values[a:b].tolist() for a, b in itertools.pairwise(tokens.offsets)]


class TestRows:
    @pytest.mark.parametrize("compression", [None, "zstd"])
    def test_values_are_python_and_numpy_ones(self, layout, compression, tmp_path):
        rows = ROWS * 40
        if layout == "parquet":
            path = write_table(tmp_path / "a.parquet", pa.Table.from_pylist(rows, SCHEMA), 7)
        else:
            path, new = tmp_path / "a.arrow", pa.ipc.new_stream if layout == "stream" else pa.ipc.new_file
            with new(path, SCHEMA, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
                for start, stop in itertools.pairwise((0, 0, 7, 8, 8, 38, 120)):
                    writer.write_batch(pa.RecordBatch.from_pylist(rows[start:stop], SCHEMA))
        source = source_of(tmp_path, path.suffix)
        assert source.num_rows == 120
        assert_source(source, columns=["ids"])
        for index, expected in enumerate(rows):
            row = source.row(index)
            assert list(row) == list(expected)
            assert (row["ids"].dtype, row["pair"].dtype) == (np.int32, np.float32)
            assert plain(row) == expected
            assert all(type(v).__module__ in ("builtins", "numpy") for v in row.values())
        some = source_of(path, path.suffix, columns=["n", "ids"])
        assert some.columns == list(some.row(1)) == ["n", "ids"]
        assert some.row(2)["ids"].tolist() == [70000]

    @suffixes
    def test_tensors_have_their_shape_and_dictionaries_their_words(self, suffix, tmp_path):
        values = [[1, 2, 3, 4, 5, 6], None, [7, 8, None, 10, 11, 12], [1, 0, 0, 0, 0, 2]]
        kind = pa.fixed_shape_tensor(pa.float32(), (2, 3))
        image = pa.ExtensionArray.from_storage(kind, pa.array(values, pa.list_(pa.float32(), 6)))
        word = pa.array(["a", "b", "a", "a"]).dictionary_encode()
        write_table(tmp_path / f"a{suffix}", {"image": image, "word": word}, 3)
        source = source_of(tmp_path, suffix)
        first = source.row(0)["image"]
        assert (first.tolist(), first.dtype, first.flags.writeable) == ([[1, 2, 3], [4, 5, 6]], np.float32, True)
        assert (source.row(0)["word"], source.row(1)) == ("a", {"image": None, "word": "b"})
        with pytest.raises(ValueError, match=r"row 2.*null"):
            source.row(2)
        assert source.row(3)["image"].tolist() == [[1, 0, 0], [0, 0, 2]]

    @pytest.mark.parametrize("kind", [pa.list_(pa.uint16()), pa.large_list(pa.int64()), pa.list_(pa.int32(), 3)])
    @pytest.mark.parametrize("others", [False, True])
    @pytest.mark.parametrize("cuts", [(0, 20), (0, 5, 20)])
    def test_what_is_mapped_is_the_same_again_and_looked_into_once(self, kind, others, cuts, tmp_path, monkeypatch):
        """Once if it is one batch of lists; a fragment of several is joined anew, and lists of one length are read anew."""
        docs = documents([3] * 20 if pa.types.is_fixed_size_list(kind) else [3, 0, 7, 1] * 5)
        table = pa.table({**({"n": range(20)} if others else {}), "ids": pa.array(docs, kind)})
        with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
            for start, stop in itertools.pairwise(cuts):
                writer.write_table(table.slice(start, stop - start).combine_chunks())
        source = rd.ArrowSource(tmp_path)
        assert tokens_in(source) == docs
        cache().clear()
        if len(cuts) == 2 and not pa.types.is_fixed_size_list(kind):
            monkeypatch.setattr(rd.ArrowSource, "_decode", None)
        assert tokens_in(source) == docs
        os.truncate(tmp_path / "a.arrow", 100)
        cache().clear()
        with pytest.raises(ValueError, match=r"a\.arrow was cut off while it was read"):
            source.tokens("ids", 0)

    @suffixes
    @pytest.mark.parametrize("hole", [[1, None], None])
    def test_a_null_among_tokens_names_its_row_and_harms_no_other(self, suffix, hole, tmp_path):
        write_table(tmp_path / f"a{suffix}", {"ids": [[1], [2]], "n": [1, 2]})
        write_table(tmp_path / f"b{suffix}", {"ids": [[1], hole, [3]], "n": [1, 2, 3]})
        source = source_of(tmp_path, suffix)
        fragment = len(source.fragments) - 2
        source.prefetch("ids", fragment)
        with pytest.raises(ValueError, match=rf"b{suffix}, row 1: a list of numbers is null"):
            source.tokens("ids", fragment)
        assert source.row(4)["ids"].tolist() == [3]
        if hole is None:
            assert source.row(3)["ids"] is None
        else:
            with pytest.raises(ValueError, match=rf"b{suffix}, row 1"):
                source.row(3)

    @suffixes
    def test_a_string_that_is_not_utf_8_names_its_row_and_harms_no_other(self, suffix, tmp_path):
        strings = pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"\xff", b"b"]).buffers())
        source = source_of(write_table(tmp_path / f"a{suffix}", {"text": strings}), suffix)
        with pytest.raises(ValueError, match=rf"a{suffix}, row 1: it cannot be read: 'utf-8' codec"):
            source.row(1)
        assert source.row(2) == {"text": "b"}

    @suffixes
    def test_columns_are_found_by_their_names(self, suffix, tmp_path):
        write_table(tmp_path / f"a{suffix}", {"ids": [[1]], "a.b": [1], "a": [{"b": 2}]})
        write_table(tmp_path / f"b{suffix}", {"a": [{"b": 4}], "a.b": [3], "ids": [[2]]})
        source = source_of(tmp_path, suffix)
        assert [source.row(i)["ids"].tolist() for i in range(2)] == [[1], [2]]
        assert [source_of(tmp_path, suffix, columns=["a.b"]).row(i) for i in range(2)] == [{"a.b": 1}, {"a.b": 3}]
        assert source_of(tmp_path, suffix, columns=["a"]).row(1) == {"a": {"b": 4}}

    @suffixes
    def test_others_are_read_beside_columns_of_one_name(self, suffix, tmp_path):
        columns = [pa.array([1]), pa.array([2]), pa.array([3]), pa.array([[3, 4]])]
        columns += [pa.array(["x"]).dictionary_encode()]
        write_table(tmp_path / f"a{suffix}", pa.Table.from_arrays(columns, ["a", "a", "b", "ids", "d"]))
        for condition in (None, pc.scalar(True), pc.field("b") == 3):
            assert source_of(tmp_path, suffix, columns=["b"], filter=condition).row(0) == {"b": 3}
        assert tokens_in(source_of(tmp_path, suffix, columns=["ids"])) == [[3, 4]]
        with pytest.raises(ValueError, match=rf"a{suffix} has several columns 'a'"):
            source_of(tmp_path, suffix)
        with pytest.raises(ValueError, match=r"filter=\(a == 1\).* Multiple matches"):
            source_of(tmp_path, suffix, columns=["b"], filter=pc.field("a") == 1)
        write_table(tmp_path / f"0{suffix}", {"a": [1], "b": [2]})
        with pytest.raises(ValueError, match=r"differ in 'a': int64 in .*, int64 and int64 in"):
            source_of(tmp_path, suffix)


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 60))
@settings(max_examples=60)
def test_fragments_are_batches_that_fit(rows, limit):
    before = cumulative_sums(np.array(rows, dtype=np.int64))
    cuts = group_pieces(before, before * 10, limit, 400).tolist()
    assert cuts[0] == 0
    assert cuts[-1] == len(rows)
    for a, b in itertools.pairwise(cuts):
        assert b == a + 1 or sum(rows[a:b]) <= min(limit, 40)
        assert b == len(rows) or sum(rows[a : b + 1]) > min(limit, 40)


class TestMemory:
    @pytest.mark.parametrize("cache_bytes", [2**20, 1])  # where they were decoded, copied out of it
    def test_tokens_are_kept_as_narrow_as_they_are(self, cache_bytes, tmp_path):
        """Each row group in memory of its own; packed they are what the rows are."""
        ends = [0, 255, 256, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**62, -1]
        kept = [np.uint8, np.uint8, np.uint16, np.uint16, np.int32, np.int32, np.int64, np.int64, np.int64]
        docs = [[end, 3, 7, end][:size] for end in ends for size in (4, 0, 1)]
        write_table(tmp_path / "a.parquet", {"tokens": pa.array(docs, pa.list_(pa.int64()))}, 3)
        source = rd.ParquetSource(tmp_path, cache_bytes=cache_bytes)
        found = [source.tokens("tokens", fragment).values for fragment in range(len(ends))]
        assert [array.dtype for array in found] == kept
        assert [array.tolist() for array in found] == [[end, 3, 7, end, end] for end in ends]
        assert all(array.base is None for array in found)
        first, second = (rd.Reader(source, rd.Shard(), shuffle=5) for _ in range(2))
        nodes = (first, rd.Map(second, lambda row: row))
        ours, rows = (rd.TokenPacker(node, column="tokens", seq_len=2, eos_id=2) for node in nodes)
        for _ in range(23):
            assert next(ours)["tokens"].tolist() == next(rows)["tokens"].tolist()

    @pytest.mark.parametrize("kind", ["arrow", "megatron"])
    def test_some_of_a_mapped_source_larger_than_the_budget_stays(self, kind, tmp_path, monkeypatch):
        for module in (arrow, fragments):
            monkeypatch.setattr(module, "MAX_FRAGMENT_ROWS", 64)
        docs = (np.arange(24 * 64 * 800) % 60_000).reshape(-1, 800).tolist()
        if kind == "arrow":
            write_table(tmp_path / "a.arrow", {"tokens": pa.array(docs, pa.list_(pa.uint16()))}, 64)
        else:
            write_megatron(tmp_path / "a", docs)
        source_kind = rd.ArrowSource if kind == "arrow" else rd.MegatronSource
        size = source_kind(tmp_path).fragment_bytes
        source = source_kind(tmp_path, cache_bytes=14 * size)
        read = []
        name = "_load_tokens" if kind == "arrow" else "_load"
        load = getattr(source_kind, name)
        monkeypatch.setattr(source_kind, name, lambda self, *args: (read.append(args[-1]), load(self, *args))[1])
        packer = rd.TokenPacker(
            rd.Reader(source, rd.Shard(repeat=True), shuffle=64), column="tokens", seq_len=5000, eos_id=None
        )
        an_epoch = 24 * 64 * 800 // 5000
        next(packer)
        skip(packer, an_epoch)
        of_epoch = [(read.clear(), skip(packer, an_epoch), len(set(read)))[-1] for _ in range(4)]
        assert len(source.fragments) == 25
        assert max(of_epoch) <= 15  # of 24: there is room for 12 beside those that are read; by age 20 and more
        assert min(of_epoch) >= 9

    @pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
    def test_resident_memory_is_bounded_by_the_budget(self, layout, tmp_path):
        values = np.arange(2**24 // 1000 * 2000, dtype=np.int32) // 7
        offsets = pa.array(np.arange(0, len(values) + 1, 2000), pa.int32())
        tokens = pa.ListArray.from_arrays(offsets, pa.array(values))
        path = tmp_path / ("a.parquet" if layout == "parquet" else "a.arrow")
        write_table(path, {"tokens": tokens}, 500, is_stream=layout == "stream")
        size = values.nbytes
        del values, tokens
        source = source_of(tmp_path, path.suffix, cache_bytes=2**23)
        first = source.tokens("tokens", 0).nbytes
        assert 0.5 * first < source.fragment_bytes < 3 * first
        peak = before = resident()
        for fragment in range(len(source.fragments) - 1):
            source.tokens("tokens", fragment).values.sum()
            peak = max(peak, resident())
        assert peak - before < 2**23 + 4 * source.fragment_bytes < size / 3

    def test_few_files_are_open_and_a_worker_reads_no_footer_again(self, layout, tmp_path, monkeypatch):
        monkeypatch.setattr(open_files(), "_max_files", 3)
        source = write(layout, tmp_path, documents([2] * 20), per_file=2)
        for index in range(20):
            source.row(index)
        assert open_files().nbytes <= 3
        monkeypatch.setattr(FileSource, "_read_footers", None)
        assert pickle.loads(pickle.dumps(source)).row(19)["tokens"].tolist() == source.row(19)["tokens"].tolist()


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TestFilesThatChange:
    @pytest.mark.parametrize("columns", [None, ["ids"]])
    def test_one_that_is_cut_off_while_it_is_read_is_an_error(self, columns, tmp_path):
        path = tmp_path / "a.arrow"
        write_table(path, {"ids": [list(range(100))] * 5000, "row": list(range(5000))}, 500)
        source = rd.ArrowSource(tmp_path, columns=columns)
        source.row(0)
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(ValueError, match=r"a\.arrow was cut off while it was read: it had \d+ bytes and has \d+"):
            source.row(4999)
        with pytest.raises(OSError, match=r"a\.arrow was cut off while it was read"):
            list(rd.Reader(source, rd.Shard(), shuffle=False, on_error="skip"))

    def test_a_message_that_ends_before_it_begins_is_an_error(self, tmp_path):
        """A body of so many bytes below 0 would lead back to the message itself, for ever."""
        path = tmp_path / "a.arrow"
        with pa.ipc.new_stream(path, pa.schema({"n": pa.int64()})) as writer:
            writer.write_batch(pa.record_batch({"n": pa.array([1, 2, 3, 4])}))
        stream = path.read_bytes()
        start = len(pa.ipc.open_stream(stream).schema.serialize())
        body_length = stream.index((32).to_bytes(8, "little"), start)
        back = -(len(stream) - 8 - 32 - start)
        path.write_bytes(stream[:body_length] + back.to_bytes(8, "little", signed=True) + stream[body_length + 8 :])
        with pytest.raises(ValueError, match=f"a.arrow.* a message of {back} bytes"):
            rd.ArrowSource(path)

    def test_one_that_is_replaced_while_it_is_read_is_read_to_its_end(self, tmp_path):
        write_table(tmp_path / "a.arrow", {"row": list(range(9000))})
        source = rd.ArrowSource(tmp_path)
        source.row(0)
        write_table(tmp_path / "b.arrow", {"row": [0]})
        os.replace(tmp_path / "b.arrow", tmp_path / "a.arrow")
        assert source.row(8999)["row"] == 8999

    @suffixes
    def test_what_is_not_the_fault_of_a_file(self, suffix, tmp_path, monkeypatch):
        write_table(tmp_path / f"a{suffix}", {"row": [1]})
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(
            rd.ParquetSource if suffix == ".parquet" else rd.ArrowSource, "_footer", Mock(side_effect=full)
        )
        with pytest.raises(OSError, match="No space left") as raised:
            source_of(tmp_path, suffix)
        assert f"a{suffix} was read" in raised.value.__notes__[0]
