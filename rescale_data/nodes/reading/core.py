"""`ReaderCore`: the part of a `Reader` that all logical shards share. There may be hundreds of sources and of shards."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from rescale_data.nodes.error_handler import ErrorHandler, OnError
from rescale_data.nodes.reading.blocklist import Blocklist
from rescale_data.nodes.reading.epochs import DataVersion
from rescale_data.nodes.reading.fetching import FragmentPrefetcher
from rescale_data.nodes.reading.rows import SourceRows
from rescale_data.shard import Shard
from rescale_data.sources.source import Source


class ReaderArguments(NamedTuple):
    """The arguments of a `Reader` that are the same in all logical shards.

    Args:
        reader_class: The class of the reader, for messages.
        source: The source.
        shard: Logical shard 0, for the values that all shards have in common.
        shuffle, by_global_batch, provenance, on_error: See `Reader`.
        blocklist: The rows to leave out; `None` if no list is given.
        versions: See `SourceRows`.
    """

    reader_class: type[Any]
    source: Source
    shard: Shard
    shuffle: bool | int
    by_global_batch: bool
    provenance: bool
    on_error: OnError
    blocklist: Blocklist | None
    versions: tuple[DataVersion, ...] = ()

    @property
    def key(self) -> Hashable:
        """A value that is equal if the arguments are the same: objects by identity, ``shuffle`` by text (`True` is not 1)."""
        on_error = self.on_error if isinstance(self.on_error, str) else id(self.on_error)
        objects = id(self.source), id(self.blocklist), on_error, repr(self.shuffle)
        return (*objects, self.reader_class, self.shard, self.by_global_batch, self.provenance, self.versions)


class ReaderCore:
    """The values that readers of all logical shards share if their source and arguments are the same. They never change.

    Attributes:
        rows: The rows of each shard.
        has_provenance: True if samples name their rows.
        gives_documents: True if columns may be read without their rows: no sample is left out because of an error or names
            its row.
        fragments: ``int64[F + 1]``, the first row of each fragment of the source, and the end; `None` if it has no fragments.
        prefetcher: Fetches fragments ahead; `None` if the source does not read ahead.
        leaves_out_rows: True if a row is on the blocklist.
        only_row_advances: True if reading a row only adds 1 to the row number in the position, except at the end of an epoch.
    """

    def __init__(self, arguments: ReaderArguments) -> None:
        source, shard, blocklist = arguments.source, arguments.shard, arguments.blocklist
        self.arguments, self.source, self.blocklist = arguments, source, blocklist
        self.rows = SourceRows(source, shard, arguments.shuffle, arguments.by_global_batch, arguments.versions)
        self.error_handler = ErrorHandler(arguments.reader_class, arguments.on_error, "while reading", source.faults)
        self.has_provenance = arguments.provenance or shard.provenance
        self.gives_documents = not (self.error_handler.skips or self.has_provenance)
        self.fragments = None if source.fragments is None else np.ascontiguousarray(source.fragments, dtype=np.int64)
        self.prefetcher: FragmentPrefetcher | None = None
        if source.reads_ahead and self.fragments is not None:
            self.prefetcher = FragmentPrefetcher(source, self.fragments, self.rows.rows_per_window)
        self.leaves_out_rows = blocklist is not None and len(blocklist.rows) > 0
        self.only_row_advances = not shard.verify and not self.leaves_out_rows

    def __reduce__(self) -> tuple[Any, ...]:
        return core_of, (self.arguments,)


_cores: WeakValueDictionary[Hashable, ReaderCore] = WeakValueDictionary()


def core_of(arguments: ReaderArguments) -> ReaderCore:
    """Return the core with these arguments, always the same one as long as a reader has it.

    Raises:
        ValueError: ``shuffle``, ``by_global_batch`` or ``on_error`` are not valid.
    """
    core = _cores.get(arguments.key)
    return _cores.setdefault(arguments.key, ReaderCore(arguments)) if core is None else core


@lru_cache(maxsize=64)
def first_shard_like(shard: Shard) -> Shard:
    """Return logical shard 0 of the run that a shard belongs to."""
    return replace(shard, index=0)
