"""`Map`, `Filter` and `RandomMap`: whose random numbers, and what becomes of errors."""

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rescale_data as rd
from tests.corpus import documents, unreadable, write
from tests.nodes.zoo import WEB, fails_on_some, mixture, noisy, read, without_arrays

ROWS = [row["id"] for row in WEB.dataset]
BAD = [i for i in ROWS if i % 5 == 2]


def fails(sample: Any, *_: Any) -> Any:
    raise ZeroDivisionError("by hand")


class TestErrors:
    @pytest.mark.parametrize("node", [rd.Map, rd.Filter, rd.RandomMap])
    @pytest.mark.parametrize("below", [lambda rows: rows, lambda rows: rd.Map(rows, dict)], ids=["reader", "map"])
    @pytest.mark.parametrize("is_packed", [False, True])
    def test_carry_source_file_and_row(self, node: Any, below: Any, is_packed: bool, tmp_path: Path) -> None:
        """Also where a packer reads many documents at a time."""
        source = write("parquet", tmp_path / "corpus", documents([3] * 20))
        rows = node(below(rd.Reader(source, rd.Shard(), shuffle=False)), _fails_at(documents([3] * 20)[9]))
        with pytest.raises(ZeroDivisionError) as caught:
            list(rd.TokenPacker(rows, column="tokens", seq_len=4, eos_id=1) if is_packed else rows)
        assert caught.value.__notes__ == [
            f"in the function of {node.__name__}, given corpus: {tmp_path / 'corpus' / '001.parquet'}, row 2"
        ]

    def test_name_the_source_of_a_mixture(self) -> None:
        with pytest.raises(ValueError, match="bad row") as caught:
            list(rd.Map(mixture(rd.Shard()), fails_on_some))
        row = int(str(caught.value).split()[-1])
        source = {3: "web", 4: "code", 5: "books"}[row // 1000]
        assert f"given {source}: {source}[{row % 1000}]" in caught.value.__notes__[0]

    def test_stop_iteration_that_is_skipped_does_not_end_the_epoch(self) -> None:
        def ends(sample: Any) -> Any:
            return next(iter(())) if sample["id"] == ROWS[3] else sample

        assert len(list(rd.Map(read(WEB, rd.Shard()), ends, on_error="skip"))) == len(ROWS) - 1

    def test_of_a_source_are_not_skipped(self) -> None:
        with pytest.raises(ValueError, match="cannot be read"):
            next(rd.Map(rd.Reader(unreadable([1, 2], [0, 1]), rd.Shard()), without_arrays, on_error="skip"))


class TestOnError:
    @pytest.mark.parametrize("bug", [NameError, AttributeError, ImportError, NotImplementedError])
    def test_a_bug_is_not_skipped(self, bug: Any) -> None:
        def buggy(*_: Any) -> Any:
            raise bug("in the program")

        for node in (rd.Map, rd.RandomMap, rd.Filter):
            with pytest.raises(bug) as caught:
                list(node(read(WEB, rd.Shard()), buggy, on_error="skip"))
            assert "given web: web[" in caught.value.__notes__[0]

    def test_a_function_decides(self) -> None:
        """It leaves out every third bad row, replaces every other third, and raises for one."""
        told: list[str] = []

        def decide(error: Exception, where: str) -> Any:
            told.append(where)
            assert "bad row" in str(error)
            return {"id": -1} if len(told) % 3 == 1 else None

        nodes = rd.Map(read(WEB, rd.Shard()), fails_on_some, on_error=decide)
        ids = [row["id"] for row in nodes]
        good = [i for i in ROWS if i not in BAD]
        assert sorted(i for i in ids if i >= 0) == good
        assert ids.count(-1) == -(-len(BAD) // 3)
        assert nodes.get_state()["skipped"] == len(BAD) - ids.count(-1)
        assert sorted(told) == sorted(f"web: web[{i - 3000}]" for i in BAD)

        def stop(error: Exception, _: str) -> Any:
            raise RuntimeError("enough") from error

        with pytest.raises(RuntimeError, match="enough"):
            list(rd.Map(read(WEB, rd.Shard()), fails_on_some, on_error=stop))

    def test_of_a_predicate_a_tokenizer_and_a_row(self) -> None:
        kept = rd.Filter(
            read(WEB, rd.Shard()), lambda row: row["id"] not in BAD or fails(row), on_error=lambda *_: True
        )
        assert len(list(kept)) == len(ROWS)

        rows = rd.Reader(unreadable([0, 1, 2, 3], [2]), rd.Shard(), shuffle=False, on_error=lambda *_: 7)
        assert list(rows) == [0, 1, 7, 3]
        texts = rd.Reader([{"text": "a"}, {"text": 3}], rd.Shard(), shuffle=False)
        tokens = rd.Tokenize(texts, lambda texts: [[len(t)] for t in texts], "text", on_error=lambda *_: [9])
        assert [row["tokens"].tolist() for row in tokens] == [[1], [9]]


class TestSkip:
    @pytest.mark.parametrize("node", [rd.Map, rd.RandomMap, rd.Filter])
    def test_leaves_out_logs_and_counts(self, node: Any, caplog: pytest.LogCaptureFixture) -> None:
        nodes = node(read(WEB, rd.Shard()), fails_on_some, on_error="skip")
        for epoch in range(1, 3):
            with caplog.at_level(logging.WARNING, "rescale_data"):
                assert sorted(row["id"] for row in nodes) == [i for i in ROWS if i not in BAD]
            assert nodes.get_state()["skipped"] == epoch * len(BAD)
            nodes.reset(nodes.get_state())
        assert f"{node.__name__} left out web: web[{BAD[0] - 3000}]" in caplog.text
        assert caplog.text.count("left out") == 10 + sum(n & (n - 1) == 0 for n in range(11, 2 * len(BAD) + 1))

    @pytest.mark.parametrize("fails_in", ["Reader", "Map"])
    def test_a_loader_counts_and_may_switch_between_segments(self, fails_in: str) -> None:
        """The first bad row stops a run; it is resumed with on_error="skip", and nothing else is left out."""
        source = rd.DatasetSource(unreadable(WEB.dataset, [i - 3000 for i in BAD]), name="web")

        def make(on_error: Any) -> rd.DataLoader:
            def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
                if fails_in == "Reader":
                    return rd.Map(read(source, shard, on_error=on_error), without_arrays)
                return rd.Map(rd.Map(read(WEB, shard), fails_on_some, on_error=on_error), without_arrays)

            return rd.DataLoader(pipeline, global_batch_size=2, num_logical_shards=4)

        first, ids = make("raise"), []
        with pytest.raises(ValueError, match=r"bad row|cannot be read"):
            ids.extend(i for batch in first for i in batch["id"].tolist())
        second = make("skip")
        second.load_state_dict(first.state_dict())
        for batch in second:
            ids += batch["id"].tolist()
        good = [i for i in ROWS if i not in BAD]
        assert len(ids) == len(set(ids)) == len(good) // 2 * 2
        assert set(ids) <= set(good)
        assert second.progress()["skipped_rows"] == len(BAD)


class TestRandom:
    def draws(self, shard: rd.Shard, num: int = 80, key: str = "noise", **kwargs: Any) -> dict[tuple[int, int], float]:
        """The noise by epoch and row; the "second" is that of one over another."""
        node = rd.RandomMap(rd.Map(read(WEB, shard), without_arrays), noisy, **kwargs)
        node = rd.RandomMap(node, lambda sample, rng: {**sample, "second": float(rng.random())})
        found: dict[tuple[int, int], float] = {}
        for epoch in itertools.count():
            for sample in node:
                found[epoch, sample["id"]] = sample[key]
                if len(found) == num:
                    return found
            node.reset(node.get_state())
        raise AssertionError

    def test_differs_by_sample_epoch_seed_shard_label_and_node(self) -> None:
        found = [
            self.draws(rd.Shard()),
            self.draws(rd.Shard(seed=1)),
            self.draws(rd.Shard(1, 2)),
            self.draws(rd.Shard(), label="other"),
            self.draws(rd.Shard(), key="second"),
        ]
        values = [value for draws in found for value in draws.values()]
        assert len(set(values)) == len(values)

    def test_what_was_counted_on_the_way_changes_nothing(self) -> None:
        """Rows skipped and the digest of `verify` are part of the state, and not of what a sample's generator is keyed by."""

        def drawn(bad: int, **kwargs: Any) -> list[int]:
            reader = rd.Reader(unreadable(range(6), [bad]), rd.Shard(seed=7, **kwargs), shuffle=False, on_error="skip")
            keep = rd.Filter(reader, lambda row: row != 2)
            return list(rd.RandomMap(keep, lambda row, rng: (row, int(rng.bit_generator.random_raw()))))

        assert drawn(bad=9, verify=True) == drawn(bad=9)
        assert drawn(bad=1)[2:] == drawn(bad=9)[3:]

    def test_a_source_of_ones_own_takes_a_shard(self) -> None:
        class Source(rd.Node[int]):
            def next(self) -> int:
                return 1

        assert next(rd.RandomMap(Source(), lambda _, rng: rng.integers(3), shard=rd.Shard())) in (0, 1, 2)


def _fails_at(document: list[int]) -> Any:
    def fn(sample: Any, *_: Any) -> Any:
        if sample["tokens"].tolist() == document:
            raise ZeroDivisionError("by hand")
        return sample

    return fn


# CleanDocuments


texts = st.lists(st.lists(st.sampled_from([0, 1, 7, 8, 9]), max_size=9), min_size=2, max_size=20)
cleanings = st.fixed_dictionaries(
    {
        "strip": st.sampled_from([(), (0,), (0, 1)]),
        "min_length": st.integers(0, 3),
        "max_length": st.sampled_from([None, 3, 5]),
    }
)


def naive(document: list[int], strip: tuple[int, ...], min_length: int, max_length: int | None) -> list[list[int]]:
    while document and document[0] in strip:
        document = document[1:]
    while document and document[-1] in strip:
        document = document[:-1]
    if len(document) < min_length:
        return []
    step = max_length or len(document) or 1
    return [document[i : i + step] for i in range(0, len(document), step)] or [[]]


@given(texts, cleanings)
@settings(max_examples=100)
def test_pieces_are_what_the_arguments_say_and_keep_the_other_columns(
    docs: list[list[int]], cleaning: dict[str, Any]
) -> None:
    rows = [{"tokens": np.array(doc, dtype=np.uint16), "id": i} for i, doc in enumerate(docs)]
    node = rd.CleanDocuments(rd.Reader(rows, rd.Shard(), shuffle=False), "tokens", **cleaning)
    pieces = [(i, piece) for i, doc in enumerate(docs) for piece in naive(doc, **cleaning)]
    assert [(sample["id"], sample["tokens"].tolist()) for sample in node] == pieces
    assert node.get_state()["short"] == sum(not naive(doc, **cleaning) for doc in docs)
