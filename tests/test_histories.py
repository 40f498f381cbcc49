"""Whatever a trainer does, on whatever ranks: no sample is lost or repeated, no rank waits for ever. See `tests.histories`."""

import functools
import random
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import pytest

import rescale_data as rd
from tests.histories.books import Books, difference
from tests.histories.crew import Hang, in_threads
from tests.histories.history import accepts, fail_in, failing_reads
from tests.histories.plans import Files, Pipeline
from tests.histories.ranks import Seats, Top
from tests.histories.shards import history_of
from tests.pipelines import PIPELINES, as_samples
from tests.states import opened


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with in_threads(), failing_reads():
        yield


@pytest.mark.parametrize("seed", range(120))
def test_a_random_history(seed: int) -> None:
    """``python -m tests.histories SEED --one`` says what was done in it, ``FIRST SECONDS`` plays others."""
    history = history_of(seed)
    try:
        history.play()
    except (Exception, Hang) as error:
        if not accepts(error):
            raise


def _make(pipeline: Any, top: Top, **how: Any) -> rd.DataLoader:
    sizes: Any = {"global_batch_size": top.o, "micro_batch_size": top.b, "num_logical_shards": 8, "num_workers": top.k}
    return rd.DataLoader(pipeline, **{**sizes, "tail": "pad", "verify": True, **how}, collate_fn=as_samples)


def _seats(top: Top, *pipeline: Any, **how: Any) -> Seats:
    return Seats(functools.partial(_make, Pipeline(*pipeline), **how), top)


def _ids(books: Books) -> Counter[int]:
    return Counter(sample["id"] for samples in books.delivered.values() for sample in samples)


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_a_save_at_every_micro_batch_of_two_epochs(kind: str, tail: str) -> None:
    """On the same ranks a resume is exact wherever it is: in mid-step, in the remainder, at an epoch's end, in the next."""
    whole, seats, other = (_seats(Top(2, 2, 12), ("Kind", kind, 90), tail=tail) for _ in range(3))
    expected, books = Books(), Books()
    while whole.lead.data_epoch < 2:
        whole.next(expected)
    while len(books.batches) < len(expected.batches):
        seats.take(1, books)
        other.load(seats.state())
        assert not difference(seats.state(), other.state())
        seats, other = other, seats
    assert books.batches == expected.batches
    books.ended = 2
    seats.reference().check(books, repeat=False)
    seats.reference().check_epochs(books, 8, tail)


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("becomes_endless", [True, False])
def test_a_run_may_become_endless_and_end_again(kind: str, becomes_endless: bool) -> None:
    """From any micro batch of an epoch, those of its end included; of a packer, before its padded end."""
    for num in range(1, 30 if kind != "packed" else 9 * becomes_endless):
        first, then = (
            _seats(Top(2, 2, 12), ("Kind", kind, 90), repeat=repeat is becomes_endless, verify=False)
            for repeat in (False, True)
        )
        books = Books()
        first.take(num, books)
        state = opened(first.state())
        if first.lead.loader.epoch:
            break
        then.load(first.state())
        if becomes_endless and (state["shards"]["remainder"] >= 0).any():
            assert opened(then.state())["origin"] == state["samples"], "steps are counted anew"
        then.take(4, books)
        books.delivered = {key: samples for key, samples in books.delivered.items() if key[0] == 0}  # type: ignore[assignment]
        (then if becomes_endless else first).reference().check(books, repeat=True)


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_a_larger_batch_before_any_batch_of_an_epoch_that_must_be_read(tail: str) -> None:
    """Also before the first of a round, which may hold less than the new batch though more is left."""
    for num_before in range(50):
        first, then = (
            _seats(top, ("Kind", "skewed", 90), tail=tail, num_logical_shards=5) for top in (Top(1, 1, 1), Top(1, 6, 6))
        )
        books = Books()
        first.take(num_before, books)
        before = first.lead.stream.clock.dropped_samples
        then.load(first.state())
        books.dropped[0] += then.lead.stream.clock.dropped_samples - before
        while then.next(books) is not None:
            pass
        books.ended = then.lead.data_epoch
        then.reference().check(books, repeat=False)
        then.reference().check_epochs(books, 5, tail)


@pytest.mark.parametrize("num_delivered", [1, 4, 11, 40])
@pytest.mark.parametrize("change", ["files", "weights", "seq_len", "nothing"])
@pytest.mark.parametrize("top", ["Pack", "Whole", "Shuffle"])
def test_what_changed_before_or_since_it_was_delivered(top: str, change: str, num_delivered: int) -> None:
    """Files that came later were not read for it; windows of earlier weights or lengths end as they began."""

    def seats_of(files: Any, seq_len: int, weight: int) -> Seats:
        rows = ("Mix", "samples", "never", (1, weight), None, None, [("Files", True), ("Files", True)])
        plan = ("Shuffle", rows, 5) if top == "Shuffle" else (top, (("seq_len", seq_len), ("eos_id", None)), rows)
        return _seats(Top(1, 4, 4), plan, files, **{**_ENDLESS, "num_logical_shards": 4, "verify": True})

    changed = 9 if change == "seq_len" else 12, 3 if change == "weights" else 1
    first, then = seats_of(_FEW, 12, 1), seats_of(_FEW, *changed)
    first.take(3, Books())
    then.load(first.state())
    then.take(1, Books())
    state = then.state()
    then.take(num_delivered, Books())
    here, there = (seats_of(_MORE if change == "files" else _FEW, *changed) for _ in range(2))
    here.all(lambda seat: seat.loader.load_state_dict(state, 4 * num_delivered))
    there.load(then.state())
    assert not difference(here.state(), there.state())
    found, expected = Books(), Books()
    here.take(20, found)
    there.take(20, expected)
    assert found.delivered == expected.delivered


@pytest.mark.parametrize("shard", [0, 11])
def test_a_failed_proof_of_one_rank_is_an_error_of_all_before_the_same_batch(shard: int) -> None:
    """Of a shard that ends first, in the main phase, and of one that ends last, in a round of the remainder."""

    def error_of(seat: Any) -> tuple[int, str]:
        batches = list[Any]()
        with pytest.raises(rd.DataStateError) as raised:
            deque(map(batches.append, seat.loader))
        return len(batches), str(raised.value)

    seats = _seats(Top(4, 1, 12), ("Kind", "skewed", 300), num_logical_shards=12, tail="drop", prefetch=2)
    seats.take(3, Books())
    state = seats.state()
    columns = opened(state)["shards"]
    columns[next(name for name in columns if name.endswith("row"))][shard] += 1
    seats.load(state)
    for again in range(2):
        found = seats.all(error_of)
        assert len({num for num, _ in found}) == 1
        assert (found[0][0] == 0) == bool(again), "each time that it is asked for"
        assert ["lost or repeated" in said for _, said in found] == [rank == shard * 4 // 12 for rank in range(4)]


@pytest.mark.parametrize("delivered", [0, 8])
def test_who_joins_where_an_epoch_ends_sees_the_end_with_the_others(delivered: int) -> None:
    """The last batch has been taken, and nobody has seen that it was the last."""
    seats, books, states = _seats(Top(2, 2, 8), ("Files", False), {"f1": 16}), Books(), list[Any]()
    for _ in range(4):
        assert seats.next(books) is not None
        states.append(seats.state())
    seats = seats.rescale(Top(4, 1, 8), seats.make, [1, -1, 0, -1], states[1 if delivered else 3], delivered)
    assert seats.next(books) is None
    assert sum(seats.next(books) is not None for _ in range(4)) == 4
    assert set(_ids(books).values()) == {2}
    seats.close()


def test_who_stays_counts_empty_epochs_as_who_joins() -> None:
    """Two in a row are an error: of the new ranks all have seen none."""
    seats = _seats(Top(1, 4, 8), ("Filter", ("Files", False)), {"f1": 6}, tail="drop", verify=False)
    books = Books()
    assert seats.next(books) is None
    seats = seats.rescale(Top(2, 4, 8), seats.make, [0, -1], seats.state())
    assert seats.next(books) is None
    with pytest.raises(rd.DataStateError, match="Two epochs in a row hold less than one global batch of 8"):
        seats.next(books)
    seats.close()


@pytest.mark.parametrize("top", [Top(2, 2, 8), Top(4, 1, 4), Top(2, 2, 4), Top(3, 1, 3), Top(2, 2, 8, 1)], ids=str)
def test_a_read_that_fails_on_one_rank_keeps_no_other_waiting(top: Top) -> None:
    """Wherever in an epoch: while batches are made ahead, while what is left is counted, in the proof."""
    plan, files = ("Filter", ("Files", False)), {"f1": 40, "f2": 31}
    kept = Counter(document["id"] for document in Files(files).documents if document["id"] % 3 != 1)
    for at in range(1, 110, 9):
        seats, books = _seats(top, plan, files), Books()
        fail_in(at)
        while seats.next(books) is not None:
            pass
        fail_in(0)
        seats.close()
        assert _ids(books) == kept


def test_a_blocklist_may_change_wherever_an_epoch_is() -> None:
    """Also where what is left has been counted and redistributed: some of that is blocked now."""
    plan, files, rng = ("Blocked", ("Files", 4)), {"f1": 40, "f2": 31}, random.Random(0)
    before, blocked = ({n for n in range(21_000, 23_000) if rng.random() < 0.5} for _ in range(2))
    rows = {row["id"] for row in Files(files).documents}
    for saved_at in range(1, 14):
        first, then, books = (
            _seats(Top(2, 2, 8), plan, files, before),
            _seats(Top(2, 2, 8), plan, files, blocked),
            Books(),
        )
        while len(books.batches) * 2 + bool(books.open and books.open[0]) < saved_at and not first.lead.ended:
            first.next(books)
        delivered, ended = _ids(books), first.lead.ended
        then.load(first.state())
        while then.next(books) is not None:
            pass
        first.close()
        then.close()
        later = _ids(books) - delivered
        assert not any(number in blocked for number in later)
        if not ended:
            assert rows - before - blocked <= {*_ids(books)} <= rows
            assert max(_ids(books).values()) == 1


_LABELS = (("seq_len", 6), ("eos_id", 1), ("labels", True))
_MIXTURE = ("Mix", "samples", "never", (1, 1), None, None, [("Files", 4), ("Reader", 1, 4)])
_FEW, _MORE = {"f1": 24, "f4": 14}, {"f1": 24, "f2": 19, "f4": 14}
_ENDLESS: dict[str, Any] = {"repeat": True, "num_logical_shards": 16, "tail": "drop", "verify": False}


def test_files_that_are_added_leave_the_label_of_the_next_document_as_it_is() -> None:
    """It may be of an epoch behind the one at which whoever goes on within it begins to read. Windows: random histories."""
    plan = ("Pack", _LABELS, ("Files", 4))
    first, then, books = (
        _seats(Top(1, 4, 8), plan, _FEW, **_ENDLESS),
        _seats(Top(1, 4, 8), plan, _MORE, **_ENDLESS),
        Books(),
    )
    for _ in range(7):
        first.take(3, books)
        then.load(first.state())
        later = books.copy()
        then.take(8, later)
        then.reference().check(later, repeat=True)
    first.close()
    then.close()


def test_a_read_that_fails_while_files_join_keeps_no_other_waiting() -> None:
    """What has begun is read to know where they join: on one of two ranks it fails, and nothing has changed on either."""
    plan, top, books = ("CleanDocuments", _MIXTURE), Top(2, 4, 8), Books()
    first, then = _seats(top, plan, _FEW, **_ENDLESS), _seats(top, plan, _MORE, **_ENDLESS)
    first.take(8, books)
    before = then.state()
    fail_in(1)
    either = r"this passes|Another dp rank could not"  # whichever reads first
    with pytest.raises((OSError, RuntimeError), match=either) as raised:
        then.load(first.state())
    fail_in(0)
    assert "ALONE" not in str(getattr(raised.value, "__notes__", ""))
    assert not difference(before, then.state())
    then.load(first.state())
    then.take(8, books)
    then.reference().check(books, repeat=True)
    first.close()
    then.close()
