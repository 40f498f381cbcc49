"""Barriers in the job's store, used before the loader has a gloo group; they name the processes that do not arrive."""

from __future__ import annotations

import datetime
import gc
import hashlib
import os
from collections.abc import Callable, Hashable, Sequence
from queue import Empty
from time import monotonic
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from rescale_data.engine.threads import run_in_thread

T = TypeVar("T")

_ABSENT_TEXT = "?"
"""A text that no key has."""
_CHECK_SECONDS = 2.0
"""Seconds between checks of the store for the outcome of a barrier."""


class MissingRanks(Exception):
    """Error raised if some ranks do not arrive in time; its ``ranks`` is `None` if the store cannot be reached."""

    def __init__(self, ranks: list[int] | None) -> None:
        super().__init__(ranks)
        self.ranks = ranks


def meet_at_barrier(
    store: Any, my_index: int, ranks: Sequence[int], seconds: float, own_text: str = ""
) -> tuple[list[str], int]:
    """Wait at a barrier until all members have arrived; a failed barrier can be repeated.

    Args:
        store: A part of a store that only these meetings use.
        my_index: The index of this process.
        ranks: The ranks of all members in the job, for messages.
        own_text: The text that this member sends.

    Returns:
        The texts of all members, and the number of the attempt, which no other meeting in this store has.

    Raises:
        MissingRanks: Some member did not come. All members that came raise it, with the same ranks.
    """
    attempt_number = 1 + max(map(int, store.compare_set("left", "", "-1\n").decode().split()))
    try:
        return arrive(PrefixStore(str(attempt_number), store), my_index, ranks, seconds, own_text), attempt_number
    finally:
        store.append("left", f"{attempt_number}\n")  # no answer is waited for, and members may write in any order


def arrive(store: Any, my_index: int, member_ranks: Sequence[int], seconds: float, own_text: str = "") -> list[str]:
    """Wait until all members have arrived at the one barrier in this part of a store, and return the texts that they sent.

    A member that finds the texts of all writes them as the verdict. The first member whose time is over finds the missing
    members, and writes these as the verdict. The first verdict holds, also for a member that comes later.

    Raises:
        MissingRanks: As in `meet_at_barrier`.
    """
    store.append("came", f"{my_index} {own_text}\n")
    verdict, deadline, is_late = _write_verdict(store, len(member_ranks), is_late=False), monotonic() + seconds, False
    while not verdict:
        if _wait_for_key(store, "verdict", min(_CHECK_SECONDS, seconds / 4)):
            verdict = _read(store, "verdict")
        elif monotonic() >= deadline:
            if store.add("looks", 1) == 1 or is_late:  # the member that looked first may have died since
                verdict = _write_verdict(store, len(member_ranks), is_late=True)
            is_late = True
    outcome, *lines = verdict.splitlines()
    if outcome == "missing":
        raise MissingRanks([member_ranks[int(index)] for index in lines])
    return [text for _, text in sorted(_text_by_member(lines).items())]


def _write_verdict(store: Any, num_members: int, *, is_late: bool) -> str:
    """Write the outcome of a barrier to the store unless it has one; return the outcome, empty if there is none yet."""
    arrived_text = _read(store, "came")
    missing = sorted({*range(num_members)} - {*_text_by_member(arrived_text.splitlines())})
    if missing and not is_late:
        return ""
    verdict = "\n".join(["missing", *map(str, missing)]) if is_late else f"all\n{arrived_text}"
    return store.compare_set("verdict", "", verdict).decode()


def _read(store: Any, key: str) -> str:
    """Return the text that the store holds for an existing key, in one request; ``get`` makes two."""
    return store.compare_set(key, _ABSENT_TEXT, _ABSENT_TEXT).decode()


def _text_by_member(lines: Sequence[str]) -> dict[int, str]:
    """Return the texts of the members that have arrived, by the index of the member."""
    return {int(index): text for index, _, text in (line.partition(" ") for line in lines)}


def _wait_for_key(store: Any, key: str, seconds: float) -> bool:
    try:
        store.wait([key], datetime.timedelta(seconds=seconds))
    except (RuntimeError, dist.DistError):
        return store.check([key])  # this fails, too, if the store is gone
    return True


def call_within(seconds: float, work: Callable[[], T]) -> T:
    """Return ``work()``, a request to the store; raise `MissingRanks` if the store fails, or does not answer within `seconds`.

    The host of a store may vanish without notice. A request to it then waits until the kernel gives up the connection, a
    quarter of an hour. So a thread of its own does the work, and only that thread is left waiting.
    """
    try:
        return run_in_thread(work, seconds)
    except Empty:
        raise MissingRanks(None) from None
    except (RuntimeError, dist.DistError) as error:
        raise MissingRanks(None) from error


def members_by_dp_rank(dp_rank: int, dp_world_size: int, timeout: float) -> list[int]:
    """Return a job rank for each dp rank: that of the process with the same index in its dp rank as this one has in its own."""
    return make_once(None, ("dp", dp_rank, dp_world_size), lambda: _meet_by_dp_rank(dp_rank, dp_world_size, timeout))


def _meet_by_dp_rank(dp_rank: int, dp_world_size: int, timeout: float) -> list[int]:
    me, all_ranks = dist.get_rank(), list(range(dist.get_world_size()))
    texts, _ = gather_texts("dp", all_ranks, timeout, f"{dp_rank} {dp_world_size}")
    answers = [tuple(map(int, text.split())) for text in texts]
    dp_sizes = sorted({size for _, size in answers})
    if len(dp_sizes) > 1:
        raise ValueError(f"The ranks built their loaders with different dp_world_size: {dp_sizes}. All need the same.")
    groups = [[rank for rank, (given_rank, _) in enumerate(answers) if given_rank == n] for n in range(dp_world_size)]
    sizes = [len(group) for group in groups]
    if min(sizes) < max(sizes):
        raise ValueError(
            f"dp_world_size={dp_world_size}, but dp_rank={sizes.index(min(sizes))} was given to {min(sizes)} processes, and "
            f"dp_rank={sizes.index(max(sizes))} to {max(sizes)}. Give each dp rank to as many, its peers, or pass "
            f"mesh= of the dp ranks in place of dp_rank= and dp_world_size=."
        )
    index_in_dp_rank = groups[dp_rank].index(me)
    return [group[index_in_dp_rank] for group in groups]


def make_once(group: dist.ProcessGroup | None, key: Hashable, make: Callable[[], T]) -> T:
    """Return the value of ``key``, made once by ``make`` and kept as long as the process group (default: the job's) exists."""
    cached_values = _values_by_group.setdefault(dist.group.WORLD if group is None else group, {})
    if key not in cached_values:
        cached_values[key] = make()
    return cached_values[key]


_values_by_group: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


os.register_at_fork(after_in_child=gc.freeze)
"""A forked process never frees objects that its parent has dropped. A group freed there would wait for threads that the forked
process does not have, or would leave the epoll set that both processes share, and then the parent dies."""


def gloo(name: str, store: Any, me: int, num_members: int, timeout: float) -> Any:
    """Return a new gloo process group that is not registered with ``torch.distributed``."""
    return ProcessGroupGloo(PrefixStore(name, store), me, num_members, datetime.timedelta(seconds=timeout))


def part_of_store(name: str, group: dist.ProcessGroup | None) -> Any:
    """Return a part of the store of a process group (default: the group of the job), under a prefix."""
    store_owner: Any = dist.group.WORLD if group is None else group
    return PrefixStore(f"rescale_data/{name}", store_owner.get_group_store())


def is_file_store() -> bool:
    """True if the job's store is a file, which torch removes when a forked child process of a rank ends."""
    group: Any = dist.group.WORLD
    store = group.get_group_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)  # pyright: ignore[reportPrivateImportUsage]


def gather_texts(name: str, members: Sequence[int], timeout: float, own_text: str = "") -> tuple[list[str], Any]:
    """Wait until all members, given as ranks of the job, have arrived at the barrier `name`; it may be repeated.

    Returns:
        The texts of all members, and a part of the store that only this meeting uses.

    Raises:
        RuntimeError: Some member does not come. The next call begins the next attempt.
    """
    store, me = part_of_store(name, None), members.index(dist.get_rank())
    try:
        texts, meeting_number = call_within(2 * timeout, lambda: meet_at_barrier(store, me, members, timeout, own_text))
    except MissingRanks as missing:
        if missing.ranks is None:
            raise RuntimeError(
                "The process that holds the job's store (rank 0) cannot be reached, so no data loader can be built. Start the "
                "job again."
            ) from missing.__cause__
        raise RuntimeError(
            f"The ranks {missing.ranks} did not build the data loader that rank {members[me]} builds, within "
            f"timeout={timeout:g} s. All ranks of mesh= build it (default: all of the job)."
        ) from None
    return texts, PrefixStore(str(meeting_number), store)


def digest(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)
