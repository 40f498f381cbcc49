"""`Changing`: the behaviour of a node whose pipeline or data have changed since a state was saved.

between documents   the change takes effect (`settle`), and rows on a new blocklist are passed (`pass_blocked`)
within a document   the document goes on as it began, and the change waits; if a child or list it needs is gone, it begins again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rescale_data.state import Ints

View = memoryview  # of int64, always over a NumPy row, so that one slice can be copied into another


class Changing:
    """The part of `Node` that handles changes between segments. By default a node passes each call on to its children."""

    MAY_CHANGE: frozenset[str] = frozenset()
    """The `parameters` that may differ when a state is loaded. Their values in use are part of the position; see `settle`."""
    FORM: ClassVar[frozenset[str]] = frozenset()
    """The `parameters` that may differ when a state is loaded, and that set the form of the same data from then on. A node
    with such parameters has a ``seq_len``, and receives its earlier forms in `adopt`."""
    CHILDREN_MAY_CHANGE: ClassVar[bool] = False
    """True if children may come and go between the segments of a run (`rescale_data.checkpoint.load_changed`). The node keeps
    its values for a child in own fields whose path ends in the child's name."""

    within: int | None = None
    """Index of the own slot that is not 0 while this node is within a document or window, which it reads again to go on.
    `None` if the node never is."""

    within_document: bool = False
    """True if `within` stands for one document, which may be found again. Otherwise the content of the window follows from
    the old blocklist."""

    reread: bool = False
    """True if a node above goes back to samples that it has drawn from this one, to go on within them."""

    position: Any
    children: dict[str, Any]
    _changing: Sequence[tuple[Any, slice]]
    """The children below which anything may change between segments, with their slots."""
    READS_AHEAD: ClassVar[bool]
    one_for_one: bool

    def _slots(self, child: str) -> slice:
        raise NotImplementedError

    def adopt(self, history: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Set the manifests that describe the source which this node reads, each from its epoch on.

        Args:
            history: ``(epoch, manifest)`` in order; the last one is the present manifest. Empty if there is no earlier one.
                For a node with a `FORM`: `rescale_data.nodes.form.History`.
        """

    def reform(self, rows: Ints) -> None:
        """Convert rows that were saved with the last form in the node's history; ``rows`` is a view, changed in place."""

    def check_change(self, saved: Mapping[str, Any], rows: Ints) -> None:
        """Raise ``DataStateError`` if a changed parameter (`MAY_CHANGE`) does not fit what has been drawn.

        Args:
            saved: The `parameters` of this node in the state.
            rows: ``int64[N, slots]``, the positions of all logical shards in it.
        """

    def earlier(self, saved: Mapping[str, Any], rows: Ints) -> Sequence[tuple[int, Mapping[str, Any]]]:
        """Return the earlier parameters that `adopt` needs to go on within a window that was begun with them; kept in states.

        Args:
            saved: The `parameters` of this node in the state, with the previous result of this method under "earlier".
            rows: ``int64[N, slots]``, the positions of all logical shards in it.
        """
        del saved, rows
        return ()

    def settle(self, position: View) -> bool:
        """Let changes between segments (`MAY_CHANGE`) take effect in a row of this node. No node reads again from before it.

        Some nodes read again from a position, to go on within a document. Such a node passes this call on when it is not
        within a document, and in `next` whenever it begins one.

        Returns:
            True if a begun document or window begins again, because it needs a child or a blocklist that is gone.
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
        """Let a change take effect at this node's position, unless a node above reads again from before it."""
        if not self.reread:
            self.settle(self.position)
            self.pass_blocked(self.position)

    def pass_blocked(self, position: View) -> None:
        """Move a row of this node, at the beginning of a sample, past the rows on a blocklist (`Reader`)."""
        if self.READS_AHEAD if self.within is None else position[self.within]:
            return
        for child, slots in self._changing:
            child.pass_blocked(position[slots])

    def is_blocked(self, position: View) -> bool:
        """True if the sample at this row, which has been begun, is on a new blocklist."""
        if not self.one_for_one:
            return self.is_lost(position)
        return self.children["source"].is_blocked(position[self._slots("source")])

    def is_lost(self, position: View) -> bool:
        """True if the present blocklist and sources no longer show which sample begins at this row."""
        if not self.one_for_one:
            return self.is_stale(position)
        return self.children["source"].is_lost(position[self._slots("source")])

    def is_stale(self, position: View) -> bool:
        """True if this row was written with another blocklist, or with the weight of a source that is gone."""
        return any(child.is_stale(position[slots]) for child, slots in self._changing)

    def is_pending(self, position: View) -> bool:
        """True if a change between segments has still to take effect in a row of this node (`settle`)."""
        return any(child.is_pending(position[slots]) for child, slots in self._changing)
