"""Who is missing when a collective fails: gloo says that some peer is gone, not which rank."""

from __future__ import annotations

import time

import torch.distributed as dist

_GRACE = 10.0
"""Seconds that slower ranks are given after a connection broke, so that only those that never come are named."""
_LEAST_GRACE = 2.0
"""The same after the timeout has passed: the others see the failure a moment later."""
_MEETING = 60.0
"""Seconds, at most, that a rank waits for the others to call what it has called."""
_LONGEST_PAUSE = 0.05


class RollCall:
    """Each rank notes in the group's store how many collectives it has come to, and the last that it saw fail.

    Args:
        group: The group whose collectives are counted.
        ranks: Names of its members in the order of the group.
        timeout: Seconds that a rank may keep the others waiting.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: list[int], timeout: float) -> None:
        self._store = group.get_group_store()
        self._me, self._ranks, self._timeout = ranks[group.rank()], ranks, timeout
        self._came = self._met = 0
        self._note("failed")
        self._note("met")
        self._note()

    def come(self) -> float:
        """Say that this rank has come to the next collective; when the others must have, as `time.monotonic`."""
        self._came += 1
        self._note()
        return time.monotonic() + self._timeout

    def meet(self, what: str) -> None:
        """Wait until every rank has come here as often as this one; ``RuntimeError`` where some do not come in time."""
        self._met += 1
        self._note("met")
        all_here, timeout = self._met * len(self._ranks), min(self._timeout, _MEETING)
        deadline, pause = time.monotonic() + timeout, 0.0005
        here = self._store.add(_ALL_MET, 1)
        while here < all_here:
            if time.monotonic() > deadline:
                raise self._alone(what, timeout)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            here = self._store.add(_ALL_MET, 0)

    def _alone(self, what: str, timeout: float) -> RuntimeError:
        """Say who has not come, and let the next time count in place of this one. What this rank noted stays, for others."""
        missing = [rank for rank in self._ranks if self._number("met", rank) < self._met]
        self._met -= 1
        self._store.add(_ALL_MET, -1)
        return RuntimeError(
            f"{what} was called on rank {self._me}, and not within {timeout:g} s on the ranks {missing}: each rank knows its "
            f"own rows alone, so all of them give theirs. Call it on every rank, before `if rank == 0`."
        )

    def failure(self, error: RuntimeError, deadline: float) -> RuntimeError:
        """What to raise in place of ``error``: a message that names the ranks which did not come."""
        self._note("failed")
        now = time.monotonic()
        end = max(min(deadline, now + _GRACE), now + _LEAST_GRACE)
        while (missing := self._missing()) and time.monotonic() < end:
            time.sleep(0.1)
        if missing is None:
            who = "and the process that holds the store (rank 0 of the job) cannot be reached either"
        elif missing:
            who = f"because the ranks {missing} did not come to it, or died in it"
        else:
            who = "although all ranks came: the network failed"
        return RuntimeError(
            f"A collective of the data loader failed on rank {self._me} after at most {self._timeout:g} s, {who}. State that "
            f"was saved is whole; restart from it. (gloo: {error})"
        )

    def _note(self, what: str = "came") -> None:
        self._store.set(_key(what, self._me), str(self._met if what == "met" else self._came))

    def _missing(self) -> list[int] | None:
        """Ranks that have not come so far, else those that came and neither saw it fail nor went on; `None`: no store."""
        try:
            came = {rank: self._number("came", rank) for rank in self._ranks}
            behind = [rank for rank in self._ranks if came[rank] < self._came]
            abreast = [rank for rank in self._ranks if came[rank] == self._came]
            return behind or [rank for rank in abreast if self._number("failed", rank) < self._came]
        except (RuntimeError, dist.DistError):
            return None

    def _number(self, what: str, rank: int) -> int:
        return int(self._store.get(_key(what, rank)))


def _key(what: str, rank: int | str) -> str:
    return f"rescale_data/{what}/{rank}"


_ALL_MET = _key("met", "all")
