"""JSON lines: plain and compressed, with an index that is written once."""

import json
import logging
import multiprocessing
import os
import pickle
import tarfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescale_data.sources import indexed, jsonl
from rescale_data.sources.bad_row import BadRow
from rescale_data.sources.decoded.cache import cache, open_files
from rescale_data.sources.files import local_store
from rescale_data.sources.files.blocks import BlockRangeReader, write_blocks
from rescale_data.sources.jsonl import JsonlSource, find_lines, parse
from rescale_data.sources.webdataset import WebDatasetSource
from rescale_data.testing import assert_source
from tests.formats import lines, pack, write_jsonl

PACKED = ["", ".gz", ".zst", ".bz2"]
ROWS: list[dict[str, Any]] = [
    {"text": f"zeile {i} ü\n", "n": i, "ids": list(range(i % 5)), "x": [0.5, i], "meta": {"a": [1, "b"]}, "none": None}
    for i in range(50)
]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()}


def rows_of(source: JsonlSource) -> list[dict[str, Any]]:
    return [plain(source.row(i)) for i in range(source.num_rows)]


@pytest.fixture(params=PACKED)
def packed(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def small_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "FRAGMENT_ROWS", 7)


class TestRows:
    def test_are_those_of_the_files(self, packed: str, tmp_path: Path) -> None:
        write_jsonl(tmp_path / f"a.jsonl{packed}", ROWS[:30])
        write_jsonl(tmp_path / f"b.jsonl{packed}", ROWS[30:])
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

    def test_urls(self, packed: str, tmp_path: Path) -> None:
        memory = fsspec.filesystem("memory")
        memory.pipe(f"/lines{packed}/a.jsonl{packed}", pack(lines(ROWS), packed))
        url = f"memory://lines{packed}"
        with pytest.raises(ValueError, match="Give index_dir="):
            JsonlSource(url)
        assert rows_of(JsonlSource(url, index_dir=tmp_path)) == ROWS

    def test_without_rows(self, packed: str, tmp_path: Path) -> None:
        write_jsonl(tmp_path / f"a.jsonl{packed}", [])
        with pytest.raises(ValueError, match="have no rows"):
            JsonlSource(tmp_path)
        write_jsonl(tmp_path / f"b.jsonl{packed}", ROWS[:2])
        assert JsonlSource(tmp_path).num_rows == 2


class TestLines:
    @given(
        st.lists(st.sampled_from(["{}", '{"a": 1}', "", "  ", "\r", "\t"]), max_size=30), st.booleans(), st.booleans()
    )
    def test_empty_ones_are_no_rows(self, given_lines: list[str], end: bool, crlf: bool) -> None:
        text = ("\r\n" if crlf else "\n").join(given_lines) + ("\n" if end and given_lines else "")
        data = text.encode()
        starts, empty = find_lines(_Bytes(data))
        found = [data[a:b].strip() for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
        wanted = [(i + 1, line.strip().encode()) for i, line in enumerate(text.split("\n")) if line.strip()]
        assert found == [line for _, line in wanted]
        numbers = [row + 1 + int(np.searchsorted(empty, row, side="right")) for row in range(len(found))]
        assert numbers == [number for number, _ in wanted]

    def test_across_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = lines(ROWS)
        whole = find_lines(_Bytes(data))[0].tolist()
        monkeypatch.setattr(jsonl, "_CHUNK_BYTES", 13)
        assert find_lines(_Bytes(data))[0].tolist() == whole

    def test_a_byte_order_mark(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(ROWS[:3]))
        assert rows_of(JsonlSource(tmp_path)) == ROWS[:3]


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def read(self, offset: int, length: int) -> Any:
        import pyarrow as pa

        return pa.py_buffer(self._data[offset : offset + length])

    def as_arrow(self) -> Any: ...
    def release_with(self, user: object, data: Any) -> None: ...


class TestIndex:
    def test_is_read_and_not_made_again(self, packed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_jsonl(tmp_path / f"a.jsonl{packed}", ROWS)
        first = JsonlSource(tmp_path)
        kinds = sorted(path.suffix for path in (tmp_path / ".rescale_data").iterdir())
        assert kinds == [*([".rdblocks"] if packed else []), ".rdindex", ".rdpart"]
        monkeypatch.setattr(JsonlSource, "_scan_file", None)
        again = JsonlSource(tmp_path)
        assert rows_of(again) == ROWS
        assert again.manifest() == first.manifest()

    @pytest.mark.parametrize("damage", [".rdindex", ".rdpart", ".rdblocks"])
    @pytest.mark.parametrize("is_cut", [True, False])
    def test_is_made_again_where_it_is_not_whole(self, packed: str, damage: str, is_cut: bool, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / f"a.jsonl{packed}", ROWS)
        kept = pickle.dumps(JsonlSource(path))
        for hurt in (tmp_path / ".rescale_data").glob(f"*{damage}"):
            if is_cut:
                hurt.write_bytes(hurt.read_bytes()[:-3])
            else:
                hurt.unlink()
        assert rows_of(JsonlSource(path)) == ROWS
        assert rows_of(pickle.loads(kept)) == ROWS

    def test_a_copy_that_the_disk_has_changed(self, packed: str, tmp_path: Path) -> None:
        """Blocks of zstd have no checksum of their own; the places of the blocks are found again from the file."""
        path = write_jsonl(tmp_path / f"a.jsonl{packed}", ROWS)
        source = JsonlSource(path)
        for copy in (tmp_path / ".rescale_data").glob("*.rdblocks"):
            whole = copy.read_bytes()
            for at in range(0, len(whole), 7):
                changed = bytearray(whole)
                changed[at] ^= 4
                copy.write_bytes(changed)
                open_files().clear()
                cache().clear()
                try:
                    assert rows_of(source) == ROWS
                except OSError as error:
                    assert error.filename == str(copy)  # noqa: PT017
                    assert "delete the file" in str(error)  # noqa: PT017
                    copy.unlink()
                    open_files().clear()
                    assert rows_of(source) == ROWS

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

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_where_nothing_may_be_written(self, tmp_path: Path) -> None:
        write_jsonl(tmp_path / "data" / "a.jsonl", ROWS)
        (tmp_path / "data").chmod(0o555)
        with pytest.raises(PermissionError, match="index_dir="):
            JsonlSource(tmp_path / "data")

    def test_many_processes_scan_each_file_once(self, packed: str, tmp_path: Path) -> None:
        for number in range(6):
            write_jsonl(tmp_path / f"{number}.jsonl{packed}", ROWS * 20)
        context = multiprocessing.get_context("fork")
        counter = context.Value("i", 0)
        processes = [context.Process(target=_open_and_count, args=(tmp_path, counter)) for _ in range(4)]
        [process.start() for process in processes]
        [process.join() for process in processes]
        assert [process.exitcode for process in processes] == [0] * 4
        assert counter.value == 6
        assert not [path for path in tmp_path.rglob("*") if path.suffix in (".tmp", ".claim")]

    def test_a_copy_is_announced(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = write_jsonl(tmp_path / "a.jsonl.gz", ROWS)
        with caplog.at_level(logging.WARNING, "rescale_data"):
            JsonlSource(path)
        (message,) = caplog.messages
        assert f"a.jsonl.gz ({path.stat().st_size} bytes)" in message
        assert ".rdblocks" in message

    def test_a_copy_is_refused(self, tmp_path: Path) -> None:
        write_jsonl(tmp_path / "a.jsonl.gz", ROWS)
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz is compressed as a whole.*transcode=True"):
            JsonlSource(tmp_path, transcode=False)
        assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl.gz"]

    def test_files_of_several_compressed_parts(self, tmp_path: Path) -> None:
        for packed in PACKED[1:]:
            path = tmp_path / f"a.jsonl{packed}"
            path.write_bytes(pack(lines(ROWS[:20]), packed) + pack(lines(ROWS[20:]), packed))
            assert rows_of(JsonlSource(path)) == ROWS


def _open_and_count(folder: Path, counter: Any) -> None:
    scan = JsonlSource._scan_file

    def count(self: JsonlSource, ranges: Any) -> Any:
        with counter.get_lock():
            counter.value += 1
        time.sleep(0.05)
        return scan(self, ranges)

    JsonlSource._scan_file = count  # type: ignore[method-assign]
    assert JsonlSource(folder).num_rows == 6000


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
            ('{"text": "cut o', "it is not JSON: Unterminated string.*begins with"),
            ("\x00\x01", "it is not JSON"),
            ("[" * 100_000, "it is not JSON: maximum recursion depth"),
            ("[1, 2]", "it is a JSON list, not an object"),
            ("3", "it is a JSON int"),
        ],
    )
    def test_a_line_that_does_not_parse(self, line: str, message: str, packed: str, tmp_path: Path) -> None:
        data = lines(ROWS[:9]) + b"\n" + line.encode() + b"\n" + lines(ROWS[9:])
        (tmp_path / f"a.jsonl{packed}").write_bytes(pack(data, packed))
        source = JsonlSource(tmp_path)
        with pytest.raises(ValueError, match=rf"a\.jsonl{packed}, line 11: {message}"):
            source.row(9)
        assert plain(source.row(10)) == ROWS[9]

    def test_a_half_written_last_line(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:5])[:-20])
        source = JsonlSource(tmp_path)
        assert plain(source.row(3)) == ROWS[3]
        with pytest.raises(ValueError, match="line 5: it is not JSON"):
            source.row(4)

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_bytes(b'{"a": "\xff\xfe"}\n')
        with pytest.raises(ValueError, match="line 1: it is not JSON"):
            JsonlSource(tmp_path).row(0)

    @pytest.mark.parametrize("packed", PACKED[1:])
    def test_blocks_are_decompressed_once_for_all_processes_of_a_host(
        self, packed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_jsonl(tmp_path / f"a.jsonl{packed}", ROWS)
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

    @pytest.mark.parametrize("packed", PACKED[1:])
    @pytest.mark.parametrize("kept", [0, 5, 0.5, -4])
    def test_a_compressed_file_that_was_cut_off(self, packed: str, kept: float, tmp_path: Path) -> None:
        write_jsonl(tmp_path / f"a.jsonl{packed}", ROWS)
        path = write_jsonl(tmp_path / f"b.jsonl{packed}", [{"x": os.urandom(50).hex()} for _ in range(200)])
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])
        with pytest.raises(ValueError, match=rf"b\.jsonl{packed} cannot be read as jsonl.*half-written"):
            JsonlSource(tmp_path)
        assert not list(tmp_path.glob(".b*"))

    def test_a_number_that_is_too_large_for_an_array(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(json.dumps({"ids": [2**70, 1]}) + "\n")
        assert JsonlSource(tmp_path).row(0) == {"ids": [2**70, 1]}
        (tmp_path / "a.jsonl").write_text(json.dumps({"ids": [2**64 - 1, -1]}) + "\n")  # NumPy makes floats of these
        assert JsonlSource(tmp_path).row(0) == {"ids": [2**64 - 1, -1]}
