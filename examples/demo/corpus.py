"""A small corpus of real text in Parquet files: the rows of the demo."""

from __future__ import annotations

import contextlib
import json
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import rescale_data as rd

MAX_TOKENS = 300_000
MAX_ROW = 200
MIN_ROW = 40
NUM_FILES, ROW_GROUPS_PER_FILE = 4, 5
MAX_TOKEN_ID = 1024  # of tokens that a user brings; the demo's model is too small for a real vocabulary
PREFERRED = ("text", "content", "tokens", "input_ids")


@dataclass(frozen=True)
class Corpus:
    """Parquet files with one column, ``tokens: list<int32>``, a document a row.

    Args:
        eos_id: A token that no document holds, the largest of all.
    """

    folder: str
    eos_id: int
    description: str

    @property
    def vocabulary(self) -> int:
        return self.eos_id + 1


def build_corpus(data: Path | None, folder: Path, min_rows: int) -> Corpus:
    """Write documents from ``data``, or from this interpreter's own library, as several files of several row groups."""
    path = data or Path(sysconfig.get_paths()["stdlib"])
    left_out: list[Path] = []
    rows = _enough(_documents(path, left_out) if data else _text_documents(sorted(path.glob("*.py"))))
    if len(rows) < min_rows:
        raise ValueError(
            f"{path} holds {len(rows)} different documents, and the demo needs at least {min_rows}, one for each logical "
            f"shard. Give a folder with more text, JSON lines, Parquet or Arrow in it.{_told(left_out)}"
        )
    eos_id = max(255, *(int(row.max()) for row in rows)) + 1
    table = pa.table({"tokens": pa.array([row.tolist() for row in rows], pa.list_(pa.int32()))})
    per_file = -(-len(rows) // NUM_FILES)
    folder.mkdir()
    for number in range(NUM_FILES):
        part = table.slice(number * per_file, per_file)
        pq.write_table(part, folder / f"part-{number}.parquet", row_group_size=-(-per_file // ROW_GROUPS_PER_FILE))
    source = data or "the Python standard library of this machine"
    return Corpus(
        str(folder),
        eos_id,
        f"{len(rows)} documents of {source}, {sum(map(len, rows)):,} {'byte ' if eos_id == 256 else ''}tokens, in {NUM_FILES} "
        f"Parquet files of {ROW_GROUPS_PER_FILE} row groups.{_told(left_out)}",
    )


def _told(left_out: list[Path]) -> str:
    kinds = Counter(file.suffix or file.name for file in left_out)
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(8))
    return f" Left out, without text or tokens: {told}." if left_out else ""


def read_rows(corpus: Corpus) -> list[bytes]:
    """Each document as the bytes of its int32 tokens; read with pyarrow alone, for the check."""
    column = pq.read_table(corpus.folder)["tokens"]
    return [np.array(row, dtype=np.int32).tobytes() for row in column.to_pylist()]


def _enough(documents: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Documents, each once and none empty, until there are tokens enough."""
    rows: dict[bytes, np.ndarray] = {}
    tokens = 0
    for document in documents:
        row = document.astype(np.int32)
        if len(row) and rows.setdefault(row.tobytes(), row) is row:
            tokens += len(row)
        if tokens >= MAX_TOKENS:
            break
    return list(rows.values())


def _documents(path: Path, left_out: list[Path]) -> Iterator[np.ndarray]:
    """Of each file that can be read, in the order of their names; the others are added to ``left_out``."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        if any(part.startswith(".") for part in file.relative_to(path).parts):
            continue
        found = 0
        with contextlib.suppress(ValueError, OSError):
            for document in _file_documents(file):
                found += 1
                yield document
        if not found:
            left_out.append(file)


def _file_documents(file: Path) -> Iterator[np.ndarray]:
    if file.name.endswith(rd.ParquetSource.SUFFIXES):
        return _row_documents(rd.Reader(rd.ParquetSource(file), rd.Shard(), shuffle=False))
    if file.name.endswith(rd.ArrowSource.SUFFIXES):
        return _row_documents(rd.Reader(rd.ArrowSource(file), rd.Shard(), shuffle=False))
    if file.name.endswith((".jsonl", ".ndjson")):
        return _row_documents(json.loads(line) for line in file.open("rb") if line.strip())
    return _text_documents([file])


def _row_documents(rows: Iterable[Mapping[str, Any]]) -> Iterator[np.ndarray]:
    for row in rows:
        columns = _columns(row)
        document = _tokens(row[columns[0]]) if columns else None
        if document is not None:
            yield document


def _columns(row: Mapping[str, Any]) -> list[str]:
    """Those that hold documents, the likeliest first."""
    return [name for name in (*PREFERRED, *row) if name in row and _tokens(row[name]) is not None]


def _tokens(value: Any) -> np.ndarray | None:
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return np.frombuffer(value, dtype=np.uint8)
    value = np.array(value) if isinstance(value, list) else value
    is_ints = isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.integer)
    return value % MAX_TOKEN_ID if is_ints else None


def _text_documents(files: Iterable[Path]) -> Iterator[np.ndarray]:
    for file in files:
        with file.open("rb") as opened:
            text = opened.read(MAX_TOKENS)
        if b"\0" not in text:
            yield from _paragraphs(text)


def _paragraphs(text: bytes) -> Iterator[np.ndarray]:
    """Some paragraphs at a time, so that even a few files have many documents."""
    document = b""
    for paragraph in text.split(b"\n\n"):
        document += paragraph + b"\n\n"
        if len(document) >= MIN_ROW:
            yield from (
                np.frombuffer(document[i : i + MAX_ROW], dtype=np.uint8) for i in range(0, len(document), MAX_ROW)
            )
            document = b""
    yield np.frombuffer(document, dtype=np.uint8)
