"""`Node`: a torchdata node whose whole state is a row of integers that lives wherever the loader wants it.

The loader keeps the rows of all logical shards in one table. A node does not copy its state there: its `position` *is*
that row, a writable memoryview of int64 slots, so that what a sample costs to record is one assignment.

    row of the root:  [ own slots | slots of child a | slots of child b ]
                                    ^ a.position is this part of it

Children that are not ours are made so by `as_node`, which `foreign.py` teaches about torchdata's own. This is the only module
that imports torchdata: what of it others need, they take from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, singledispatch
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import numpy as np
from torchdata.nodes import (
    BaseNode,
    IterableWrapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    PinMemory,
    Prefetcher,
    SamplerWrapper,
    Stateful,
    Unbatcher,
)

from rescale_data.nodes.changing import Changing, View
from rescale_data.nodes.reading.documents import Documents, Texts
from rescale_data.nodes.tray import Columns, Tray
from rescale_data.shard import Shard
from rescale_data.sources.source import Described
from rescale_data.state import (
    Field,
    Ints,
    copy_of,
    joined,
    offsets,
    place_slots,
    require_limits,
    row_of,
    state_of,
)

__all__ = [
    "BaseNode",
    "IterableWrapper",
    "MultiNodeWeightedSampler",
    "Node",
    "ParallelMapper",
    "PinMemory",
    "Prefetcher",
    "SamplerWrapper",
    "Stateful",
    "Unbatcher",
    "View",
    "as_node",
    "copy_of",
]

T = TypeVar("T")
_ENDED = "_ended"
_NO_CHILDREN: dict[str, Any] = {}  # of leaves, of which there may be many


_BESIDE_NEXT = ("documents", "texts", "write", "skip", "epoch_end")
"""What gives samples, or counts them, without `Node.next`."""


class Node(Changing, BaseNode[T]):
    """Base of our nodes, and of yours where `get_state()` after every sample would cost too much.

    A subclass lists its own fields in `FIELDS`, hands its children to ``super().__init__(name=child)``, reads and writes
    ``self.position[0 .. len(FIELDS) - 1]`` in `next`, and forgets in `seek` whatever it derived from the position.
    `get_state` and `reset` then follow. `parameters` returns what must not change between two segments of a run. A node that
    reads rows itself sets `of_shard`. By default `skip` draws, and `epoch_end`, `locate` and `progress` know nothing. All other
    names serve the nodes of this package.

    Contract, in addition to that of `BaseNode`:

    - The position after a sample has been yielded, whatever was read ahead, is the one from which the next sample is made.
    - At the end of an epoch `next` raises `StopIteration`, writes the beginning of the next epoch into the position, and
      raises again until it is bound or reset: ``reset(get_state())`` or ``reset(None)`` then begins that epoch. After the last
      sample of an epoch, but before that `StopIteration`, the position still belongs to the epoch.
    - ``reset(None)`` in the middle of an epoch leaves out the rest of it, and begins the next.
    - Paths, dtypes, shapes and the initial row are the same for every logical shard.

    Example:
        >>> import rescale_data as rd
        >>> class Double(rd.Node[int]):
        ...     def next(self) -> int:
        ...         return 2 * next(self.children["source"])
        >>> list(Double(source=rd.Reader(range(3), rd.Shard(), shuffle=False)))
        [0, 2, 4]
    """

    FIELDS: tuple[Field, ...] = ()
    """The fields of this node's own slots. A node whose arguments decide on them sets them before ``super().__init__``."""
    READS_AHEAD: ClassVar[bool] = False
    """True where a node reads its children further than the samples it has yielded. Their live positions are then
    private, and this node writes into its own row (`bookmark`) where each child has to go on."""

    tells_next: bool = False
    """Whether a sample of such a node says something of what the next one begins with: the label of its last token."""

    one_for_one: bool = False
    """Whether this node yields one sample for each that its only child, ``source``, does."""

    repeats_itself: bool = False
    """Whether each epoch of this node, where it knows the end, moves it by as much if those of its readers do."""

    reads: Described | None = None
    """The source whose rows this node reads, if it reads any itself."""

    writes: Columns = MappingProxyType({})
    """Where samples are dicts of 1-D arrays whose length and dtype are known: which. Such a node implements `write`."""

    of_shard: Shard | None = None
    """The logical shard whose rows this node reads, if it reads any itself."""

    provenance: bool = False
    """Whether each sample says which row it is, where this node reads rows itself."""

    is_built: bool = False
    """Whether a loader has this node: no other may."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "next" in vars(cls):
            beside = [
                name for name in _BESIDE_NEXT if name not in vars(cls) and getattr(cls, name) is not getattr(Node, name)
            ]
            if beside:
                parent = cls.__mro__[1].__name__
                raise TypeError(
                    f"{cls.__name__} has a next() of its own, and from {parent} {', '.join(f'{name}()' for name in beside)}, "
                    f"which go past it. Put it above in place of deriving it: rd.Map, or a subclass of rd.Node with the "
                    f"{parent} as a child. Or give it these as well."
                )

    def __init__(self, **children: BaseNode[Any]) -> None:
        super().__init__()
        self.is_bound = self._ended = False
        self.children: dict[str, Node[Any]] = {name: as_node(child) for name, child in children.items()} or _NO_CHILDREN
        self.fields, self._slices = joined(
            self.FIELDS, tuple((name, child.fields) for name, child in self.children.items())
        )
        self._changing = tuple(
            (child, self._slots(name))
            for name, child in self.children.items()
            if any(below.MAY_CHANGE for _, below in child.walk())
        )

    @cached_property
    def position(self) -> View:
        """The row of slots that says where this node stands; a row of its own until it is bound."""
        return self.initial()

    def initial(self) -> View:
        """The row of a stream that has yielded nothing, a fresh one."""
        row = np.zeros(offsets(self.fields)[-1], dtype=np.int64)
        for name, child in self.children.items():
            row[self._slots(name)] = child.initial()
        return row.data

    def bookmark(self, child: str) -> View:
        """The part of this node's row that belongs to a child."""
        return self.position[self._slots(child)]

    def bind(self, position: View) -> None:
        """Go on from ``position`` and keep the state there from now on: int64 slots of `fields`, in their order."""
        super().reset(None)
        self.is_bound, self._ended = True, False
        self.position = position
        self._bind_children()
        self.seek()

    def _bind_once(self) -> None:
        """Go on from the position of this node if it has not been bound yet."""
        if not self.is_bound:
            self.bind(self.position)

    def go_to(self, position: View) -> None:
        """Go on from a copy of ``position``, kept where this node's own is."""
        self.position[:] = position
        self.bind(self.position)

    def _bind_children(self) -> None:
        """Bind them to their parts of the position."""
        for name, child in self.children.items():
            part = self.bookmark(name)
            if self.READS_AHEAD:
                child.position[:] = part
                part = child.position
            child.bind(part)

    def borrow(self, other: Node[Any]) -> None:
        """Share with ``other``, this node in another logical shard, what both have alike."""
        for name, child in self.children.items():
            child.borrow(other.children[name])

    def unbind(self) -> None:
        """Keep no position: somebody else does, and binds this node before it is drawn from."""
        if self.is_bound:
            self.is_bound = False
            del self.position

    def seek(self) -> None:
        """The position has been rewritten: forget what was derived from it. Children have been told."""

    def reset(self, initial_state: Mapping[str, Any] | None = None) -> None:
        values = dict(initial_state or {})
        ended = bool(values.pop(_ENDED, False))
        if initial_state is not None:
            position = row_of(self.fields, values, type(self).__name__)
            require_limits(self.fields, np.asarray(position)[None], f"a {type(self).__name__}")
            self.position[:] = position
        elif not self._ended:
            self.next_epoch(self.position)
        self.bind(self.position)
        self._ended = ended

    def get_state(self) -> dict[str, Any]:
        return state_of(self.fields, self.position)

    def state_dict(self) -> dict[str, Any]:
        """`get_state`, and whether the epoch has ended: what torchdata's nodes keep, some of which yield once more then."""
        return {**super().state_dict(), _ENDED: self._ended}

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        self._bind_once()
        try:
            return self.next()
        except StopIteration:
            self._ended = True
            raise

    def next_epoch(self, position: View, *, is_drawn: bool = False) -> None:
        """Write the beginning of the next epoch into a row of this node; one at which nothing has been drawn stays.

        Args:
            is_drawn: Something has been drawn all the same: a node above is within the first sample.
        """
        first = self.initial()
        for slot in place_slots(self.FIELDS):
            is_drawn |= self.READS_AHEAD and position[slot] != first[slot]
            position[slot] = first[slot]
        for name, child in self.children.items():
            child.next_epoch(position[self._slots(name)], is_drawn=is_drawn and len(self.children) == 1)

    def place(self) -> list[int]:
        """Return the slots of a position that tell the next sample from all others of the run, to key random numbers with.

        They hold the same values whichever sources come and go between legs.
        """
        below = [self._slots(name).start + slot for name, child in self.children.items() for slot in child.place()]
        return [*place_slots(self.FIELDS), *below]

    def write(self, tray: Tray, place: int) -> None:
        """Draw the next sample into row ``place`` of a tray of `writes`; at the end of an epoch as `next`."""
        raise NotImplementedError(f"{type(self).__name__} writes {list(self.writes)}, and so needs a write method.")

    @staticmethod
    def write_ready(nodes: Sequence[Any], tray: Tray, first: int) -> int:
        """Draw the next sample of each node, all of this class, into its row from ``first`` on, while that takes but a copy.

        Returns:
            The first row that was not written: `write` does what that one needs.
        """
        del nodes, tray
        return first

    def skip(self, num_samples: int) -> None:
        """Leave out the next samples, as if they had been drawn."""
        if self.one_for_one:
            self._bind_once()
            return self.children["source"].skip(num_samples)
        for _ in range(num_samples):
            next(self)
        return None

    def read_begun(self) -> None:
        """Read again what samples have been drawn from in part, as whoever goes on within it does (`READS_AHEAD`)."""
        next(self)

    def skip_ahead(self, num_samples: int) -> int:
        """Leave out up to so many samples where `epoch_end` is not known, and yet they need not be drawn.

        Returns:
            How many; fewer where the epoch ends, which in an endless stream it need not do, or where they have to be read.
        """
        return self.children["source"].skip_ahead(num_samples) if self.one_for_one else 0

    def epoch_end(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        """Return the samples left in the epoch, and the rows at which the next begins; `None` where only reading tells.

        Args:
            rows: ``int64[M, slots]``, positions of this node in any logical shards; not changed.
            shards: ``int64[M]``, their indices.

        Returns:
            ``int64[M]`` samples and ``int64[M, slots]`` rows, or `None`.
        """
        return self._epoch_end_of_source(rows, shards) if self.one_for_one else None

    def _epoch_end_of_source(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        """`epoch_end` of a node that yields one sample for each of its source, and whose own slots stay as they are."""
        own = self._slots("source").start
        end = self.children["source"].epoch_end(rows[:, own:], shards)
        return None if end is None else (end[0], np.concatenate([rows[:, :own], end[1]], axis=1))

    def prepare(self, rows: Ints, shards: Ints) -> None:
        """Begin to bring what is needed at these positions, from which this process is about to draw; returns at once.

        Args:
            rows: ``int64[M, slots]``, positions of this node in any logical shards; not changed.
            shards: ``int64[M]``, their indices.
        """

    def documents(self, column: str) -> Documents | None:
        """A token column of this node's samples, to be read many documents at a time; `None` where that is not possible.

        It moves this node neither now nor later: it reads from positions that its caller keeps. A node over others that hand
        over documents can do so as well: it picks and cuts the `Spans` of its children, which are arrays of numbers.
        """
        del column
        return None

    def texts(self, column: str) -> Texts | None:
        """A column of strings of this node's samples, to be read many at a time; `None` where that is not possible."""
        del column
        return None

    def dtype_of(self, column: str) -> np.dtype[Any] | None:
        """The dtype of a token column where samples are dicts of that column alone, so that `documents` leaves nothing out;
        `None` where they are not, or where it differs."""
        del column
        return None

    def parameters(self) -> dict[str, Any]:
        """Return all that changes order or content of the samples, JSON values by name; checked when a state is loaded."""
        return {}

    def locate(self) -> str:
        """Return the place of the sample that was yielded last, for messages; empty if it is not known."""
        return next(iter(self.children.values())).locate() if len(self.children) == 1 else ""

    def verify(self) -> None:
        """``DataStateError`` where what was read is not what the position says, as far as this node keeps account of it."""

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        """Return counts of what logical shards have drawn, for a logger; keys start with the kind of value, ``"rows/..."``.

        Args:
            rows: ``int64[M, slots]`` of this node.
            shards: ``int64[M]`` indices.
            samples: ``int64[M]`` samples that the root has delivered.
        """
        del rows, shards, samples
        return {}

    def walk(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node[Any]]]:
        """Yield this node and all below it, with their paths."""
        yield path, self
        for name, child in self.children.items():
            yield from child.walk((*path, name))

    def slots_of(self, path: tuple[str, ...]) -> slice | None:
        """Return the slots of the node at ``path`` in a row of this node; `None` inside a torchdata node."""
        node, first = self, 0
        for name in path:
            if name not in node.children:
                return None
            node, first = node.children[name], first + node._slots(name).start
        return slice(first, first + offsets(node.fields)[-1])

    def _slots(self, child: str) -> slice:
        return self._slices[child]


@singledispatch
def as_node(node: object) -> Node[Any]:
    """``node`` itself if it is ours, else wrapped in one of ours."""
    raise TypeError(
        f"A pipeline is made of nodes, but it was given a {type(node).__name__}. Return a torchdata.nodes.BaseNode, for "
        f"example rd.Reader(source, shard)."
    )


@as_node.register(Node)
def _itself(node: Node[Any]) -> Node[Any]:
    return node
