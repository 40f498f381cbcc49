"""Weights that change in the course of a run: schedules, caps, and as large as the sources."""

import itertools
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rescale_data as rd
from rescale_data.nodes.mixture.schedule import pieces_of
from tests.nodes.mixture.test_mixtures import counted, rows, without_tokens
from tests.nodes.resume import endless
from tests.nodes.zoo import BOOKS, CODE, WEB, read
from tests.states import opened

NAMES = ("web", "code", "books")
A, B, C = (dict(zip(NAMES, w, strict=True)) for w in ((0.5, 0.3, 0.2), (0.1, 0.1, 0.8), (0.0, 0.6, 0.4)))


def mixture(shard: rd.Shard, weights: Any, **kwargs: Any) -> rd.BaseNode[Any]:
    nodes = {name: rd.Reader(rows(i, 4096), shard) for i, name in enumerate(NAMES)}
    return rd.Map(rd.WeightedSampler(nodes, weights, **kwargs), without_tokens)


@pytest.mark.parametrize("interpolate", ["step", "linear"])
def test_global_batches_follow_a_schedule(interpolate: Any) -> None:
    """In each constant piece within one sample of its weights, from the first batch on."""
    schedule = rd.Schedule([(0, A), (2560, B), (10_240, C)], interpolate)
    pieces = pieces_of(NAMES, schedule)
    found = counted(lambda shard: mixture(shard, schedule), 128, 256, 120, 3)
    shares = [np.array(pieces.weights[pieces.number(step // 2 * 256)]) for step in range(120)]
    assert np.abs(found - [128 * share / share.sum() for share in shares]).max() <= 1 + 1e-9
    assert abs(found[40][1] / 128 - (0.1 if interpolate == "step" else 0.3)) < 0.2
    assert (found[85:, 0] == 0).all()


def test_a_schedule_by_tokens() -> None:
    node = mixture(rd.Shard(), rd.Schedule([(0, A), (3000, C)]), unit="tokens", column="tokens").children["source"]  # type: ignore[attr-defined]
    drawn: Counter[int] = Counter()
    for sample in itertools.islice(node, 2500):
        drawn[sample["source"]] += len(sample["tokens"])
        if 2990 < drawn.total() <= 3000:
            first = drawn.copy()
    wanted = [3000 * 0.5, 3000 * 0.3 + 0.6 * (drawn.total() - 3000), 3000 * 0.2 + 0.4 * (drawn.total() - 3000)]
    assert all(abs(first[i] - w) < 20 for i, w in enumerate((1500, 900, 600)))
    assert all(abs(drawn[i] - w) < 30 for i, w in enumerate(wanted))


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
    pieces = pieces_of(NAMES, now)
    for step, counts in enumerate(found):
        share = np.array(pieces.weights[pieces.number(160 + 8 * step)])
        assert np.abs(counts - 8 * share / share.sum()).max() <= 3


@pytest.mark.parametrize("unit", ["epochs", "samples", "tokens"])
def test_caps(unit: str, caplog: pytest.LogCaptureFixture) -> None:
    total = {"epochs": 3, "samples": 100, "tokens": 345}[unit]
    sources = {"web": WEB, "code": CODE, "books": BOOKS}
    kwargs: Any = {"unit": "tokens", "column": "tokens"} if unit == "tokens" else {}

    def pipeline(shard: rd.Shard) -> Any:
        nodes = {name: read(source, shard) for name, source in sources.items()}
        caps = {"code": {unit: total}}
        return rd.WeightedSampler(nodes, {"web": 0.3, "code": 0.6, "books": 0.1}, caps=caps, **kwargs)

    found: Counter[int] = Counter()
    with caplog.at_level(logging.WARNING, "rescale_data"):
        loader = rd.DataLoader(pipeline, global_batch_size=7, num_logical_shards=7, repeat=True, collate_fn=list)
        for batch in itertools.islice(loader, 150):
            found.update(sample["id"] for sample in batch)
        state = loader.state_dict()
    code = {row["id"]: len(row["tokens"]) for row in CODE.dataset}
    drawn = {i: found[i] for i in code}
    tokens = sum(n * code[i] for i, n in drawn.items())
    if unit == "epochs":
        assert set(drawn.values()) == {3}
    elif unit == "samples":
        assert sum(drawn.values()) == 100
        assert opened(state)["shards"]["drawn.code"].tolist() == [100 * (i + 1) // 7 - 100 * i // 7 for i in range(7)]
    else:
        assert 345 <= tokens < 345 + 7 * max(code.values())
    assert caplog.text.count(f"'code' of a mixture has reached its cap of {{'{unit}': {total}}}") == 1
    progress = loader.progress()
    assert progress["capped_shards/code"] == 7
    assert progress["drawn_samples/code"] == sum(drawn.values())
    assert abs(progress["epochs/code"] - sum(drawn.values()) / len(code)) < 0.1
    assert opened(state)["shards"]["weight.code"].tolist() == [0.0] * 7
    others = Counter(i // 1000 for i in found.elements())
    if unit == "samples":
        assert abs(others[3] - 0.75 * (150 * 7 - 100)) < 15


@pytest.mark.parametrize("above", ["root", "packer", "shuffle"])
def test_a_cap_of_less_than_one_in_each_logical_shard(above: str, caplog: pytest.LogCaptureFixture) -> None:
    def pipeline(shard: rd.Shard) -> Any:
        nodes = {"web": read(WEB, shard), "code": read(CODE, shard)}
        mixed = rd.WeightedSampler(nodes, {"web": 1, "code": 1}, caps={"code": {"samples": 3}})
        if above == "packer":
            return rd.TokenPacker(mixed, column="tokens", seq_len=8, eos_id=None)
        return rd.Shuffle(mixed, 4) if above == "shuffle" else mixed

    with caplog.at_level(logging.WARNING, "rescale_data"):
        loader = rd.DataLoader(pipeline, global_batch_size=8, num_logical_shards=8, repeat=True, collate_fn=list)
        for _ in itertools.islice(loader, 20):
            pass
    progress = loader.progress()
    assert (progress["drawn_samples/code"], progress["capped_shards/code"]) == (3, 8)
    assert caplog.text.count("'code' of a mixture has reached its cap of {'samples': 3}") == 1


def capped(shard: rd.Shard) -> rd.BaseNode[Any]:
    nodes = {"web": read(WEB, shard), "code": read(CODE, shard)}
    caps = {"web": {"samples": 40}, "code": {"epochs": 1}}
    return rd.Map(rd.WeightedSampler(nodes, {"web": 1, "code": 1}, caps=caps), lambda sample: {"id": sample["id"]})


def test_the_stream_ends_when_all_sources_are_capped() -> None:
    node = capped(rd.Shard())
    found = Counter(sample["id"] // 1000 for sample in node)
    assert found == {3: 40, 4: CODE.num_rows}
    node.reset(node.get_state())
    assert not list(node)
    with pytest.raises(
        rd.DataStateError, match=r"have reached their caps, .*'web': {'samples': 40}.* shard 0 of 4.*repeat=F"
    ):
        list(itertools.islice(endless(capped(rd.Shard(0, 4, repeat=True))), 1000))  # type: ignore[arg-type]


def test_a_cap_below_what_has_been_drawn_is_refused() -> None:
    state = state_after(100, A, caps={"web": {"samples": 300}})
    for caps in ({"web": {"samples": 500}}, {"web": {"samples": 300}}, {}):
        loader_of(A, caps=caps).load_state_dict(state)
    with pytest.raises(rd.DataStateError, match=r"caps\['web'\]={'samples': 290} is below .* 300 samples, in 8 of 8"):
        loader_of(A, caps={"web": {"samples": 290}}).load_state_dict(state)
    later = loader_of(A)
    later.skip(8 * 1040)  # an epoch of "web" and a little
    loader_of(A, caps={"web": {"epochs": 2}}).load_state_dict(later.state_dict())
    with pytest.raises(
        rd.DataStateError, match=r"caps\['web'\]={'epochs': 1} is below .* already: 2 epochs, in 8 of 8"
    ):
        loader_of(A, caps={"web": {"epochs": 1}}).load_state_dict(later.state_dict())


def test_a_raised_cap_opens_the_source_again() -> None:
    state = state_after(100, A, caps={"web": {"samples": 300}})
    loader = loader_of(A, caps={"web": {"samples": 316}})
    loader.load_state_dict(state)
    found = Counter(i for batch in itertools.islice(loader, 50) for i in batch["source"].tolist())
    assert found[0] == 16


@pytest.mark.parametrize("taken", [12, 14, 15, 16, 20])
def test_each_shard_keeps_its_part_of_a_cap_when_weights_change(taken: int) -> None:
    """Of 60 samples half of the shards have 8, the others 7."""
    caps = {"web": {"samples": 60}}
    first, then = loader_of(A, caps=caps), loader_of(B, caps=caps)
    found = [batch["source"] for batch in itertools.islice(first, taken)]
    then.load_state_dict(first.state_dict())
    found += [batch["source"] for batch in itertools.islice(then, 80)]
    assert sum(int((sources == 0).sum()) for sources in found) == 60


def write(folder: Path, name: str, size: int) -> None:
    pq.write_table(pa.table({"id": np.arange(size)}), folder / f"{name}.parquet")


def test_weights_by_rows_grow_with_the_epoch_at_which_files_join(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "0", {"a": 64, "b": 192}[name])

    def make() -> rd.DataLoader:
        sources = {name: rd.ParquetSource(tmp_path / name) for name in ("a", "b")}

        def pipeline(shard: rd.Shard) -> Any:
            return rd.WeightedSampler({name: rd.Reader(s, shard) for name, s in sources.items()}, "rows")

        return rd.DataLoader(pipeline, global_batch_size=4, num_logical_shards=4, repeat=True)

    loader = make()
    for _ in itertools.islice(loader, 5):
        pass
    state = loader.state_dict()
    write(tmp_path / "a", "1", 512)
    loader = make()
    loader.load_state_dict(state)
    weights = []
    for _ in range(80):
        next(iter(loader))
        shards = opened(loader.state_dict())["shards"]
        weights.append((shards["a.epoch"][0].item(), shards["weight.a"][0].item() / shards["weight.b"][0].item()))
    assert {epoch for epoch, _ in weights} == {0, 1}
    assert all(abs(weight - (1 / 3 if epoch == 0 else 3)) < 1e-6 for epoch, weight in weights)


class Counted(rd.DatasetSource):
    def num_tokens(self, column: str | None, fragments: Any = None) -> int:
        return sum(len(row[column]) for row in self.dataset)


def test_weights_by_tokens_and_temperature() -> None:
    sources = {name: Counted([{"tokens": [1] * n}] * 5, name=name) for name, n in (("a", 1), ("b", 4))}
    for temperature, weight in ((1, 0.25), (2, 0.5)):
        nodes = {name: rd.Reader(source, rd.Shard()) for name, source in sources.items()}
        node = rd.WeightedSampler(nodes, "tokens", unit="tokens", column="tokens", temperature=temperature)
        assert node.weights == {"a": weight, "b": 1.0}
        assert node.parameters()["weights"] == node.weights
    with pytest.raises(ValueError, match="web does not know how many tokens"):
        rd.WeightedSampler({"web": read(WEB, rd.Shard())}, "tokens")


@pytest.mark.parametrize(
    ("weights", "kwargs", "message"),
    [
        ("words", {}, "'rows' or 'tokens'"),
        ("rows", {"temperature": 0}, "temperature=0: give a number above 0"),
        (A, {"caps": {"wob": {"samples": 3}}}, "caps has 'wob', and the sources are"),
        (A, {"caps": {"web": {"rows": 3}}}, "give one of {'epochs': n}"),
        (A, {"caps": {"web": {"samples": 0}}}, "at least 1; for a source that rests, weight 0"),
        (A, {"caps": {"web": {"tokens": 3}}}, "counted by unit='tokens'"),
    ],
)
def test_bad_arguments(weights: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixture(rd.Shard(), weights, **kwargs)


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


@pytest.mark.parametrize("feature", ["schedule", "caps", "rows"])
def test_a_packer_reads_the_documents_that_the_mixture_draws(feature: str) -> None:
    """However many at a time it reads them."""
    weights: Any = {"schedule": rd.Schedule([(0, A), (40, C), (90, B)], "linear"), "caps": A, "rows": "rows"}[feature]
    caps = {"web": {"tokens": 80}, "code": {"epochs": 1}} if feature == "caps" else None

    def rows(shard: rd.Shard) -> Any:
        nodes = {name: read(source, shard) for name, source in (("web", WEB), ("code", CODE), ("books", BOOKS))}
        return rd.WeightedSampler(nodes, weights, caps=caps, unit="tokens", column="tokens")

    shard = rd.Shard(1, 3, repeat=True)
    packed = rd.TokenPacker(rows(shard), column="tokens", seq_len=100, eos_id=None)
    tokens = [token for sample in itertools.islice(packed, 15) for token in sample["tokens"].tolist()]
    drawn = [token for sample in itertools.islice(rows(shard), 400) for token in sample["tokens"].tolist()]
    assert tokens == drawn[: len(tokens)]


def windows(shard: rd.Shard, above: str, weights: Any, caps: Any, unit: str) -> rd.BaseNode[Any]:
    nodes = {name: rd.Reader(rows(i, 4096), shard) for i, name in enumerate(NAMES)}
    column = "tokens" if unit == "tokens" else None
    mixed = rd.WeightedSampler(nodes, weights, unit=unit, column=column, caps=caps)  # type: ignore[arg-type]
    if above == "whole":
        return rd.WholeDocumentPacker(mixed, column="tokens", seq_len=64, window=100)
    packed = (
        rd.TokenPacker(mixed, column="tokens", seq_len=32, eos_id=None)
        if above == "packed"
        else rd.Map(mixed, without_tokens)
    )
    return rd.Shuffle(packed, 10 if above == "packed" else 100)


STEP, LATER = rd.Schedule([(0, A), (150, B)]), rd.Schedule([(0, A), (170, C), (400, B)])
CAP = {"web": {"samples": 60}}
LEGS: list[Any] = [
    ((STEP, None), (LATER, None)), ((STEP, None), (A, None)), ((A, None), (LATER, None)), ((STEP, CAP), (STEP, None)),
    ((A, CAP), (A, {"web": {"samples": 65}})), ((A, None), (A, CAP)), ((A, CAP), (B, None)), ((STEP, CAP), (LATER, CAP)),
]  # fmt: skip


@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("above", ["whole", "packed", "shuffle"])
@pytest.mark.parametrize(("saved", "now"), LEGS)
def test_a_window_that_is_open_holds_what_it_held(saved: Any, now: Any, above: str, unit: str) -> None:
    """Whichever keys and caps it passes, and however often it is loaded."""
    num = 1 if unit == "samples" else 3  # tokens of a document

    def scaled(weights: Any) -> Any:
        keys = [(num * at, key) for at, key in weights.keys] if isinstance(weights, rd.Schedule) else None
        return rd.Schedule(keys) if keys else weights

    def loader(weights: Any, caps: Any) -> rd.DataLoader:
        return rd.DataLoader(
            lambda shard: windows(shard, above, scaled(weights), caps, unit),
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
