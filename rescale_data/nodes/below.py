"""Functions that ask a node and the nodes below it for their logical shard, sources, readers, epochs and abilities."""

from __future__ import annotations

from typing import Any

import numpy as np

from rescale_data.nodes.abilities import Counts, FillsBatch, HasDocuments, HasTexts, MayChange, Mixes, Skips, SkipsAhead
from rescale_data.nodes.base import Node, bind_once, draw_and_drop, record_epoch_end, slots_of
from rescale_data.nodes.batch_buffer import ColumnFormats
from rescale_data.nodes.reader import Reader
from rescale_data.nodes.reading.documents import DocumentReader
from rescale_data.shard import Shard, require_shard
from rescale_data.state import Ints, position_slots, slot_offsets


def find_shard(node: Node[Any]) -> Shard | None:
    """Return the logical shard read by a node or by a node below it; `None` if there is none (`Node.of_shard`)."""
    return next((inner.of_shard for _, inner in node.walk() if inner.of_shard is not None), None)


def is_endless(node: Node[Any]) -> bool:
    """True if a node reads an endless stream (`Shard.repeat`); its consumer restarts it at the end of each epoch."""
    return any(inner.of_shard.repeat for _, inner in node.walk() if inner.of_shard is not None)


def shard_of(node: Node[Any], explicit_shard: Shard | None) -> Shard:
    """Return ``explicit_shard`` if it is given, else the logical shard that the node reads; ``ValueError`` if there is none."""
    if explicit_shard is not None:
        require_shard(explicit_shard, node)
    shard = explicit_shard or find_shard(node)
    if shard is None:
        raise ValueError(
            "No node below reads a logical shard (as rd.Reader does), so there is nothing to key random numbers with. Give "
            "shard=, what the pipeline was called with, or set `of_shard` in your node."
        )
    return shard


def num_nodes_below(node: Node[Any], kind: type[Node[Any]]) -> int:
    """Return the number of nodes of a class below a node, but not below a mixture, whose sources may change."""
    paths = [path for path, inner in node.walk() if path and isinstance(inner, kind)]
    mixtures = [path for path, inner in node.walk() if isinstance(inner, Mixes)]
    return sum(not any(path[: len(outer)] == outer for outer in mixtures) for path in paths)


def source_names(node: Node[Any]) -> list[str]:
    """Return the sorted names of the sources that a node and the nodes below it read."""
    return sorted({inner.reads.name for _, inner in node.walk() if inner.reads is not None})


def readers_of(node: Node[Any], start: int) -> list[tuple[Reader, int]]:
    """Return ``(reader, slot)`` for each `Reader` at or below a node: its first slot in a row where the node is at ``start``.

    The first slot of a reader is its epoch.
    """
    readers = [(inner, slots_of(node, path)) for path, inner in node.walk() if isinstance(inner, Reader)]
    return [(reader, start + slots.start) for reader, slots in readers if slots is not None]


def skip_epochs(node: Node[Any], row: Ints, shard: int, samples_to_skip: int) -> int:
    """Advance a node's position by whole epochs, up to the epoch that holds the last of the next ``samples_to_skip`` samples.

    Args:
        row: ``int64[slots]``, at the beginning of an epoch; changed in place.
        shard: Index of the logical shard.
        samples_to_skip: Number of samples, at least 1.

    Returns:
        The number of samples in the epochs that were passed; 0 if it is not known.
    """
    end, readers = epoch_end(node, row[None], np.array([shard])), readers_of(node, 0)
    nodes = [inner for _, inner in node.walk()]
    if end is None or not all(map(has_equal_epochs, nodes)):
        return 0
    if not any(reader.rows.is_small or reader.rows.is_growing for reader, _ in readers):  # each epoch is like the next
        epoch_size = int(end[0][0])
        num_skipped = (samples_to_skip - 1) // epoch_size if epoch_size else 0
        row += num_skipped * (end[1][0] - row)
        return num_skipped * epoch_size
    reader, slot = readers[0]
    if not all(inner is reader or inner.one_for_one for inner in nodes):  # a window spans several epochs of a round
        return 0
    row[slot], num_skipped = reader.rows.epoch_after_rows(int(row[slot]), samples_to_skip, shard)
    return num_skipped


# Abilities: the node's own method, or what holds for a node without the ability


def epoch_end(node: Node[Any], rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
    """Return the number of samples left in the epoch of any node, and the positions at which the next epoch begins.

    Args:
        node: Any node, for example the child of your own.
        rows: ``int64[M, slots]``, positions of this node in any logical shards; not changed.
        shards: ``int64[M]``, their indices.

    Returns:
        ``int64[M]`` samples and ``int64[M, slots]`` positions (`Counts.epoch_end`), or `None` if only reading can show it.

    Example:
        >>> import numpy as np
        >>> import rescale_data as rd
        >>> reader = rd.Reader(range(8), rd.Shard())
        >>> samples, rows = rd.nodes.epoch_end(reader, np.array([reader.position]), np.array([0]))
        >>> samples.tolist()
        [8]
    """
    if isinstance(node, Counts):
        return node.epoch_end(rows, shards)
    return epoch_end_of_source(node, rows, shards) if node.one_for_one else None


def epoch_end_of_source(node: Node[Any], rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
    """Return `epoch_end` of a node that yields one sample per sample of its source; its own part of the position stays."""
    num_own_slots = slot_offsets(node.FIELDS)[-1]
    end = epoch_end(node.children["source"], rows[:, num_own_slots:], shards)
    return None if end is None else (end[0], np.concatenate([rows[:, :num_own_slots], end[1]], axis=1))


def has_equal_epochs(node: Node[Any]) -> bool:
    """True if all epochs of a node move its position by the same amount, provided that the epochs of its readers do.

    A node says so by ``epochs_are_equal = True``; a class with a `Node.next` of its own says so anew.
    """
    return node.one_for_one or getattr(node, "epochs_are_equal", False)


def skip(node: Node[Any], num_samples: int) -> int:
    """Leave out the next samples of any node, as if they had been drawn; without drawing them if the node can do that.

    Args:
        node: Any node, for example the child of your own.
        num_samples: Number of samples.

    Returns:
        The number of samples that were left out. It is less if the epoch ended before; the node is then as after the
        `StopIteration` of `Node.next`.

    Example:
        >>> import rescale_data as rd
        >>> reader = rd.Reader(range(8), rd.Shard(), shuffle=False)
        >>> rd.nodes.skip(reader, 5)
        5
        >>> list(reader)
        [5, 6, 7]
    """
    bind_once(node)
    if isinstance(node, Skips):
        try:
            num_skipped = node.skip(num_samples)
        except StopIteration:
            num_skipped = None
        if num_skipped is None or not 0 <= num_skipped <= num_samples:
            raise TypeError(
                f"skip({num_samples}) of {type(node).__name__} returned {num_skipped}, or raised StopIteration: return the "
                f"number of samples that it left out, which is less if the epoch ended."
            )
    elif node.one_for_one:
        num_skipped = skip(node.children["source"], num_samples)
    else:
        num_skipped = draw_and_drop(node, num_samples)
    if num_skipped < num_samples:
        record_epoch_end(node)
    return num_skipped


def skip_ahead(node: Node[Any], num_samples: int) -> int:
    """Skip up to ``num_samples`` samples of a node without drawing them, though its epoch's number of samples is not known.

    Returns:
        The number of samples left out. There are fewer if the epoch ends (an endless stream may go on), or if the samples have
        to be read.
    """
    while node.one_for_one:
        node = node.children["source"]
    return node.skip_ahead(num_samples) if isinstance(node, SkipsAhead) else 0


def open_documents(node: Node[Any], column: str) -> DocumentReader | None:
    """Return a reader of a node's token column, many documents at a time; `None` if that is not possible (`HasDocuments`)."""
    return node.open_documents(column) if isinstance(node, HasDocuments) else None


def dtype_of(node: Node[Any], column: str) -> np.dtype[Any] | None:
    """Return the dtype of a node's only column, which holds tokens; `None` as in `HasDocuments.dtype_of`."""
    return node.dtype_of(column) if isinstance(node, HasDocuments) else None


def open_texts(node: Node[Any], column: str) -> DocumentReader | None:
    """Return a reader of a node's string column, many rows at a time; `None` if that is not possible (`HasTexts`)."""
    return node.open_texts(column) if isinstance(node, HasTexts) else None


def columns_of(node: Node[Any]) -> ColumnFormats:
    """Return the columns that a node writes; empty if it writes none."""
    return node.written_columns if isinstance(node, FillsBatch) else {}


def has_provenance(node: Node[Any]) -> bool:
    """True if a node reads rows itself and each sample names its row (``provenance``)."""
    return getattr(node, "provenance", False)


def may_change(node: Node[Any]) -> frozenset[str]:
    """Return the parameters of a node that may differ when a state is loaded."""
    return node.changeable if isinstance(node, MayChange) else frozenset()


def sample_id_slots(node: Node[Any]) -> list[int]:
    """Return the slots of a position that identify the next sample among all samples of the run.

    Random numbers are keyed with these slots. Their values do not depend on sources that come and go between segments.
    """
    if isinstance(node, Mixes):
        return node.sample_id_slots()
    slots, first_slot = position_slots(node.FIELDS), slot_offsets(node.FIELDS)[-1]
    for child in node.children.values():
        slots += [first_slot + slot for slot in sample_id_slots(child)]
        first_slot += slot_offsets(child.fields)[-1]
    return slots
