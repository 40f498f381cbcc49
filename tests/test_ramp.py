"""`DataLoader.reopen`: a ramp in one process is a chain of saves and loads."""

import functools
import threading
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rescale_data as rd
from tests.pipelines import KNOWN, PIPELINES
from tests.promises import Case, check_epochs, check_exactly_once, run_of
from tests.simulate import Run, Topology, same_state

UNKNOWN = sorted(set(PIPELINES) - KNOWN)


class Ramp(NamedTuple):
    """Micro batches taken with one global batch; b stays."""

    case: Case
    b: int
    segments: list[tuple[int, int]]


@st.composite
def ramps(draw: st.DrawFn, kinds: list[str], *, repeat: bool) -> Ramp:
    """Aligned or not; a step need not be complete, and then the ramp waits for it."""
    b = draw(st.integers(1, 3))
    segments = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=2, max_size=5))
    n, tail = draw(st.sampled_from([5, 12, 24])), draw(st.sampled_from(["drop", "pad"]))
    return Ramp(Case(draw(st.sampled_from(kinds)), 90, n, repeat, tail), b, segments)


def play(ramp: Ramp, *, live: bool) -> tuple[Run, list[dict[str, Any]]]:
    """The run, and the states at which the batch changes: in the same loaders, or loaded into new ones."""
    run, states = run_of(ramp.case), []
    for segment, (a, num_micro_batches) in enumerate(ramp.segments):
        topology = Topology(1, ramp.b, ramp.b * a)
        if not live or not segment:
            run.resume(topology, states[-1] if states else None)
        else:
            for loader in run.loaders:
                loader.reopen(global_batch_size=topology.o)
        run.take(num_micro_batches)
        while (run.loaders[0]._stream.clock.samples - run.loaders[0]._stream.clock.origin) % topology.o:
            run.take(1)
        states.append(run.save())
    return run, states


def check(ramp: Ramp) -> None:
    (live, live_states), (chain, chain_states) = play(ramp, live=True), play(ramp, live=False)
    assert [batch.rows for batch in live.global_batches] == [batch.rows for batch in chain.global_batches]
    assert live.delivered == chain.delivered
    assert all(same_state(one, other) for one, other in zip(live_states, chain_states, strict=True))


few = settings(max_examples=max(3, settings().max_examples // 10))


@given(ramps(list(PIPELINES), repeat=True))
@few
def test_a_ramp_is_a_chain_of_saves_and_loads(ramp: Ramp) -> None:
    check(ramp)


@given(ramps(["rows", *UNKNOWN], repeat=False))
@few
def test_over_ends_of_epochs(ramp: Ramp) -> None:
    check(ramp)


def loader_of(**others: Any) -> rd.DataLoader:
    return rd.DataLoader([{"x": i} for i in range(96)], **{"global_batch_size": 8, "micro_batch_size": 4, **others})


def test_within_one_loop_over_the_batches() -> None:
    loader, rows, accumulation = loader_of(num_logical_shards=24), [], []
    for batch in loader:
        rows += batch["x"].tolist()
        accumulation.append(loader.gradient_accumulation_steps)
        if len(rows) == 24:
            loader.reopen(global_batch_size=12)
    assert sorted(rows) == list(range(96))
    assert accumulation == [2] * 6 + [3] * 18
    loader.reopen(global_batch_size=24)  # after the last batch, before the next epoch
    assert sorted(x for batch in loader for x in batch["x"].tolist()) == list(range(96))
    assert loader.step == 3 + 6 + 4


def test_the_order_of_the_dataset_is_that_of_one_global_batch() -> None:
    loader = loader_of(shuffle=False, num_logical_shards=24)
    with pytest.raises(ValueError, match="root: global_batch_size"):
        loader.reopen(global_batch_size=12)
    loader.reopen(global_batch_size=8)
    assert [x for batch in loader for x in batch["x"].tolist()] == list(range(96))


@pytest.mark.parametrize(("before", "after"), [(10, 5), (5, 10), (4, 3), (3, 7)])
@pytest.mark.parametrize("step", [1, 2, 6, 11, 13])
def test_the_iterator_goes_on_where_epochs_have_other_lengths(step: int, before: int, after: int) -> None:
    loader = loader_of(micro_batch_size=8, repeat=True, steps_per_epoch=before)
    batches = iter(loader)
    for _ in range(step):
        if next(batches, None) is None:
            batches = iter(loader)
            next(batches)
    loader.reopen(steps_per_epoch=after)
    assert len(list(batches)) == after - step % after
    assert loader.epoch == loader.step // after


def test_off_a_boundary_it_names_the_next_one() -> None:
    loader = loader_of()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with pytest.raises(ValueError, match=r"1 of its 2 micro batches .* when loader.step is 2, after 1 more"):
        loader.reopen(global_batch_size=12)
    next(batches)
    assert loader.step == 2
    loader.reopen(global_batch_size=12)
    next(batches)


@pytest.mark.parametrize(("o", "message"), [(6, "not a multiple"), (0, "at least 1"), (200, "An epoch has 96 samples")])
def test_one_that_does_not_fit_changes_nothing(o: Any, message: str) -> None:
    loader = loader_of()
    before = loader.state_dict()
    with pytest.raises(ValueError, match=message):
        loader.reopen(global_batch_size=o)
    assert same_state(before, loader.state_dict())


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("kind", ["every", "skewed"])
def test_a_larger_batch_before_any_batch_of_an_epoch_that_must_be_read(kind: str, tail: str) -> None:
    """Also before the first of a round, which may hold less than the new batch though more is left."""
    case = Case(kind, 90, 5, False, tail)
    for num_before in range(50):
        run = run_of(case)
        run.resume(Topology(1, 1, 1))
        run.take(num_before)
        run.resume(Topology(1, 6, 6), run.save())
        run.take_epoch()
        run.iterate()
        check_exactly_once(case, run)
        check_epochs(case, run)


def test_a_tokenizer_is_never_called_by_two_threads() -> None:
    """Also not while the new pipeline asks it for the tokens that it is known by; Rust's say "Already borrowed"."""
    calling, is_asked, num_at_once = list[int](), threading.Event(), list[int]()

    def letters(texts: list[str]) -> list[list[int]]:
        calling.append(0)
        num_at_once.append(len(calling))
        if threading.current_thread() is threading.main_thread():
            is_asked.set()
        elif len(num_at_once) > 8:  # in the thread, ahead: until the main thread comes
            is_asked.wait(0.2)
        calling.pop()
        return [[len(text)] for text in texts]

    rows = [{"text": "x" * i} for i in range(96)]
    loader = rd.DataLoader(
        lambda shard: rd.Tokenize(rd.Reader(rows, shard), letters, "text", batch_size=1),
        global_batch_size=4,
        num_logical_shards=4,
        prefetch=9,
    )
    is_asked.clear()
    next(iter(loader))
    loader.reopen(prefetch=3)
    assert is_asked.is_set()
    assert set(num_at_once) == {1}


def packed(num_rows: int, shard: rd.Shard) -> rd.Node[Any]:
    documents = rd.DatasetSource([{"tokens": list(range(1 + i * 7 % 13))} for i in range(num_rows)], "documents")
    return rd.TokenPacker(rd.Reader(documents, shard), column="tokens", seq_len=5, eos_id=None)


@pytest.mark.parametrize(("kind", "num_rows"), [("rows", 50), ("packed", 22), ("packed", 44)])
@pytest.mark.parametrize("num_before", range(1, 15))
def test_a_trainer_that_counts_iterators_trains_as_many_epochs(kind: str, num_rows: int, num_before: int) -> None:
    """After the last batch of an epoch, too: whether its end was seen is known to the object, and not to a state."""
    pipeline = range(num_rows) if kind == "rows" else functools.partial(packed, num_rows)
    loader = rd.DataLoader(pipeline, global_batch_size=4, micro_batch_size=4, num_logical_shards=8)
    batches = iter(loader)
    for _ in range(num_before):
        next(batches, None)
    epoch, ended = loader.epoch, loader._epoch_ended
    loader.reopen(micro_batch_size=2)
    assert loader.epoch == epoch
    assert next(iter(loader), None) is not None
    assert loader.epoch == epoch + ended
