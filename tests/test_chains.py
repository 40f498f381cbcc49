"""R1 to R4 over chains of topologies, with a save at any micro batch of any segment, and all ranks but one lost there."""

from typing import Any, NamedTuple, TypeAlias

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import rescale_data as rd
from tests.nodes.zoo import ENDLESS, STOCK
from tests.pipelines import KNOWN, PIPELINES, ZOO, data_for, plain
from tests.promises import (
    Begin,
    Case,
    check_epochs,
    check_exactly_once,
    check_load,
    check_same_batches,
    endless,
    run_of,
)
from tests.simulate import Run, Topology, same_state
from tests.states import opened


class Segment(NamedTuple):
    """Micro batches taken in one topology, with a peek or a new iterator before some of them."""

    topology: Topology
    micro_batches: int
    peeks_at: int
    iterates_at: int


Chain: TypeAlias = tuple[Case, list[Segment]]


def play(case: Case, segments: list[Segment]) -> tuple[Run, list[Begin]]:
    """Run a chain; also where the count of steps began, and with which state."""
    run, state = run_of(case), None
    begins: list[Begin] = []
    for segment in segments:
        run.resume(segment.topology, state)
        if state is not None:
            check_load(state, run.loaded, segment.topology)
        if state is None or opened(run.loaded)["origin"] != opened(state)["origin"]:
            begins.append((len(run.global_batches), state))
        for i in range(segment.micro_batches):
            if i == segment.peeks_at:
                peek(run)
            if i == segment.iterates_at:
                run.iterate()
            run.take(1)
        state = run.save()
        assert same_state(state, run.save())
    return run, begins


def peek(run: Run) -> None:
    """On every rank, which changes nothing."""
    before = run.save()
    shown = [_shown(loader) for loader in run.loaders]
    assert shown == [_shown(loader) for loader in run.loaders]
    assert all((batch is None) == run.loaders[0]._stream.cursor.epoch_ended for batch in shown)
    assert same_state(before, run.save())


def _shown(loader: rd.DataLoader) -> Any:
    """`None` at the end of an epoch."""
    try:
        return plain(loader.peek()["samples"])
    except StopIteration:
        return None


def segments_of(topologies: st.SearchStrategy[Topology]) -> st.SearchStrategy[list[Segment]]:
    """Segments, of which some are read ahead by a thread of each rank."""
    counts = st.integers(0, 9)
    topologies = st.builds(lambda size, ahead: size._replace(ahead=ahead), topologies, st.sampled_from([0, 1, 3]))
    return st.lists(st.builds(Segment, topologies, counts, counts, counts), min_size=1, max_size=5)


@st.composite
def any_chain(draw: st.DrawFn, kinds: list[str], *, repeat: bool, max_ranks: int = 5) -> Chain:
    """W, b and O of each segment are free: most are not aligned."""
    sizes = st.tuples(st.integers(1, max_ranks), st.integers(1, 4), st.integers(1, 3))
    topologies = sizes.map(lambda size: Topology(size[0], size[1], size[0] * size[1] * size[2]))
    n = draw(
        st.sampled_from([5, 7, 12, 20, 24] + ([96] if kinds == ["rows"] and not repeat else []))
    )  # 96: empty shards
    tail = draw(st.sampled_from(["drop", "pad"]))
    num_rows = draw(st.sampled_from([4 * n, 4 * n + 5, 5 * n] if repeat else [80, 113, 144]))
    return Case(draw(st.sampled_from(kinds)), num_rows, n, repeat, tail), draw(segments_of(topologies))


SIZES = ((24, 24), (24, 12), (12, 36), (12, 12), (30, 60), (48, 12), (8, 32))
FEW = ((24, 12), (12, 12), (12, 24), (8, 8))
"""N and O for some fifty rows: a row at least for each shard, and more than a global batch in an epoch."""


@st.composite
def aligned_chain(
    draw: st.DrawFn, kinds: list[str], *, repeat: bool, max_ranks: int = 6, sizes: tuple[tuple[int, int], ...] = SIZES
) -> Chain:
    n, o = draw(st.sampled_from(sizes))
    plan = rd.plan(o, num_logical_shards=n, num_workers=0)
    options = [Topology(p.dp_world_size, p.micro_batch_size, o) for p in plan if p.dp_world_size <= max_ranks]
    tail = draw(st.sampled_from(["drop", "pad"]))
    num_rows = draw(st.sampled_from([4 * n, 4 * n + 5, 5 * n] if repeat else [150, 163, 192]))
    return Case(draw(st.sampled_from(kinds)), num_rows, n, repeat, tail), draw(segments_of(st.sampled_from(options)))


phases = [Phase.explicit, Phase.reuse, Phase.generate]  # each example is a whole run: to shrink one takes minutes
some = settings(max_examples=settings().max_examples * 2 // 5, phases=phases)
fewer = settings(max_examples=settings().max_examples // 4, phases=phases)
ALL, UNKNOWN = list(PIPELINES), sorted(set(PIPELINES) - KNOWN)
OF_OURS = [name for name in ZOO if name not in STOCK]
WITH_ENDS = sorted(set(OF_OURS) - set(ENDLESS))


CHAINS = {
    "any, endless": (any_chain(ALL, repeat=True), some),
    "any, epochs": (any_chain(["rows"], repeat=False), some),
    "any, counted epochs": (any_chain(UNKNOWN, repeat=False, max_ranks=1), some),
    "any of our nodes, endless": (any_chain(OF_OURS, repeat=True), fewer),
    "any of our nodes, epochs": (any_chain(WITH_ENDS, repeat=False, max_ranks=1), fewer),
    "aligned, endless": (aligned_chain(ALL, repeat=True), some),
    "aligned, epochs": (aligned_chain(["rows"], repeat=False), some),
    "aligned, counted epochs": (aligned_chain(UNKNOWN, repeat=False, max_ranks=1), some),
    "aligned of our nodes, endless": (aligned_chain(OF_OURS, repeat=True, sizes=FEW), fewer),
    "aligned of our nodes, epochs": (aligned_chain(WITH_ENDS, repeat=False, max_ranks=1, sizes=FEW), fewer),
}
"""Chains of topologies; epochs whose samples must be counted are redistributed at their end on one rank."""


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_topologies(name: str) -> None:
    """Each shard delivers its samples in order, all ranks end an epoch together; aligned, batches are those of one rank."""
    chains, profile = CHAINS[name]

    @given(chains)
    @profile
    def test(chain: Chain) -> None:
        case, segments = chain
        run, begins = play(case, segments)
        if not case.repeat:
            run.take_epoch()
            check_epochs(case, run)
        check_exactly_once(case, run)
        if name.startswith("aligned"):
            check_same_batches(case, run, segments[0].topology.o, begins)

    test()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_a_save_at_every_micro_batch_of_two_epochs(kind: str, tail: str) -> None:
    """On the same topology a resume is exact wherever it is: in mid-step, in the remainder, at an epoch's end, in the next."""
    topology = Topology(2 if kind in KNOWN else 1, 2, 12)
    case = Case(kind, 90, 9, False, tail)
    whole = run_of(case)
    whole.resume(topology)
    whole.take_epoch()
    whole.iterate()
    whole.take_epoch()
    run = run_of(case)
    run.resume(topology)
    while len(run.global_batches) < len(whole.global_batches):
        run.take(1)
        state = run.save()
        run.resume(topology, state)
        assert same_state(state, run.loaded)
    assert run.global_batches == whole.global_batches
    assert run.delivered == whole.delivered
    check_epochs(case, run)


@pytest.mark.parametrize(
    ("kind", "repeats"),
    [(kind, (False, True)) for kind in ALL] + [(kind, (True, False)) for kind in ALL if kind != "packed"],
)
def test_a_run_may_become_endless_and_end_again(kind: str, repeats: tuple[bool, bool]) -> None:
    """From any micro batch of an epoch, those of its end included; both are one stream, but for a packer's padded end."""
    w, samples = 2 if kind in KNOWN else 1, 0
    first, second = (Case(kind, 90, 9, repeat, "pad") for repeat in repeats)
    for num in range(1, 30):
        run, after = run_of(first), run_of(second)
        run.resume(Topology(w, 2, 12))
        run.take(num)
        if run.loaders[0].epoch:
            break
        after.resume(Topology(w, 2, 12), run.save())
        after.take(4)
        for shard in range(9):
            found = run.delivered[0, shard] + after.delivered[0, shard]
            assert found == endless(kind, 90, 9, shard, len(found))
            samples += len(found)
    assert samples


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("w", [1, 3])
def test_the_first_batch_after_a_resume_reads_as_many_rows_wherever_it_is(kind: str, w: int) -> None:
    """R4: nothing is replayed."""
    case, data = Case(kind, 2000, 12, True, "drop"), data_for(kind, 2000)
    read, steps_an_epoch = list[int](), 2000 // 12
    for step in (steps_an_epoch // 100, steps_an_epoch // 2, steps_an_epoch * 99 // 100, 5 * steps_an_epoch):
        run = run_of(case, data)
        run.resume(Topology(w, 12 // w, 12))
        for loader in run.loaders:
            loader.skip(step * 12)
        state, before = run.save(), data.num_read
        run.resume(Topology(w, 12 // w, 12), state)
        loaded = data.num_read - before
        for batches in run.iterators:
            before = data.num_read
            next(batches)
            read.append(loaded + data.num_read - before)
    assert max(read) <= 12 // w * {"packed": 20}.get(kind, 6), read
