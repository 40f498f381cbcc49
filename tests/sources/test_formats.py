"""Lines, tars, Megatron's files and saved datasets: rows are what was written, with an index that is written once."""

import itertools
import json
import os
import pickle
import tarfile
import tempfile
from pathlib import Path
from unittest.mock import Mock

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.sources import arrow, fragments, jsonl
from rescale_data.sources.files import local_store
from rescale_data.sources.files.blocks import BlockRangeReader, write_blocks
from rescale_data.sources.jsonl import parse
from rescale_data.sources.source import BadRow
from rescale_data.testing import assert_source
from tests.corpus import documents
from tests.formats import lines, pack, tar_bytes, write_jsonl, write_megatron, write_tar
from tests.nodes.resume import plain
from tests.sources.corpora import FORMATS, make_source

pytestmark = pytest.mark.usefixtures("small_fragments")

ROWS = [
    {"text": f"zeile {i} ü\n", "n": i, "ids": list(range(i % 5)), "x": [0.5, i], "meta": {"a": [1, "b"]}, "none": None}
    for i in range(50)
]


def rows_of(source):
    return [plain(source.row(i)) for i in range(source.num_rows)]


class TestLines:
    def test_are_those_of_the_files(self, packed, tmp_path):
        """Of one that begins with a byte order mark, and of one of several compressed parts."""
        (tmp_path / f"a.jsonl{packed}").write_bytes(pack(b"\xef\xbb\xbf" + lines(ROWS[:30]), packed))
        parts = [pack(lines(ROWS[30:41]), packed), pack(lines(ROWS[41:]), packed)]
        (tmp_path / f"b.jsonl{packed}").write_bytes(b"".join(parts))
        source = rd.JsonlSource(tmp_path)
        assert rows_of(source) == ROWS
        assert source.fragments.tolist() == [0, 7, 14, 21, 28, 30, 37, 44, 50]
        assert [source.row(4)[name].dtype for name in ("ids", "x")] == [np.int64, np.float64]
        assert source.locate(33) == f"{tmp_path}/b.jsonl{packed}, line 4"
        assert_source(source)

    def test_some_columns(self, tmp_path):
        source = rd.JsonlSource(write_jsonl(tmp_path / "a.jsonl", [*ROWS[:2], {"n": 9}]), columns=["n", "text"])
        assert source.row(1) == {"n": 1, "text": "zeile 1 ü\n"}
        with pytest.raises(ValueError, match=r"a\.jsonl, line 3: the line has no \['text'\]; it has \['n'\]"):
            source.row(2)

    def test_a_number_that_is_too_large_for_an_array(self, tmp_path):
        (tmp_path / "a.jsonl").write_text(json.dumps({"ids": [2**70, 1]}) + "\n")
        assert rd.JsonlSource(tmp_path).row(0) == {"ids": [2**70, 1]}
        (tmp_path / "a.jsonl").write_text(json.dumps({"ids": [2**64 - 1, -1]}) + "\n")  # NumPy makes floats of these
        assert rd.JsonlSource(tmp_path).row(0) == {"ids": [2**64 - 1, -1]}

    LINES = st.lists(st.sampled_from(["{}", '{"a": 1}', "", "  ", "\r", "\t"]), max_size=30)

    @given(LINES, st.sampled_from(["", "\n"]), st.sampled_from(["\n", "\r\n"]), st.sampled_from([3, 13, 2**24]))
    def test_empty_ones_are_no_rows(self, given_lines, end, newline, chunk_bytes):
        text = newline.join(given_lines) + end
        wanted = [(i + 1, json.loads(line)) for i, line in enumerate(text.split("\n")) if line.strip()]
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(jsonl, "_CHUNK_BYTES", chunk_bytes)
            path = Path(folder, "a.jsonl")
            path.write_bytes(text.encode())
            source = rd.JsonlSource(path) if wanted else None
            rows = range(source.num_rows if source else 0)
            assert [(int(source.locate(i).rpartition(" ")[2]), source.row(i)) for i in rows] == wanted


class TestIndex:
    def test_is_read_and_not_made_again(self, packed, tmp_path, monkeypatch, caplog):
        path = write_jsonl(tmp_path / f"a.jsonl{packed}", ROWS)
        first = rd.JsonlSource(tmp_path)
        announced = f"{path} ({path.stat().st_size} bytes)"
        assert [announced in message and ".rdblocks" in message for message in caplog.messages] == [True] * bool(packed)
        kinds = sorted(path.suffix for path in (tmp_path / ".rescale_data").iterdir())
        assert kinds == [*([".rdblocks"] if packed else []), ".rdindex", ".rdpart"]
        monkeypatch.setattr(rd.JsonlSource, "_scan_file", None)
        again = rd.JsonlSource(tmp_path)
        assert rows_of(again) == ROWS
        assert again.manifest() == first.manifest()

    @pytest.mark.parametrize("damage", [".rdindex", ".rdpart", ".rdblocks"])
    @pytest.mark.parametrize("left", [None, 0, 7, 200, -3])
    def test_is_made_again_where_it_is_not_whole(self, packed, damage, left, tmp_path):
        path = write_jsonl(tmp_path / f"a.jsonl{packed}", ROWS)
        kept = pickle.dumps(rd.JsonlSource(path))
        for hurt in (tmp_path / ".rescale_data").glob(f"*{damage}"):
            if left is None:
                hurt.unlink()
            else:
                hurt.write_bytes(hurt.read_bytes()[:left])
        assert rows_of(rd.JsonlSource(path)) == ROWS
        assert rows_of(pickle.loads(kept)) == ROWS

    def test_is_made_again_where_a_file_as_long_as_before_has_another_time(self, packed, tmp_path):
        path = write_jsonl(tmp_path / f"a.jsonl{packed}", ROWS)
        rd.JsonlSource(path)
        write_jsonl(path, ROWS[::-1])
        os.utime(path, ns=(1, 1))
        assert rows_of(rd.JsonlSource(path)) == ROWS[::-1]

    def test_of_another_format_is_made_again(self, tmp_path):
        """As where a folder was first read as JSON lines by mistake."""
        path = tmp_path / "a.tar"
        with tarfile.open(path, "w") as tar:
            tar.add(write_jsonl(tmp_path / "x.jsonl", ROWS), "x.json")
        for _ in range(2):
            assert rd.JsonlSource(path).num_rows > 1
            assert rd.WebDatasetSource(path).num_rows == 1

    def test_in_a_folder_of_its_own(self, packed, tmp_path):
        data = tmp_path / "data"
        write_jsonl(data / "x" / f"a.jsonl{packed}", ROWS[:5])
        write_jsonl(data / "y" / f"a.jsonl{packed}", ROWS[5:9])
        before = sorted(data.rglob("*"))
        assert rows_of(rd.JsonlSource(data, index_dir=tmp_path / "index")) == ROWS[:9]
        assert sorted(data.rglob("*")) == before
        write_jsonl(tmp_path / "data 2" / "x" / f"a.jsonl{packed}", ROWS[9:12])
        assert rows_of(rd.JsonlSource(tmp_path / "data 2" / "x", index_dir=tmp_path / "index")) == ROWS[9:12]


WHITE = st.text(" \t\r\n\x0b\x0c\u2028\ufeff\xa0", max_size=2)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
PARTS = WHITE | VALUES.map(json.dumps) | VALUES.map(lambda value: json.dumps(value, ensure_ascii=False))


class TestParse:
    @given(st.lists(PARTS, min_size=1, max_size=3).map("".join), st.sampled_from(["utf-8", "utf-16"]))
    def test_a_line_is_what_json_makes_of_it(self, text, encoding):
        line = text.encode(encoding, "surrogatepass")
        try:
            found = json.loads(line.strip())
        except ValueError:
            found = None
        if isinstance(found, dict):
            assert repr(parse(memoryview(line))) == repr(found)
        else:
            with pytest.raises(BadRow):
                parse(memoryview(line))

    def test_texts_are_those_of_the_rows(self, packed, tmp_path):
        write_jsonl(tmp_path / f"a.jsonl{packed}", [*ROWS, {"text": None}, {"other": "x"}])
        source, chosen = rd.JsonlSource(tmp_path), rd.JsonlSource(tmp_path, columns=["text", "n"])
        rows = np.random.default_rng(0).permutation(50)
        for each in (source, chosen):
            texts = each.texts("text", rows)
            assert [texts.copy_of(i).tobytes().decode() for i in range(50)] == [ROWS[i]["text"] for i in rows]
        for bad in (50, 51):
            with pytest.raises((TypeError, KeyError)):
                source.texts("text", np.array([1, bad]))
        with pytest.raises(BadRow):
            chosen.texts("text", np.array([50]))


BAD_LINES = [
    (b'{"text": "cut o', "it is not JSON: Unterminated string.*begins with"),
    (b"\x00\x01", "it is not JSON"),
    (b'{"a": "\xff\xfe"}', "it is not JSON"),
    (b"[" * 100_000, "it is not JSON: maximum recursion depth"),
    (b"[1, 2]", "it is a JSON list, not an object"),
    (b"3", "it is a JSON int"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_line_that_does_not_parse(line, message, packed, tmp_path):
    data = lines(ROWS[:9]) + b"\n" + line + b"\n" + lines(ROWS[9:])
    (tmp_path / f"a.jsonl{packed}").write_bytes(pack(data, packed))
    source = rd.JsonlSource(tmp_path)
    with pytest.raises(ValueError, match=rf"a\.jsonl{packed}, line 11: {message}"):
        source.row(9)
    assert plain(source.row(10)) == ROWS[9]


class TestCopies:
    def test_blocks_are_decompressed_once_for_all_processes_of_a_host(self, tmp_path, monkeypatch):
        write_jsonl(tmp_path / "a.jsonl.gz", ROWS)
        source = rd.JsonlSource(tmp_path, cache_dir=tmp_path / "cache")
        assert rows_of(source) == ROWS
        sent = pickle.dumps(source)
        monkeypatch.setattr(local_store, "_stores", {})  # as in another process
        monkeypatch.setattr(BlockRangeReader, "_decompress", Mock(side_effect=AssertionError))
        assert rows_of(pickle.loads(sent)) == ROWS

    def test_blocks_of_a_copy_that_was_made_again_are_other_entries(self, tmp_path):
        """With blocks of another size, as another release may write them, or of a file that has changed without a stamp."""
        store, copy = local_store.LocalStore(str(tmp_path / "cache"), 10_000), str(tmp_path / "copy")
        for size, data in [(10, bytes(range(100))), (30, bytes(range(100))), (30, b"other" * 20), (100, b"more!" * 20)]:
            write_blocks((data[i : i + size] for i in range(0, 100, size)), copy)
            assert BlockRangeReader(copy, store).read(0, 100).to_pybytes() == data


SAMPLES = [{"jpg": bytes([i]) * (i * 7 % 600), "json": b'{"n": %d}' % i, "cls": b"%d" % (i % 3)} for i in range(40)]


def test_rows_of_a_tar_are_its_samples(packed, tmp_path):
    write_tar(tmp_path / f"a.tar{packed}", SAMPLES[:25])
    write_tar(tmp_path / f"b.tar{packed}", SAMPLES[25:], first=25)
    source = rd.WebDatasetSource(tmp_path)
    assert source.columns == ["jpg", "json", "cls"]
    assert [source.row(i) for i in range(40)] == [{"__key__": f"{i:06d}", **SAMPLES[i]} for i in range(40)]
    assert source.fragments.tolist() == [0, 7, 14, 21, 25, 32, 39, 40]
    assert source.locate(26) == f"{tmp_path}/b.tar{packed}, row 1"
    assert_source(source)
    assert_source(rd.WebDatasetSource(tmp_path, columns=["cls"]))


def test_names_of_members_of_a_tar(tmp_path):
    (tmp_path / "1.txt").write_bytes(b"one")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path, "folder", recursive=False)
        tar.add(tmp_path / "1.txt", "folder/1.txt")
    short, long = "a/b.x/1", "a/c/" + "long" * 60
    members = [(f"{short}.SEG.png", b"1"), (f"{short}.txt", b"2"), ("a/b.x/noextension", b"3"), ("__meta__.json", b"4")]
    members += [(f"{long}.txt", b"5"), (f"{long}.seg.png", "ü".encode())]
    (tmp_path / "b.tar").write_bytes(tar_bytes(members))
    assert rd.WebDatasetSource(tmp_path / "a.tar").row(0) == {"__key__": "folder/1", "txt": b"one"}
    source = rd.WebDatasetSource(tmp_path / "b.tar")
    assert source.row(0) == {"__key__": short, "seg.png": b"1", "txt": b"2"}
    assert source.row(1) == {"__key__": long, "seg.png": "ü".encode(), "txt": b"5"}
    assert source.num_rows == 2


def test_a_tar_is_what_the_webdataset_library_reads(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    path = write_tar(tmp_path / "a.tar", SAMPLES)
    source, theirs = rd.WebDatasetSource(path), webdataset.WebDataset(str(path), shardshuffle=False)
    rows = [{key: row[key] for key in row if key not in ("__url__", "__local_path__")} for row in theirs]
    assert rows == [source.row(i) for i in range(source.num_rows)]


def test_a_member_that_is_missing_is_told_and_an_error_of_its_row(tmp_path, caplog):
    samples = [*SAMPLES[:5], {"jpg": b"alone"}, *SAMPLES[5:9]]
    path = write_tar(tmp_path / "a.tar", samples)
    source = rd.WebDatasetSource(path)
    assert f"{path}: of 10 rows, {{'json': 1, 'cls': 1}} have no such member" in caplog.text
    with pytest.raises(ValueError, match=r"a\.tar, row 5: the sample '000005' has no member \['json', 'cls'\]"):
        source.row(5)
    reader = rd.Reader(source, rd.Shard(), shuffle=False, on_error="skip")
    assert [row["json"] for row in reader] == [sample["json"] for sample in samples if "json" in sample]
    caplog.clear()
    assert rd.WebDatasetSource(path, columns=["jpg"]).row(5)["jpg"] == b"alone"
    assert not caplog.records


def test_a_link_has_no_bytes_so_it_makes_no_row_and_that_is_told(tmp_path, caplog):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, kind in (("1.txt", tarfile.REGTYPE), ("2.txt", tarfile.LNKTYPE), ("3.txt", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "1.txt"
            tar.addfile(info)
    source = rd.WebDatasetSource(tmp_path)
    assert [source.row(i) for i in range(source.num_rows)] == [{"__key__": "1", "txt": b""}]
    assert "a.tar: 2 members are links and are left out" in caplog.text


DOCS = documents([3, 0, 7, 1, 5, 9, 2, 2, 0, 4] * 3)


@pytest.mark.parametrize("sentences", [1, 3])
@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_rows_of_megatron_are_documents_of_counted_tokens(sentences, dtype, tmp_path):
    write_megatron(tmp_path / "a", DOCS[:17], dtype, sentences)
    write_megatron(tmp_path / "b", DOCS[17:], dtype)
    source = rd.MegatronSource(tmp_path)
    rows = [source.row(i)["tokens"] for i in range(source.num_rows)]
    assert [row.tolist() for row in rows] == DOCS
    assert {row.dtype for row in rows} == {np.dtype(dtype)}
    assert source.fragments.tolist() == [0, 7, 14, 17, 24, 30]
    assert source.locate(18) == f"{tmp_path}/b.bin, row 1"
    assert_source(source, columns=["tokens"])
    counts = [sum(map(len, DOCS[a:b])) for a, b in itertools.pairwise(source.fragments)]
    assert source.num_tokens(None) == source.num_tokens("tokens") == sum(counts)
    assert [source.num_tokens("tokens", np.array([i])) for i in range(len(counts))] == counts
    assert source.num_tokens("tokens", np.array([0, 3])) == counts[0] + counts[3]


def test_files_that_are_written_anew_are_read_anew_beside_a_local_store(tmp_path):
    for docs in ([[1, 1, 1], [2], [3, 3]], [[7], [8, 8], [9, 9, 9]]):
        write_megatron(tmp_path / "data" / "a", docs)
        for file in (tmp_path / "data").iterdir():
            fsspec.filesystem("memory").pipe(f"/written_anew/{file.name}", file.read_bytes())
        source = rd.MegatronSource("memory://written_anew", cache_dir=tmp_path / "local")
        assert [source.row(i)["tokens"].tolist() for i in range(3)] == docs


SAVED = [{"text": f"row {i}", "label": i % 3, "tokens": list(range(i % 7))} for i in range(50)]


@pytest.mark.parametrize("name", ["saved", "saved[1]*"])
def test_a_saved_dataset(name, tmp_path):
    """Images are their bytes."""
    datasets = pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image").new("RGB", (3, 2), (1, 2, 3))
    saved = datasets.Dataset.from_list([{**row, "image": image} for row in SAVED])
    saved.filter(lambda row: row["label"] != 1).save_to_disk(tmp_path / name, num_shards=3)
    (tmp_path / name / "cache-0123.arrow").write_bytes(b"what a map left behind")
    source = rd.ArrowSource(tmp_path / name)
    assert rd.ArrowSource(f"file://{tmp_path / name}").manifest() == source.manifest()
    rows = [plain(source.row(i)) for i in range(source.num_rows)]
    assert all(row.pop("image")["bytes"].startswith(b"\x89PNG") for row in rows)
    assert rows == [row for row in SAVED if row["label"] != 1]
    assert_source(source, columns=["tokens"])
    assert source.manifest()["files"][0][0] == "data-00000-of-00003.arrow"


def test_a_folder_of_splits_names_them(tmp_path):
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_list(SAVED)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"splits \['train', 'test'\]. Give one of them, .*saved/train'"):
        rd.ArrowSource(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"splits .*saved/train'"):
        rd.ArrowSource(f"file://{tmp_path / 'saved'}")
    assert rd.ArrowSource(tmp_path / "saved" / "train").num_rows == 50


def test_the_same_corpus_in_all_formats_gives_the_same_batches(tmp_path, monkeypatch):
    """Where fragments have the same rows, on which the order depends."""
    for module in (arrow, fragments):
        monkeypatch.setattr(module, "MAX_FRAGMENT_ROWS", 17)

    def samples(kind):
        reader = rd.Reader(make_source(kind, tmp_path / kind), rd.Shard(), shuffle=8)
        if kind == "webdataset":
            reader = rd.Map(reader, lambda row: {"tokens": np.array(json.loads(row["json"])["tokens"])})
        return [sample["tokens"].tolist() for sample in rd.TokenPacker(reader, column="tokens", seq_len=8, eos_id=7)]

    assert all(samples(kind) == samples(FORMATS[0]) for kind in FORMATS)
