"""`IterableSource`: streams without random access, each of which belongs to one logical shard."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, Protocol, TypeAlias, cast, runtime_checkable

from rescale_data.errors import DataStateError, checks_argument_types, require_type
from rescale_data.sources.source import BaseSource

StreamFactory: TypeAlias = Callable[[int], Iterable[Any]]
PositionKind: TypeAlias = Literal["state", "count", "nothing"]


@runtime_checkable
class Stateful(Protocol):
    """A stream that can save and restore its position, such as an ``IterableDataset`` of Hugging Face."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any, /) -> None: ...


@runtime_checkable
class Shardable(Protocol):
    """A stream that can split itself into shards, as Hugging Face's ``IterableDataset`` does."""

    @property
    def num_shards(self) -> int: ...
    def shard(self, num_shards: int, index: int) -> Any: ...


Streams: TypeAlias = Sequence[Iterable[Any]] | Shardable | StreamFactory


class IterableSource(BaseSource):
    """Streams without random access, read from their beginning to their end; each belongs to one logical shard.

    A stream is resumed with ``state_dict`` and ``load_state_dict`` if its iterator, or the stream itself, has them. Its state
    is kept in the loader's state, as JSON in a row of fixed width. Any other stream is read again, up to the number of rows
    that were drawn. It must then yield the same rows, and a later position takes longer (R4 does not hold). Streams of Hugging
    Face that shuffle in a buffer are read again, too, because their state leaves the buffer out. An iterator that can be read
    only once, such as a generator over a queue, can do neither: saving a checkpoint, an epoch's end (``repeat=False``) and
    going back to rows that were read ahead then raise an error.

    Args:
        streams: A list of iterables; one iterable that splits itself (``num_shards`` and ``shard(num_shards, index)``, as
            ``IterableDataset`` of Hugging Face ``datasets``); or a function from the number of a stream to an iterable, which
            is called anew each epoch.
        num_streams: Number of streams, if ``streams`` is a function.
        name: Name for logs and counters.
        state_bytes: Bytes that the state of one stream may take as JSON. 0: count rows, even if the streams have a state.

    Raises:
        TypeError: ``streams`` is none of these, or it is a function and ``num_streams`` is missing.
        ValueError: There is no stream, or ``state_bytes`` is negative.

    Example:
        >>> import rescale_data as rd
        >>> source = rd.IterableSource([["a", "b"], ["c", "d"]])
        >>> list(rd.StreamReader(source, rd.Shard(index=1, num_logical_shards=2)))
        ['c', 'd']
    """

    @checks_argument_types
    def __init__(
        self, streams: Streams, *, num_streams: int | None = None, name: str = "stream", state_bytes: int = 1024
    ) -> None:
        self._make_stream, self.num_streams = _to_factory(streams, num_streams)
        self.name, self.state_bytes = name, state_bytes
        if self.num_streams < 1 or state_bytes < 0:
            raise ValueError(f"num_streams={self.num_streams}, {state_bytes=}: give a stream, no negative bytes.")
        self._begun: set[int] = set()  # streams that can be read once, and were opened
        is_read_once = isinstance(streams, Sequence) and any(map(_is_read_once, streams))
        self.keeps: PositionKind = "nothing" if is_read_once else _position_kind(self._make_stream, state_bytes)

    def manifest(self) -> Mapping[str, Any]:
        return {"format": "streams", "name": self.name, "streams": self.num_streams}

    def stream(self, index: int, epoch: int) -> Iterable[Any]:
        """Return a stream at its beginning, after a call of ``set_epoch`` if the stream has that method."""
        stream = self._make_stream(index)
        if self.keeps == "nothing" and _is_read_once(stream):
            if index in self._begun:
                self._raise_unsupported(
                    f"Stream {index} of {self.name} cannot be read again, and rows of it were read ahead or are over"
                )
            self._begun.add(index)
        set_epoch = getattr(stream, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        return stream

    def require_saveable(self) -> None:
        if self.keeps == "nothing":
            self._raise_unsupported(f"The position in {self.name} cannot be saved")

    def _raise_unsupported(self, text: str) -> NoReturn:
        raise DataStateError(
            f"{text}: its streams are iterators that can be read once, and have no state_dict(), so that a resumed run could "
            f"neither go on nor begin again, nor the end of an epoch be counted. Give IterableSource a function that makes "
            f"each stream anew, iterables that begin again, or iterators with state_dict and load_state_dict; or save without "
            f"the loader, with repeat=True."
        )


def _position_kind(make_stream: StreamFactory, state_bytes: int) -> PositionKind:
    stream = make_stream(0)
    iterator = iter(stream)
    has_state = isinstance(stream, Stateful) or isinstance(iterator, Stateful)
    if state_bytes and has_state and not _has_buffer(getattr(stream, "_ex_iterable", None)):
        return "state"
    return "nothing" if iterator is stream and make_stream(0) is stream else "count"


def _is_read_once(stream: object) -> bool:
    """True if the rows of a stream, once drawn, cannot be drawn again."""
    return isinstance(stream, Iterator) and not isinstance(stream, Stateful)


def _has_buffer(iterable: Any) -> bool:
    """True if a part of Hugging Face's ``IterableDataset`` shuffles in a buffer, which its ``state_dict`` does not save."""
    inner = [getattr(iterable, "ex_iterable", None), *getattr(iterable, "ex_iterables", ())]
    return "BufferShuffled" in type(iterable).__name__ or any(_has_buffer(item) for item in inner if item is not None)


def _shard_of(stream: Shardable, index: int) -> Iterable[Any]:
    return stream.shard(num_shards=stream.num_shards, index=index)


def _stream_at(streams: Sequence[Iterable[Any]], index: int) -> Iterable[Any]:
    stream = streams[index]
    return copy.deepcopy(stream) if isinstance(stream, Stateful) else stream  # each reader has a state of its own


def _to_factory(streams: Any, num_streams: int | None) -> tuple[StreamFactory, int]:
    if isinstance(streams, Shardable):
        return partial(_shard_of, streams), int(streams.num_shards)
    if isinstance(streams, Sequence) and not isinstance(streams, str | bytes):
        require_type(Iterable, "an iterable", **{f"streams[{i}]": each for i, each in enumerate(cast(Any, streams))})
        return partial(_stream_at, streams), len(streams)
    if not callable(streams) or num_streams is None:
        raise TypeError(
            f"IterableSource was given a {type(streams).__name__} and num_streams={num_streams}. Give a list of iterables, an "
            f"IterableDataset, or a function from the number of a stream to an iterable, with num_streams=."
        )
    return cast(StreamFactory, streams), num_streams
