"""JSON lines: plain and compressed, with an index that is written once."""

import json
import logging
import os
import pickle
import tarfile
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescale_data.sources import jsonl
from rescale_data.sources.bad_row import BadRow
from rescale_data.sources.files import local_store
from rescale_data.sources.files.blocks import BlockRangeReader, write_blocks
from rescale_data.sources.jsonl import JsonlSource, parse
from rescale_data.sources.webdataset import WebDatasetSource
from rescale_data.testing import assert_source
from tests.formats import lines, pack, write_jsonl
from tests.nodes.resume import plain

ROWS: list[dict[str, Any]] = [
    {"text": f"zeile {i} ü\n", "n": i, "ids": list(range(i % 5)), "x": [0.5, i], "meta": {"a": [1, "b"]}, "none": None}
    for i in range(50)
]


def rows_of(source: JsonlSource) -> list[dict[str, Any]]:
    return [plain(source.row(i)) for i in range(source.num_rows)]


pytestmark = pytest.mark.usefixtures("small_fragments")


class TestRows:
    def test_are_those_of_the_files(self, packed: str, tmp_path: Path) -> None:
        """Of one that begins with a byte order mark, and of one of several compressed parts."""
        (tmp_path / f"a.jsonl{packed}").write_bytes(pack(b"\xef\xbb\xbf" + lines(ROWS[:30]), packed))
        parts = [pack(lines(ROWS[30:41]), packed), pack(lines(ROWS[41:]), packed)]
        (tmp_path / f"b.jsonl{packed}").write_bytes(b"".join(parts))
        source = JsonlSource(tmp_path)
        assert rows_of(source) == ROWS
        assert source.fragments.tolist() == [0, 7, 14, 21, 28, 30, 37, 44, 50]
        assert [source.row(4)[name].dtype for name in ("ids", "x")] == [np.int64, np.float64]
        assert source.locate(33) == f"{tmp_path}/b.jsonl{packed}, line 4"
        assert_source(source)

    def test_some_columns(self, tmp_path: Path) -> None:
        source = JsonlSource(write_jsonl(tmp_path / "a.jsonl", [*ROWS[:2], {"n": 9}]), columns=["n", "text"])
        assert source.row(1) == {"n": 1, "text": "zeile 1 ü\n"}
        with pytest.raises(ValueError, match=r"a\.jsonl, line 3: the line has no \['text'\]; it has \['n'\]"):
            source.row(2)

    def test_a_number_that_is_too_large_for_an_array(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(json.dumps({"ids": [2**70, 1]}) + "\n")
        assert JsonlSource(tmp_path).row(0) == {"ids": [2**70, 1]}
        (tmp_path / "a.jsonl").write_text(json.dumps({"ids": [2**64 - 1, -1]}) + "\n")  # NumPy makes floats of these
        assert JsonlSource(tmp_path).row(0) == {"ids": [2**64 - 1, -1]}


class TestLines:
    @given(
        st.lists(st.sampled_from(["{}", '{"a": 1}', "", "  ", "\r", "\t"]), max_size=30),
        st.booleans(),
        st.booleans(),
        st.sampled_from([3, 13, 2**24]),
    )
    def test_empty_ones_are_no_rows(self, given_lines: list[str], end: bool, crlf: bool, chunk_bytes: int) -> None:
        text = ("\r\n" if crlf else "\n").join(given_lines) + ("\n" if end else "")
        wanted = [(i + 1, json.loads(line)) for i, line in enumerate(text.split("\n")) if line.strip()]
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(jsonl, "_CHUNK_BYTES", chunk_bytes)
            path = Path(folder, "a.jsonl")
            path.write_bytes(text.encode())
            source = JsonlSource(path) if wanted else None
            rows = range(source.num_rows if source else 0)
            assert [(int(source.locate(i).rpartition(" ")[2]), source.row(i)) for i in rows] == wanted


class TestIndex:
    def test_is_read_and_not_made_again(
        self, packed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """And a copy is announced."""
        path = write_jsonl(tmp_path / f"a.jsonl{packed}", ROWS)
        with caplog.at_level(logging.WARNING, "rescale_data"):
            first = JsonlSource(tmp_path)
        announced = f"{path} ({path.stat().st_size} bytes)"
        assert [announced in message and ".rdblocks" in message for message in caplog.messages] == [True] * bool(packed)
        kinds = sorted(path.suffix for path in (tmp_path / ".rescale_data").iterdir())
        assert kinds == [*([".rdblocks"] if packed else []), ".rdindex", ".rdpart"]
        monkeypatch.setattr(JsonlSource, "_scan_file", None)
        again = JsonlSource(tmp_path)
        assert rows_of(again) == ROWS
        assert again.manifest() == first.manifest()

    @pytest.mark.parametrize("damage", [".rdindex", ".rdpart", ".rdblocks"])
    @pytest.mark.parametrize("left", [None, 0, 7, 200, -3])
    def test_is_made_again_where_it_is_not_whole(
        self, packed: str, damage: str, left: int | None, tmp_path: Path
    ) -> None:
        path = write_jsonl(tmp_path / f"a.jsonl{packed}", ROWS)
        kept = pickle.dumps(JsonlSource(path))
        for hurt in (tmp_path / ".rescale_data").glob(f"*{damage}"):
            if left is None:
                hurt.unlink()
            else:
                hurt.write_bytes(hurt.read_bytes()[:left])
        assert rows_of(JsonlSource(path)) == ROWS
        assert rows_of(pickle.loads(kept)) == ROWS

    def test_is_made_again_where_the_file_has_changed(self, packed: str, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / f"a.jsonl{packed}", ROWS)
        before, later = JsonlSource(path).manifest(), path.stat().st_mtime_ns + 10**9
        write_jsonl(path, [*ROWS[1:], ROWS[0]])  # as long as it was
        os.utime(path, ns=(later, later))
        assert rows_of(JsonlSource(path)) == [*ROWS[1:], ROWS[0]]
        write_jsonl(path, ROWS[:3])
        assert JsonlSource(path).num_rows == 3
        assert JsonlSource(path).manifest() != before

    def test_of_another_format_is_made_again(self, tmp_path: Path) -> None:
        """As where a folder was first read as JSON lines by mistake."""
        path = tmp_path / "a.tar"
        with tarfile.open(path, "w") as tar:
            tar.add(write_jsonl(tmp_path / "x.jsonl", ROWS), "x.json")
        for _ in range(2):
            assert JsonlSource(path).num_rows > 1
            assert WebDatasetSource(path).num_rows == 1

    def test_in_a_folder_of_its_own(self, packed: str, tmp_path: Path) -> None:
        data = tmp_path / "data"
        write_jsonl(data / "x" / f"a.jsonl{packed}", ROWS[:5])
        write_jsonl(data / "y" / f"a.jsonl{packed}", ROWS[5:9])
        before = sorted(data.rglob("*"))
        assert rows_of(JsonlSource(data, index_dir=tmp_path / "index")) == ROWS[:9]
        assert sorted(data.rglob("*")) == before
        write_jsonl(tmp_path / "data 2" / "x" / f"a.jsonl{packed}", ROWS[9:12])
        assert rows_of(JsonlSource(tmp_path / "data 2" / "x", index_dir=tmp_path / "index")) == ROWS[9:12]


WHITE = st.text(" \t\r\n\x0b\x0c\u2028\ufeff\xa0", max_size=2)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
PARTS = WHITE | VALUES.map(json.dumps) | VALUES.map(lambda value: json.dumps(value, ensure_ascii=False))


class TestParse:
    @given(st.lists(PARTS, min_size=1, max_size=3).map("".join), st.sampled_from(["utf-8", "utf-16"]))
    def test_a_line_is_what_json_makes_of_it(self, text: str, encoding: str) -> None:
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

    def test_texts_are_those_of_the_rows(self, packed: str, tmp_path: Path) -> None:
        write_jsonl(tmp_path / f"a.jsonl{packed}", [*ROWS, {"text": None}, {"other": "x"}])
        source, chosen = JsonlSource(tmp_path), JsonlSource(tmp_path, columns=["text", "n"])
        rows = np.random.default_rng(0).permutation(50)
        assert source.texts("text", rows) == chosen.texts("text", rows) == [ROWS[i]["text"] for i in rows]
        for bad in (50, 51):
            with pytest.raises((BadRow, KeyError)):
                source.texts("text", np.array([1, bad]))
        with pytest.raises(BadRow):
            chosen.texts("text", np.array([50]))


class TestBadData:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b'{"text": "cut o', "it is not JSON: Unterminated string.*begins with"),
            (b"\x00\x01", "it is not JSON"),
            (b'{"a": "\xff\xfe"}', "it is not JSON"),
            (b"[" * 100_000, "it is not JSON: maximum recursion depth"),
            (b"[1, 2]", "it is a JSON list, not an object"),
            (b"3", "it is a JSON int"),
        ],
    )
    def test_a_line_that_does_not_parse(self, line: bytes, message: str, packed: str, tmp_path: Path) -> None:
        data = lines(ROWS[:9]) + b"\n" + line + b"\n" + lines(ROWS[9:])
        (tmp_path / f"a.jsonl{packed}").write_bytes(pack(data, packed))
        source = JsonlSource(tmp_path)
        with pytest.raises(ValueError, match=rf"a\.jsonl{packed}, line 11: {message}"):
            source.row(9)
        assert plain(source.row(10)) == ROWS[9]


class TestCopies:
    def test_blocks_are_decompressed_once_for_all_processes_of_a_host(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_jsonl(tmp_path / "a.jsonl.gz", ROWS)
        source = JsonlSource(tmp_path, cache_dir=tmp_path / "cache")
        assert rows_of(source) == ROWS
        sent = pickle.dumps(source)
        monkeypatch.setattr(local_store, "_stores", {})  # as in another process
        monkeypatch.setattr(BlockRangeReader, "_decompress", Mock(side_effect=AssertionError))
        assert rows_of(pickle.loads(sent)) == ROWS

    def test_blocks_of_a_copy_that_was_made_again_are_other_entries(self, tmp_path: Path) -> None:
        """With blocks of another size, as another release may write them, or of a file that has changed without a stamp."""
        store, copy = local_store.LocalStore(str(tmp_path / "cache"), 10_000), str(tmp_path / "copy")
        for size, data in [(10, bytes(range(100))), (30, bytes(range(100))), (30, b"other" * 20), (100, b"more!" * 20)]:
            write_blocks((data[i : i + size] for i in range(0, 100, size)), copy)
            assert BlockRangeReader(copy, store).read(0, 100).to_pybytes() == data
