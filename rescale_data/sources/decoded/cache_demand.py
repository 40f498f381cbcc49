"""Records which logical shards of each source this process reads, so that the cache can be divided among them."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rescale_data.sources.decoded.cache import cache_share, new_dict_by_owner, owner_id
from rescale_data.sources.source import BaseSource, Source

DOC_BLOCK_PARTS = 8
"""Number of parts of a block of copied documents. The memory of a part is freed when all of its documents were read."""
_MIN_BLOCK_BYTES = 2**16


class CacheDemand(NamedTuple):
    """The sources that one loader reads, and the logical shards that it reads in turn.

    Args:
        owners: Keys of the sources, see `owner_id`.
        shards: Logical shards that are read in turn.
        num_bytes: Bytes of the fragments that these shards visit in turn, of all these sources.
    """

    owners: Sequence[int]
    shards: Sequence[int]
    num_bytes: int


_demands: dict[int, CacheDemand] = {}  # by the id of the reader
# One dict, replaced where demands change: a late writer has the old one
_source_and_shard_counts: list[dict[int, tuple[int, int]]] = [{}]
_warned_owners: dict[int, bool] = new_dict_by_owner()
_log = logging.getLogger("rescale_data")


def record_served_shards(reader: object, sources: Iterable[BaseSource], shards: Sequence[int]) -> None:
    """Record that ``reader`` reads these shards of the sources in turn.

    The record holds until ``reader`` is garbage-collected, or calls this again: without shards, other readers divide the cache.
    """
    if id(reader) not in _demands:
        weakref.finalize(reader, _remove_demands, id(reader)).atexit = False
    served_sources = list(sources)
    needed_bytes = sum(_bytes_needed_by(source, len(shards)) for source in served_sources)
    _demands[id(reader)] = CacheDemand([owner_id(source) for source in served_sources], shards, needed_bytes)
    _source_and_shard_counts[0] = {}


def _remove_demands(*reader_ids: int) -> None:
    for reader_id in reader_ids:
        _demands.pop(reader_id, None)
    _source_and_shard_counts[0] = {}


os.register_at_fork(after_in_child=lambda: _remove_demands(*_demands))  # the loaders are the parent's


def _demands_on(source_key: int) -> list[CacheDemand]:
    """Return the demands of the loaders that read a source. A loader whose rank has no row left to serve does not count."""
    demands = list(_demands.values())  # a copy: the collector may end a reader meanwhile
    return [demand for demand in demands if demand.shards and source_key in demand.owners]


def served_shards(source_key: int, num_logical_shards: int) -> Sequence[int]:
    """Return the logical shards of a source that the loaders of this process read; all shards if there is no loader.

    Args:
        source_key: Key of the source, see `owner_id`.
        num_logical_shards: Number of all shards.

    Returns:
        One entry for each loader that serves a shard.
    """
    shards_of_loaders = [demand.shards for demand in _demands_on(source_key)]
    if len(shards_of_loaders) == 1:
        return shards_of_loaders[0]
    return [shard for shards in shards_of_loaders for shard in shards] or range(num_logical_shards)


def num_sources_and_shards(source_key: int) -> tuple[int, int]:
    """Return two counts: the sources, this one included, and the shards that this process reads in turn.

    They are (1, 1) without a loader. A shard counts once for each loader that reads it.

    Args:
        source_key: Key of the source, see `owner_id`.
    """
    # For each read of documents a sum over the loaders would cost 1 % of a packed batch
    source_and_shard_counts = _source_and_shard_counts[0]
    if source_key not in source_and_shard_counts:
        demands = _demands_on(source_key)
        num_sources = max((len(demand.owners) for demand in demands), default=1)
        source_and_shard_counts[source_key] = num_sources, sum(len(demand.shards) for demand in demands) or 1
    return source_and_shard_counts[source_key]


def room_for_block(source: Source) -> int:
    """Return the number of bytes of the cache that one block of copied documents may take.

    A block holds the documents that one shard copies out of its fragments. The cache also has room for one fragment, and for a
    part of each shard's block before.

    Returns:
        Bytes; 0 if the cache has room for all fragments, or if a block would be too small to pay.
    """
    num_sources, num_shards = num_sources_and_shards(owner_id(source))
    room = cache_share(source)
    block_bytes = (room - source.fragment_bytes) * DOC_BLOCK_PARTS // ((DOC_BLOCK_PARTS + 1) * num_sources * num_shards)
    all_fit = num_sources * _num_fragments(source) * source.fragment_bytes <= room
    return 0 if all_fit or block_bytes < _MIN_BLOCK_BYTES else block_bytes


def bytes_needed(source: Source, num_shards: int) -> int:
    """Return the bytes of the fragments that the cache must hold for ``num_shards`` shards to be read in turn.

    Fragments of all sources that are read together with this one are included.
    """
    return max(sum(demand.num_bytes for demand in _demands_on(owner_id(source))), _bytes_needed_by(source, num_shards))


def _bytes_needed_by(source: BaseSource, num_shards: int) -> int:
    return min(num_shards, _num_fragments(source)) * source.fragment_bytes if isinstance(source, Source) else 0


def _num_fragments(source: Source) -> int:
    return 0 if source.fragments is None else len(source.fragments) - 1


def warn_if_thrashing(
    sources: Iterable[BaseSource], num_owned_shards: int, extra_bytes: int = 0, *, num_workers: int = 0
) -> None:
    """Warn, once, if the processes of a rank visit more fragments in turn than the cache holds, over all sources.

    Args:
        sources: The sources; the ones without fragments do not count.
        num_owned_shards: Number of logical shards that the rank runs.
        extra_bytes: Bytes that the cache keeps for each of these shards, in addition to fragments.
        num_workers: Number of worker processes. Each takes an equal part of the shards. Each of them, and the trainer's
            process, has an equal part of the cache.
    """
    num_shards = -(-num_owned_shards // max(1, num_workers))
    fragmented = [source for source in sources if isinstance(source, Source) and source.fragment_bytes]
    max_decodes = max((source.num_rows // max(1, _num_fragments(source)) for source in fragmented), default=0)
    needed_bytes = sum(_bytes_needed_by(source, num_shards) for source in fragmented) + num_shards * extra_bytes
    num_bytes = (1 + num_workers) * needed_bytes
    # A piece is kept in both
    room_bytes = max((max(source.cache_bytes, source.disk_bytes) for source in fragmented), default=0)
    owners = {owner_id(source) for source in fragmented}
    if num_bytes <= room_bytes or max_decodes < 2 or owners <= _warned_owners.keys():
        return
    _warned_owners.update(dict.fromkeys(owners, True))
    name = fragmented[0].name if len(fragmented) == 1 else f"{len(fragmented)} sources, {fragmented[0].name} among them"
    median_bytes = sorted(source.fragment_bytes for source in fragmented)[len(fragmented) // 2]
    _log.warning(
        "%s: this rank visits %d logical shards in turn, whose fragments of about %d bytes (of Parquet: all columns), and "
        "the order in which they read, take %d bytes. The larger of cache_bytes and cache_dir_bytes, which all sources share, "
        "and all processes in equal parts, is %d. Fragments are then decoded again at each visit, up to %d times an "
        "epoch (their rows; less under a TokenPacker, which takes many at a visit). "
        "Give cache_bytes=%d, or cache_dir=, a local folder with as much room, run fewer shards in a rank (a smaller "
        "num_logical_shards, more ranks), or write smaller row groups or record batches.",
        name, num_owned_shards, median_bytes, num_bytes, room_bytes, max_decodes, num_bytes,
    )  # fmt: skip
