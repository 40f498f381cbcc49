"""Mechanisms that the laws cross with one another. A new source, node or option joins its table in one line.

A pipeline of the laws has five layers: a source, its reader, a node over rows, a mixture, and what stands on top. Rows are
``{"id": int, "text": str, "tokens": uint16[n]}`` and no id and no token occurs twice.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import rescale_data as rd
from rescale_data.nodes.base import as_node
from tests.formats import write_jsonl, write_megatron, write_table, write_tar
from tests.laws.pairs import Case, cases

Row = dict[str, Any]
Rows = list[Row]


def rows_of(lengths: list[int], first: int = 0) -> Rows:
    """Return documents of `lengths` tokens, with ids from `first` on."""
    ends = np.cumsum([first * 8 + 10, *lengths])
    return [
        {"id": first + i, "text": "x" * (1 + int(b - a) % 7), "tokens": np.arange(a, b, dtype=np.uint16)}
        for i, (a, b) in enumerate(pairwise(ends))
    ]


LENGTHS = {
    "web": 3 * [3, 9, 0, 5, 14, 2, 7, 1, 6, 4, 11, 3],
    "code": 4 * [6, 1, 2, 12, 4, 3],
    "books": 4 * [7, 5, 13, 8],
}
"""Lengths of the documents of three corpora."""
CORPORA = {name: rows_of(lengths, 1000 * i) for i, (name, lengths) in enumerate(LENGTHS.items())}


# Sources ------------------------------------------------------------------------------------------------------------------


def table_of(rows: Rows) -> pa.Table:
    """Return `rows` as an Arrow table with lists of uint16."""
    tokens = pa.array([row["tokens"] for row in rows], pa.list_(pa.uint16()))
    return pa.table({"id": [row["id"] for row in rows], "text": [row["text"] for row in rows], "tokens": tokens})


FILES: dict[str, tuple[Callable[..., Any], str]] = {
    "parquet": (rd.ParquetSource, ".parquet"),
    "arrow": (rd.ArrowSource, ".arrow"),
    "jsonl": (rd.JsonlSource, ".jsonl"),
    "webdataset": (rd.WebDatasetSource, ".tar"),
    "megatron": (rd.MegatronSource, ".bin"),
}
"""The source of each format of files, and the suffix of its files."""


def write(kind: str, path: Path, table: pa.Table, fragment_rows: int = 5, suffix: str = "", **options: Any) -> Path:
    """Write a table as a file of a format: each row as JSON in a tar, and tokens alone for Megatron. Return its path.

    Args:
        path: The file without its suffix.
        options: Of `tests.formats.write_table`.
    """
    file = Path(f"{path}{suffix or FILES[kind][1]}")
    if kind in ("parquet", "arrow"):
        write_table(file, table.combine_chunks(), fragment_rows, **options)
    elif kind == "jsonl":
        write_jsonl(file, table.to_pylist())
    elif kind == "webdataset":
        write_tar(file, [{"json": json.dumps(row, default=repr).encode()} for row in table.to_pylist()])
    else:
        write_megatron(path, table[table.column_names[-1]].to_pylist())
    return file


def written(kind: str, folder: Path, rows: Rows) -> rd.Source:
    """Return the source of a folder with one file of `rows`."""
    write(kind, folder / "a", table_of(rows))
    return FILES[kind][0](folder)


SOURCES: dict[str, Callable[[Path, Rows], rd.Source]] = {
    "dataset": lambda folder, rows: rd.DatasetSource(rows),
    **{kind: partial(written, kind) for kind in FILES},
}
"""Sources of the same rows. Rows of "webdataset" are JSON bytes, those of "megatron" are tokens alone."""


# Nodes over rows ------------------------------------------------------------------------------------------------------------


def is_kept(row: Row) -> bool:
    """True for two rows in three, by their tokens."""
    return len(row["tokens"]) % 3 != 1


def with_length(row: Row) -> Row:
    return {**row, "length": len(row["tokens"])}


def cut(row: Row, rng: np.random.Generator) -> Row:
    """Return the row with a part of its tokens, from the front."""
    return {**row, "tokens": row["tokens"][: rng.integers(len(row["tokens"]) + 1)]}


def letters(texts: list[str]) -> list[list[int]]:
    """Tokenize texts by their letters, with their length in front."""
    return [[len(text), *map(ord, text)] for text in texts]


ROWS: dict[str, Callable[[rd.Node[Any]], rd.Node[Any]]] = {
    "plain": lambda node: node,
    "Map": lambda node: rd.Map(node, with_length),
    "Filter": lambda node: rd.Filter(node, is_kept),
    "RandomMap": lambda node: rd.RandomMap(node, cut),
    "Tokenize": lambda node: rd.Tokenize(node, letters, "text", batch_size=3),
    "CleanDocuments": lambda node: rd.CleanDocuments(node, "tokens", min_length=2, max_length=10),
    "Shuffle": lambda node: rd.Shuffle(node, 4),
}
"""Nodes that yield rows with "tokens", over others that do."""


# Mixtures -------------------------------------------------------------------------------------------------------------------

WEIGHTS = {"web": 3, "code": 1, "books": 2}
Below = Callable[[str], rd.Node[Any]]
"""The node over the rows of a corpus, by its name."""


def mixture(below: Below, weights: Mapping[str, float] = WEIGHTS, **kwargs: Any) -> rd.Node[Any]:
    return rd.WeightedSampler({name: below(name) for name in weights}, weights, **kwargs)


def nested(below: Below, weights: Mapping[str, float] = WEIGHTS, **kwargs: Any) -> rd.Node[Any]:
    """Two corpora in a mixture, beside a third in another over it."""
    inner = mixture(below, {name: weight for name, weight in weights.items() if name != "books"}, **kwargs)
    outer = {"inner": 2, **{name: weight for name, weight in weights.items() if name == "books"}}
    return rd.WeightedSampler({name: inner if name == "inner" else below(name) for name in outer}, outer, **kwargs)


BY_TOKENS: Mapping[str, Any] = {"unit": "tokens", "column": "tokens"}
MIXTURES: dict[str, Callable[..., rd.Node[Any]]] = {
    "one source": lambda below, weights=WEIGHTS: below("web"),
    "samples": mixture,
    "samples-first": partial(mixture, stop="first"),
    "samples-all": partial(mixture, stop="all"),
    "tokens": partial(mixture, **BY_TOKENS),
    "tokens-all": partial(mixture, stop="all", **BY_TOKENS),
    "nested": nested,
    "nested-all": partial(nested, stop="all"),
    "nested-tokens": partial(nested, **BY_TOKENS),
    "max_epochs": partial(mixture, max_epochs={"web": 1}),
}
"""Ways in which rows of several corpora become one stream: of `Below`, and weights of the corpora that there are."""
ENDLESS = ("samples", "tokens", "nested", "nested-tokens", "max_epochs")
"""Mixtures that never end."""


# On top ---------------------------------------------------------------------------------------------------------------------


def packer(node: rd.Node[Any], *, last: Any = "drop", seq_len: int = 11, eos_id: int | None = None) -> rd.Node[Any]:
    return rd.TokenPacker(node, column="tokens", seq_len=seq_len, eos_id=eos_id, last=last)


def whole(node: rd.Node[Any], *, seq_len: int = 16) -> rd.Node[Any]:
    return rd.WholeDocumentPacker(node, column="tokens", seq_len=seq_len, window=5, max_documents=6)


TOPS: dict[str, Callable[..., rd.Node[Any]]] = {
    "rows": lambda node: node,
    "Shuffle": lambda node: rd.Shuffle(node, 5),
    "TokenPacker": packer,
    "TokenPacker-pad": partial(packer, seq_len=5, eos_id=1, last="pad"),
    "WholeDocumentPacker": whole,
    "Shuffle-WholeDocumentPacker": lambda node: rd.Shuffle(whole(node), 3),
}
"""Nodes that stand over all others. Packers take another ``seq_len``."""


# Pipelines ------------------------------------------------------------------------------------------------------------------

DATASETS = {name: rd.DatasetSource(rows, name=name) for name, rows in CORPORA.items()}
CASES = cases({"rows": [*ROWS], "mixture": [*MIXTURES], "top": [*TOPS]})


def pipeline(case: Case, shard: rd.Shard) -> rd.Node[Any]:
    """Return the pipeline of one of `CASES`."""

    def below(name: str) -> Any:
        return ROWS[case["rows"]](rd.Reader(DATASETS[name], shard, shuffle=4))

    return as_node(TOPS[case["top"]](MIXTURES[case["mixture"]](below)))
