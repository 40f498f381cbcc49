"""Changes of a pipeline or its data since a state was saved, as they take effect in the nodes.

between documents   the change takes effect (`apply_changes_at`), and rows on a new blocklist are passed (`skip_blocked_rows`)
within a document   the document goes on as it began, and the change waits; if a child or list it needs is gone, it begins again

A `Reader` and a `WeightedSampler` have values in use in their positions (`abilities.MayChange`). The functions here ask them,
through the nodes above.

A node that `READS_AHEAD` says by ``RESUME_UNIT`` what it reads again to go on: "document", which may be found again, or
"window", whose content follows from the old blocklist. It is within one while an own slot that gives its place is not 0, and
calls `apply_changes` when it begins one.
"""

from __future__ import annotations

from typing import Any, Literal

from rescale_data.nodes.abilities import MayChange
from rescale_data.nodes.base import Node, View, changing_children
from rescale_data.state import position_slots, slot_offsets


def resume_unit(node: Node[Any]) -> Literal["document", "window"] | None:
    """Return "document" or "window", which a node reads again to resume within it; `None` if changes below have no effect."""
    return getattr(node, "RESUME_UNIT", None)


def apply_changes_at(node: Node[Any], position: View) -> bool:
    """Apply changes between segments to a node's position; allowed only if no node will read again from an earlier position.

    Some nodes read again from a position, to go on within a document. Such a node passes this call on when it is not within a
    document, and in `next` whenever it begins one.

    Returns:
        True if a begun document or window begins again, because it needs a child or a blocklist that is gone.
    """
    if isinstance(node, MayChange):
        node.apply_changes_at(position)
    if not node.READS_AHEAD:
        return sum(apply_changes_at(child, position[slots]) for child, slots in changing_children(node)) > 0
    if resume_unit(node) is None:
        return False
    source, source_position, restarts = node.children["source"], position[slot_offsets(node.FIELDS)[-1] :], False
    if _is_begun(node, position):
        needs_restart = is_sample_untraceable if resume_unit(node) == "document" else is_old_position
        restarts = needs_restart(source, source_position)
        if not restarts:
            return False
        for slot in position_slots(node.FIELDS):
            position[slot] = 0
    return apply_changes_at(source, source_position) or restarts


def apply_changes(node: Node[Any]) -> None:
    """Apply changes between segments to a node; do nothing if a node above will read again from an earlier position."""
    if not node.is_reread and changing_children(node):
        apply_changes_at(node, node.position)
        skip_blocked_rows(node, node.position)


def skip_blocked_rows(node: Node[Any], position: View) -> None:
    """Move a position of a node, which is at the beginning of a sample, past the rows on a blocklist."""
    if isinstance(node, MayChange):
        node.skip_blocked_rows(position)
    if changing_children(node) and not (node.READS_AHEAD and (resume_unit(node) is None or _is_begun(node, position))):
        for child, slots in changing_children(node):
            skip_blocked_rows(child, position[slots])


def is_on_blocklist(node: Node[Any], position: View) -> bool:
    """True if the sample that was begun at a position of a node is on a new blocklist."""
    if isinstance(node, MayChange):
        return node.is_on_blocklist(position)
    return is_on_blocklist(*_source(node, position)) if node.one_for_one else is_sample_untraceable(node, position)


def is_sample_untraceable(node: Node[Any], position: View) -> bool:
    """True if the present blocklist and sources no longer show which sample begins at a position of a node."""
    if isinstance(node, MayChange):
        return node.is_sample_untraceable(position)
    return is_sample_untraceable(*_source(node, position)) if node.one_for_one else is_old_position(node, position)


def is_old_position(node: Node[Any], position: View) -> bool:
    """True if a position was written with another blocklist, or with the weight of a source that was removed."""
    if isinstance(node, MayChange) and node.is_old_position(position):
        return True
    return any(is_old_position(child, position[slots]) for child, slots in changing_children(node))


def is_node_change_due(node: Node[Any], position: View) -> bool:
    """True if a change between segments has not taken effect yet in a position of a node (`apply_changes_at`)."""
    if isinstance(node, MayChange) and node.is_node_change_due(position):
        return True
    return any(is_node_change_due(child, position[slots]) for child, slots in changing_children(node))


def _source(node: Node[Any], position: View) -> tuple[Node[Any], View]:
    return node.children["source"], position[slot_offsets(node.FIELDS)[-1] :]


def _is_begun(node: Node[Any], position: View) -> bool:
    return any(position[slot] for slot in position_slots(node.FIELDS))
