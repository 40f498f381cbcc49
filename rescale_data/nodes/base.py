"""`Node`: a torchdata node whose whole state is a row of integers, in memory that the loader chooses.

The loader keeps the rows of all logical shards in one table. A node does not copy its state there: its `position` *is*
that row, a writable memoryview of int64 slots. So recording a sample costs one assignment.

    row of the root:  [ own slots | slots of child a | slots of child b ]
                                    ^ a.position is this part of it

`as_node` wraps children that are no `Node`; `foreign.py` registers torchdata's nodes with it. Only this module imports
torchdata: the other modules import torchdata's names from here.
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
_NO_CHILDREN: dict[str, Any] = {}  # shared by all leaves: there may be many


_BESIDE_NEXT = ("documents", "texts", "write", "skip", "epoch_end")
"""Methods that give samples, or count them, without a call of `Node.next`."""


class Node(Changing, BaseNode[T]):
    """Base class of this package's nodes, and of your nodes where `get_state()` after every sample would cost too much.

    A subclass lists its own fields in `FIELDS`, hands its children to ``super().__init__(name=child)``, reads and writes
    ``self.position[0 .. len(FIELDS) - 1]`` in `next`, and forgets in `seek` whatever it derived from the position.
    `get_state` and `reset` then need no code. `parameters` returns what must not change between two segments of a run. A node
    that reads rows itself sets `of_shard`. By default `skip` draws, and `epoch_end`, `locate` and `progress` know nothing. All
    other names serve the nodes of this package.

    Contract, in addition to that of `BaseNode`:

    - After a sample has been yielded, the next sample is made from the position, whatever was read ahead.
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
    """The fields of this node's own slots. A node whose arguments decide its fields sets them before ``super().__init__``."""
    READS_AHEAD: ClassVar[bool] = False
    """True if the node reads its children further than the samples it has yielded. The live positions of the children are
    then private, and this node writes the position at which each child has to go on into its own row (`bookmark`)."""

    tells_next: bool = False
    """True if a sample of this node reveals how the next one begins: by the label of its last token."""

    one_for_one: bool = False
    """True if this node yields one sample for each sample of its only child, ``source``."""

    repeats_itself: bool = False
    """True if each epoch of this node whose end is known moves the position by the same amount, provided that the epochs of
    its readers do so too."""

    reads: Described | None = None
    """The source whose rows this node reads, if it reads any itself."""

    writes: Columns = MappingProxyType({})
    """The columns of samples that are dicts of 1-D arrays of known length and dtype. A node with any implements `write`."""

    of_shard: Shard | None = None
    """The logical shard whose rows this node reads, if it reads any itself."""

    provenance: bool = False
    """True if this node reads rows itself and each sample names its row."""

    is_built: bool = False
    """True if a loader has this node: no other loader may take it."""

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
        """The row of slots that says where this node stands; until the node is bound, a row of its own."""
        return self.initial()

    def initial(self) -> View:
        """Return a fresh row, of a stream that has yielded nothing."""
        row = np.zeros(offsets(self.fields)[-1], dtype=np.int64)
        for name, child in self.children.items():
            row[self._slots(name)] = child.initial()
        return row.data

    def bookmark(self, child: str) -> View:
        """Return the part of this node's row that belongs to a child; a view."""
        return self.position[self._slots(child)]

    def bind(self, position: View) -> None:
        """Go on from ``position``, int64 slots of `fields` in their order, and keep the state there from now on."""
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
        """Copy ``position`` into this node's own row and go on from there."""
        self.position[:] = position
        self.bind(self.position)

    def _bind_children(self) -> None:
        """Bind the children to their parts of the position."""
        for name, child in self.children.items():
            part = self.bookmark(name)
            if self.READS_AHEAD:
                child.position[:] = part
                part = child.position
            child.bind(part)

    def borrow(self, other: Node[Any]) -> None:
        """Share memory with ``other``, the same node in another logical shard, for everything that is equal in both."""
        for name, child in self.children.items():
            child.borrow(other.children[name])

    def unbind(self) -> None:
        """Drop the position. The caller keeps it, and binds this node again before drawing from it."""
        if self.is_bound:
            self.is_bound = False
            del self.position

    def seek(self) -> None:
        """Forget all that was derived from the position, which has been rewritten. The children are bound already."""

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
        """Return `get_state()`, and whether the epoch has ended.

        Nodes of torchdata keep this state of a source. Some of them draw from it once more after the end.
        """
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
        """Write the beginning of the next epoch into a row of this node; a row from which nothing was drawn stays.

        Args:
            is_drawn: True if something was drawn although the row does not show it: a node above is within the first sample.
        """
        first = self.initial()
        for slot in place_slots(self.FIELDS):
            is_drawn |= self.READS_AHEAD and position[slot] != first[slot]
            position[slot] = first[slot]
        for name, child in self.children.items():
            child.next_epoch(position[self._slots(name)], is_drawn=is_drawn and len(self.children) == 1)

    def place(self) -> list[int]:
        """Return the slots of a position that identify the next sample among all samples of the run.

        Random numbers are keyed with these slots. Their values do not depend on sources that come and go between segments.
        """
        below = [self._slots(name).start + slot for name, child in self.children.items() for slot in child.place()]
        return [*place_slots(self.FIELDS), *below]

    def write(self, tray: Tray, place: int) -> None:
        """Draw the next sample into row ``place`` of a tray of `writes`; the end of an epoch is as in `next`."""
        raise NotImplementedError(f"{type(self).__name__} writes {list(self.writes)}, and so needs a write method.")

    @staticmethod
    def write_ready(nodes: Sequence[Any], tray: Tray, first: int) -> int:
        """Draw the next sample of each node into its row from ``first`` on, as long as a copy is enough.

        Args:
            nodes: Nodes of this class, one for each row.
            tray: The tray to write into.
            first: The first row to write.

        Returns:
            The first row that was not written. The caller uses `write` for it.
        """
        del nodes, tray
        return first

    def skip(self, num_samples: int) -> None:
        """Leave out the next ``num_samples`` samples, as if they had been drawn."""
        if self.one_for_one:
            self._bind_once()
            return self.children["source"].skip(num_samples)
        for _ in range(num_samples):
            next(self)
        return None

    def read_begun(self) -> None:
        """Read again the document or window that is drawn in part, as going on within it requires (`READS_AHEAD`)."""
        next(self)

    def skip_ahead(self, num_samples: int) -> int:
        """Leave out up to ``num_samples`` samples without drawing them, where `epoch_end` is not known.

        Returns:
            The number of samples left out. There are fewer if the epoch ends (an endless stream may go on), or if the samples
            have to be read.
        """
        return self.children["source"].skip_ahead(num_samples) if self.one_for_one else 0

    def epoch_end(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        """Return the samples left in the epoch, and the rows at which the next begins; `None` if only reading can show it.

        Args:
            rows: ``int64[M, slots]``, positions of this node in any logical shards; not changed.
            shards: ``int64[M]``, their indices.

        Returns:
            ``int64[M]`` samples and ``int64[M, slots]`` rows, or `None`.
        """
        return self._epoch_end_of_source(rows, shards) if self.one_for_one else None

    def _epoch_end_of_source(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        """Return `epoch_end` of a node that yields one sample for each sample of its source and keeps its own slots."""
        own = self._slots("source").start
        end = self.children["source"].epoch_end(rows[:, own:], shards)
        return None if end is None else (end[0], np.concatenate([rows[:, :own], end[1]], axis=1))

    def prepare(self, rows: Ints, shards: Ints) -> None:
        """Begin to fetch the data at positions from which this process is about to draw; return at once.

        Args:
            rows: ``int64[M, slots]``, positions of this node in any logical shards; not changed.
            shards: ``int64[M]``, their indices.
        """

    def documents(self, column: str) -> Documents | None:
        """Return a token column of this node's samples, to be read many documents at a time; `None` if that is not possible.

        The caller keeps the positions from which it reads, and does not draw from this node beside it: where samples are read
        one at a time, the node moves. A node over children that return documents can return documents too: it picks and cuts
        the `Spans` of its children, which are arrays of numbers.
        """
        del column
        return None

    def texts(self, column: str) -> Texts | None:
        """Return a column of strings of this node's samples, to be read many at a time; `None` if that is not possible."""
        del column
        return None

    def dtype_of(self, column: str) -> np.dtype[Any] | None:
        """Return the dtype of a token column if samples are dicts of that column alone and the dtype is always the same.

        `documents` then leaves nothing out. In all other cases return `None`.
        """
        del column
        return None

    def parameters(self) -> dict[str, Any]:
        """Return all that changes the order or content of samples, as JSON values by name; checked when a state is loaded."""
        return {}

    def locate(self) -> str:
        """Return the place of the sample that was yielded last, for messages; an empty string if it is not known."""
        return next(iter(self.children.values())).locate() if len(self.children) == 1 else ""

    def verify(self) -> None:
        """Raise ``DataStateError`` if the rows that were read are not those in the position's digest, if this node has one."""

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        """Return counts of what logical shards have drawn, for a logger.

        Keys start with the kind of value, as in ``"rows/..."``.

        Args:
            rows: ``int64[M, slots]`` of this node.
            shards: ``int64[M]`` indices.
            samples: ``int64[M]`` samples that the root has delivered.
        """
        del rows, shards, samples
        return {}

    def walk(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node[Any]]]:
        """Yield this node and all nodes below it, each after its path."""
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
    """Return ``node`` itself if it is a `Node`, else a `Node` that wraps it."""
    raise TypeError(
        f"A pipeline is made of nodes, but it was given a {type(node).__name__}. Return a torchdata.nodes.BaseNode, for "
        f"example rd.Reader(source, shard)."
    )


@as_node.register(Node)
def _itself(node: Node[Any]) -> Node[Any]:
    return node
