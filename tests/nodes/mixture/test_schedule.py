"""Weights that change in the course of a run: schedules, `max_epochs`, and weights by size."""

import itertools
import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest

import rescale_data as rd
from rescale_data.nodes.mixture.rules import make_rule, weights_at
from tests.nodes.mixture.test_mixtures import counted, rows, without_tokens
from tests.nodes.resume import endless
from tests.nodes.zoo import BOOKS, CODE, WEB, read
from tests.states import opened

NAMES = ("web", "code", "books")
A, B, C = (dict(zip(NAMES, w, strict=True)) for w in ((0.5, 0.3, 0.2), (0.1, 0.1, 0.8), (0.0, 0.6, 0.4)))


def shares_at(weights: Any, progress: int) -> Any:
    """Return the shares of `NAMES` that count at a progress."""
    rule = make_rule(weights, {})
    found = dict(zip(rule.names, weights_at(rule, progress, {}).values, strict=True))
    return np.array([found[name] for name in NAMES]) / sum(found.values())


def mixture(shard: rd.Shard, weights: Any, **kwargs: Any) -> rd.BaseNode[Any]:
    nodes = {name: rd.Reader(rows(i, 4096), shard) for i, name in enumerate(NAMES)}
    return rd.Map(rd.WeightedSampler(nodes, weights, **kwargs), without_tokens)


@pytest.mark.parametrize("interpolate", ["step", "linear"])
def test_global_batches_follow_a_schedule(interpolate: Any) -> None:
    """In each constant piece within one sample of its weights, from the first batch on."""
    schedule = rd.Schedule([(0, A), (2560, B), (10_240, C)], interpolate)
    found = counted(lambda shard: mixture(shard, schedule), 128, 256, 120, 3)
    assert np.abs(found - [128 * shares_at(schedule, step // 2 * 256) for step in range(120)]).max() <= 1 + 1e-9
    assert abs(found[40][1] / 128 - (0.1 if interpolate == "step" else 0.3)) < 0.2
    assert (found[85:, 0] == 0).all()


@pytest.mark.parametrize("then", [B, C])
def test_a_schedule_by_tokens(then: dict[str, float]) -> None:
    """What was drawn by the weights before is no debt."""
    node = mixture(rd.Shard(), rd.Schedule([(0, A), (3000, then)]), unit="tokens", column="tokens").children["source"]  # type: ignore[attr-defined]
    drawn: Counter[int] = Counter()
    for sample in itertools.islice(node, 2500):
        drawn[sample["source"]] += len(sample["tokens"])
        if 2990 < drawn.total() <= 3000:
            first = drawn.copy()
    after = drawn.total() - 3000
    assert all(abs(first[i] - 3000 * A[name]) < 20 for i, name in enumerate(NAMES))
    assert all(abs(drawn[i] - 3000 * A[name] - then[name] * after) < 30 for i, name in enumerate(NAMES))


def loader_of(weights: Any, **kwargs: Any) -> rd.DataLoader:
    return rd.DataLoader(
        lambda shard: mixture(shard, weights, **kwargs), global_batch_size=8, num_logical_shards=8, repeat=True
    )


def state_after(num_steps: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
    loader = loader_of(*args, **kwargs)
    for _ in itertools.islice(loader, num_steps):
        pass
    return loader.state_dict()


CHANGES: list[tuple[Any, Any, str]] = [
    (rd.Schedule([(0, A), (400, B)]), rd.Schedule([(0, A), (240, C)]), ""),
    (rd.Schedule([(0, A), (400, B)]), rd.Schedule([(0, B), (400, A)]), "from 0 on"),
    (rd.Schedule([(0, A), (100, B)]), rd.Schedule([(0, A), (90, B)]), "from 90 on"),
    (rd.Schedule([(0, A), (100, B)]), rd.Schedule([(0, A), (100, B), (161, C)]), ""),
    (rd.Schedule([(0, A), (100, B)]), rd.Schedule([(0, A), (100, B), (160, C)]), "from 160 on"),
    (rd.Schedule([(0, A), (300, B)], "linear"), rd.Schedule([(0, A), (300, C)], "linear"), "both keys around it"),
    (A, rd.Schedule([(0, A), (200, B), (400, C)], "linear"), "both keys"),
    (A, rd.Schedule([(0, A), (200, A), (400, C)], "linear"), ""),
    (A, rd.Schedule([(0, {n: 10 * w for n, w in A.items()}), (200, B)]), ""),
    (A, rd.Schedule([(0, B)]), "from 0 on"),
    (rd.Schedule([(0, A), (100, B)]), C, ""),
]


@pytest.mark.parametrize(("saved", "now", "message"), CHANGES)
def test_only_what_lies_ahead_may_change(saved: Any, now: Any, message: str) -> None:
    """After 160 samples: 20 in each of 8 logical shards."""
    state, loader = state_after(20, saved), loader_of(now)
    if message:
        with pytest.raises(rd.DataStateError, match=f"of the Schedule up to 160, .*{message}"):
            loader.load_state_dict(state)
        return
    loader.load_state_dict(state)
    found = [np.bincount(batch["source"].numpy(), minlength=3) for batch in itertools.islice(loader, 40)]
    for step, counts in enumerate(found):
        assert np.abs(counts - 8 * shares_at(now, 160 + 8 * step)).max() <= 3


@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("above", ["root", "packer", "shuffle"])
def test_max_epochs(unit: Any, above: str, caplog: pytest.LogCaptureFixture) -> None:
    sources = {"web": WEB, "code": CODE, "books": BOOKS}
    column = "tokens" if unit == "tokens" else None

    def pipeline(shard: rd.Shard) -> Any:
        nodes = {name: read(source, shard) for name, source in sources.items()}
        weights = {"web": 0.3, "code": 0.6, "books": 0.1}
        rows = rd.WeightedSampler(nodes, weights, max_epochs={"code": 3}, unit=unit, column=column)
        if above == "packer":
            return rd.TokenPacker(rows, column="tokens", seq_len=3, eos_id=None)
        return rd.Shuffle(rows, 4) if above == "shuffle" else rows

    found: Counter[int] = Counter()
    with caplog.at_level(logging.WARNING, "rescale_data"):
        loader = rd.DataLoader(pipeline, global_batch_size=7, num_logical_shards=7, repeat=True, collate_fn=list)
        for batch in itertools.islice(loader, 150):
            found.update(token for sample in batch for token in sample["tokens"].tolist())
        state = loader.state_dict()
    drawn = [found[int(token)] for row in CODE.dataset for token in row["tokens"]]
    assert set(drawn) == {3}
    assert caplog.text.count("'code' of a mixture has reached its max_epochs of 3") == 1
    progress = loader.progress()
    assert progress["ended_shards/code"] == 7
    assert progress["drawn_samples/code"] == 3 * CODE.num_rows
    assert progress["epochs/code"] == 3
    assert not any("weight" in key for key in opened(state)["shards"])
    if unit == "samples" and above == "root":
        others = sum(progress[f"drawn_samples/{name}"] for name in sources) - 3 * CODE.num_rows
        assert abs(progress["drawn_samples/web"] - 0.75 * others) < 0.2 * 3 * CODE.num_rows


def limited(shard: rd.Shard) -> rd.BaseNode[Any]:
    nodes = {"web": read(WEB, shard), "code": read(CODE, shard)}
    mixed = rd.WeightedSampler(nodes, {"web": 1, "code": 1}, max_epochs={"web": 2, "code": 1})
    return rd.Map(mixed, lambda sample: {"id": sample["id"]})


def test_the_stream_ends_when_all_sources_have_had_their_epochs() -> None:
    node = limited(rd.Shard())
    found = Counter(sample["id"] // 1000 for sample in node)
    assert found == {3: 2 * WEB.num_rows, 4: CODE.num_rows}
    node.reset(node.get_state())
    assert not list(node)
    with pytest.raises(rd.DataStateError, match=r"have reached their max_epochs, .*'web': 2.* shard 0 of 4.*repeat=F"):
        list(itertools.islice(endless(limited(rd.Shard(0, 4, repeat=True))), 1000))  # type: ignore[arg-type]


def test_fewer_epochs_than_have_been_drawn_are_refused() -> None:
    later = loader_of(A)
    later.skip(8 * 1040)  # an epoch of "web" and a little
    for max_epochs in ({"web": 2}, {"web": 9}, {}):
        loader_of(A, max_epochs=max_epochs).load_state_dict(later.state_dict())
    with pytest.raises(
        rd.DataStateError, match=r"max_epochs\['web'\]=1 is below .* already: 2 epochs, more than that in 8 of 8"
    ):
        loader_of(A, max_epochs={"web": 1}).load_state_dict(later.state_dict())


def test_more_epochs_open_the_source_again() -> None:
    first = loader_of({"web": 1, "code": 0.01, "books": 0}, max_epochs={"web": 1})
    first.skip(8 * 1000)
    state = first.state_dict()
    for max_epochs, num in (({"web": 1}, 0), ({"web": 2}, 512)):
        loader = loader_of({"web": 1, "code": 1, "books": 0}, max_epochs=max_epochs)
        loader.load_state_dict(state)
        found = Counter(i for batch in itertools.islice(loader, 128) for i in batch["source"].tolist())
        assert abs(found[0] - num) <= 8


class Sized(rd.DatasetSource):
    def num_tokens(self, column: str | None, fragments: Any = None) -> int:
        return sum(len(row[column]) for row in self.dataset)


def test_weights_by_size() -> None:
    sources = {name: Sized([{"tokens": [1] * n}] * rows, name=name) for name, n, rows in (("a", 1, 5), ("b", 2, 10))}
    assert rd.weights_by_size(sources) == {"a": 0.5, "b": 1.0}
    assert rd.weights_by_size(sources, "tokens", column="tokens") == {"a": 0.25, "b": 1.0}
    assert rd.weights_by_size(sources, "tokens", column="tokens", temperature=2) == {"a": 0.5, "b": 1.0}
    with pytest.raises(ValueError, match="web does not know how many tokens"):
        rd.weights_by_size({"web": WEB}, "tokens")
    for bad in ({"by": "words"}, {"temperature": 0}, {"temperature": float("nan")}):
        with pytest.raises(ValueError, match="'rows' or 'tokens', and a number above 0"):
            rd.weights_by_size(sources, **bad)


@pytest.mark.parametrize(
    ("weights", "kwargs", "message"),
    [
        (A, {"max_epochs": {"wob": 3}}, "max_epochs has 'wob', and the sources are"),
        (A, {"max_epochs": {"web": 0}}, "at least 1; for a source that rests, weight 0"),
        (A, {"max_epochs": {"web": 1}}, r"fewer rows than there are logical shards \(5000\).*Schedule"),
    ],
)
def test_bad_arguments(weights: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixture(rd.Shard(0, 5000, repeat=True), weights, **kwargs)


@pytest.mark.parametrize(
    ("keys", "interpolate", "message"),
    [
        ([], "step", "the first at 0"),
        ([(5, A)], "step", "the first at 0"),
        ([(0, A), (9, B), (7, C)], "step", "each later than the one before"),
        ([(0, A), (9, {"web": 1})], "step", r"at 9 has weights of \['web'\]"),
        ([(0, A), (9, dict.fromkeys(NAMES, 0))], "step", "in the key at 9: give finite"),
        ([(0, A)], "cubic", "'step' or 'linear'"),
        ([(0, A), (9, None)], "step", r"give a list of \(progress, {name: weight}\)"),
        ({0: A}, "step", r"give a list of \(progress, {name: weight}\)"),
        ([(0, A), (9, {**A, "web": "1"})], "step", r"weights\['web'\]='1' in the key at 9 is a str"),
    ],
)
def test_bad_schedules(keys: Any, interpolate: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        rd.Schedule(keys, interpolate)


@pytest.mark.parametrize("feature", ["schedule", "max_epochs"])
def test_a_packer_reads_the_documents_that_the_mixture_draws(feature: str) -> None:
    """However many at a time it reads them."""
    weights: Any = {"schedule": rd.Schedule([(0, A), (40, C), (90, B)], "linear"), "max_epochs": A}[feature]
    max_epochs = {"web": 2, "code": 1} if feature == "max_epochs" else None

    def rows(shard: rd.Shard) -> Any:
        nodes = {name: read(source, shard) for name, source in (("web", WEB), ("code", CODE), ("books", BOOKS))}
        return rd.WeightedSampler(nodes, weights, max_epochs=max_epochs, unit="tokens", column="tokens")

    shard = rd.Shard(1, 3, repeat=True)
    packed = rd.TokenPacker(rows(shard), column="tokens", seq_len=100, eos_id=None)
    tokens = [token for sample in itertools.islice(packed, 15) for token in sample["tokens"].tolist()]
    drawn = [token for sample in itertools.islice(rows(shard), 400) for token in sample["tokens"].tolist()]
    assert tokens == drawn[: len(tokens)]


def windows(shard: rd.Shard, above: str, weights: Any, max_epochs: Any, unit: str) -> rd.BaseNode[Any]:
    nodes = {name: rd.Reader(rows(i, 60 if i == 0 else 4096), shard) for i, name in enumerate(NAMES)}
    column = "tokens" if unit == "tokens" else None
    mixed = rd.WeightedSampler(nodes, weights, unit=unit, column=column, max_epochs=max_epochs)  # type: ignore[arg-type]
    if above == "whole":
        return rd.WholeDocumentPacker(mixed, column="tokens", seq_len=64, window=100)
    packed = (
        rd.TokenPacker(mixed, column="tokens", seq_len=32, eos_id=None)
        if above == "packed"
        else rd.Map(mixed, without_tokens)
    )
    return rd.Shuffle(packed, 10 if above == "packed" else 100)


STEP, LATER = rd.Schedule([(0, A), (150, B)]), rd.Schedule([(0, A), (170, C), (400, B)])
CAP = {"web": 1}
SEGMENTS: list[Any] = [
    ((STEP, None), (LATER, None)), ((STEP, None), (A, None)), ((A, None), (LATER, None)), ((STEP, CAP), (STEP, None)),
    ((A, CAP), (A, {"web": 2})), ((A, None), (A, CAP)), ((A, CAP), (B, None)), ((STEP, CAP), (LATER, CAP)),
]  # fmt: skip


@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("above", ["whole", "packed", "shuffle"])
@pytest.mark.parametrize(("saved", "now"), SEGMENTS)
def test_a_window_that_is_open_holds_what_it_held(saved: Any, now: Any, above: str, unit: str) -> None:
    """Whichever keys and ends it passes, and however often it is loaded."""
    num = 1 if unit == "samples" else 3  # tokens of a document

    def scaled(weights: Any) -> Any:
        keys = [(num * at, key) for at, key in weights.keys] if isinstance(weights, rd.Schedule) else None
        return rd.Schedule(keys) if keys else weights

    def loader(weights: Any, max_epochs: Any) -> rd.DataLoader:
        return rd.DataLoader(
            lambda shard: windows(shard, above, scaled(weights), max_epochs, unit),
            global_batch_size=1, num_logical_shards=1, repeat=True,
        )  # fmt: skip

    def key(batch: Any) -> Any:
        return {name: value.tolist() for name, value in batch.items()}

    def place(of: rd.DataLoader) -> tuple[int, int]:
        shards = opened(of.state_dict())["shards"]
        return int(shards["emitted"]), int(next(v for k, v in shards.items() if k.endswith("draws")))

    with loader(*saved) as first:
        stream = iter(first)
        while place(first)[0] < 3 or place(first)[1] < 90:  # within the window that passes key and cap
            next(stream)
        state, begin = first.state_dict(), place(first)[1]
        wanted = [key(next(stream))]
        while place(first)[0]:
            wanted.append(key(next(stream)))
        assert begin < 150 < place(first)[1]
    got: list[Any] = []
    for _ in range(2):
        with loader(*now) as second:
            second.load_state_dict(state)
            stream = iter(second)
            got += [key(next(stream)) for _ in range(2 if not got else len(wanted) - 2)]
            state = second.state_dict()
    assert got == wanted
    for _ in range(2):
        with loader(*now) as second:
            second.load_state_dict(state)
            next(iter(second))
            state = second.state_dict()
    assert "earlier" not in state["header"]
