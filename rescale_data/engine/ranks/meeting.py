"""Processes meet in the job's store before there is a group of them: by name, so that who does not come is known."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from rescale_data.engine.ranks.rollcall import Missing, RollCall

T = TypeVar("T")


def by_dp_rank(dp_rank: int, dp_world_size: int, timeout: float) -> list[int]:
    """The job's ranks that this one reads with: of the processes of each dp rank the first together, the second, ..."""
    return once(None, ("dp", dp_rank, dp_world_size), lambda: _meet_by_dp_rank(dp_rank, dp_world_size, timeout))


def _meet_by_dp_rank(dp_rank: int, dp_world_size: int, timeout: float) -> list[int]:
    me, everyone = dist.get_rank(), list(range(dist.get_world_size()))
    store = part_of_store("dp", len(everyone), None)
    given = [
        tuple(map(int, text.split()))
        for text in meet(store, me, everyone, timeout, f"{dp_rank} {dp_world_size}").split(",")
    ]
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
            f"many (its TP, PP and CP peers), or pass mesh= or group= of the dp ranks."
        )
    return [found[place] for found in of_rank]


def once(group: dist.ProcessGroup | None, key: Hashable, make: Callable[[], T]) -> T:
    """What is made once, by its key, for all that needs it, as long as the group (default: the job's) exists."""
    known = _made.setdefault(dist.group.WORLD if group is None else group, {})
    if key not in known:
        known[key] = make()
    return known[key]


_made: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def gloo(name: str, store: Any, me: int, num_members: int, timeout: float) -> Any:
    """A group of gloo's own, which torch does not know."""
    return ProcessGroupGloo(PrefixStore(name, store), me, num_members, datetime.timedelta(seconds=timeout))


def part_of_store(name: str, num_members: int, group: dist.ProcessGroup | None) -> Any:
    """A part of the group's (default: the job's) store that the members alone use, and no earlier ones have."""
    owner: Any = dist.group.WORLD if group is None else group
    store = PrefixStore(f"rescale_data/{name}", owner.get_group_store())
    joined = store.add("joined", 1)  # a job may begin anew on an old store: each member joins once a time
    return PrefixStore(str((joined - 1) // num_members), store)


def is_in_a_file() -> bool:
    """Whether the job's store is a file, which torch removes when a forked child of a rank ends."""
    group: Any = dist.group.WORLD
    store = group.get_group_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)  # pyright: ignore[reportPrivateImportUsage]


def meet(store: Any, me: int, members: Sequence[int], timeout: float, value: str = "") -> str:
    """What all members say, joined by commas; ``RuntimeError`` where some member does not come to where a group is made."""
    roll_call = RollCall(PrefixStore("meet", store), me, members)
    try:
        return roll_call.wait(roll_call.come("make", value, ",".join, timeout), timeout)
    except Missing as missing:
        raise RuntimeError(
            f"The ranks {missing.ranks} did not build the data loader that rank {members[me]} builds, within "
            f"timeout={timeout:g} s. All ranks of mesh= build it (default: all of the job)."
        ) from None


def digest(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)
