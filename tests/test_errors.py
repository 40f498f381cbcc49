"""What bad input gets: one clear error each, which names the value and the cure. Those of files are in tests/sources."""

import functools
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchdata.nodes import BaseNode, Batcher, IterableWrapper, Mapper

import rescale_data as rd
from rescale_data.layout.layout import Layout
from rescale_data.state import Field
from rescale_data.testing import assert_rescalable, full_state_dict
from tests.pipelines import Documents, Every, Rows, pipeline_of
from tests.states import closed, opened, same_state

ROWS, DOCUMENTS = Rows(48), Documents(48)


def loader_of(data: Any = ROWS, **kwargs: Any) -> rd.DataLoader:
    return rd.DataLoader(data, **{"global_batch_size": 12, "num_logical_shards": 24, **kwargs})


def rank_of(world_size: int) -> dict[str, int]:
    return {"dp_rank": 0, "dp_world_size": world_size}


def over_rows(top: Callable[[Any], Any], **kwargs: Any) -> rd.DataLoader:
    """A loader of a pipeline with ``top`` over its reader."""
    return loader_of(lambda shard: top(rd.Reader(ROWS, shard)), **kwargs)


def first_batch(loader: rd.DataLoader) -> Any:
    return next(iter(loader))


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Mapped(rd.Node[Any]):
    """As its source is."""

    def __init__(self, source: BaseNode[Any]) -> None:
        super().__init__(source=source)

    def next(self) -> Any:
        return next(self.children["source"])


class Odd(Mapped):
    def parameters(self) -> Any:
        return {"dtype": torch.int64}


class Liar(Mapped):
    def epoch_end(self, rows: Any, shards: Any) -> Any:
        left, after = self.children["source"].epoch_end(rows, shards)
        return left + 1, after


class Stateful(BaseNode[Any]):
    """A torchdata node with any state, which may change as it goes on."""

    def __init__(self, source: BaseNode[Any], *values: Any) -> None:
        super().__init__()
        self.source, self.values, self.num = source, values, 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])

    def next(self) -> Any:
        self.num = min(self.num + 1, len(self.values) - 1)
        return next(self.source)

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "deep": {"value": self.values[self.num]}}


# Arguments of the loader

VALUES: list[tuple[dict[str, Any], str]] = [
    ({"global_batch_size": 768, "micro_batch_size": 5, **rank_of(48)}, r"=768 is not a multiple .* 48 \* 5 = 240"),
    ({"global_batch_size": 4, "micro_batch_size": 1, **rank_of(8)}, r"=4 .*nearest global_batch_size are \[8\]"),
    (rank_of(3), r"micro_batch_size is missing: 3 dp ranks share global_batch_size=12\. Give"),
    (
        {"num_logical_shards": 5, "micro_batch_size": 4, "num_workers": 2, **rank_of(3)},
        r"num_logical_shards=5 is less than dp_world_size=3 times 2 worker.*fewer workers or ranks",
    ),
    ({"global_batch_size": 0}, "global_batch_size=0: it is at least 1"),
    ({"num_workers": -1}, "num_workers=-1: it is at least 0"),
    ({"timeout": 0}, "timeout=0: give the seconds to wait"),
    ({"num_logical_shards": 10**9}, r"num_logical_shards=1000000000: .* GB.* Give a small multiple"),
    ({"num_workers": 1, "prefetch": 0}, "prefetch=0, num_workers=1: give the batches"),
    ({"prefetch": -1}, "prefetch=-1, num_workers=0: give the batches"),
    ({"num_workers": 1, "multiprocessing_context": "bogus"}, "context='bogus': give one of .*'forkserver'"),
    ({"num_workers": 1, "multiprocessing_context": 3}, "context=3: give one of .*'forkserver'"),
    ({"tail": "keep"}, "tail='keep': give 'drop' or 'pad'"),
    ({"dp_rank": 1}, "dp_rank=1 and dp_world_size=None: give both, or neither"),
    ({"dp_rank": 2, "dp_world_size": 2}, "dp_rank=2, dp_world_size=2: a rank is at least 0 and less than"),
    *(({"shuffle": wrong}, f"shuffle={wrong!r}: give True, False .*or the window in rows") for wrong in (0, -1, "yes")),
    ({"shuffle": 1.5}, r"shuffle=1\.5: give True, False .*or the window in rows"),
    (
        {"shuffle": False, "global_batch_size": 3, "num_logical_shards": 3, "num_workers": 2},
        "shuffle=False keeps the order .* num_workers=2 do not divide",
    ),
    ({"shuffle": False, "repeat": True}, "by_global_batch=True with shuffle=False, repeat=True"),
    ({"steps_per_epoch": 0, "repeat": True}, "steps_per_epoch=0: give 1 to 9"),
    ({"steps_per_epoch": 10**30, "repeat": True}, r"give 1 to \d+, or leave it out for no end"),
    ({"steps_per_epoch": 5}, "steps_per_epoch=5, but the pipeline knows how many samples an epoch has"),
    ({"data": Rows(11)}, "11 samples, less than one global batch of 12.*smaller global_batch_size, tail='pad'"),
    (
        {"data": pipeline_of("packed", Documents(96)), "micro_batch_size": 6, **rank_of(2)},
        r"needs a process group.*dp_rank=0 and dp_world_size=2.*repeat=True",
    ),
]
FITS: list[dict[str, Any]] = [
    {"num_logical_shards": 6, "micro_batch_size": 4, "num_workers": 2, **rank_of(3)},
    {"data": Rows(11), "tail": "pad"},
    {"data": pipeline_of("packed", Documents(96)), "micro_batch_size": 6, "repeat": True, **rank_of(2)},
    {"shuffle": False, **rank_of(3)},
    {},
]
TYPES: list[tuple[dict[str, Any], str]] = [
    ({"mesh": "dp"}, "mesh='dp' is a str; give a DeviceMesh of the dp ranks"),
    ({"batch_size": 3}, r"rd\.DataLoader has no argument batch_size=.*micro_batch_size="),
    ({"sampler": 3}, r"rd\.DataLoader has no argument sampler=.*shuffle= and seed="),
    ({"drop_last": 3}, r"rd\.DataLoader has no argument drop_last=.*tail="),
    ({"collate_fn": 3}, "collate_fn=3 is a int: give a function"),
    *(
        ({"data": lambda shard: rd.Reader(ROWS, shard), "shuffle": given}, rf"{given} with a function.*rd\.Reader\(")
        for given in (False, True, 8)
    ),
    ({"data": Stream()}, r"A Stream is an IterableDataset.*rd\.IterableSource"),
    ({"data": 3}, "A int is no pipeline: give a function that makes the nodes of"),
    ({"data": None}, "A NoneType is no pipeline: give a function that makes the nodes of"),
    ({"data": object()}, "A object is no pipeline: give a function that makes the nodes of"),
    ({"data": OrderedDict}, r"The class OrderedDict is no pipeline: give a function .* an object, not its class"),
    *(
        ({"data": data}, r"is no data set: give rd\.ParquetSource.*one split")  # its characters or keys would be rows
        for data in ("corpus/*.parquet", Path("corpus"), {"train": ROWS})
    ),
    ({"data": f"/users/{'name' * 9}/train.jsonl"}, "'/users/namename.*name/train.jsonl' is no data set"),
    ({"data": lambda shard: [0]}, r"it was given a list\. Return a torchdata\.nodes\.BaseNode"),
]


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [(*given[:1], ValueError, *given[1:]) for given in VALUES]
    + [(*given[:1], TypeError, *given[1:]) for given in TYPES],
)
def test_arguments(kwargs: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        loader_of(**kwargs)


@pytest.mark.parametrize("kwargs", FITS)
def test_arguments_that_just_fit(kwargs: dict[str, Any]) -> None:
    """With no micro batch named: a default would double the batch when ranks halve, but evaluation has the memory."""
    assert loader_of(**kwargs).gradient_accumulation_steps == 1


@pytest.mark.parametrize(("o", "w", "b"), [(768, 48, 5), (768, 5, 3), (100, 3, 7), (12, 2, 5), (7, 2, 3), (5, 8, 2)])
def test_what_is_listed_fits(o: int, w: int, b: int) -> None:
    """All micro batches that fit, or that none does as the ranks do not divide the global batch; the nearest of these."""
    with pytest.raises(ValueError) as raised:
        Layout(num_logical_shards=4 * o, global_batch_size=o, dp_world_size=w, micro_batch_size=b)
    none = rf"no micro_batch_size fits, as {w} ranks do not divide it"
    found = re.search(rf"(?:is one of \[(.*?)\]|{none}).*nearest global_batch_size are \[(.*?)\]", str(raised.value))
    assert found is not None
    sizes, nearest = ([int(n) for n in part.split(",")] if part else [] for part in found.groups())
    assert sizes == [size for size in range(1, o + 1) if o % (w * size) == 0]
    assert all(
        Layout(num_logical_shards=4 * n, global_batch_size=n, dp_world_size=w, micro_batch_size=b) for n in nearest
    )
    assert nearest == [n * w * b for n in (o // (w * b), o // (w * b) + 1) if n]


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"batch_size": 4}, TypeError, "micro_batch_size= says the samples of one batch"),
        ({"state": {}, "delivered": 4.0}, TypeError, r"delivered=4\.0 is a float; give an int"),
        ({"step": 4}, TypeError, r"reopen\(\) has no argument \['step'\].*'num_workers'"),
        ({"global_batch_size": 6}, ValueError, "not a multiple"),
        ({"global_batch_size": 0}, ValueError, "at least 1"),
        ({"global_batch_size": 60}, ValueError, "An epoch has 48 samples"),
    ],
)
def test_arguments_of_reopen_change_nothing(kwargs: dict[str, Any], error: type[Exception], words: str) -> None:
    loader = loader_of()
    batches = iter(loader)
    next(batches)
    before = loader.state_dict()
    with pytest.raises(error, match=words):
        loader.reopen(**kwargs)
    assert same_state(before, loader.state_dict())
    assert len(next(batches)["row"]) == 12


# What is warned about

WARNED: list[tuple[Callable[[], Any], str]] = [
    (lambda: loader_of(num_workers=5), "num_workers=5 do not divide .* keeps the order: .*num_workers=2;"),
    (
        lambda: loader_of(num_logical_shards=18, micro_batch_size=3),
        "num_logical_shards=18, global_batch_size=12, .* global_batch_size=9 or 18;",
    ),
    (
        lambda: loader_of(num_logical_shards=6, micro_batch_size=3, **rank_of(4)),
        "num_logical_shards=6, .* dp_world_size=4, .* do not divide .* keeps the order: none; rd.plan lists",
    ),
    (
        lambda: loader_of(num_logical_shards=3, global_batch_size=24, micro_batch_size=12),
        "num_logical_shards=3, global_batch_size=24, .* micro_batch_size=8 or 24;",
    ),
    (
        lambda: loader_of(num_logical_shards=3, micro_batch_size=1, num_workers=2),
        "micro_batch_size=1, num_workers=2 do not divide .*num_workers=1;",
    ),
    (
        lambda: loader_of(lambda shard: rd.Reader(Rows(48), shard)),
        "makes a new source for each of 24 logical shards.*Make the source once, outside of the pipeline",
    ),
    (
        lambda: loader_of(lambda shard: IterableWrapper(range(12))),
        "each of the 24 logical shards yields all of the data",
    ),
    (lambda: over_rows(lambda rows: Mapper(rows, dict)), ""),
    (lambda: reloaded(micro_batch_size=4), ""),
    (
        lambda: reloaded(micro_batch_size=2),
        r"middle of a step.*global batches begin anew at sample 4\. loader\.step goes on from 0",
    ),
]


def reloaded(**kwargs: Any) -> None:
    """Load a state of one micro batch of three."""
    loader = loader_of(micro_batch_size=4)
    next(iter(loader))
    loader_of(**kwargs).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(("act", "words"), WARNED)
def test_one_warning(act: Callable[[], Any], words: str, caplog: pytest.LogCaptureFixture) -> None:
    act()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == bool(words)
    assert not words or re.search(words, warnings[0], re.DOTALL)


# Pipelines


def at_two_places(shard: rd.Shard) -> BaseNode[Any]:
    rows = rd.Reader(ROWS, shard)
    return rd.WeightedSampler({"a": rows, "b": rd.Map(rows, dict)}, {"a": 1, "b": 1})


def in_two_pipelines() -> None:
    """Two loaders would move one position, and each leave out what the other reads."""
    pipeline = functools.cache(lambda shard: rd.Reader(ROWS, shard))
    for _ in zip(loader_of(pipeline, repeat=True), loader_of(pipeline, repeat=True), strict=True):
        pass


def of_shard(other: Callable[[rd.Shard], rd.Shard]) -> rd.DataLoader:
    return loader_of(lambda shard: Mapper(rd.Reader(ROWS, other(shard)), dict), num_logical_shards=8)


def with_odd_states(odd: range) -> rd.DataLoader:
    return loader_of(lambda shard: Stateful(rd.Reader(ROWS, shard), 1.5 if shard.index in odd else 1), repeat=True)


def with_own_weights(shard: rd.Shard) -> BaseNode[Any]:
    """All would begin in the state of shard 0."""
    return rd.WeightedSampler({name: rd.Reader(ROWS, shard) for name in "ab"}, {"a": 1, "b": 1 + shard.index})


class Once:
    def __init__(self) -> None:
        self.rows = iter(range(5))

    def __iter__(self) -> Iterator[int]:
        return self.rows


def search(sample: dict[str, Any]) -> Any:
    return next(sample for _ in range(1) if sample["row"] != 5)


WRONG_TYPES: list[tuple[Callable[[], Any], str]] = [
    (lambda: rd.DataLoader(ROWS, 2), r"rd\.DataLoader has no argument batch_size=: micro_batch_size="),
    (lambda: rd.Reader(ROWS, 0), r"rd\.Reader was given the shard 0: .*rd\.Shard\(\) to try"),
    (lambda: rd.Reader("corpus", rd.Shard()), "is no data set"),
    (
        lambda: next(iter(torch.utils.data.DataLoader(loader_of()))),
        r"makes the batches itself, in place of torch\.utils\.data\.DataLoader",
    ),
    (lambda: rd.ParquetSource(3), "paths=3 is a int: give a glob, a folder, a file, or a list"),
    (lambda: rd.ParquetSource(["a", 3]), r"paths=\['a', 3\] is a list: give a glob"),
    *(
        (lambda columns=columns: rd.ParquetSource("x", columns=columns), "give a list with at least one name")
        for columns in ("tokens", [])
    ),
    *(
        (lambda make=make, fn=fn: make(rd.Reader(ROWS, rd.Shard()), fn, on_error="skip"), f"{fn} is a .*: give a")
        for make in (rd.Map, rd.Filter, rd.RandomMap, functools.partial(rd.Tokenize, column="row"))
        for fn in (None, 3)  # before a row is drawn: with on_error="skip" all would be left out
    ),
    (
        lambda: next(rd.TokenPacker(rd.Reader([{"text": "a"}], rd.Shard()), column="text", seq_len=2, eos_id=0)),
        r"given a str.*rd\.Tokenize makes them",
    ),
    (
        lambda: with_odd_states(range(3, 24)),
        "shard 23 has the state .*'deep.value': 'float64.*the same for every shard",
    ),
    (
        lambda: [*zip(range(2), with_odd_states(range(3, 23)), strict=False)],
        r"logical shard \d+ has the state .*the same for every shard",
    ),
    (lambda: loader_of(with_own_weights), r"'rule' begins as -?\d+ in logical shard 23 and as .* in shard 0.*same for"),
    (lambda: over_rows(lambda rows: Mapper(Odd(rows), dict)), r"Odd \(source\) has parameters\(\) that JSON can"),
    *(
        (
            lambda name=name: over_rows(type("Clash", (Mapped,), {"FIELDS": (Field((name,)),)})),
            rf"the paths \['{name}'\], which the table .*Rename",
        )
        for name in ("samples", "stamp", "remainder")
    ),
]
WRONG_VALUES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: rd.LogicalShards(rd.Reader, num_logical_shards=4, global_batch_size=4, **rank_of(2)),
        "micro_batch_size is missing",
    ),
    (lambda: rd.Shard(4, 4), "index=4, num_logical_shards=4"),
    (lambda: rd.ParquetSource("x", columns=["a", "a"]), r"columns=\['a', 'a'\] has a name twice: give each"),
    (lambda: loader_of(at_two_places), r"a Reader \(b\.source\) that stands at a, too"),
    (in_two_pipelines, r"Reader \(root\) that an earlier call had returned"),
    (lambda: of_shard(lambda shard: rd.Shard(0, 8)), "shard 0 of 8 in the pipeline of 7 of 8: rows would"),
    (lambda: of_shard(lambda shard: rd.Shard(shard.index, 16)), "shard 0 of 16 in the pipeline of 0 of 8: rows would"),
    (lambda: of_shard(lambda shard: rd.Shard()), "shard 0 of 1 in the pipeline of 0 of 8: rows would"),
    (
        lambda: of_shard(lambda shard: replace(shard, seed=shard.index)),  # each would divide another order
        r"logical shard 7 have the seeds \[7\], those of shard 0 \[0\]",
    ),
    (lambda: assert_rescalable(lambda *_: loader_of(), []), "topologies is empty"),
]
WRONG_DATA: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: first_batch(over_rows(lambda rows: Every(rows, 1), repeat=True)),
        r"Logical shard \d+ of 24 yielded no sample in two whole epochs.*filtered",
    ),
    (
        lambda: [*loader_of(lambda _: IterableWrapper(Once()), repeat=True)],
        r"does not start again at reset\(None\)\. .* an rd\.Reader",
    ),
    (lambda: [*over_rows(Liar)], r"ended before its pipeline's epoch_end\(\) said.*Return None"),
]
ERRORS = {
    TypeError: WRONG_TYPES,
    ValueError: WRONG_VALUES,
    rd.DataStateError: WRONG_DATA,
    RuntimeError: [
        (
            lambda repeat=repeat: [*over_rows(lambda rows: Mapper(rows, search), repeat=repeat)],
            "it raised StopIteration",
        )
        for repeat in (False, True)
    ],
}
CALLS = [(error, *call) for error, calls in ERRORS.items() for call in calls]


@pytest.mark.parametrize(("error", "act", "words"), CALLS)
def test_calls(error: type[Exception], act: Callable[[], Any], words: str) -> None:
    with pytest.raises(error, match=words):
        act()


@pytest.mark.parametrize(
    ("values", "words", "note"),
    [
        (["text"], r"'deep\.value' is a str\. .*keep a position", "while the pipeline of logical shard 0 was built"),
        ([1, 1.5], r"'deep\.value'", "in the pipeline of logical shard"),
    ],
)
def test_a_state_that_is_none_says_in_which_logical_shard(values: list[Any], words: str, note: str) -> None:
    with pytest.raises(TypeError, match=words) as raised:
        first_batch(over_rows(lambda rows: Stateful(rows, *values), repeat=True))
    assert any(note in each for each in raised.value.__notes__)


def test_what_a_node_of_torchdata_begins_in_and_the_seed_of_all_shards_are_the_users() -> None:
    loader_of(lambda shard: Stateful(rd.Reader(ROWS, shard), shard.index))
    other = loader_of(lambda shard: rd.Reader(ROWS, replace(shard, seed=shard.seed + 7)))
    assert sorted(row for batch in other for row in batch["row"].tolist()) == list(range(len(ROWS)))


def test_a_table_whose_columns_would_be_its_rows() -> None:
    table = pa.table({str(i): list(range(48)) for i in range(48)})
    frame: Any = pytest.importorskip("pandas").DataFrame(np.zeros((48, 48)))
    for data in (table, table.to_batches()[0], frame):
        with pytest.raises(
            TypeError, match=r"is a table, and table\[3\] a column of it.*Give the rows: table\.to_pylist"
        ):
            loader_of(data)


def test_epochs_without_a_whole_global_batch_that_must_be_counted() -> None:
    loader = loader_of(lambda shard: Every(rd.Reader(Rows(24), shard), 1))
    assert list(loader) == []
    with pytest.raises(rd.DataStateError, match="Two epochs in a row hold less than one global batch of 12"):
        list(loader)


@pytest.mark.parametrize(
    ("top", "arguments", "why"),
    [
        (lambda rows: rows, {"repeat": True}, "repeat=True has no end"),
        (lambda rows: rd.TokenPacker(rows, column="tokens", seq_len=2, eos_id=0), {}, "come out of TokenPacker"),
        (lambda rows: rd.Map(rd.Filter(rows, bool), dict), {}, "come out of Filter"),
        (
            lambda rows: rd.TokenPacker(rd.Filter(rows, bool), column="tokens", seq_len=2, eos_id=0),
            {},
            "come out of Filter",
        ),
        (lambda rows: Batcher(rows, 2), {}, "come out of Batcher"),
    ],
)
def test_no_len(top: Any, arguments: dict[str, Any], why: str) -> None:
    rows = [{"tokens": [1, 2, 3]}] * 96
    loader = loader_of(lambda shard: top(rd.Reader(rows, shard)), **arguments)
    with pytest.raises(TypeError, match=rf"no number of batches: .*{why}\. Give it steps_per_epoch="):
        len(loader)
    with pytest.raises(TypeError, match=r"A torch DataLoader over it .* makes the batches itself"):
        next(iter(torch.utils.data.DataLoader(loader)))


# Batches


def with_more_in_odd_rows(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, **({"more": 1} if sample["row"] % 2 else {})}


def nested_in(other: Any) -> list[Any]:
    return [{"tokens": [1], "meta": {"of": {"a": 1}}}, {"tokens": [2], "meta": {"of": other}}] * 12


RAGGED = [{"id": i, "tokens": np.arange(i % 5)} for i in range(48)]
DIFFERENT = r"different columns, .* and .*\. Give all samples the same ones"
BATCHES: list[tuple[Any, dict[str, Any], str]] = [
    ([{"x": 2**64 - 1}] * 24, {}, r"The column 'x' cannot be stacked.*\['int'\]"),
    ([None] * 48, {}, "The samples cannot be stacked .* your own collate_fn"),
    ([object()] * 48, {}, "The samples cannot be stacked .* your own collate_fn"),
    (RAGGED, {}, r"The column 'tokens' cannot be stacked.*shapes \[\(\d,\).*pad_collate.*TokenPacker"),
    (
        ROWS,
        {"collate_fn": rd.pad_collate({"labels": 0})},
        r"columns \['labels'\], which samples lack; they have \['row'\]",
    ),
    (ROWS, {"collate_fn": rd.pad_collate({"row": 0})}, r"pad the column 'row': .* types \['int'\]\. It pads sequences"),
    *(
        (lambda shard: Mapper(rd.Reader(ROWS, shard), with_more_in_odd_rows), {"collate_fn": collate_fn}, DIFFERENT)
        for collate_fn in (None, rd.pad_collate({"row": 0}))
    ),
    *(
        (nested_in(other), {"collate_fn": collate_fn}, DIFFERENT)
        for collate_fn in (None, rd.pad_collate({"tokens": 0}))
        for other in ({"a": 1, "b": 2}, {"b": 1}, 3)
    ),
    (
        lambda shard: Mapper(rd.Reader(ROWS, shard), lambda sample: {"valid": sample["row"]}),
        {"repeat": True, "tail": "pad"},
        r"batch\['valid'\], but samples have a column 'valid'",
    ),
]


@pytest.mark.parametrize(("data", "kwargs", "words"), BATCHES)
def test_samples_that_make_no_batch(data: Any, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list(loader_of(data, **{"num_logical_shards": 12, **kwargs}))


def test_no_run_goes_further_than_a_state_can_tell() -> None:
    loader = loader_of(range(480), repeat=True)
    most = (2**62 // 24 - 1) // 12 * 12
    with pytest.raises(ValueError, match=rf"skip\(num_samples={10**30 * 12}\): .* counts up to \d+\. Give less"):
        loader.skip(10**30 * 12)
    before, saved = loader.state_dict(), loader_of(range(480), repeat=True, micro_batch_size=3).state_dict()
    with pytest.raises(ValueError, match=r"delivered=1200+\): .* counts up to"):
        loader.load_state_dict(before, delivered=10**30 * 12)
    for wrong in (-12, 2, 4):
        says = rf"delivered={wrong}\): give a multiple of dp_world_size .* = 1 \* 3 = 3"
        with pytest.raises(ValueError, match=says):
            loader.load_state_dict(saved, delivered=wrong)
    assert same_state(before, loader.state_dict())
    for wrong in (-4, 3, 5):
        with pytest.raises(ValueError, match=rf"num_samples={wrong}\): give a multiple of .* = 12"):
            loader.skip(wrong)
    loader.skip(most)
    state = loader.state_dict()
    with pytest.raises(ValueError, match=r"it would end at sample .* Give less"):
        loader.skip(12)
    resumed = loader_of(range(480), repeat=True)
    resumed.load_state_dict(state)
    assert resumed.step == loader.step == most // 12


# States: one of another run says what differs and what to do (R6)


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (
            {"num_logical_shards": 12},
            "num_logical_shards=12, the loader has num_logical_shards=24. It is fixed for a whole run",
        ),
        ({"seed": 3}, "seed=3, the loader has seed=0. Another seed is another order"),
        (
            {"data": Rows(50)},
            "The sources differ .*root: rows: saved 50, now 48.*restore the files, or begin a new run",
        ),
        ({"data": DOCUMENTS}, 'The sources differ .*root: class: saved "Documents", now "Rows"'),
        (
            {"data": lambda shard: rd.Reader(ROWS, shard, shuffle=8)},
            'The parameters of the pipeline differ.*root: shuffle: saved 8, now "full".*use the saved',
        ),
        (
            {"data": lambda shard: Every(rd.Reader(ROWS, shard), 3)},
            "The fields differ.*Build the pipeline that was saved, with the saved verify=",
        ),
        ({"verify": True}, r"digest.*the saved verify= \(True keeps a digest"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_of_another_run(saved: dict[str, Any], words: str, tmp_path: Path) -> None:
    """In hand, and in a checkpoint, where DCP says that shapes differ, before it asks us."""
    other, loader = loader_of(**saved), loader_of()
    with pytest.raises(rd.DataStateError, match=words):
        loader.load_state_dict(other.state_dict())
    dcp.save({"loader": other}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(rd.DataStateError, match=words):
        rd.checkpoint.check_checkpoint(tmp_path, loader)
    with pytest.raises((dcp.CheckpointException, rd.DataStateError), match=f"Size mismatch|{words}"):
        dcp.load({"loader": loader}, checkpoint_id=tmp_path, no_dist=True)
    assert loader.step == 0


def even(row: Any, _: Any = None) -> bool:
    return row["row"] % 2 == 0


def odd(row: Any, _: Any = None) -> bool:
    return row["row"] % 2 == 1


@pytest.mark.parametrize(
    ("saved", "now", "says"),
    [
        ((even, None), (even, None), ""),
        ((even, None), (odd, None), 'root: fn.code: name: saved "even", now "odd"'),
        ((even, 1), (odd, 1), ""),
        ((even, None), (odd, 1), "version is new"),
        ((even, 1), (odd, 2), "version: saved 1, now 2"),
    ],
)
@pytest.mark.parametrize("kind", [rd.Filter, rd.Map, rd.RandomMap])
def test_another_function_is_warned_about_and_another_version_an_error(
    saved: Any, now: Any, says: str, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def make(fn: Any, version: Any) -> rd.DataLoader:
        def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
            return kind(rd.Reader(ROWS, shard), fn, version=version)

        return rd.DataLoader(pipeline, global_batch_size=4, num_logical_shards=4, repeat=True, collate_fn=list)

    state, loader = make(*saved).state_dict(), make(*now)
    if "saved 1" in says:
        with pytest.raises(rd.DataStateError, match=says):
            loader.load_state_dict(state)
        return
    with caplog.at_level(logging.WARNING, "rescale_data"):
        loader.load_state_dict(state)
    assert (says in caplog.text) if says else "Functions of the pipeline" not in caplog.text


State = dict[str, Any]


def with_parts(**parts: Any) -> Callable[[State], State]:
    return lambda state: closed({**opened(state), **parts})


def without(*names: str) -> Callable[[State], State]:
    return lambda state: closed({name: part for name, part in opened(state).items() if name not in names})


def with_table(change: Callable[[torch.Tensor], Any]) -> Callable[[State], State]:
    return lambda state: {**state, "table": change(state["table"])}


def with_rows(field: str, rows: slice, value: int) -> Callable[[State], State]:
    def change(state: State) -> State:
        opened(state)["shards"][field][rows] = value
        return state

    return change


def ended_but_for_one(_: State) -> State:
    loader = loader_of()
    loader.skip(48)
    return with_rows("remainder", slice(3, 4), -1)(loader.state_dict())


NO_TABLE, SHAPE = (
    r"The table of the state is a .*, not a tensor\. Give what",
    r"by its header it has \(\(24, 6\), torch.int64",
)
SPOILED: list[tuple[Callable[[State], Any], str]] = [
    (lambda state: {"header": state["header"]}, r"The state lacks \['table'\]"),
    (opened, r"The state lacks \['header', 'table'\]"),
    (lambda state: {**state, "header": "{}"}, "The header of the state lacks"),
    (
        lambda state: {**state, "header": "no JSON"},
        "header of the state is not the JSON that was saved: Expecting value",
    ),
    (lambda state: {**state, "header": None}, "header of the state is not the JSON that was saved: .* NoneType"),
    (without("samples", "pipeline"), r"lacks \['pipeline', 'samples'\]\. Give what loader\.state_dict"),
    (with_parts(version=7), "format version 7, this rescale_data reads the version 1. Load it with the release"),
    (with_parts(seed=1), "saved with seed=1, the loader has seed=0"),
    (with_parts(global_batch_size=0), "The state counts 0 global_batch_size: it was changed or damaged"),
    (with_parts(columns=[]), r"by its header it has \(\(24, 0\), torch.int64"),
    (with_parts(columns=[{"name": 3}]), "does not describe its columns: it was changed or damaged"),
    (with_parts(pipeline=None), "has no pipeline and sources: it was changed or damaged"),
    *(
        (with_parts(skipped=wrong), "The state leaves out the samples .*: it was changed or damaged")
        for wrong in ([[3]], [[3, "4"]], [[-1, 4]], [[0, 2**62]])
    ),
    *((with_table(lambda _, table=table: table), NO_TABLE) for table in (None, [0] * 24, "rows")),
    (with_table(lambda _: torch.zeros(24, 6)), SHAPE),
    (with_table(lambda _: torch.zeros(24, dtype=torch.int64)), SHAPE),
    (with_table(lambda _: torch.zeros(23, 6, dtype=torch.int64)), SHAPE),
    (with_table(lambda rows: rows[torch.arange(24) % 12]), "12 of 24 rows .* row 12 is that of shard 0 at sample 12"),
    (with_table(lambda rows: rows.flip(0)), "24 of 24 rows .* row 0 is that of shard 23 at sample 12"),
    (with_table(lambda rows: rows.roll(1, 0)), "24 of 24 rows .* kept for all, rows changed places"),
    (with_rows("stamp", slice(24), 3), "24 of 24 rows .* are not those of their logical shards at sample 12"),
    (  # what DCP leaves in the placeholders of a rank that was lost: its old rows, with another stamp
        with_rows("stamp", slice(6, 12), 0),
        "6 of 24 rows of the state are not those of their logical shards at sample 12: row 6 is",
    ),
    (with_rows("row", slice(5, 6), 10**6), "stands at row 1000000 of epoch 0 of Rows"),  # other numbers: law 8
    (ended_but_for_one, "an epoch has ended for 23 of 24 logical shards"),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILED)
def test_a_state_that_is_damaged_is_refused_and_changes_nothing(spoil: Callable[[State], Any], words: str) -> None:
    loader, whole = loader_of(), loader_of()
    batches, expected = iter(loader), iter(whole)
    assert next(batches)["row"].tolist() == next(expected)["row"].tolist()
    before = loader.state_dict()
    with pytest.raises(rd.DataStateError, match=words):
        loader.load_state_dict(spoil(whole.state_dict()))
    assert same_state(before, loader.state_dict())
    assert next(batches)["row"].tolist() == next(expected)["row"].tolist()
    with pytest.raises(TypeError, match=r"The state is a NoneType. Give what loader\.state_dict\(\) returned"):
        loader.load_state_dict(None)  # type: ignore[arg-type]


def test_states_of_simulated_ranks() -> None:
    loaders = [loader_of(micro_batch_size=4, dp_rank=rank, dp_world_size=3) for rank in range(3)]
    for method in (rd.DataLoader.state_dict, rd.DataLoader.local_state_dict):
        with pytest.raises(ValueError, match=r"rescale_data\.testing\.full_state_dict\(loaders\)"):
            method(loaders[0])
    with pytest.raises(ValueError, match=r"dp ranks \[0, 1\]; give one of each of 3 ranks"):
        full_state_dict(loaders[:2])
    next(iter(loaders[0]))
    with pytest.raises(ValueError, match="stand at different batches"):
        full_state_dict(loaders)


# Nodes of a user


def write(self: Any, buffer: Any, place: int) -> None: ...


def move(self: Any, num_samples: int = 0) -> Any: ...


@pytest.mark.parametrize(
    ("bases", "own", "words"),
    [
        (
            (rd.Reader,),
            {"next": move},
            r"next\(\) of its own, and from Reader open_documents\(\), open_texts\(\), skip\(\)",
        ),
        (
            (rd.TokenPacker,),
            {"next": move, "write": write, "skip": move},
            r"next\(\) of its own, and from TokenPacker write_many\(\), which",
        ),
        ((rd.TokenPacker,), {"write": write}, r"write\(\) of its own, and from TokenPacker write_many\(\), which"),
        ((rd.WeightedSampler,), {"skip": move}, r"skip\(\) of its own, and from WeightedSampler skip_ahead\(\), which"),
        (
            (type("Mixin", (), {"write": write}), rd.TokenPacker),
            {},
            r"the write\(\) of Mixin, and from TokenPacker write_many\(\), which go past it",
        ),
    ],
)
def test_a_subclass_whose_samples_would_be_gone_past(bases: tuple[type, ...], own: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=f"Marked has .*{words}"):
        type("Marked", bases, own)
    named = type("Named", (rd.Reader,), {"name": "mine"})  # and this one has none
    assert list(named(range(3), rd.Shard(), shuffle=False)) == [0, 1, 2]
