"""Which logical shards this process serves, as the loader says it, for whoever decodes for several of them at once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from rescale_data.sources.decoded.cache import by_owner, follows, owner_of
from rescale_data.sources.source import Described
from rescale_data.state import Ints

PARTS = 8
"""Of a block, each of which goes when it has been passed."""
_LEAST_BLOCK = 2**16

_shards: dict[int, Sequence[int]] = by_owner()
_needed: dict[int, int] = by_owner()
_beside: dict[int, tuple[int, int]] = by_owner()
_warned: dict[int, bool] = by_owner()
_log = logging.getLogger("rescale_data")


@runtime_checkable
class Decoded(Protocol):
    """A source whose fragments take memory."""

    @property
    def name(self) -> str: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def fragments(self) -> Ints | None: ...

    @property
    def cache_bytes(self) -> int: ...

    @property
    def spill_bytes(self) -> int:
        """What may lie on disk beside them."""
        ...

    @property
    def fragment_bytes(self) -> int:
        """Bytes of the median fragment when it is decoded, as far as the footers tell."""
        ...


def serve(sources: Iterable[Described], shards: Sequence[int]) -> None:
    """Remember that this process reads these shards of the sources, in turn, from now on."""
    served = list(sources)
    needed = sum(_needed_by(source, len(shards)) for source in served if follows(source, Decoded))
    for source in served:
        owner = owner_of(source)
        _shards[owner], _needed[owner], _beside[owner] = shards, needed, (len(served), len(shards))


def shards_of(source: int, num_logical_shards: int) -> Sequence[int]:
    """The shards that this process serves of a source, given by its key: all of them where nobody has said."""
    return _shards.get(source, range(num_logical_shards))


def beside(source: int) -> tuple[int, int]:
    """How many sources are read in turn with this one, given by its key, and how many shards: one where nobody has said."""
    return _beside.get(source, (1, 1))


def room_for_block(source: Decoded) -> int:
    """Bytes that the cache has for copies out of fragments, those of one shard with a part of those before, beside a fragment.

    Returns:
        None where it has room for all fragments, or for nothing that is worth it.
    """
    sources, shards = beside(owner_of(source))
    fragments = 0 if source.fragments is None else len(source.fragments) - 1
    room = (source.cache_bytes - source.fragment_bytes) * PARTS // ((PARTS + 1) * sources * shards)
    fit = sources * fragments * source.fragment_bytes <= source.cache_bytes
    return 0 if fit or room < _LEAST_BLOCK else room


def needed_with(source: Decoded, num_shards: int) -> int:
    """Bytes of the fragments that so many shards visit in turn, with those of all sources that are served beside this one."""
    return max(_needed.get(owner_of(source), 0), _needed_by(source, num_shards))


def _needed_by(source: Decoded, num_shards: int) -> int:
    return 0 if source.fragments is None else min(num_shards, len(source.fragments) - 1) * source.fragment_bytes


def warn_if_thrashing(sources: Iterable[Described], owned_shards: int, beside: int = 0) -> None:
    """Warn, once, where one process visits more fragments in turn than its cache holds, those of all sources together.

    Args:
        sources: Nothing is said of those without fragments.
        owned_shards: Logical shards that this process runs.
        beside: Bytes of what the cache keeps for each of them beside fragments.
    """
    known = [source for source in sources if follows(source, Decoded) and source.fragments is not None]
    counts = [source.num_rows // max(1, len(found) - 1) for source in known if (found := source.fragments) is not None]
    times = max(counts, default=0)
    needed = sum(_needed_by(source, owned_shards) for source in known) + owned_shards * beside
    room = max((source.cache_bytes + source.spill_bytes for source in known), default=0)
    owners = {owner_of(source) for source in known}
    if needed <= room or times < 2 or owners <= _warned.keys():
        return
    _warned.update(dict.fromkeys(owners, True))
    name = known[0].name if len(known) == 1 else f"{len(known)} sources, {known[0].name} among them"
    size = sorted(source.fragment_bytes for source in known)[len(known) // 2]
    _log.warning(
        "%s: this process visits %d logical shards in turn, whose fragments of about %d bytes (of Parquet: all columns), and "
        "the order in which they read, take %d bytes, and cache_bytes and spill_bytes, which all sources share, are %d. "
        "Fragments are then decoded again at each visit, up to %d times an epoch (their rows; less under a TokenPacker, "
        "which takes many at a visit). "
        "Give cache_bytes=%d, or spill_dir=, a local folder with as much room, run fewer shards in a process (a smaller "
        "num_logical_shards, more ranks or workers), or write smaller row groups or record batches.",
        name, owned_shards, size, needed, room, times, needed,
    )  # fmt: skip
