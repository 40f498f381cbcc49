"""`Node`: a torchdata node whose whole state is one row of int64 numbers, in an array that the loader provides.

The loader keeps the rows of all logical shards in one table. A node does not copy its state there: its `position` *is*
that row, a writable memoryview of int64 slots. So recording a sample costs one assignment.

    row of the root:  [ own slots | slots of child a | slots of child b ]
                                    ^ a.position is this part of it

`as_node` wraps children that are no `Node`; `foreign.py` registers torchdata's nodes with it. Only this module imports
torchdata: the others import `BaseNode` and ``torchdata_nodes`` from here.
"""

# pyright: reportPrivateUsage=false
# The functions of this module use private parts of its class, which no other module does.
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, singledispatch
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
from torchdata import nodes as torchdata_nodes

from rescale_data.nodes.abilities import MayChange
from rescale_data.shard import Shard
from rescale_data.sources.source import BaseSource
from rescale_data.state import Field, join_fields, position_slots, require_limits, row_of, slot_offsets, state_of

T = TypeVar("T")
BaseNode = torchdata_nodes.BaseNode
View: TypeAlias = memoryview  # of int64, always over a NumPy row, so that one slice can be copied into another
_ENDED_KEY = "_ended"
_NO_CHILDREN: dict[str, Any] = {}  # shared by all leaves: there may be many


_METHODS_BYPASSING = {
    "next": ("open_documents", "open_texts", "write", "write_many", "skip", "skip_ahead", "epoch_end"),
    "write": ("write_many",),
    "skip": ("skip_ahead",),
}
"""For a method, the methods that give, leave out or count samples without calling it (`rescale_data.nodes.abilities`)."""


class Node(BaseNode[T]):
    """Base class of this package's nodes, and of user-defined nodes whose state must be cheap to save after every sample.

    A subclass lists its own fields in `FIELDS`, hands its children to ``super().__init__(name=child)``, reads and writes
    ``self.position[0 .. len(FIELDS) - 1]`` in `next`, and forgets in `seek` whatever it derived from the position.
    `get_state` and `reset` then need no code. `parameters` returns what must not change between two segments of a run. A node
    that reads rows itself sets `of_shard`, and writes its own epoch in `next_epoch`.

    A node declares what else it can do by having the methods (`rescale_data.nodes.abilities`): to count its samples
    (``epoch_end``), to leave samples out without drawing them (``skip``), to report counters (``progress``).

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
    then private, and this node writes the position at which each child has to go on into its own row, behind its own slots."""

    one_for_one: bool = False
    """True if this node yields one sample for each sample of its only child, ``source``. A class with a `next` of its own says
    so anew."""

    reads: BaseSource | None = None
    """The source whose rows this node reads, if it reads any itself."""

    of_shard: Shard | None = None
    """The logical shard whose rows this node reads, if it reads any itself."""

    is_reread: bool = False
    """True if a node above goes back to samples that it has drawn from this one, to go on within them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for claim in ("one_for_one", "epochs_are_equal"):  # of a parent, about the parent's `next`
            if getattr(cls, claim, False) and _mro_index_of_definer(cls, "next") < _mro_index_of_definer(cls, claim):
                setattr(cls, claim, False)
        for method in [name for name in _METHODS_BYPASSING if getattr(cls, name, None) is not None]:
            index = _mro_index_of_definer(cls, method)
            present = [name for name in _METHODS_BYPASSING[method] if getattr(cls, name, None) is not None]
            bypassing_methods = [name for name in present if _mro_index_of_definer(cls, name) > index]
            if bypassing_methods:
                override = f"the {method}() of {cls.__mro__[index].__name__}" if index else f"a {method}() of its own"
                parent = cls.__mro__[_mro_index_of_definer(cls, bypassing_methods[0])].__name__
                raise TypeError(
                    f"{cls.__name__} has {override}, and from {parent} {', '.join(f'{name}()' for name in bypassing_methods)}, "
                    f"which go past it. Put it above in place of deriving it: rd.Map, or a subclass of rd.Node with the "
                    f"{parent} as a child. Or give it these as well."
                )

    def __init__(self, **children: BaseNode[Any]) -> None:
        super().__init__()
        self._is_position_bound = self._epoch_ended = self._is_in_loader = False
        self.children: dict[str, Node[Any]] = {name: as_node(child) for name, child in children.items()} or _NO_CHILDREN
        child_fields = tuple((name, child.fields) for name, child in self.children.items())
        self.fields, self._slices = join_fields(self.FIELDS, child_fields)

    @cached_property
    def position(self) -> View:
        """Position of the node in its stream, a row of int64 numbers; `bind` replaces the node's private row by a given one."""
        return initial(self)

    @cached_property
    def _changing_children(self) -> Sequence[tuple[Node[Any], slice]]:
        """The children in whose subtree parameters or data may change between segments, each with its slots."""
        return tuple(
            (child, self._slots(name))
            for name, child in self.children.items()
            if any(isinstance(descendant, MayChange) and descendant.changeable for _, descendant in child.walk())
        )

    def bind(self, position: View) -> None:
        """Continue from ``position``, int64 numbers in the order of `fields`, and keep the state in that row from now on."""
        super().reset(None)
        self._is_position_bound, self._epoch_ended = True, False
        self.position = position
        self._bind_children()
        self.seek()

    def _bind_children(self) -> None:
        """Bind each child to its part of this node's position."""
        for name, child in self.children.items():
            child_position = self.position[self._slots(name)]
            if self.READS_AHEAD:
                child.position[:] = child_position
                child_position = child.position
            child.bind(child_position)

    def seek(self) -> None:
        """Drop all that was derived from the old position; called when the node and its children have their new positions."""

    def reset(self, initial_state: Mapping[str, Any] | None = None) -> None:
        state_values = dict(initial_state or {})
        epoch_ended = bool(state_values.pop(_ENDED_KEY, False))
        if initial_state is not None:
            position = row_of(self.fields, state_values, type(self).__name__)
            require_limits(self.fields, np.asarray(position)[None], f"a {type(self).__name__}")
            self.position[:] = position
        elif not self._epoch_ended:
            self.next_epoch(self.position)
        self.bind(self.position)
        self._epoch_ended = epoch_ended

    def get_state(self) -> dict[str, Any]:
        return state_of(self.fields, self.position)

    def state_dict(self) -> dict[str, Any]:
        """Return `get_state()` and a flag that is true if the epoch has ended.

        Nodes of torchdata keep this state of a source. Some of them draw from it once more after the end.
        """
        return {**super().state_dict(), _ENDED_KEY: self._epoch_ended}

    def __next__(self) -> T:
        if self._epoch_ended:
            raise StopIteration
        if not self._is_position_bound:
            self.bind(self.position)
        try:
            return self.next()
        except StopIteration:
            self._epoch_ended = True
            raise

    def next_epoch(self, position: View, *, is_drawn: bool = False) -> None:
        """Set a position to the beginning of the next epoch; leave it unchanged if nothing was drawn in the present epoch.

        Args:
            is_drawn: True if something was drawn although the row does not show it: a node above is within the first sample.
        """
        initial_row = initial(self)
        for slot in position_slots(self.FIELDS):
            is_drawn |= self.READS_AHEAD and position[slot] != initial_row[slot]
            position[slot] = initial_row[slot]
        for name, child in self.children.items():
            child.next_epoch(position[self._slots(name)], is_drawn=is_drawn and len(self.children) == 1)

    def parameters(self) -> dict[str, Any]:
        """Return, by name, the arguments that change the order or content of samples, as JSON values; a load compares them."""
        return {}

    def locate(self) -> str:
        """Return the source, file and row of the last yielded sample as text, for messages; an empty string if unknown."""
        return next(iter(self.children.values())).locate() if len(self.children) == 1 else ""

    def walk(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node[Any]]]:
        """Yield ``(path, node)`` for this node and for all nodes below it."""
        yield path, self
        for name, child in self.children.items():
            yield from child.walk((*path, name))

    def _slots(self, child: str) -> slice:
        return self._slices[child]


def _mro_index_of_definer(cls: type, name: str) -> int:
    """Return the index, in the method resolution order of a class, of the first class that defines ``name``."""
    return next((index for index, base_class in enumerate(cls.__mro__) if name in vars(base_class)), len(cls.__mro__))


def initial(node: Node[Any]) -> View:
    """Return the initial position of a node, before its first sample, as a new row."""
    initial_row = np.zeros(slot_offsets(node.fields)[-1], dtype=np.int64)
    for name, child in node.children.items():
        initial_row[node._slots(name)] = initial(child)
    if isinstance(node, MayChange):
        node.begin(initial_row.data)
    return initial_row.data


def slots_of(node: Node[Any], path: tuple[str, ...]) -> slice | None:
    """Return the slots of the node at ``path`` in the position of a node above it; `None` inside a torchdata node."""
    first_slot = 0
    for name in path:
        if name not in node.children:
            return None
        node, first_slot = node.children[name], first_slot + node._slots(name).start
    return slice(first_slot, first_slot + slot_offsets(node.fields)[-1])


def changing_children(node: Node[Any]) -> Sequence[tuple[Node[Any], slice]]:
    """Return the children in whose subtree parameters or data may change between segments, each with its slots."""
    return node._changing_children


def go_to(node: Node[Any], position: View) -> None:
    """Copy ``position`` into a node's own row, and continue from it."""
    node.position[:] = position
    node.bind(node.position)


def bind_once(node: Node[Any], position: View | None = None) -> None:
    """Bind a node to ``position``, or else to its own, if it has not been bound yet."""
    if not node._is_position_bound:
        node.bind(node.position if position is None else position)


def drop_position(node: Node[Any]) -> None:
    """Drop the position of a node. The caller keeps it, and binds the node again before drawing from it."""
    if node._is_position_bound:
        node._is_position_bound = False
        del node.position


def record_loader(node: Node[Any]) -> bool:
    """Record that a loader has a node; return false if that was recorded before."""
    was_in_loader, node._is_in_loader = node._is_in_loader, True
    return not was_in_loader


def record_epoch_end(node: Node[Any]) -> None:
    """Record that a node has raised `StopIteration` outside of ``next``: `reset(None)` then begins the next epoch."""
    node._epoch_ended = True


def draw_and_drop(node: Node[Any], num_samples: int) -> int:
    """Skip samples by drawing and dropping them; return their number, which is less if the epoch ends."""
    return count_until_end(node.__next__, num_samples)


def count_until_end(draw: Callable[[], object], num_samples: int) -> int:
    """Call ``draw`` for each of ``num_samples`` samples; return how many there were before it raised `StopIteration`."""
    for number in range(num_samples):
        try:
            draw()
        except StopIteration:
            return number
    return num_samples


@singledispatch
def as_node(node: object) -> Node[Any]:
    """Return ``node`` itself if it is a `Node`, else a `Node` that wraps it."""
    raise TypeError(
        f"A pipeline is made of nodes, but it was given a {type(node).__name__}. Return a torchdata.nodes.BaseNode, for "
        f"example rd.Reader(source, shard)."
    )


@as_node.register(Node)
def _node_itself(node: Node[Any]) -> Node[Any]:
    return node
