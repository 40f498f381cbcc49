"""Interest: the logical shards of each source that the loaders of this process serve. With them the cache is shared out."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rescale_data.sources.decoded.cache import by_owner, owner_of, room_for
from rescale_data.sources.source import Described, Source

PARTS = 8
"""Number of parts of a block of copied documents. The memory of each part is freed when it has been passed."""
_LEAST_BLOCK = 2**16


class Interest(NamedTuple):
    """The interest in a source, of one loader or of all loaders of this process.

    Args:
        shards: Logical shards that are read in turn, one entry for each loader that reads a shard.
        sources: Number of sources that are read in turn, with this one.
        needed: Bytes of the fragments that these shards visit in turn, of all these sources.
    """

    shards: Sequence[int]
    sources: int
    needed: int


_by_reader: dict[int, dict[int, Interest]] = by_owner()
_of_all: dict[int, Interest] = by_owner()
_readers: set[int] = set()
_warned: dict[int, bool] = by_owner()
_log = logging.getLogger("rescale_data")


def serve(reader: object, sources: Iterable[Described], shards: Sequence[int]) -> None:
    """Note that ``reader`` reads these shards of the sources in turn, until it is collected or calls this again."""
    served, key = list(sources), id(reader)
    if key not in _readers:
        _readers.add(key)
        weakref.finalize(reader, _leave, key).atexit = False
    needed = sum(_needed_by(source, len(shards)) for source in served)
    for source in served:
        owner = owner_of(source)
        _by_reader.setdefault(owner, {})[key] = Interest(shards, len(served), needed)
        _sum_up(owner)


def _leave(reader: int) -> None:
    _readers.discard(reader)
    for owner in list(_by_reader):  # a copy: the collector may end another reader meanwhile
        if _by_reader.get(owner, {}).pop(reader, None) is not None:
            _sum_up(owner)


def _sum_up(source: int) -> None:
    # A loader without shards does not count: its rank may have no row left to serve.
    found = [each for each in _by_reader.get(source, {}).values() if each.shards]
    _of_all.pop(source, None)
    if found:
        shards = [shard for each in found for shard in each.shards]
        _of_all[source] = Interest(shards, max(each.sources for each in found), sum(each.needed for each in found))


def _renew() -> None:
    """Forget the parent's loaders in a forked child."""
    for kept in (_by_reader, _of_all, _readers):
        kept.clear()


os.register_at_fork(after_in_child=_renew)


def shards_of(source: int, num_logical_shards: int) -> Sequence[int]:
    """Return the logical shards of a source that the loaders of this process serve; without a loader, all shards.

    Args:
        source: Key of the source, see `owner_of`.
        num_logical_shards: Number of all shards.

    Returns:
        One entry for each loader that serves a shard.
    """
    found = _of_all.get(source)
    return range(num_logical_shards) if found is None else found.shards


def beside(source: int) -> tuple[int, int]:
    """Return the numbers of sources and of shards that take turns with a source, itself included; (1, 1) without a loader.

    Args:
        source: Key of the source, see `owner_of`.
    """
    found = _of_all.get(source)
    return (1, 1) if found is None else (found.sources, len(found.shards))


def room_for_block(source: Source) -> int:
    """Return the bytes in the cache for a block: documents of one shard, copied out of fragments.

    The cache also has room for one fragment, and for a part of each shard's block before.

    Returns:
        Bytes; 0 if the cache has room for all fragments, or if a block would be too small to pay.
    """
    sources, shards = beside(owner_of(source))
    fragments = 0 if source.fragments is None else len(source.fragments) - 1
    room = room_for(source)
    block = (room - source.fragment_bytes) * PARTS // ((PARTS + 1) * sources * shards)
    fit = sources * fragments * source.fragment_bytes <= room
    return 0 if fit or block < _LEAST_BLOCK else block


def needed_with(source: Source, num_shards: int) -> int:
    """Return the bytes of the fragments that ``num_shards`` shards visit in turn, of all sources served with this one."""
    found = _of_all.get(owner_of(source))
    return max(0 if found is None else found.needed, _needed_by(source, num_shards))


def _needed_by(source: Described, num_shards: int) -> int:
    if not isinstance(source, Source) or source.fragments is None:
        return 0
    return min(num_shards, len(source.fragments) - 1) * source.fragment_bytes


def warn_if_thrashing(
    sources: Iterable[Described], owned_shards: int, beside: int = 0, *, num_workers: int = 0
) -> None:
    """Warn, once, if the processes of a rank visit more fragments in turn than the cache holds, over all sources.

    Args:
        sources: The sources; the ones without fragments do not count.
        owned_shards: Number of logical shards that the rank runs.
        beside: Bytes that the cache keeps for each of these shards, in addition to fragments.
        num_workers: Number of worker processes. Each takes an equal part of the shards. Each of them, and the trainer's
            process, has an equal part of the cache.
    """
    shards_each = -(-owned_shards // max(1, num_workers))
    known = [source for source in sources if isinstance(source, Source) and source.fragment_bytes]
    counts = [source.num_rows // max(1, len(found) - 1) for source in known if (found := source.fragments) is not None]
    times = max(counts, default=0)
    needed = (1 + num_workers) * (sum(_needed_by(source, shards_each) for source in known) + shards_each * beside)
    room = max((source.cache_bytes + source.cache_dir_bytes for source in known), default=0)
    owners = {owner_of(source) for source in known}
    if needed <= room or times < 2 or owners <= _warned.keys():
        return
    _warned.update(dict.fromkeys(owners, True))
    name = known[0].name if len(known) == 1 else f"{len(known)} sources, {known[0].name} among them"
    size = sorted(source.fragment_bytes for source in known)[len(known) // 2]
    _log.warning(
        "%s: this rank visits %d logical shards in turn, whose fragments of about %d bytes (of Parquet: all columns), and "
        "the order in which they read, take %d bytes, and cache_bytes and cache_dir_bytes, which all sources share, and all "
        "processes in equal parts, are %d. Fragments are then decoded again at each visit, up to %d times an epoch (their "
        "rows; less under a TokenPacker, which takes many at a visit). "
        "Give cache_bytes=%d, or cache_dir=, a local folder with as much room, run fewer shards in a rank (a smaller "
        "num_logical_shards, more ranks), or write smaller row groups or record batches.",
        name, owned_shards, size, needed, room, times, needed,
    )  # fmt: skip
