"""Law 8, files: any number in an Arrow, Megatron or index file is an error that names the file, or rows; never a crash, never a
loop without end.

Crossed: formats (the file and the stream format of Arrow, lists, texts and nested columns, documents a batch; Megatron with its
index; indexes of Parquet footers and of lines; copies of compressed files in blocks) with numbers of 4 and 8 bytes at any
place, and files that end too soon. Each damaged file is opened, its rows are read, and they are packed, in a process of its
own, since a crash ends it. What the package writes has checksums: there the rows are the right ones, or it is an error.
"""

import random
import resource
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rescale_data as rd
from rescale_data.sources.decoded.cache import cache
from tests.formats import write_megatron
from tests.laws.tables import write

EXAMPLES = 100
NUMBERS = [0, 1, -1, 2, 7, 63, -8, 255, 1 << 20, 1 << 32, 1 << 40, 1 << 61]
NUMBERS += [(1 << 31) - 1, -(1 << 31), (1 << 63) - 1, -(1 << 63)]
DOCUMENTS = [[10 * i + j for j in range(i % 6)] for i in range(40)]


def lists() -> pa.Table:
    return pa.table({"tokens": pa.array(DOCUMENTS, pa.list_(pa.uint16()))})


def mixed() -> pa.Table:
    texts = [f"text {i}" * (i % 3) for i in range(40)]
    nested = pa.array([[text, text] for text in texts], pa.list_(pa.string()))
    words = pa.array(texts).dictionary_encode()
    views = pa.array(texts, pa.string_view())
    return pa.table({"tokens": lists()["tokens"], "text": texts, "nested": nested, "word": words, "view": views})


def arrow(folder: Path, table: pa.Table, **options: Any) -> Path:
    return write("arrow", folder / "a", table, 16, **options)


def megatron(folder: Path, suffix: str) -> Path:
    write_megatron(folder / "a", DOCUMENTS, sentences=2)
    return folder / f"a{suffix}"


def indexed(folder: Path, source: Callable[..., rd.Source]) -> Path:
    """An index of files, once it is made."""
    (folder / "index").mkdir()
    source(folder)
    return max((path for path in (folder / "index").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def footers(folder: Path) -> Path:
    write("parquet", folder / "a", lists(), 8)
    return indexed(folder, parquet)


def lines(folder: Path) -> Path:
    write("jsonl", folder / "a", lists())
    return indexed(folder, jsonl)


def blocks(folder: Path) -> Path:
    """The copy of a compressed file in blocks, once it is made."""
    write("jsonl", folder / "a", lists(), suffix=".jsonl.gz")
    indexed(folder, jsonl)
    (path,) = (folder / "index").rglob("*.rdblocks")
    return path


def parquet(folder: Path) -> rd.Source:
    return rd.ParquetSource(folder, index_dir=folder / "index")


def jsonl(folder: Path) -> rd.Source:
    return rd.JsonlSource(folder, index_dir=folder / "index")


KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], rd.Source]]] = {
    "arrow": (lambda folder: arrow(folder, lists()), rd.ArrowSource),
    "arrow-stream": (lambda folder: arrow(folder, lists(), is_stream=True), rd.ArrowSource),
    "arrow-mixed": (lambda folder: arrow(folder, mixed()), rd.ArrowSource),
    "arrow-zstd": (lambda folder: arrow(folder, mixed(), compression="zstd"), rd.ArrowSource),
    "megatron-idx": (lambda folder: megatron(folder, ".idx"), rd.MegatronSource),
    "megatron-bin": (lambda folder: megatron(folder, ".bin"), rd.MegatronSource),
    "index-parquet": (footers, parquet),
    "index-jsonl": (lines, jsonl),
    "blocks-jsonl": (blocks, jsonl),
}
"""The file that is damaged, and its source."""


def damaged(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        return data[: rng.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2])):
        size = rng.choice([2, 4, 4, 8, 8])
        at = rng.randrange(max(1, len(data) - size)) // 4 * 4
        number = rng.choice(NUMBERS) & ((1 << 8 * size) - 1)
        changed[at : at + size] = number.to_bytes(size, "little")
    return bytes(changed)


def read(source: rd.Source) -> list[list[int]]:
    """Return the tokens of all rows, after packing them."""
    rows: list[list[int]] = []
    for shard in range(2):
        rows += [list(row["tokens"]) for row in rd.Reader(source, rd.Shard(shard, 2), shuffle=8)]
        cache().clear()
        list(rd.TokenPacker(rd.Reader(source, rd.Shard(shard, 2)), column="tokens", seq_len=7, eos_id=None))
        cache().clear()
    return rows


def run(kind: str, seeds: range) -> None:
    """Read a file, damaged in so many ways, and print each that is read wrong: what a process of its own does."""
    make, source_of = KINDS[kind]
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            path = make(Path(folder))
            path.write_bytes(damaged(path.read_bytes(), random.Random(seed)))
            print("BEGIN", seed, flush=True)
            try:
                rows = read(source_of(Path(folder)))
                if path.parent != Path(folder) and sorted(rows) != sorted(DOCUMENTS):
                    print("WRONG", seed, "rows", rows, flush=True)
            except (ValueError, OSError) as error:
                if folder not in str(error) and path.stem not in str(error):
                    print("NAMELESS", seed, type(error).__name__, error, traceback.format_exc(limit=-3), flush=True)
            except Exception:
                print("WRONG", seed, traceback.format_exc(limit=-4), flush=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_an_error_that_names_it_or_rows(kind: str) -> None:
    code = f"from tests.laws.test_files_never_crash import run; run({kind!r}, range({EXAMPLES}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    wrong = [each for each in done.stdout.split("BEGIN ") if "NAMELESS" in each or "WRONG" in each]
    assert not wrong, "\n".join(wrong[:5])
