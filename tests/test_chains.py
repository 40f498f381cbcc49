"""R1 to R4 over chains of topologies, with a save at any micro batch of any segment, and all ranks but one lost there."""

import random
from typing import Any

import pytest
from hypothesis import settings

from tests.histories.crew import Hang, in_threads
from tests.histories.history import History, accepts
from tests.nodes.zoo import ENDLESS, STOCK
from tests.pipelines import KNOWN, PIPELINES, ZOO, data_for
from tests.promises import Case, check_epochs, endless, run_of
from tests.simulate import Topology, same_state

SIZES = ((24, 24), (24, 12), (12, 36), (12, 12), (30, 60), (48, 12), (8, 32))
FEW = ((24, 12), (12, 12), (12, 24), (8, 8))
"""N and O for some fifty rows: a row at least for each shard, and more than a global batch in an epoch."""
ALL, UNKNOWN = list(PIPELINES), sorted(set(PIPELINES) - KNOWN)
OF_OURS = [name for name in ZOO if name not in STOCK]
WITH_ENDS = sorted(set(OF_OURS) - set(ENDLESS))


class Chain(History):
    """A history of a pipeline by its name, of enough rows that nothing is refused.

    Args:
        sizes: N and O that keep the order; if none, W, b and O of each segment are free, and most are not aligned.
    """

    max_ranks, actions = 6, {"take": 6, "ask": 2, "iterate": 1}

    def __init__(self, r: random.Random, kinds: list[str], *, repeat: bool, sizes: Any = None) -> None:
        super().__init__(r)
        self.repeat, self.aligned, self.steps, self.verify, self.faults = repeat, bool(sizes), None, False, False
        empty_shards = [96] if kinds == ["rows"] and not repeat else []
        self.n, self.o = r.choice(sizes or [(n, 0) for n in (5, 7, 12, 20, 24, *empty_shards)])
        self.sizes = [o for n, o in sizes or () if n == self.n]
        rows = [4 * self.n, 4 * self.n + 5, 5 * self.n] if repeat else [150, 163, 192] if sizes else [80, 113, 144]
        self.plan, self.collates, self.files = ("Kind", r.choice(kinds), r.choice(rows)), False, {}


some, fewer = settings().max_examples * 2 // 5, settings().max_examples // 4
CHAINS: dict[str, tuple[int, dict[str, Any]]] = {
    "any, endless": (some, {"kinds": ALL, "repeat": True}),
    "any, epochs": (some, {"kinds": ["rows"], "repeat": False}),
    "any, counted epochs": (some, {"kinds": UNKNOWN, "repeat": False}),
    "any of our nodes, endless": (fewer, {"kinds": OF_OURS, "repeat": True}),
    "any of our nodes, epochs": (fewer, {"kinds": WITH_ENDS, "repeat": False}),
    "aligned, endless": (some, {"kinds": ALL, "repeat": True, "sizes": SIZES}),
    "aligned, epochs": (some, {"kinds": ["rows"], "repeat": False, "sizes": SIZES}),
    "aligned, counted epochs": (some, {"kinds": UNKNOWN, "repeat": False, "sizes": SIZES}),
    "aligned of our nodes, endless": (fewer, {"kinds": OF_OURS, "repeat": True, "sizes": FEW}),
    "aligned of our nodes, epochs": (fewer, {"kinds": WITH_ENDS, "repeat": False, "sizes": FEW}),
}
"""How many chains there are, and of which pipelines."""


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_topologies(name: str) -> None:
    """Each shard delivers its samples in order, all ranks end an epoch together; aligned, batches are those of one rank."""
    (num_chains, given), refused = CHAINS[name], 0
    with in_threads():
        for seed in range(num_chains):
            chain = Chain(random.Random(f"{name} {seed}"), **given)
            try:
                chain.play()
            except (Exception, Hang) as error:
                error.add_note("\n".join([f"chain {seed} of {name}", *chain.log]))
                if not accepts(error):
                    raise
                refused += 1
    assert refused <= num_chains / 8, "a global batch may be larger than an epoch, but seldom"


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
