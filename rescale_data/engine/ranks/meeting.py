"""Barriers in the job's store, before there is a group of the processes; they name the processes that do not come."""

from __future__ import annotations

import datetime
import gc
import hashlib
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

T = TypeVar("T")

_LOOK = 2.0
"""Seconds between checks for the verdict."""


class Missing(Exception):
    """Some ranks did not come in time; ``ranks`` is `None` if the store cannot be reached."""

    def __init__(self, ranks: list[int] | None) -> None:
        super().__init__(ranks)
        self.ranks = ranks


def meet(store: Any, me: int, names: Sequence[int], seconds: float, value: str = "") -> tuple[list[str], int]:
    """Wait until all members have come to the current attempt; a failed attempt is followed by the next one.

    Args:
        store: A part of a store that only these meetings use.
        me: The index of this process.
        names: The ranks of all members in the job, for messages.
        value: The text that this member sends.

    Returns:
        The texts of all members, and the number of the attempt, which no other meeting in this store has.

    Raises:
        Missing: Some member did not come. All members that came raise it, with the same ranks.
    """
    number = store.compare_set("attempt", "", "0").decode()
    try:
        return arrive(PrefixStore(number, store), me, names, seconds, value), int(number)
    finally:
        store.compare_set("attempt", number, str(int(number) + 1))


def arrive(store: Any, me: int, names: Sequence[int], seconds: float, value: str = "") -> list[str]:
    """Wait until all members have come to the one meeting in this part of a store, and return their texts.

    The last member that comes writes the texts of all as the verdict. The first member whose time is over finds the missing
    members, and writes these as the verdict. The first verdict holds, also for a member that comes later.

    Raises:
        Missing: As in `meet`.
    """
    store.append("came", f"{me} {value}\n")
    if store.add("count", 1) >= len(names):
        _decide(store, len(names), is_over=False)
    until, is_over = monotonic() + seconds, False
    while not _appears(store, "verdict", min(_LOOK, seconds / 4)):
        if monotonic() >= until:
            if store.add("looks", 1) == 1 or is_over:  # the member that looked first may have died since
                _decide(store, len(names), is_over=True)
            is_over = True
    kind, *lines = store.get("verdict").decode().splitlines()
    if kind == "missing":
        raise Missing([names[int(index)] for index in lines])
    return [said for _, said in sorted(_came(lines).items())]


def _decide(store: Any, num_members: int, *, is_over: bool) -> None:
    text = store.get("came").decode()
    missing = sorted({*range(num_members)} - {*_came(text.splitlines())})
    if is_over:
        store.compare_set("verdict", "", "\n".join(["missing", *map(str, missing)]))
    elif not missing:
        store.compare_set("verdict", "", f"all\n{text}")


def _came(lines: Sequence[str]) -> dict[int, str]:
    """Return the messages of the members that have arrived, by index."""
    return {int(index): said for index, _, said in (line.partition(" ") for line in lines)}


def _appears(store: Any, key: str, seconds: float) -> bool:
    try:
        store.wait([key], datetime.timedelta(seconds=seconds))
    except (RuntimeError, dist.DistError):
        return store.check([key])  # this fails, too, if the store is gone
    return True


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return ``work()``, or raise `Missing` without ranks if the store fails, or does not answer in time.

    The host of a store may vanish without notice. A request to it then waits until the kernel gives up the connection, a
    quarter of an hour. So a thread of its own does the work, and only that thread is left waiting.
    """
    try:
        return in_a_thread(work, seconds)
    except Empty:
        raise Missing(None) from None
    except (RuntimeError, dist.DistError) as error:
        raise Missing(None) from error


class Answer(Generic[T]):
    """The result of a piece of work that another thread does, or the error that is raised in its place."""

    def __init__(self) -> None:
        self._results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def set_by(self, work: Callable[[], T]) -> None:
        """Do the work."""
        try:
            self._results.put((work(), None))
        except BaseException as error:
            self._results.put((None, error))

    def fail(self, error: BaseException) -> None:
        """Let `get` raise an error, though the work goes on."""
        self._results.put((None, error))

    def get(self, seconds: float | None = None) -> T:
        """Return the result, once; while this thread waits, signal handlers and Ctrl-C run.

        Raises:
            Empty: The work has taken `seconds`. It goes on.
        """
        value, error = self._results.get(timeout=seconds)
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame
        return value


def in_a_thread(work: Callable[[], T], seconds: float | None = None) -> T:
    """Return ``work()``, done in another thread; `Empty` where it has taken `seconds`, and goes on."""
    answer = Answer[T]()
    threading.Thread(target=answer.set_by, args=(work,), daemon=True, name="rescale_data-store").start()
    return answer.get(seconds)


def by_dp_rank(dp_rank: int, dp_world_size: int, timeout: float) -> list[int]:
    """Return the job's ranks in the group of this process: the n-th process of each dp rank, if this is the n-th of its own."""
    return once(None, ("dp", dp_rank, dp_world_size), lambda: _meet_by_dp_rank(dp_rank, dp_world_size, timeout))


def _meet_by_dp_rank(dp_rank: int, dp_world_size: int, timeout: float) -> list[int]:
    me, everyone = dist.get_rank(), list(range(dist.get_world_size()))
    said, _ = meet_in_job("dp", everyone, timeout, f"{dp_rank} {dp_world_size}")
    given = [tuple(map(int, text.split())) for text in said]
    sizes = sorted({size for _, size in given})
    if len(sizes) > 1:
        raise ValueError(f"The ranks built their loaders with different dp_world_size: {sizes}. All need the same.")
    of_rank = [[rank for rank, (of, _) in enumerate(given) if of == wanted] for wanted in range(dp_world_size)]
    missing = [of for of, found in enumerate(of_rank) if not found]
    if missing:
        raise ValueError(
            f"dp_world_size={dp_world_size}, but no process of the group was given dp_rank={missing[0]} ({len(missing)} "
            f"of the dp ranks are missing), so their logical shards would never be read. Give each dp rank to a process "
            f"at least, or pass mesh= in place of dp_rank= and dp_world_size=."
        )
    place = of_rank[dp_rank].index(me)
    if len({len(found) for found in of_rank}) > 1:
        raise ValueError(
            f"The dp ranks were given to {sorted({len(found) for found in of_rank})} processes each: give each dp rank to as "
            f"many (its TP, PP and CP peers), or pass mesh= of the dp ranks."
        )
    return [found[place] for found in of_rank]


def once(group: dist.ProcessGroup | None, key: Hashable, make: Callable[[], T]) -> T:
    """Return the value of ``key``, made once and kept as long as the group (default: the group of the job) exists."""
    known = _made.setdefault(dist.group.WORLD if group is None else group, {})
    if key not in known:
        known[key] = make()
    return known[key]


_made: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


os.register_at_fork(after_in_child=gc.freeze)
"""A forked process never frees objects that its parent has dropped. A group freed there would wait for threads that the forked
process does not have, or would leave the epoll set that both processes share, and then the parent dies."""


def gloo(name: str, store: Any, me: int, num_members: int, timeout: float) -> Any:
    """Return a gloo group that is not registered with ``torch.distributed``."""
    return ProcessGroupGloo(PrefixStore(name, store), me, num_members, datetime.timedelta(seconds=timeout))


def part_of_store(name: str, group: dist.ProcessGroup | None) -> Any:
    """Return a part of the store of a group (default: the group of the job)."""
    owner: Any = dist.group.WORLD if group is None else group
    return PrefixStore(f"rescale_data/{name}", owner.get_group_store())


def is_in_a_file() -> bool:
    """True if the job's store is a file, which torch removes when a forked child of a rank ends."""
    group: Any = dist.group.WORLD
    store = group.get_group_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)  # pyright: ignore[reportPrivateImportUsage]


def meet_in_job(name: str, members: Sequence[int], timeout: float, value: str = "") -> tuple[list[str], Any]:
    """Wait until all members, ranks of the job, have come to the meeting of this name; it may be repeated.

    Returns:
        The texts of all members, and a part of the store that only this meeting uses.

    Raises:
        RuntimeError: Some member does not come. The next call begins the next attempt.
    """
    store, me = part_of_store(name, None), members.index(dist.get_rank())
    try:
        said, number = within(2 * timeout, lambda: meet(store, me, members, timeout, value))
    except Missing as missing:
        if missing.ranks is None:
            raise RuntimeError(
                "The process that holds the job's store (rank 0) cannot be reached, so no data loader can be built. Start the "
                "job again."
            ) from missing.__cause__
        raise RuntimeError(
            f"The ranks {missing.ranks} did not build the data loader that rank {members[me]} builds, within "
            f"timeout={timeout:g} s. All ranks of mesh= build it (default: all of the job)."
        ) from None
    return said, PrefixStore(str(number), store)


def digest(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)
