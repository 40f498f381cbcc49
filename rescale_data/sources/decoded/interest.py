"""Which logical shards this process serves, as the loader says it, for whoever decodes for several of them at once."""

from __future__ import annotations

from collections.abc import Iterable

from rescale_data.sources.decoded.cache import owner_of
from rescale_data.sources.source import Described

_shards: dict[int, range] = {}


def serve(sources: Iterable[Described], shards: range) -> None:
    """From now on this process reads these shards of the sources."""
    for source in sources:
        _shards[owner_of(source)] = shards


def shards_of(source: int, num_logical_shards: int) -> range:
    """The shards of a source, given by its key: all of them where nobody has said."""
    return _shards.get(source, range(num_logical_shards))
