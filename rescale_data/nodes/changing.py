"""`Changing`: what becomes of a node where its pipeline or its data are other ones than when a state was saved.

within nothing      what has changed takes effect (`settle`), and what is on a new blocklist is passed (`pass_blocked`)
within a document   it goes on as it began, and the change waits; unless what it needs is gone: then it begins again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rescale_data.state import Ints

View = memoryview  # of int64, always over a NumPy row, so that slices copy from one into another


class Changing:
    """The part of `Node` that a change between legs is about. By default a node hands all of it on to those below."""

    MAY_CHANGE: frozenset[str] = frozenset()
    """The `parameters` that may differ when a state is loaded. Those in use are then part of the position; see `settle`."""
    FORM: ClassVar[frozenset[str]] = frozenset()
    """The `parameters` that may differ when a state is loaded, and say in which form the same data comes from then on: a node
    that has any has a ``seq_len``, and is told in `adopt` which it had before."""
    CHILDREN_MAY_CHANGE: ClassVar[bool] = False
    """True if children may come and go between the legs of a run (`rescale_data.checkpoint.load_changed`). What a node keeps
    for a child lies in own fields whose path ends in the child's name."""

    within: int | None = None
    """The own slot that is not 0 while this node is within something that it reads again to go on; `None`: it never is."""

    within_document: bool = False
    """Whether that is one document, which may be found again; else what it consists of follows from the old blocklist."""

    reread: bool = False
    """Whether a node above goes back behind the samples that it has drawn from this one, to go on within them."""

    position: Any
    children: dict[str, Any]
    _changing: Sequence[tuple[Any, slice]]
    """The children below which anything may change between legs, with their slots."""
    READS_AHEAD: ClassVar[bool]
    one_for_one: bool

    def _slots(self, child: str) -> slice:
        raise NotImplementedError

    def adopt(self, history: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """From now on the source that this node reads consists of what the manifests say, each from its epoch on.

        Args:
            history: ``(epoch, manifest)`` in order, the last of what there is now; empty for that alone. Of a node with a
                `FORM`: `rescale_data.nodes.form.History`.
        """

    def reform(self, rows: Ints) -> None:
        """Change rows that were saved with the last form in the node's history; ``rows`` is a view."""

    def check_change(self, saved: Mapping[str, Any], rows: Ints) -> None:
        """``DataStateError`` where what may change (`MAY_CHANGE`) does not fit what has been drawn.

        Args:
            saved: The `parameters` of this node in the state.
            rows: ``int64[N, slots]``, the positions of all logical shards in it.
        """

    def earlier(self, saved: Mapping[str, Any], rows: Ints) -> Sequence[tuple[int, Mapping[str, Any]]]:
        """Return the earlier parameters that `adopt` needs, to go on within what was begun with them; kept in states.

        Args:
            saved: The `parameters` of this node in the state, and what this returned before it, as "earlier".
            rows: ``int64[N, slots]``, the positions of all logical shards in it.
        """
        del saved, rows
        return ()

    def settle(self, position: View) -> bool:
        """Let what has changed between legs (`MAY_CHANGE`) take effect in a row of this node, behind which nobody goes back.

        A node that reads again from a position, to go on within a document, hands this on where it is not within one, and in
        `next` whenever it begins one.

        Returns:
            Whether something that was begun is begun again, because it needs a child or a blocklist that is gone.
        """
        slot = self.within
        if slot is None:
            parts = () if self.READS_AHEAD else self._changing
            return sum(child.settle(position[slots]) for child, slots in parts) > 0
        source, below = self.children["source"], position[self._slots("source")]
        is_lost = source.is_lost if self.within_document else source.is_stale
        again = bool(position[slot]) and is_lost(below)
        if again:
            position[slot] = 0
        return again if position[slot] else source.settle(below) or again

    def take_effect(self) -> None:
        """Let a change take effect where this node reads next, unless a node above goes back behind it."""
        if not self.reread:
            self.settle(self.position)
            self.pass_blocked(self.position)

    def pass_blocked(self, position: View) -> None:
        """Move a row of this node, at the beginning of a sample, behind what is on a blocklist (`Reader`)."""
        if self.READS_AHEAD if self.within is None else position[self.within]:
            return
        for child, slots in self._changing:
            child.pass_blocked(position[slots])

    def is_blocked(self, position: View) -> bool:
        """True if the sample that begins at this row, and is begun, is on a new blocklist."""
        if not self.one_for_one:
            return self.is_lost(position)
        return self.children["source"].is_blocked(position[self._slots("source")])

    def is_lost(self, position: View) -> bool:
        """True if, with the present blocklist and sources, nobody knows which sample begins at this row."""
        if not self.one_for_one:
            return self.is_stale(position)
        return self.children["source"].is_lost(position[self._slots("source")])

    def is_stale(self, position: View) -> bool:
        """True if this row was written with another blocklist, or by the weight of a source that is gone."""
        return any(child.is_stale(position[slots]) for child, slots in self._changing)

    def is_pending(self, position: View) -> bool:
        """True if a change between legs has still to take effect in a row of this node (`settle`)."""
        return any(child.is_pending(position[slots]) for child, slots in self._changing)
