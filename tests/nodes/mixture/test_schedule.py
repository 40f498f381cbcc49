"""Weights that change in the course of a run: schedules, `max_epochs`, and weights by size."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

import rescale_data as rd
from rescale_data.nodes.mixture.rules import make_rule, weights_at
from tests.nodes.mixture.test_mixtures import counted, rows, without_tokens
from tests.nodes.resume import endless, take
from tests.nodes.zoo import BOOKS, CODE, WEB, read
from tests.nodes.zoo import mixture as zoo_mixture

SOURCES = {"web": WEB, "code": CODE, "books": BOOKS}
NAMES = tuple(SOURCES)
A, B, C = (dict(zip(NAMES, w, strict=True)) for w in ((0.5, 0.3, 0.2), (0.1, 0.1, 0.8), (0.0, 0.6, 0.4)))


def shares_at(weights: Any, progress: int) -> Any:
    """Return the shares of `NAMES` that count at a progress."""
    rule = make_rule(weights, {})
    found = weights_at(rule, NAMES, progress, 1, {}).source_weights
    return np.array(found) / sum(found)


def readers(shard: rd.Shard) -> dict[str, rd.BaseNode[Any]]:
    return {name: rd.Reader(rows(i, 4096), shard) for i, name in enumerate(NAMES)}


def mixture(shard: rd.Shard, weights: Any, **kwargs: Any) -> rd.BaseNode[Any]:
    return rd.Map(rd.WeightedSampler(readers(shard), weights, **kwargs), without_tokens)


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
    schedule = rd.Schedule([(0, A), (3000, then)])
    node = rd.WeightedSampler(readers(rd.Shard()), schedule, unit="tokens", column="tokens")
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
    before, loader = loader_of(saved), loader_of(now)
    before.skip(160)
    state = before.state_dict()
    if message:
        with pytest.raises(rd.DataStateError, match=f"of the Schedule up to 160, .*{message}"):
            loader.load_state_dict(state)
        return
    loader.load_state_dict(state)
    found = [np.bincount(batch["source"].numpy(), minlength=3) for batch in itertools.islice(loader, 40)]
    for step, counts in enumerate(found):
        assert np.abs(counts - 8 * shares_at(now, 160 + 8 * step)).max() <= 3


ABOVE: dict[str, Any] = {
    "root": lambda rows: rows,
    "packer": lambda rows: rd.TokenPacker(rows, column="tokens", seq_len=3, eos_id=None),
    "shuffle": lambda rows: rd.Shuffle(rows, 4),
}


@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("above", ABOVE)
def test_max_epochs(unit: Any, above: str, caplog: pytest.LogCaptureFixture) -> None:
    weights, column = {"web": 0.3, "code": 0.6, "books": 0.1}, "tokens" if unit == "tokens" else None

    def pipeline(shard: rd.Shard) -> Any:
        nodes = {name: read(source, shard) for name, source in SOURCES.items()}
        return ABOVE[above](rd.WeightedSampler(nodes, weights, max_epochs={"code": 3}, unit=unit, column=column))

    found: Counter[int] = Counter()
    loader = rd.DataLoader(pipeline, global_batch_size=7, num_logical_shards=7, repeat=True, collate_fn=list)
    for batch in itertools.islice(loader, 150):
        found.update(token for sample in batch for token in sample["tokens"].tolist())
    assert {found[int(token)] for row in CODE.dataset for token in row["tokens"]} == {3}
    assert caplog.text.count("'code' of a mixture has reached its max_epochs of 3") == 1
    progress = loader.progress()
    assert progress["ended_shards/code"] == 7
    assert progress["drawn_samples/code"] == 3 * CODE.num_rows
    assert progress["epochs/code"] == 3
    if unit == "samples" and above == "root":
        others = sum(progress[f"drawn_samples/{name}"] for name in SOURCES) - 3 * CODE.num_rows
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


# Shares, epochs of each source, and what becomes of the ends


def source_of(sample: dict[str, Any]) -> str:
    return {3: "web", 4: "code", 5: "books"}[sample["id"] // 1000]


@pytest.mark.parametrize("shard", [rd.Shard(), rd.Shard(3, 5, repeat=True)])
@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("weights", [{"web": 0.6, "code": 0.1, "books": 0.3}, {"web": 1, "books": 2.71828}])
def test_a_shard_s_stream_is_near_the_weights_and_reports_them(
    shard: rd.Shard, unit: Any, weights: dict[str, float]
) -> None:
    node = zoo_mixture(shard, weights, unit=unit, column="tokens" if unit == "tokens" else None)
    drawn: Counter[str] = Counter()
    for sample in itertools.islice(node, 400):
        drawn[source_of(sample)] += 1 if unit == "samples" else len(sample["tokens"])
        bound = 8 if unit == "samples" else 4 * 30  # the longest document has 30 tokens
        assert all(abs(drawn[name] - drawn.total() * w / sum(weights.values())) < bound for name, w in weights.items())
    progress = node.progress(np.array([node.position.tolist()]), np.array([shard.index]), np.array([400]))
    assert sum(progress[f"drawn_samples/{name}"] for name in weights) == 400
    for name in weights:
        assert progress[f"share/{name}"] == pytest.approx(drawn[name] / drawn.total())


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_weights_may_be_as_large_as_sources_are(unit: Any) -> None:
    weights, column = {"web": 3e15, "code": 1e290}, "tokens" if unit == "tokens" else None
    node, again = (zoo_mixture(rd.Shard(repeat=True), weights, unit=unit, column=column) for _ in range(2))
    take(node, 3)
    again.reset(node.get_state())
    assert take(again, 9) == take(node, 9)


@pytest.mark.parametrize("repeat", [False, True])
def test_each_source_keeps_its_own_epoch(repeat: bool) -> None:
    node = zoo_mixture(rd.Shard(repeat=repeat))
    ids = [sample["id"] for sample in itertools.islice(node, 700)]
    state = node.get_state()
    assert sum(state["drawn"].values()) == state["draws"] == 700
    for name, source, drawn in zip(state["drawn"], (BOOKS, CODE, WEB), state["drawn"].values(), strict=True):
        epoch, row = divmod(drawn, source.num_rows)
        assert state[name] == {"epoch": epoch, "row": row, "skipped": 0}
        mine = Counter(i for i in ids if i in {r["id"] for r in source.dataset})
        assert Counter(mine.values()) == {epoch: source.num_rows - row, epoch + 1: row}


def test_stop_at_the_first_end_and_go_on_where_the_others_are() -> None:
    node = zoo_mixture(rd.Shard(), {"web": 0.5, "code": 0.5}, stop="first")
    first = [sample["id"] for sample in node]
    assert sum(i // 1000 == 4 for i in first) == CODE.num_rows
    rest = WEB.num_rows - sum(i // 1000 == 3 for i in first)
    assert rest > 0
    node.reset(node.get_state())
    second = [sample["id"] for sample in node]
    web = [i for i in (*first, *second) if i // 1000 == 3]
    assert len(set(web[: WEB.num_rows])) == WEB.num_rows


def test_stop_when_all_have_ended_yields_each_row_once_an_epoch_and_others_keep_their_proportions() -> None:
    node = zoo_mixture(rd.Shard(), {"web": 0.5, "code": 0.3, "books": 0.2}, stop="all")
    sizes = {"web": WEB.num_rows, "code": CODE.num_rows, "books": BOOKS.num_rows}
    everything = Counter(row["id"] for source in (WEB, CODE, BOOKS) for row in source.dataset)
    for epoch in range(3):
        samples = list(node)
        assert Counter(sample["id"] for sample in samples) == everything
        names = [source_of(sample) for sample in samples]
        web_ended = max(i for i, name in enumerate(names) if name == "web")
        after = Counter(names[web_ended + 1 : web_ended + 21])
        assert abs(after["code"] - 20 * 0.6) <= 3
        state = node.get_state()
        assert state["drawn"] == {name: (epoch + 1) * size for name, size in sizes.items()}
        assert all(state[name] == {"epoch": epoch + 1, "row": 0, "skipped": 0} for name in sizes)
        node.reset(state)


def test_after_the_rest_of_an_epoch_was_left_out_schedules_and_epochs_go_on() -> None:
    def of_two(weights: Any = None, **kwargs: Any) -> Any:
        nodes = {"a": rd.Reader(["a"] * 6, rd.Shard()), "b": rd.Reader(["b"] * 40, rd.Shard())}
        return rd.WeightedSampler(nodes, weights or {"a": 1, "b": 1}, **kwargs)

    def drawn(node: Any, *nums: int) -> list[str]:
        found: list[str] = []
        for num in nums:
            node.reset(None)
            found.append("".join(itertools.islice(node, num)))
        return found

    assert drawn(of_two(rd.Schedule([(0, {"a": 1, "b": 0}), (3, {"a": 0, "b": 1})])), 4, 4) == ["aaab", "bbbb"]
    assert "".join(drawn(of_two(max_epochs={"a": 2}), 9, 30, 30)).count("a") <= 12
    ends = drawn(of_two(stop="all"), 25, 99)  # "a" has ended in the first
    assert [Counter(each)["a"] for each in ends] == [6, 6]
    assert len(ends[1]) == 46


def test_the_order_of_names_does_not_matter() -> None:
    weights = {"web": 0.2, "code": 0.3, "books": 0.5}
    turned = dict(reversed(weights.items()))
    assert take(zoo_mixture(rd.Shard(), weights), 50) == take(zoo_mixture(rd.Shard(), turned), 50)
