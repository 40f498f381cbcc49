"""`WeightedSampler`: shares, epochs of each source, and what becomes of the ends."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

import rescale_data as rd
from tests.nodes.resume import take
from tests.nodes.zoo import BOOKS, CODE, WEB, mixture


def source_of(sample: dict[str, Any]) -> str:
    return {3: "web", 4: "code", 5: "books"}[sample["id"] // 1000]


@pytest.mark.parametrize("shard", [rd.Shard(), rd.Shard(3, 5, repeat=True)])
@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("weights", [{"web": 0.6, "code": 0.1, "books": 0.3}, {"web": 1, "books": 2.71828}])
def test_a_shard_s_stream_is_near_the_weights_and_reports_them(
    shard: rd.Shard, unit: Any, weights: dict[str, float]
) -> None:
    node = mixture(shard, weights, unit=unit, column="tokens" if unit == "tokens" else None)
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
    node, again = (mixture(rd.Shard(repeat=True), weights, unit=unit, column=column) for _ in range(2))
    take(node, 3)
    again.reset(node.get_state())
    assert take(again, 9) == take(node, 9)


@pytest.mark.parametrize("repeat", [False, True])
def test_each_source_keeps_its_own_epoch(repeat: bool) -> None:
    node = mixture(rd.Shard(repeat=repeat))
    ids = [sample["id"] for sample in itertools.islice(node, 700)]
    state = node.get_state()
    assert sum(state["drawn"].values()) == state["draws"] == 700
    for name, source, drawn in zip(state["drawn"], (BOOKS, CODE, WEB), state["drawn"].values(), strict=True):
        epoch, row = divmod(drawn, source.num_rows)
        assert state[name] == {"epoch": epoch, "row": row, "skipped": 0}
        mine = Counter(i for i in ids if i in {r["id"] for r in source.dataset})
        assert Counter(mine.values()) == {epoch: source.num_rows - row, epoch + 1: row}


def test_stop_at_the_first_end_and_go_on_where_the_others_are() -> None:
    node = mixture(rd.Shard(), {"web": 0.5, "code": 0.5}, stop="first")
    first = [sample["id"] for sample in node]
    assert sum(i // 1000 == 4 for i in first) == CODE.num_rows
    rest = WEB.num_rows - sum(i // 1000 == 3 for i in first)
    assert rest > 0
    node.reset(node.get_state())
    second = [sample["id"] for sample in node]
    web = [i for i in (*first, *second) if i // 1000 == 3]
    assert len(set(web[: WEB.num_rows])) == WEB.num_rows


def test_stop_when_all_have_ended_yields_each_row_once_an_epoch_and_others_keep_their_proportions() -> None:
    node = mixture(rd.Shard(), {"web": 0.5, "code": 0.3, "books": 0.2}, stop="all")
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
    def mixture(weights: Any = None, **kwargs: Any) -> Any:
        nodes = {"a": rd.Reader(["a"] * 6, rd.Shard()), "b": rd.Reader(["b"] * 40, rd.Shard())}
        return rd.WeightedSampler(nodes, weights or {"a": 1, "b": 1}, **kwargs)

    def drawn(node: Any, *nums: int) -> list[str]:
        found: list[str] = []
        for num in nums:
            node.reset(None)
            found.append("".join(itertools.islice(node, num)))
        return found

    assert drawn(mixture(rd.Schedule([(0, {"a": 1, "b": 0}), (3, {"a": 0, "b": 1})])), 4, 4) == ["aaab", "bbbb"]
    assert "".join(drawn(mixture(max_epochs={"a": 2}), 9, 30, 30)).count("a") <= 12
    ends = drawn(mixture(stop="all"), 25, 99)  # "a" has ended in the first
    assert [Counter(each)["a"] for each in ends] == [6, 6]
    assert len(ends[1]) == 46


def test_the_order_of_names_does_not_matter() -> None:
    weights = {"web": 0.2, "code": 0.3, "books": 0.5}
    turned = dict(reversed(weights.items()))
    assert take(mixture(rd.Shard(), weights), 50) == take(mixture(rd.Shard(), turned), 50)


def test_behind_the_error_of_a_silent_source_a_skip_is_draws() -> None:
    num_errors = 0
    for index in range(40):
        shard = rd.Shard(index, 40, seed=3)
        drawn, skipped = (rd.WeightedSampler({"a": rd.Reader(range(9), shard)}, {"a": 1}) for _ in range(2))
        for _ in range(6):
            try:
                next(drawn)
            except rd.DataStateError:  # two whole epochs without a row
                num_errors += 1
                with pytest.raises(rd.DataStateError):
                    skipped.skip(1)
            else:
                skipped.skip(1)
            assert drawn.position == skipped.position
    assert num_errors > 40
