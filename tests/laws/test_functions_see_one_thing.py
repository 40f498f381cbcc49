"""Law 2: a function sees one thing. Values, types, dtypes, shapes and writable or not are those of ``source.row``, however rows
are read; and what a function writes into them nobody else reads.

Crossed: formats of files and data sets; types of a column (integers of every width, floats, booleans, lists, tensors, nulls,
texts, dictionaries, nested); the function (`Map`, a predicate, a tokenizer, ``collate_fn``) and where it stands (over rows,
in a mixture, below each packer; without workers, in a thread, in workers, on two ranks). It describes what it is given and then
writes into all of it; four logical shards are read in turn, twice, with a cache for one fragment. Limit: a map-style
dataset that returns one object twice, or other rows from ``__getitems__`` than from ``[]``.

An error of a function is raised by ``next``, and ends nothing. Crossed: each function that a user can give, where it runs,
errors by which loops end (`StopIteration`) and others. So is one of a source that ends with its error, as a generator does,
wherever a node reads ahead of what it yields.
"""

import copy
import datetime
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch.distributed as dist
from datasets import Dataset
from datasets.table import InMemoryTable
from torchdata.nodes import IterableWrapper

import rescale_data as rd
from rescale_data.sources.decoded.cache import cache
from rescale_data.state import Field
from tests.corpus import Hooked
from tests.laws.pairs import Case, cases, name_of
from tests.laws.tables import FILES, write
from tests.laws.tables import letters as by_letters

NUM_ROWS, NUM_SHARDS = 24, 4
NUMBERS = [[(7 * i + j) % 120 for j in range(i % 5)] for i in range(NUM_ROWS)]
WORDS = [f"text {i % 6}" for i in range(NUM_ROWS)]


def some_null(values: list[Any]) -> list[Any]:
    return [None if i % 4 == 1 else value for i, value in enumerate(values)]


INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
LISTS: dict[str, tuple[list[Any], pa.DataType]] = {
    **{name: (NUMBERS, pa.list_(getattr(pa, name)())) for name in INTEGERS},
    "large_list": (NUMBERS, pa.large_list(pa.int64())),
    "fixed_list": ([[i, i + 1, i + 2] for i in range(NUM_ROWS)], pa.list_(pa.int16(), 3)),
    "null lists": (some_null(NUMBERS), pa.list_(pa.int64())),
}
"""Columns of tokens."""
COLUMNS: dict[str, tuple[list[Any], pa.DataType]] = {
    **LISTS,
    "float32": (NUMBERS, pa.list_(pa.float32())),
    "float64": (NUMBERS, pa.list_(pa.float64())),
    "bools": ([[x % 2 == 0 for x in row] for row in NUMBERS], pa.list_(pa.bool_())),
    "lists of lists": ([[row, row[:1]] for row in NUMBERS], pa.list_(pa.list_(pa.int32()))),
    "tensors": ([[float(i + j) for j in range(6)] for i in range(NUM_ROWS)], pa.fixed_shape_tensor(pa.float32(), (2, 3))),
    "texts": (WORDS, pa.string()),
    "null texts": (some_null(WORDS), pa.string()),
    "large_string": (WORDS, pa.large_string()),
    "string_view": (WORDS, pa.string_view()),
    "dictionary": (WORDS, pa.dictionary(pa.int32(), pa.string())),
    "lists of texts": ([[word] * 2 for word in WORDS], pa.list_(pa.string())),
    "bytes": ([word.encode() for word in WORDS], pa.binary()),
    "number": (some_null(list(range(NUM_ROWS))), pa.int64()),
    "bool": ([i % 3 == 0 for i in range(NUM_ROWS)], pa.bool_()),
    "nothing": ([None] * NUM_ROWS, pa.null()),
    "time": ([datetime.datetime(2026, 1, 1 + i) for i in range(NUM_ROWS)], pa.timestamp("us")),
    "struct": ([{"a": row, "b": word} for row, word in zip(NUMBERS, WORDS, strict=True)],
               pa.struct({"a": pa.list_(pa.int64()), "b": pa.string()})),
}  # fmt: skip


LEFT_OUT = {"jsonl": ("bytes", "time"), "huggingface": ("string_view", "dictionary", "tensors")}


class Rows:
    """A map-style dataset, of a new object each time."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return {"x": copy.deepcopy(self.values[index])}


def table_of(kind: str) -> pa.Table:
    values, dtype = COLUMNS[kind]
    array = pa.array(values, dtype.value_type).cast(dtype) if pa.types.is_dictionary(dtype) else pa.array(values, dtype)
    return pa.table({"x": array})


CACHE: dict[str, Any] = {"cache_bytes": 1}  # one fragment at a time


def written(kind: str, folder: Path, table: pa.Table, **options: Any) -> rd.Source:
    write(kind, folder / "a", table, **options)
    return FILES[kind][0](folder, **CACHE)


def stored(folder: Path, table: pa.Table) -> rd.Source:
    written("parquet", folder, table)
    return rd.ParquetSource(folder, **CACHE, cache_dir=folder / "cache")


def filtered(folder: Path, table: pa.Table) -> rd.Source:
    written("parquet", folder, table)
    return rd.ParquetSource(folder, **CACHE, filter=pc.scalar(True))


FORMATS: dict[str, Callable[[Path, pa.Table], rd.Source]] = {
    **{kind: partial(written, kind) for kind in FILES},
    "stored": stored,
    "filtered": filtered,
    "arrow-stream": partial(written, "arrow", is_stream=True),
    "arrow-zstd": partial(written, "arrow", compression="zstd"),
    "arrow-lz4": partial(written, "arrow", compression="lz4"),
    "huggingface": lambda folder, table: rd.DatasetSource(Dataset(InMemoryTable(table)), batch_rows=3),
    "dataset": lambda folder, table: rd.DatasetSource(Rows(table["x"].to_pylist())),
}
"""Rows in each format; of tables, in fragments of five rows, of which the cache holds one."""


def described(value: Any) -> Any:
    """All that a function can tell of a value."""
    if isinstance(value, dict):
        return {key: described(each) for key, each in value.items()}
    if isinstance(value, list):
        return [described(each) for each in value]
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.flags.writeable, value.tolist()
    return type(value).__name__, str(value)


def spoiled(value: Any) -> None:
    """Write into all of a value that can be written."""
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        spoiled(each)
    if isinstance(value, np.ndarray) and value.flags.writeable:
        value[...] = 99 if value.dtype.kind in "iuf" else value[...]
    elif isinstance(value, dict | list):
        value.clear()


def looked(sample: Any) -> str:
    """A description of what a function is given, which is spoiled."""
    found = repr(described(sample))
    spoiled(sample)
    return found


def keeps_none(sample: Any, seen: list[str]) -> bool:
    seen.append(looked(sample))
    return False


def keeps_lists(sample: Any, seen: list[str]) -> bool:
    """Write nothing: what a predicate writes is yielded."""
    seen.append(repr(described(sample)))
    return next(iter(sample.values())) is not None


def letters(texts: list[str], seen: list[str]) -> list[list[int]]:
    seen.extend(repr({"x": described(text)}) for text in texts)
    found = [[ord(letter) for letter in text] for text in texts]
    texts.clear()
    return found


def descriptions(samples: list[Any]) -> list[str]:
    return [looked(sample) for sample in samples]


def mixture(node: rd.Node[Any]) -> rd.Node[Any]:
    return rd.WeightedSampler({"a": node}, {"a": 1}, stop="all")


def token_packer(node: rd.Node[Any], column: str) -> rd.Node[Any]:
    return rd.TokenPacker(node, column=column, seq_len=5, eos_id=1)


def whole_packer(node: rd.Node[Any], column: str) -> rd.Node[Any]:
    return rd.WholeDocumentPacker(node, column=column, seq_len=5, window=3)


def kept(node: rd.Node[Any], seen: list[str], *, by: Callable[..., bool] = keeps_lists) -> rd.Node[Any]:
    return rd.Filter(node, partial(by, seen=seen))


def tokenized(node: rd.Node[Any], seen: list[str]) -> rd.Node[Any]:
    return rd.Tokenize(node, partial(letters, seen=seen), "x", batch_size=3)


Way = Callable[[rd.Node[Any], list[str]], rd.Node[Any]]
OVER_ROWS: dict[str, Way] = {
    "Map": lambda node, seen: rd.Map(node, lambda row: seen.append(looked(row))),
    "Map-mixture": lambda node, seen: rd.Map(mixture(node), lambda row: seen.append(looked(row))),
    "Filter": partial(kept, by=keeps_none),
    "Filter-Shuffle": lambda node, seen: kept(rd.Shuffle(node, 3), seen, by=keeps_none),
}
BELOW_PACKERS: dict[str, Way] = {
    "TokenPacker": lambda node, seen: token_packer(kept(node, seen), column_of(node)),
    "TokenPacker-writes": lambda node, seen: token_packer(kept(node, seen, by=keeps_none), column_of(node)),
    "TokenPacker-mixture": lambda node, seen: token_packer(kept(mixture(node), seen), column_of(node)),
    "mixture-TokenPacker": lambda node, seen: token_packer(mixture(kept(node, seen)), column_of(node)),
    "WholeDocumentPacker": lambda node, seen: whole_packer(kept(node, seen), column_of(node)),
}
"""A predicate; that one document is left out of each, so that a packer reads on."""
TOKENIZERS: dict[str, Way] = {
    "Tokenize": tokenized,
    "Tokenize-TokenPacker": lambda node, seen: token_packer(tokenized(node, seen), "tokens"),
}
WAYS: dict[str, Way] = {**OVER_ROWS, **BELOW_PACKERS, **TOKENIZERS}


def column_of(node: rd.Node[Any]) -> str:
    return "tokens" if isinstance(node.reads, rd.MegatronSource) else "x"


def may_be(case: Case) -> bool:
    kind, form, way = case["column"], case["format"], case["way"]
    is_list = kind in LISTS
    texts = ("texts", "large_string", "string_view", "dictionary")
    if form == "megatron" and kind != "uint16":
        return False
    if kind in {"arrow-stream": ("dictionary",), **LEFT_OUT}.get(form, ()):  # refused, or none of its types
        return False
    if way in BELOW_PACKERS:
        return is_list and form != "webdataset"
    return way not in TOKENIZERS or (kind in texts and form not in ("webdataset", "megatron"))


def read(nodes: list[rd.Node[Any]]) -> None:
    """Read many logical shards in turn, twice, so that each row is read again after a function wrote into it."""
    for _ in range(2):
        going = list(nodes)
        while going:
            for node in list(going):
                if next(node, None) is None and node.state_dict()["_ended"]:
                    going.remove(node)
        for node in nodes:
            node.reset(node.get_state())


@pytest.mark.parametrize(
    "case", cases({"way": list(WAYS), "format": list(FORMATS), "column": list(COLUMNS)}, may_be), ids=name_of
)
def test_a_function_sees_what_a_row_holds(case: Case, tmp_path: Path) -> None:
    source = FORMATS[case["format"]](tmp_path, table_of(case["column"]))
    expected = {repr(described(source.row(i))) for i in range(NUM_ROWS)}
    cache().clear()
    seen: list[str] = []
    readers = [rd.Reader(source, rd.Shard(i, NUM_SHARDS), shuffle=5) for i in range(NUM_SHARDS)]
    read([WAYS[case["way"]](reader, seen) for reader in readers])
    if case["way"] in TOKENIZERS:
        seen = [each for each in seen if "text " in each]  # not the text that a tokenizer is known by
    assert set(seen) == expected
    assert len(seen) >= 2 * NUM_ROWS


def wide(form: str) -> pa.Table:
    """All columns in one row."""
    return pa.table({kind: table_of(kind)["x"] for kind in COLUMNS if kind not in LEFT_OUT.get(form, ())})


SIZES = {"global_batch_size": 4, "micro_batch_size": 2, "num_logical_shards": 8}
RUNS: dict[str, dict[str, Any]] = {
    "none": {},
    "thread": {"prefetch": 2},
    "workers": {"num_workers": 2},
    "two ranks": {"dp_world_size": 2},
}
WIDE = cases(
    {"run": list(RUNS), "format": ["parquet", "arrow", "jsonl", "huggingface"], "function": ["Map", "collate"]}
)


@pytest.mark.parametrize("case", WIDE, ids=name_of)
def test_a_function_in_a_loader_sees_what_a_row_holds(case: Case, tmp_path: Path) -> None:
    source = FORMATS[case["format"]](tmp_path, wide(case["format"]))
    expected = {repr(described(source.row(i))) for i in range(NUM_ROWS)}
    options: Any = {**SIZES, "dp_world_size": 1, **RUNS[case["run"]]}
    options["collate_fn"] = list if case["function"] == "Map" else descriptions
    found: list[str] = []
    for rank in range(options["dp_world_size"]):
        with rd.DataLoader(partial(pipeline, source, case["function"]), dp_rank=rank, **options) as loader:
            for _ in range(2):
                for batch in loader:
                    found += batch
    assert set(found) == expected
    assert len(found) == 2 * NUM_ROWS


def pipeline(source: rd.Source, function: str, shard: rd.Shard) -> rd.Node[Any]:
    reader = rd.Reader(source, shard, shuffle=5)
    return rd.Map(reader, looked) if function == "Map" else reader


def fails(error: type[Exception], *given: Any) -> Any:
    raise error("from a function")


def one(sample: Any) -> int:
    return 1


def node_with(name: str, error: type[Exception], shard: rd.Shard) -> rd.Node[Any]:
    reader = rd.Reader(Rows([str(row) for row in NUMBERS]), shard)
    function = partial(fails, error)
    made: dict[str, Callable[[], rd.Node[Any]]] = {
        "Map": lambda: rd.Map(reader, function),
        "RandomMap": lambda: rd.RandomMap(reader, function),
        "Filter": lambda: rd.Filter(reader, function),
        "Tokenize": lambda: rd.Tokenize(reader, function, "x"),
        "row": lambda: rd.Reader(Hooked(NUMBERS, function), shard),
    }
    return made.get(name, lambda: reader)()


FAILING: dict[str, Callable[[Callable[..., Any]], dict[str, Any]]] = {
    **dict.fromkeys(("Map", "RandomMap", "Filter", "Tokenize", "row"), lambda function: {}),
    "collate_fn": lambda function: {"collate_fn": function},
    "transfer": lambda function: {"transfer": function},
    "cost": lambda function: {"balance": rd.Balance(cost=function, over="rank")},
    "tokens": lambda function: {"balance": rd.Balance(cost=one, tokens=function, over="rank")},
    "weight": lambda function: {"balance": rd.Balance(cost=one, weight=function, over="rank")},
    "balanced collate_fn": lambda function: {"balance": rd.Balance(cost=one, over="rank"), "collate_fn": function},
}
"""Functions of a user's, and the arguments of a loader that has them."""
ERRORS = (StopIteration, StopAsyncIteration, IndexError, OSError)
FAILURES = cases(
    {"function": list(FAILING), "error": list(ERRORS), "run": ["none", "thread", "workers", "peers"], "repeat": [0, 1]}
)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("case", FAILURES, ids=name_of)
def test_an_error_of_a_function_is_raised_and_ends_nothing(case: Case) -> None:
    """Also one by which loops end."""
    given: dict[str, Any] = {**SIZES, "repeat": bool(case["repeat"]), "collate_fn": list}
    given |= FAILING[case["function"]](partial(fails, case["error"]))
    data: Any = partial(node_with, case["function"], case["error"])
    if case["run"] == "peers":
        given |= {"peers": dist.group.WORLD, "dp_rank": 0, "dp_world_size": 1}
    given |= RUNS.get(case["run"], {})
    loader = rd.DataLoader((lambda: data) if case["run"] == "peers" else data, **given)
    with loader, pytest.raises(Exception, match=r"from a function|StopIteration") as raised:
        list(islice(loader, 4))
    assert issubclass(raised.type, RuntimeError if case["error"] is StopIteration else case["error"])
    assert loader.step == 0


NUM_DOCUMENTS, BROKEN = 40, 19


def documents(length: int, broken: int) -> Iterator[dict[str, str]]:
    """Yield documents up to a broken one."""
    for i in range(NUM_DOCUMENTS):
        if i == broken:
            raise OSError("from a generator")
        yield {"x": "." * length}


class Iterating:
    """The documents of a logical shard, each time anew; one of the first shard is broken, before which others end sooner."""

    def __init__(self, shard: rd.Shard) -> None:
        self._given = (1000, -1) if shard.index else (100, BROKEN)

    def __iter__(self) -> Iterator[dict[str, str]]:
        return documents(*self._given)


class Own(rd.Node[Any]):
    """A user's node over a generator."""

    FIELDS = (Field(("row",)),)

    def __init__(self, shard: rd.Shard) -> None:
        super().__init__()
        self._documents, self._iterator = Iterating(shard), iter(())

    def seek(self) -> None:
        self._iterator = islice(self._documents, self.position[0], None)

    def next(self) -> Any:
        try:
            document = next(self._iterator)
        except StopIteration:
            self.position[0] = 0
            raise
        self.position[0] += 1
        return document


GENERATORS: dict[str, Callable[[rd.Shard], rd.BaseNode[Any]]] = {
    "torchdata": lambda shard: IterableWrapper(Iterating(shard)),
    "own": Own,
}


def as_tokens(sample: Any) -> dict[str, list[int]]:
    return {"tokens": by_letters([sample["x"]])[0]}


OVER_GENERATORS: dict[str, Callable[[rd.BaseNode[Any]], rd.Node[Any]]] = {
    "Tokenize": lambda node: rd.Map(rd.Tokenize(node, by_letters, "x", batch_size=16), len),
    "Tokenize-TokenPacker": lambda node: token_packer(rd.Tokenize(node, by_letters, "x", batch_size=16), "tokens"),
    "Map-TokenPacker": lambda node: token_packer(rd.Map(node, as_tokens), "tokens"),
    "Map-mixture-TokenPacker": lambda node: token_packer(mixture(rd.Map(node, as_tokens)), "tokens"),
    "Map-by tokens-TokenPacker": lambda node: token_packer(
        rd.WeightedSampler({"a": rd.Map(node, as_tokens)}, {"a": 1}, unit="tokens", column="tokens"), "tokens"
    ),
}


def over_generator(source: str, over: str, shard: rd.Shard) -> rd.Node[Any]:
    return OVER_GENERATORS[over](GENERATORS[source](shard))


@pytest.mark.parametrize("over", OVER_GENERATORS)
@pytest.mark.parametrize("source", GENERATORS)
@pytest.mark.parametrize("run", ["none", "workers"])
def test_an_error_that_ends_a_generator_is_no_end_of_an_epoch(over: str, source: str, run: str) -> None:
    """Endless, so that nothing else would show that rows after it are left out."""
    data = partial(over_generator, source, over)
    batches_per_document = 1 if over == "Tokenize" else 102 / 5  # of 100 letters, their number and eos_id
    with rd.DataLoader(data, global_batch_size=2, num_logical_shards=2, repeat=True, **RUNS[run]) as loader:
        with pytest.raises(OSError, match="from a generator"):
            list(islice(loader, 40 * BROKEN))
        # All before it, but for a sample that it is in, and those of a batch that is not full
        assert BROKEN * batches_per_document - 2 < loader.step <= BROKEN * batches_per_document
