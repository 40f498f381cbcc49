"""Wrong files and wrong arguments of sources: one error each, which names the file or the value, and the cure."""

import errno
import os
import pickle
import tarfile
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import rescale_data as rd
from tests.formats import lines, pack, tar_bytes, write_jsonl, write_megatron, write_table, write_tar
from tests.laws.tables import FILES
from tests.sources.test_formats import DOCS, SAMPLES

SOURCES = {suffix[1:]: source for source, suffix in FILES.values()}


def source_of(path, **kwargs):
    return SOURCES[path.name.split(".")[1]](path.parent, **kwargs)


@pytest.fixture
def folder(tmp_path):
    for suffix in ("parquet", "arrow"):
        write_table(tmp_path / suffix / f"a.{suffix}", {"ids": [[1]], "text": ["a"], "x": [[0.5]], "n": [1]})
    write_jsonl(tmp_path / "jsonl" / "a.jsonl", [{"n": 1}])
    write_jsonl(tmp_path / "gz" / "a.jsonl.gz", [{"n": 1}])
    write_tar(tmp_path / "tar" / "a.tar", SAMPLES)
    write_megatron(tmp_path / "bin" / "a", DOCS)
    return tmp_path


def parquet(**given):
    return lambda folder: rd.ParquetSource(folder / "parquet", **given)


NOT_ASKED = r"(?s)a\.parquet: filter=.*cannot be asked of the columns .* its type\.$"
NO_VALUES = [
    (parquet(columns=["tokens"]), r"a\.parquet has no column 'tokens'. It has 'ids', 'text'"),
    (lambda f: rd.ArrowSource(f / "arrow").token_dtype("tokens"), "no column 'tokens'"),
    (lambda f: rd.WebDatasetSource(f / "tar", columns=["png"]), r"no column 'png'. They have \['jpg', 'json', 'cls'\]"),
    (lambda f: rd.MegatronSource(f / "bin").token_dtype("text"), "no column 'text'"),
    (lambda f: rd.MegatronSource(f / "bin").num_tokens("text"), "no column 'text'"),
    (lambda _: rd.SyntheticSource(3).token_dtype("text"), "It has 'tokens'"),
    (parquet(cache_bytes=0), "cache_bytes=0"),
    (lambda f: rd.JsonlSource(f / "gz", transcode=False), r"a\.jsonl\.gz is compressed as a whole.*transcode=True"),
    (lambda f: rd.JsonlSource(f"file://{f / 'jsonl'}"), "Give index_dir="),
    (lambda f: rd.ParquetSource(f"file://{f / 'parquet'}", filter=pc.field("n") == 1), "Give index_dir="),
    (lambda f: parquet(index_dir=f / "jsonl" / "a.jsonl")(f), r"a\.jsonl cannot be a folder: .* Give index_dir="),
    (parquet(index_dir=""), "^index_dir='': give a folder"),
    (
        parquet(filter=pc.field("lang") == "de"),
        r"a\.parquet: filter=\(lang == \"de\"\) .* \['ids', .*\]: No match for FieldRef.Name\(lang\)\. Ask",
    ),
    (parquet(filter=pc.field("n") == "de"), NOT_ASKED),
    (parquet(filter=pc.field("n").isin(["de"])), NOT_ASKED),
    (parquet(filter=pc.field("n", "x") == 1), NOT_ASKED),
    (parquet(filter=pc.field(0) == 1), "name the columns"),
    (parquet(filter=pc.field("n") + 1), "is of type int64, not true or false"),
    (lambda _: rd.SyntheticSource(0), "SyntheticSource"),
    (lambda _: rd.SyntheticSource(1, length=(5, 2)), "SyntheticSource"),
    (lambda _: rd.SyntheticSource(1, vocab_size=0), "SyntheticSource"),
    (lambda _: rd.DatasetSource([]), "list has no rows"),
    (lambda _: rd.DatasetSource([1], batch_rows=0), "batch_rows=0"),
    (lambda _: rd.IterableSource([]), "stream"),
    (
        lambda _: rd.StreamReader(rd.IterableSource([[1]]), rd.Shard(0, 3, repeat=True)),
        "1 streams for 3 logical shards",
    ),
    (lambda _: rd.Remote(retries=-1), "retries=-1"),
    (lambda _: rd.Remote(timeout=0.0), "timeout=0.0"),
    (lambda _: rd.Remote(timeout=float("inf")), "timeout=inf"),
    (lambda _: rd.Remote(max_requests=0), "max_requests=0"),
    (lambda f: rd.ArrowSource([f / "arrow", "memory://corpus"]), "a source for each"),
    (lambda f: rd.ArrowSource([f"file://{f / 'arrow'}", "memory://corpus"]), "different filesystems"),
]
WRONG_TYPES = [
    (lambda f: rd.ParquetSource(f / "parquet").token_dtype("text"), "'text' .* is of type string, which is not tokens"),
    (lambda f: rd.ArrowSource(f / "arrow").token_dtype("x"), "'x' .* is of type list.*, which is not tokens"),
    (lambda f: rd.ArrowSource(f / "arrow").token_dtype("n"), "'n' .* is of type int64, which is not tokens"),
    (parquet(filter="n == 1"), "give an expression"),
    (
        lambda _: rd.Reader((i for i in range(3)), rd.Shard()),
        "generator .* is no data set.*a stream that has neither is an",
    ),
    (lambda _: rd.IterableSource("text"), "num_streams="),
    (lambda _: rd.IterableSource(lambda _: range(3)), "num_streams="),
]
NOT_THERE = [
    (lambda f: rd.ParquetSource(f / "*.parquet"), r"/\*\.parquet' matches no file .*Give a glob"),
    (lambda f: rd.ArrowSource(f / "nowhere"), r"nowhere' matches no file .*Give a glob"),
    (lambda _: rd.ParquetSource("memory://nowhere/*"), "memory://nowhere"),
    (lambda f: rd.ArrowSource(f / "jsonl"), r"folder without files that end in \.arrow, \.feather, \.ipc"),
    (lambda _: rd.ArrowSource([]), "No paths"),
]
CALLS = [
    (error, *case)
    for error, cases in ((ValueError, NO_VALUES), (TypeError, WRONG_TYPES), (FileNotFoundError, NOT_THERE))
    for case in cases
]


@pytest.mark.parametrize(("error", "call", "words"), CALLS)
def test_an_argument(error, call, words, folder):
    """Twice: no index is left behind, and no copy."""
    for _ in range(2):
        with pytest.raises(error, match=words):
            call(folder)
    assert not list(folder.rglob("*.rdblocks"))


NARROW, NONE = pa.array([[1]], pa.list_(pa.int16())), pa.array([], pa.list_(pa.int32()))
TABLES = {
    "no rows": ([{"ids": NONE}], "have no rows"),
    "another type": ([{"ids": [[1]]}, {"ids": NARROW}], "differ in 'ids'.*int64.*a.*int16.*b"),
    "a column less": ([{"ids": [[1]], "n": [1]}, {"ids": [[1]]}], "differ in 'n': int64 in .*a.*missing in .*b"),
    "a column more": ([{"ids": [[1]]}, {"ids": [[1]], "n": [1]}], "differ in 'n': missing in .*a.*int64 in .*b"),
}


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("name", TABLES)
def test_tables(name, suffix, tmp_path):
    tables, words = TABLES[name]
    for letter, columns in zip("ab", tables, strict=False):
        path = write_table(tmp_path / f"{letter}{suffix}", columns)
    with pytest.raises(ValueError, match=words):
        source_of(path)
    if "column" in name:
        assert source_of(path, columns=["ids"]).num_rows == 2


def test_a_stream_with_dictionaries(tmp_path):
    path = write_table(tmp_path / "a.arrow", {"kind": pa.array(["a", "b"]).dictionary_encode()}, is_stream=True)
    with pytest.raises(ValueError, match="stream with dictionaries"):
        source_of(path)


TEXT = b"a,b\n1,2\n" * 500
ONE, TWICE = tar_bytes([("1.txt", b"a")]), tar_bytes([("1.txt", b"a"), ("1.txt", b"b")])
KEY = tar_bytes([("1.__key__", b"a"), ("1.txt", b"b")])
CONTENTS = {
    "Parquet that is text": ("a.parquet", TEXT, r"a\.parquet cannot be read"),
    "Arrow that is text": ("a.arrow", TEXT, r"a\.arrow cannot be read"),
    "no lines": ("a.jsonl", b"", "have no rows"),
    "no samples": ("a.tar", tar_bytes([]), "have no rows"),
    "a tar that is empty": ("a.tar", b"", r"a\.tar.* cannot be read as tar.*half-written"),
    "a tar that is text": ("a.tar", TEXT, r"a\.tar.* cannot be read"),
    "a member twice": ("a.tar", TWICE, r"a\.tar.* cannot be read as tar: the sample '1' has two members 'txt'"),
    "tars one behind the other": ("a.tar", 2 * ONE, r"a\.tar.* cannot .*more behind its end .*tar --concatenate"),
    "a member with the name of the key": ("a.tar", KEY, r"extension '__key__', .* Give columns= without it: \['txt'\]"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_contents(name, packed, tmp_path):
    file, data, words = CONTENTS[name]
    if packed and file.endswith(("parquet", "arrow")):
        return
    path = tmp_path / f"{file}{packed}"
    path.write_bytes(pack(data, packed))
    with pytest.raises(ValueError, match=words):
        source_of(path)
    if data is TEXT:  # not compressed at all
        path.write_bytes(data)
        with pytest.raises(ValueError, match=words):
            source_of(path)
    if "key" in name:
        assert source_of(path, columns=["txt"]).row(0) == {"__key__": "1", "txt": b"b"}
    if name.startswith("no "):
        good = {"a.jsonl": lines([{"n": 1}]), "a.tar": ONE}
        (tmp_path / f"b{file[1:]}{packed}").write_bytes(pack(good[file], packed))
        assert source_of(path).num_rows == 1


FORMS = ["parquet", "arrow", "stream", "jsonl.gz", "jsonl.zst", "jsonl.bz2", "tar", "idx", "bin"]


@pytest.mark.parametrize("kept", [0, 3, 100, 512, 700, 1024, "a half", -200, -9])
@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_is_cut_off_is_named_when_the_source_is_opened(form, kept, tmp_path):
    rows = [{"ids": np.random.default_rng(i).integers(0, 60_000, 100).tolist()} for i in range(50)]
    for name in "ab":
        path = tmp_path / f"{name}.{'arrow' if form == 'stream' else form}"
        if "jsonl" in form:
            write_jsonl(path, rows)
        elif form == "tar":
            write_tar(path, SAMPLES)  # of which the first member is empty, so that 512 bytes are the whole of it
        elif form in ("idx", "bin"):
            write_megatron(tmp_path / name, [row["ids"] for row in rows])
        else:
            write_table(path, pa.Table.from_pylist(rows), is_stream=form == "stream")
    data = path.read_bytes().rstrip(b"\0") if form == "tar" else path.read_bytes()  # a tar without the mark of its end
    path.write_bytes(data[: len(data) // 2 if kept == "a half" else kept])
    path = path.with_suffix(".bin") if form == "idx" else path
    words = r"its \.idx" if form == "idx" else ".*half-written"
    with pytest.raises(ValueError, match=rf"b\.{path.name[2:]} cannot be read as .*{words}"):
        source_of(path)
    assert not list(tmp_path.glob(".b*"))


def test_documents_of_megatron(tmp_path):
    path = write_megatron(tmp_path / "a", [])
    with pytest.raises(ValueError, match="have no rows"):
        source_of(path)
    write_megatron(tmp_path / "b", DOCS)
    assert source_of(path).num_rows == 30
    write_megatron(tmp_path / "a", DOCS, "int32")
    with pytest.raises(ValueError, match=r"differ in their dtype: <i4 in .*a\.bin, <u2 in .*b\.bin"):
        source_of(path)
    write_megatron(tmp_path / "a", DOCS, "float32")
    with pytest.raises(ValueError, match=r"a\.bin cannot be read as megatron: it holds numbers of type float32"):
        source_of(path)
    (tmp_path / "a.idx").unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.bin has no index: there is no .*a\.idx"):
        source_of(path)


def test_a_member_with_holes(tmp_path):
    sparse = tarfile.TarInfo("4.txt")
    sparse.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": "8", "GNU.sparse.numblocks": "1"}
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(sparse)
    with pytest.raises(ValueError, match=r"a\.tar cannot .*'4\.txt' is stored with holes"):
        source_of(tmp_path / "a.tar")


@pytest.mark.parametrize("why", [errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("index_dir", [None, "index"])
def test_a_folder_that_cannot_be_written(why, index_dir, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [{"x": 1}])
    monkeypatch.setattr(os, "makedirs", Mock(side_effect=OSError(why, os.strerror(why))))
    with pytest.raises(PermissionError, match=r"cannot be read or written: .* Give index_dir=, a folder that all"):
        rd.JsonlSource(path, index_dir=index_dir and tmp_path / index_dir)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl", "a.tar", "a.bin"])
def test_a_file_that_is_replaced_before_a_worker_opens_it(name, folder):
    """What the index knows of the old one would find other rows in the new one. It is no bad row."""
    path = folder / name[2:] / name
    sent = pickle.dumps(source_of(path))
    if name in ("a.parquet", "a.arrow"):
        write_table(path, {"ids": [[2**40, 3]], "text": ["b"], "x": [[0.5]], "n": [2]})
    else:
        with path.open("ab") as file:
            file.write(bytes(512))
    with pytest.raises(ValueError, match=rf"{name} cannot be read .*it has changed: it had \d+ bytes .* and has"):
        pickle.loads(sent).row(0)
    with pytest.raises(OSError, match="it has changed"):
        next(rd.Reader(pickle.loads(sent), rd.Shard(), on_error="skip"))
