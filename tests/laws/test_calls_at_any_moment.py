"""Law 4: a public call gives what it gives without workers, or a documented error, whatever the feed is within.

Two calls, one after the other, at each moment, of loaders that make batches in a thread or in worker processes, that send them
(`transfer=`), or that peers share, on one rank or two; then the rest of the batches, and the state. All of it
is compared with a loader without peers that makes each batch when it is asked for.
"""

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rescale_data as rd
from tests.distributed.ranks import run_ranks
from tests.laws.pairs import Case, cases, name_of
from tests.nodes.resume import plain
from tests.states import where

pytestmark = pytest.mark.usefixtures("group")
ROWS, AHEAD, HOLD_SECONDS = 124, 4, 0.2
"""A batch that is `AHEAD` of those taken has the row that is held. It is held so long while calls are made, many looks."""


class Corpus:
    """Rows of which one is held, or cannot be read.

    Args:
        row: Whoever reads it tells so in the pipe ``folder/entered``.
        how: "held": the reader then waits until nobody has the lock of ``folder/gate``. "broken": it fails.
    """

    def __init__(self, folder: Path | None = None, row: int = -1, how: str = "") -> None:
        self.folder, self.row, self.how = folder, row, how

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> int:
        if row == self.row:
            if self.folder is not None:
                (self.folder / "entered").write_bytes(b".")
                with (self.folder / "gate").open() as gate:
                    fcntl.flock(gate, fcntl.LOCK_SH)
            if self.how == "broken":
                raise OSError("corrupt")
        return row


def is_odd(row: int) -> bool:
    return row % 2 == 1


def filtered(source: Corpus, shard: rd.Shard) -> Any:
    return rd.Filter(rd.Reader(source, shard), is_odd)


def mixed(source: Corpus, shard: rd.Shard) -> Any:
    readers = {"a": rd.Reader(source, shard), "b": rd.Reader(range(200, 240), shard)}
    return rd.WeightedSampler(readers, {"a": 3, "b": 1})


def cost(row: int) -> int:
    return 1 + row % 7


def flipped(batch: torch.Tensor) -> torch.Tensor:
    """Send a batch: twice, it would be as it was."""
    return ~batch


def flip_and_collate(rows: list[int]) -> torch.Tensor:
    return ~torch.tensor(rows)


PIPELINES: dict[str, tuple[Callable[..., Any] | None, dict[str, Any]]] = {
    "rows": (None, {}),
    "padded": (None, {"tail": "pad", "verify": True}),
    "filtered": (filtered, {}),
    "endless": (mixed, {"repeat": True}),
    "steps": (mixed, {"repeat": True, "steps_per_epoch": 5}),
    "balanced": (None, {"tail": "pad", "verify": True, "balance": rd.Balance(cost=cost)}),
    "balanced, filtered": (filtered, {"balance": rd.Balance(cost=cost)}),
}
"""A pipeline over a corpus, and arguments of the loader. The end of an epoch is known, or found by reading, or is none."""
ENDS = ("rows", "padded", "filtered", "steps", "balanced", "balanced, filtered")
FEEDS: dict[str, dict[str, Any]] = {
    "thread": {"prefetch": AHEAD + 1},
    "workers": {"num_workers": 2, "prefetch": AHEAD},
    "sent": {"prefetch": AHEAD + 1, "transfer": flipped},
    "workers, sent": {"num_workers": 2, "prefetch": AHEAD, "transfer": flipped},
}
DOORS = {f"{kind} of {ranks}": (kind, ranks) for ranks in (1, 2) for kind in ("loader", "peers")}
"""What a trainer asks for batches, and on how many ranks."""
MOMENTS = ("new", "taken", "full", "reading", "broken", "last taken", "end seen", "closed")
HELD = ("full", "reading", "broken")
"""Moments of a row that is held, or cannot be read."""


class Run:
    """A loader, and the newest iterator over it."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.states = loader, [loader.state_dict()]
        self.batches: Iterator[Any] | None = None

    def next(self) -> Any:
        if self.batches is None:
            self.batches = iter(self.loader)
        return next(self.batches)

    def iter(self) -> None:
        self.batches = iter(self.loader)

    def two_iterators(self) -> Any:
        older, self.batches = iter(self.loader), iter(self.loader)
        return next(older)

    def progress(self) -> Any:
        told = self.loader.progress()
        return {name: told[name] for name in sorted(told) if name.startswith(("global", "dropped", "padded"))}

    def numbers(self) -> Any:
        return [self.loader.step, self.loader.epoch, self.loader.last_batch_samples]

    def left(self) -> Any:
        return [outcome(lambda: self.loader.batches_left), outcome(lambda: len(self.loader))]


def refused(run: Run) -> None:
    run.loader.load_state_dict({**run.states[0], "seed": 5})


CALLS: dict[str, Callable[[Run], Any]] = {
    "next": Run.next,
    "iter": Run.iter,
    "state_dict": lambda run: where(run.loader.state_dict()),
    "load": lambda run: run.loader.load_state_dict(run.states[-1]),
    "skip": lambda run: run.loader.skip(2),
    "reset": lambda run: run.loader.reset(),
    "close": lambda run: run.loader.close(),
    "peek": lambda run: run.loader.peek(),
    "start": lambda run: run.loader.start(),
    "skip an epoch": lambda run: run.loader.skip(ROWS),
    "two iterators": Run.two_iterators,
    "load the first": lambda run: run.loader.load_state_dict(run.states[0]),
    "load refused": refused,
    "reopen": lambda run: run.loader.reopen(global_batch_size=8),
    "set_epoch": lambda run: run.loader.set_epoch(0),
    "set_epoch 1": lambda run: run.loader.set_epoch(1),
    "load what was delivered": lambda run: run.loader.load_state_dict(run.states[0], delivered=8),
    "reopen from a state": lambda run: run.loader.reopen(run.states[-1], micro_batch_size=4),
    "report": lambda run: sorted(run.loader.report()),
    "progress": Run.progress,
    "numbers": Run.numbers,
    "left": Run.left,
}
SECOND = list(CALLS)[:8]


def kind_of(case: Case) -> str:
    return DOORS[case["door"]][0]


def is_allowed(case: Case) -> bool:
    if case["door"] == "peers of 2" and "progress" in (case["call"], case["then"]):
        return False  # one that does not read knows its step alone
    if DOORS[case["door"]][1] > 1 and "workers" in case["feed"]:  # each rank would start a fork server
        return False
    if DOORS[case["door"]][1] > 1 and "balanced" in case["pipeline"] and case["moment"] in HELD:
        return False  # another rank may read the row than the one that delivers it
    return case["moment"] not in ("last taken", "end seen") or case["pipeline"] in ENDS


CASES = cases(
    {
        "call": list(CALLS),
        "then": SECOND,
        "moment": MOMENTS,
        "feed": list(FEEDS),
        "pipeline": list(PIPELINES),
        "taken": [2, 3],
        "door": list(DOORS),
    },
    is_allowed,
)


def opened(case: Case, feed: str, corpus: Corpus) -> Any:
    """Open the loader of a case; where `feed` is empty without peers, and with batches made when they are asked for."""
    pipeline, given = PIPELINES[case["pipeline"]]
    data = corpus if pipeline is None else partial(pipeline, corpus)
    arguments = {"global_batch_size": 4, "micro_batch_size": 2, "num_logical_shards": 8, **given, **FEEDS.get(feed, {})}
    if not feed and "sent" in case["feed"]:
        arguments["collate_fn"] = flip_and_collate
    if kind_of(case) == "loader":
        return rd.DataLoader(data, **arguments)
    one: Any = {"dp_rank": 0, "dp_world_size": 1, **arguments}
    return rd.DataLoader(lambda: data, peers=dist.group.WORLD, **one) if feed else rd.DataLoader(data, **one)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return plain(call())
    except Exception as error:
        cut = "corrupt" if "corrupt" in str(error) else str(error)  # a worker's has its traceback
        return type(error).__name__, cut


def take(run: Run, case: Case) -> None:
    """Come to the moment, but for what happens ahead."""
    if case["moment"] == "new":
        return
    if case["moment"] in ("last taken", "end seen"):
        num = sum(1 for _ in iter(opened(case, "", Corpus())))
        run.iter()
        for _ in range(num):
            run.next()
        if case["moment"] == "end seen":
            assert outcome(run.next)[0] == "StopIteration"
    for i in range(0 if run.batches else case["taken"]):
        if i == case["taken"] - 1:
            run.states.append(run.loader.state_dict())
        run.next()
    if case["moment"] == "closed":
        run.loader.close()


def called(run: Run, case: Case) -> list[Any]:
    """The results of the calls, then the batches that are left, at most 30, and the state."""
    results = [outcome(partial(CALLS[call], run)) for call in (case["call"], case["then"])]
    for _ in range(30):
        results += [outcome(lambda: run.loader.batches_left), outcome(run.next)]
        if results[-1] and isinstance(results[-1], tuple):
            break
    return [*results, outcome(lambda: where(run.loader.state_dict())), run.numbers()]


def compare(case: Case, folder: Path) -> tuple[list[Any], list[Any]]:
    """Return what a case gives, and what it gives where batches are made when they are asked for."""
    how = case["moment"] if case["moment"] in HELD else ""
    with opened(case, "", Corpus()) as loader:
        whole = [plain(batch) for batch in islice((batch for _ in range(3) for batch in loader), 10)]
    rows = [max(row, ~row) for row in [*whole[case["taken"] + AHEAD], *whole[case["taken"] + AHEAD + 1]]]
    row = next(row for row in rows if row < ROWS)
    with opened(case, "", Corpus(None, row, how)) as loader:
        run = Run(loader)
        take(run, case)
        expected = called(run, case)
    is_held = bool(how) and (kind_of(case) != "peers" or dist.get_rank() == 0)  # by one that reads
    os.mkfifo(folder / "entered")
    with (
        (folder / "gate").open("w") as gate,
        (folder / "entered").open("r+b", buffering=0) as entered,
        opened(case, case["feed"], Corpus(folder if how else None, row, how)) as loader,
    ):
        run = Run(loader)
        if how == "reading":
            fcntl.flock(gate, fcntl.LOCK_EX)
        take(run, case)
        if is_held:
            assert entered.read(1) == b"."
        release = threading.Timer(HOLD_SECONDS, fcntl.flock, (gate, fcntl.LOCK_UN))
        release.start()
        found = called(run, case)
        release.join()
    return found, expected


ALONE = [case for case in CASES if DOORS[case["door"]][1] == 1]
TOGETHER = [case for case in CASES if case not in ALONE]


@pytest.mark.parametrize("case", ALONE, ids=map(name_of, ALONE))
def test_a_call_at_any_moment(case: Case, tmp_path: Path) -> None:
    found, expected = compare(case, tmp_path)
    assert found == expected


def differences(folder: Path) -> dict[str, Any]:
    """Return what differs on this rank of two, by case."""
    found: dict[str, Any] = {}
    for number, case in enumerate(TOGETHER):
        own = folder / f"{number}-{dist.get_rank()}"
        own.mkdir()
        got, expected = compare(case, own)
        if got != expected:
            found[name_of(case)] = got, expected
        dist.barrier()
    return found


def test_a_call_at_any_moment_on_two_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, differences, tmp_path) == [{}, {}]
