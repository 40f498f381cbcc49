"""`Balanced`: a feed that makes the micro batches of a step from the samples of all ranks, so that ranks finish together.

    read ahead, one rank's own samples    InThread(InProcess), Pool
    costs, the plan, samples that move    Balanced: all ranks of a group together
    collated, one step ahead              InThread

The rows of a step count as taken with its last micro batch: the table at a step's end is that of a run without balance.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from rescale_data.engine.agreement import failure_elsewhere
from rescale_data.engine.balance import Balance
from rescale_data.engine.collate import collate as stack
from rescale_data.engine.collate import with_valid
from rescale_data.engine.feed import Feed, Over
from rescale_data.engine.leg import Leg
from rescale_data.engine.message import from_bytes, to_bytes
from rescale_data.engine.micro_batch import MicroBatch, Rows, joined
from rescale_data.engine.options import MOST_SECONDS
from rescale_data.engine.ranks.circle import Call, Circle
from rescale_data.engine.ranks.meeting import digest
from rescale_data.engine.ranks.ranks import Ranks
from rescale_data.engine.runner import Collate, Exhausted
from rescale_data.engine.setup import Setup
from rescale_data.errors import DataStateError
from rescale_data.layout.step_plan import StepPlan
from rescale_data.state import Ints

STEP_WEIGHT = "step_weight"
_MADE, _ENDED, _UNREAD, _FAILED = range(4)
"""What a rank says of its samples of a step: made, ended (with the epoch), not made for an error, not those of the epoch."""
_CURE = (
    "State that was saved is whole; restart from it. timeout= of the loader is how long a rank may keep others waiting."
)


def as_samples(samples: list[Any]) -> list[Any]:
    """Return samples as they are: what the feed below collates with."""
    return samples


@dataclass(frozen=True)
class Group:
    """Ranks that exchange integers and samples, one exchange after the other.

    Args:
        members: Their dp ranks.
        me: Index of this one.
        circle: Their processes; `None` where there is one.
        number: Tells exchanges of one `begin` of the feed from those of another, which some ranks may have left.
    """

    members: list[int]
    me: int
    circle: Circle | None
    number: int = 0

    @classmethod
    def of(cls, members: list[int], ranks: Ranks) -> Group:
        is_alone, name = len(members) == 1, f"balance/{ranks.loader}/{digest(members)}"
        circle = None if is_alone or ranks.circle is None else ranks.circle.part(name, members)
        return cls(members, members.index(ranks.rank), circle)

    def next(self) -> Group:
        """Return the same ranks, whose exchanges are others."""
        return replace(self, number=self.number + 1)

    def gather(self, name: str, numbers: Ints) -> Ints:
        """Return integers of all members, stacked (collective)."""
        if self.circle is None:
            return numbers[None]
        return self.circle.gather(self._call(name), torch.from_numpy(numbers)).numpy()

    def swap(self, outgoing: dict[int, list[Any]], incoming: Sequence[int]) -> dict[int, list[Any]]:
        """Send lists to some members and receive those of others, by their index (both know of it)."""
        if self.circle is None or not (outgoing or incoming):
            return {}
        packed = {index: to_bytes(values) for index, values in outgoing.items()}
        sizes = {index: torch.tensor([body.numel(), start], device="cpu") for index, (body, start) in packed.items()}
        expected = {index: torch.empty(2, dtype=torch.int64, device="cpu") for index in incoming}
        self.circle.exchange(self._call("sizes"), sizes, expected)
        bodies = {index: torch.empty(int(size[0]), dtype=torch.uint8, device="cpu") for index, size in expected.items()}
        self.circle.exchange(self._call("samples"), {index: body for index, (body, _) in packed.items()}, bodies)
        return {index: from_bytes(body, int(expected[index][1])) for index, body in bodies.items()}

    def _call(self, name: str) -> Call:
        # It waits without end: one that is left alone must not break the group for those that follow
        return Call(f"balance/{name}", MOST_SECONDS, _CURE, self.number)


@dataclass
class _Step:
    """Samples that this rank has made of a step. A thread that is left alone has this step alone, and nothing of later ones.

    Args:
        near: Among whom samples move.
        everyone: Whose weights are summed up, where these are more.
        leg: Of which it is a step.
        first: Its first micro batch.
        made: The micro batches as they were read.
        numbers: ``int64[samples, 5]``: of each sample cost, tokens, weight, logical shard, and 1 if it is real.
    """

    near: Group
    everyone: Group | None
    leg: Leg
    first: int
    made: list[MicroBatch] = field(default_factory=list[MicroBatch])
    numbers: Ints = field(default_factory=lambda: np.zeros((0, 5), dtype=np.int64))
    failure: Exception | None = None

    @property
    def status(self) -> int:
        if isinstance(self.failure, DataStateError):
            return _FAILED
        return _MADE if self.failure is None else _ENDED if isinstance(self.failure, Exhausted) else _UNREAD

    def require_made(self, statuses: Ints) -> None:
        """Raise where the samples of some rank could not be made, on each of them: their own error, or that there is one."""
        worst = int(statuses.max())
        if worst == _MADE:
            return
        if self.failure is not None and self.status == worst:
            raise self.failure
        raise Exhausted if worst == _ENDED else failure_elsewhere(wrong_rows=worst == _FAILED)


class Balanced(Over):
    """Makes micro batches of whole steps, of samples that a feed below makes and other ranks send.

    Args:
        feed: Makes micro batches that are lists of samples (`as_samples`).
        collate: From a list of samples to a batch.
    """

    def __init__(self, feed: Feed, setup: Setup, balance: Balance, collate: Collate | None) -> None:
        super().__init__(feed)
        self._setup, self._balance, self._collate = setup, balance, collate or stack
        members, everyone = _members(balance, setup.ranks), list(range(setup.ranks.world_size))
        self._near = Group.of(members, setup.ranks)
        is_alone = balance.weight is None or members == everyone
        self._everyone = None if is_alone else Group.of(everyone, setup.ranks)
        self._u = self._skips = 0
        self._leg: Leg | None = None
        self._ready: deque[MicroBatch] = deque()
        self._answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._is_interrupted = self._has_warned = False

    def begin(self, leg: Leg, table: Ints, first: int) -> None:
        self._leg, self._u, self._ready, self._is_interrupted = leg, leg.step_of(first), deque(), False
        self._skips = first - self._u  # micro batches of the step that were taken before
        self._near, self._everyone = self._near.next(), self._everyone and self._everyone.next()
        self.feed.begin(leg, table, self._u)

    def next(self) -> MicroBatch:
        if self._leg is None:
            raise Exhausted
        while not self._ready:
            try:
                self._ready.extend(self._make_step(self._leg))
            except BaseException:
                self._leg = None
                raise
            for _ in range(self._skips):
                self._ready.popleft()
            self._skips = 0
        return self._ready.popleft()

    def doing(self) -> str:
        return self.feed.doing() or "waiting for the samples of other ranks"

    def interrupt(self) -> None:
        self._is_interrupted = True
        self._answers.put((None, Exhausted()))
        self.feed.interrupt()

    def _make_step(self, leg: Leg) -> list[MicroBatch]:
        in_step = leg.layout.gradient_accumulation_steps
        num = in_step - self._u % in_step
        mine = _Step(self._near, self._everyone, leg, self._u)
        self._read(mine, num)
        if mine.near.circle is None and mine.everyone is None:
            micro_batches = self._arrange(mine, num)
        else:
            micro_batches = self._interruptible(lambda: self._arrange(mine, num))
        self._u += num
        return micro_batches

    def _read(self, step: _Step, num: int) -> None:
        """Read this rank's samples, and measure them; an error is kept."""
        try:
            for _ in range(num):
                if self._is_interrupted:
                    raise Exhausted
                step.made.append(self.feed.next())
            rows = [
                (*self._balance.measure(sample), shard, place < each.num_real)
                for each in step.made
                for place, (sample, shard) in enumerate(zip(each.batch, each.shards, strict=True))
            ]
            step.numbers = np.array(rows, dtype=np.int64)
        except Exception as error:
            step.failure = error

    def _interruptible(self, work: Callable[[], list[MicroBatch]]) -> list[MicroBatch]:
        """Return what a piece of work returns, done in a thread that is left alone where `interrupt` is called."""
        answers = self._answers = SimpleQueue()

        def run() -> None:
            try:
                answers.put((work(), None))
            except BaseException as error:
                answers.put((None, error))

        if self._is_interrupted:
            raise Exhausted
        threading.Thread(target=run, daemon=True, name="rescale_data-balance").start()
        timeout = self._setup.ranks.timeout
        try:
            micro_batches, error = answers.get(timeout=timeout)
        except Empty:
            raise RuntimeError(
                f"Dp rank {self._setup.ranks.rank} waited timeout={timeout:g} s for samples of the dp ranks "
                f"{self._near.members}: one of them reads slowly, makes no batches, or made other calls of the loader before. "
                f"{_CURE}"
            ) from None
        if error is not None:
            raise error
        return micro_batches

    def _arrange(self, mine: _Step, num: int) -> list[MicroBatch]:
        """Return this rank's micro batches of a step (collective over the group)."""
        size = num * mine.leg.layout.micro_batch_size
        told = np.zeros((size + 1, 5), dtype=np.int64)  # a row of its own for the status
        told[0, 0] = mine.status
        if mine.failure is None:
            told[1:] = mine.numbers
        told = mine.near.gather("costs", told)
        statuses = told[:, 0, 0]
        numbers = told[:, 1:].reshape(-1, 5)
        weight = int(numbers[:, 2] @ numbers[:, 4])
        if mine.everyone is not None:
            own = told[mine.near.me, 1:]
            sums = mine.everyone.gather("weights", np.array([statuses.max(), own[:, 2] @ own[:, 4]]))
            statuses, weight = sums[:, 0], int(sums[:, 1].sum())
        mine.require_made(statuses)
        owners = np.repeat(np.arange(len(mine.near.members)), size)
        rank, micro_batch = self._plan(mine, numbers, owners, num)
        samples = self._move(mine, owners, rank)
        batches = [
            self._batch(np.flatnonzero((rank == mine.near.me) & (micro_batch == m)), numbers, samples, weight, mine.leg)
            for m in range(num)
        ]
        batches[-1] = batches[-1]._replace(rows=joined([each.rows for each in mine.made]))
        return batches

    def _plan(self, mine: _Step, numbers: Ints, owners: Ints, num: int) -> tuple[Ints, Ints]:
        balance, costs, tokens = self._balance, numbers[:, 0], numbers[:, 1]
        most = balance.max_tokens or mine.leg.layout.micro_batch_size * int(tokens.max())
        plan = StepPlan(
            costs=costs,
            tokens=tokens,
            owners=owners,
            ranks=len(mine.near.members),
            micro_batches=num,
            max_tokens=most,
            sync=balance.sync,
            padded=balance.padded,
            seed=self._setup.recipe.seed,
            step=mine.first // mine.leg.layout.gradient_accumulation_steps,
        )
        rank, micro_batch = plan.assign()
        if balance.max_tokens is not None and not self._has_warned:
            self._warn_if_above(plan.num_tokens(rank, micro_batch), balance.max_tokens)
        return rank, micro_batch

    def _warn_if_above(self, tokens: Ints, most: int) -> None:
        if int(tokens.max()) > most:
            self._has_warned = True
            self._setup.ranks.warn(
                "rd.Balance(max_tokens=%d): a micro batch has %d tokens. A sample alone is longer, or a step has more tokens "
                "than its %d micro batches take. Raise it, shorten samples, or give more micro batches a step. Said once.",
                most,
                int(tokens.max()),
                tokens.size,
            )

    def _move(self, mine: _Step, owners: Ints, rank: Ints) -> dict[int, Any]:
        """Return the samples that this rank computes, by their number (collective over the group)."""
        me, numbers = mine.near.me, np.arange(len(rank))
        mine_now = owners == me
        own = dict(zip(numbers[mine_now].tolist(), (s for each in mine.made for s in each.batch), strict=True))
        to = _by(rank[mine_now], numbers[mine_now], me)
        of = _by(owners[rank == me], numbers[rank == me], me)
        received = mine.near.swap({index: [own[n] for n in given] for index, given in to.items()}, list(of))
        moved = {n: s for index, values in received.items() for n, s in zip(of[index], values, strict=True)}
        return own | moved

    def _batch(self, places: Ints, numbers: Ints, samples: dict[int, Any], weight: int, leg: Leg) -> MicroBatch:
        """Return a micro batch of some samples, by their numbers: those that fill the last global batch have the highest."""
        try:
            batch = self._collate([samples[n] for n in places.tolist()])
        except StopIteration as error:  # it would end the loop over the batches
            raise RuntimeError("collate_fn raised StopIteration") from error
        num_real = int(numbers[places, 4].sum())
        if leg.pads:
            batch = with_valid(batch, num_real, len(places))
        if self._balance.weight is not None:
            batch = _with_weight(batch, weight)
        nothing = np.zeros((0, 1), dtype=np.int64)  # all rows of the step come with its last micro batch
        return MicroBatch(batch, Rows(nothing[:, 0], nothing), numbers[places, 3].tolist(), num_real)


def _by(indices: Ints, numbers: Ints, me: int) -> dict[int, list[int]]:
    """Return the numbers that stand beside each index but one."""
    return {index: numbers[indices == index].tolist() for index in np.unique(indices).tolist() if index != me}


def _members(balance: Balance, ranks: Ranks) -> list[int]:
    """Return the dp ranks among which samples move, ascending (collective with "host")."""
    if balance.over == "rank" or ranks.world_size == 1:
        return [ranks.rank]
    if balance.over == "all":
        return list(range(ranks.world_size))
    hosts = ranks.each([digest(socket.gethostname())])[:, 0]
    return np.flatnonzero(hosts == hosts[ranks.rank]).tolist()


def _with_weight(batch: Any, weight: int) -> dict[str, Any]:
    if not isinstance(batch, dict):
        raise TypeError(
            f"rd.Balance(weight=) adds batch[{STEP_WEIGHT!r}], but collate_fn returns a {type(batch).__name__}."
        )
    if STEP_WEIGHT in batch:
        raise ValueError(
            f"rd.Balance(weight=) adds batch[{STEP_WEIGHT!r}], but samples have such a column: rename theirs."
        )
    return {**batch, STEP_WEIGHT: weight}
