"""Whatever a trainer does, on whatever ranks: no sample is lost or repeated, no rank waits for ever. See `tests.histories`."""

import functools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import rescale_data as rd
from tests.histories.__main__ import accepts
from tests.histories.books import Books, Reference, same_state
from tests.histories.crew import Hang, in_threads
from tests.histories.history import fail_in, failing_reads
from tests.histories.plans import Pipeline, as_samples
from tests.histories.ranks import Seats, Top
from tests.histories.shards import history_of


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with in_threads(), failing_reads():
        yield


@pytest.mark.parametrize("seed", range(24))
def test_a_random_history(seed: int) -> None:
    """``python -m tests.histories SEED --one`` says what was done in it, ``FIRST SECONDS`` plays others."""
    history = history_of(seed)
    try:
        history.play()
    except (Exception, Hang) as error:
        if not accepts(error):
            raise


def _make(pipeline: Pipeline, top: Top) -> rd.DataLoader:
    return rd.DataLoader(
        pipeline, global_batch_size=top.o, micro_batch_size=top.b, num_logical_shards=8, num_workers=top.k,
        tail="pad", verify=True, collate_fn=as_samples,
    )  # fmt: skip


def _ids(books: Books) -> Counter[int]:
    return Counter(sample["id"] for samples in books.delivered.values() for sample in samples)


@pytest.mark.parametrize("delivered", [0, 8])
def test_who_joins_where_an_epoch_ends_sees_the_end_with_the_others(delivered: int) -> None:
    """The last batch has been taken, and nobody has seen that it was the last."""
    pipeline, top, wider = Pipeline(("Files", False), {"f1": 16}), Top(2, 2, 8), Top(4, 1, 8)
    seats, books = Seats(lambda top: _make(pipeline, top), top), Books()
    states: list[Any] = []
    for _ in range(4):
        assert seats.next(books) is not None
        states.append(seats.state())
    state = states[1] if delivered else states[3]
    seats = seats.rescale(wider, lambda top: _make(pipeline, top), [1, -1, 0, -1], state, delivered)
    assert seats.next(books) is None
    assert sum(seats.next(books) is not None for _ in range(4)) == 4
    assert set(_ids(books).values()) == {2}
    seats.close()


def test_who_stays_counts_empty_epochs_as_who_joins() -> None:
    """Two in a row are an error: of the new ranks all have seen none."""
    top, wider = Top(1, 4, 8), Top(2, 4, 8)
    with_few = functools.partial(_make_dropping, {"f1": 6})
    seats, books = Seats(with_few, top), Books()
    assert seats.next(books) is None
    seats = seats.rescale(wider, with_few, [0, -1], seats.state())
    assert seats.next(books) is None
    with pytest.raises(rd.DataStateError, match="Two epochs in a row hold less than one global batch of 8"):
        seats.next(books)
    seats.close()


def _make_dropping(files: dict[str, int], top: Top) -> rd.DataLoader:
    pipeline = Pipeline(("Filter", ("Files", False)), files)
    return rd.DataLoader(
        pipeline, global_batch_size=top.o, micro_batch_size=top.b, num_logical_shards=8, collate_fn=as_samples
    )


@pytest.mark.parametrize("top", [Top(2, 2, 8), Top(4, 1, 4), Top(2, 2, 4), Top(3, 1, 3), Top(2, 2, 8, 1)], ids=str)
def test_a_read_that_fails_on_one_rank_keeps_no_other_waiting(top: Top) -> None:
    """Wherever in an epoch: while batches are made ahead, while what is left is counted, in the proof."""
    pipeline = Pipeline(("Filter", ("Files", False)), {"f1": 40, "f2": 31})
    kept = Counter(document["id"] for document in pipeline.source.documents if document["id"] % 3 != 1)
    for at in range(1, 110, 9):
        seats, books = Seats(lambda top: _make(pipeline, top), top), Books()
        fail_in(at)
        while seats.next(books) is not None:
            pass
        fail_in(0)
        seats.close()
        assert _ids(books) == kept


def test_a_blocklist_may_change_wherever_an_epoch_is() -> None:
    """Also where what is left has been counted and redistributed: some of that is blocked now."""
    plan, files = ("Blocked", ("Files", 4)), {"f1": 40, "f2": 31}
    rng = random.Random(0)
    before, blocked = ({n for n in range(21_000, 23_000) if rng.random() < 0.5} for _ in range(2))
    for saved_at in range(1, 14):
        first, books = Seats(lambda top: _make(Pipeline(plan, files, before), top), Top(2, 2, 8)), Books()
        while len(books.batches) * 2 + bool(books.open and books.open[0]) < saved_at and not first.lead.ended:
            first.next(books)
        then = Seats(lambda top: _make(Pipeline(plan, files, blocked), top), Top(2, 2, 8))
        delivered, ended = _ids(books), first.lead.ended
        then.load(first.state())
        while then.next(books) is not None:
            pass
        first.close()
        then.close()
        later = _ids(books) - delivered
        assert not any(number in blocked for number in later)
        if not ended:
            rows = {row["id"] for row in Pipeline(plan, files).source.documents}
            assert not {*_ids(books)} - rows
            assert {n for n in rows if n not in before | blocked} <= {*_ids(books)}
            assert max(_ids(books).values()) == 1


_MIXTURE = ("Mix", "samples", "never", (1, 1), None, None, [("Files", 4), ("Reader", 1, 4)])


def test_a_read_that_fails_while_files_join_keeps_no_other_waiting() -> None:
    """What has begun is read to know where they join: on one of two ranks it fails, and nothing has changed on either."""
    plan, few, more = ("CleanDocuments", _MIXTURE), {"f1": 24, "f4": 14}, {"f1": 24, "f2": 19, "f4": 14}
    first, books = Seats(lambda _: _endless(Pipeline(plan, few)), Top(2, 4, 8)), Books()
    first.take(8, books)
    then = Seats(lambda _: _endless(Pipeline(plan, more)), Top(2, 4, 8))
    before = then.state()
    fail_in(1)
    either = r"this passes|Another dp rank could not"  # whichever reads first
    with pytest.raises((OSError, RuntimeError), match=either) as raised:
        then.load(first.state())
    fail_in(0)
    assert "ALONE" not in str(getattr(raised.value, "__notes__", ""))
    assert not same_state(before, then.state())
    then.load(first.state())
    then.take(8, books)
    lead = then.lead
    Reference(lead.loader._stream.setup.recipe, dict(lead.stream.schema.histories)).check(books, repeat=True)
    first.close()
    then.close()


def _endless(pipeline: Pipeline) -> rd.DataLoader:
    sizes = {"global_batch_size": 8, "micro_batch_size": 4, "num_logical_shards": 16}
    return rd.DataLoader(pipeline, **sizes, repeat=True, collate_fn=as_samples)
