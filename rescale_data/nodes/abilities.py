"""Abilities: what a node can do besides `Node.next`. A node declares an ability by having its methods.

The functions of `rescale_data.nodes.below` ask: each calls the node's own method, or does what holds for a node without one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from rescale_data.nodes.base import View
    from rescale_data.nodes.batch_buffer import BatchBuffer, ColumnFormats
    from rescale_data.nodes.reading.documents import DocumentReader
    from rescale_data.state import Ints


class Ability(ABC):  # noqa: B024
    """Base class of abilities. A class has an ability if it has its methods and attributes; it need not derive from it.

    Only the class counts: neither a name that it sets to `None`, nor one that only its instances have.
    """

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        if Ability not in cls.__bases__:  # a node that derives from an ability
            return NotImplemented
        has_methods = all(callable(getattr(kind, name, None)) for name in cls.__abstractmethods__)
        has_attributes = all(getattr(kind, name, None) is not None for name in cls.__annotations__)
        return (has_methods and has_attributes) or NotImplemented


# To count samples, and to leave them out


class Counts(Ability):
    """A node that may know the number of its samples without reading them."""

    @abstractmethod
    def epoch_end(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        """Return the number of samples left in the epoch, and the positions at which the next epoch begins.

        Args:
            rows: ``int64[M, slots]``, positions of this node in any logical shards; not changed.
            shards: ``int64[M]``, their indices.

        Returns:
            ``int64[M]`` samples and ``int64[M, slots]`` positions, or `None` if only reading can show it.
        """


class Skips(Ability):
    """A node that can skip samples without drawing each of them."""

    @abstractmethod
    def skip(self, num_samples: int) -> int:
        """Leave out the next ``num_samples`` samples, as if they had been drawn; return their number.

        It is less if the epoch ended before, and the position is then the beginning of the next one, as after `StopIteration`.
        """


class SkipsAhead(Ability):
    """A node that can skip samples without drawing them although it cannot count the samples of an epoch."""

    @abstractmethod
    def skip_ahead(self, num_samples: int) -> int:
        """Skip up to ``num_samples`` samples without drawing them, and return the number of samples that were skipped."""


# To hand over blocks


class HasDocuments(Ability):
    """A node whose token columns may be read many documents at a time."""

    @abstractmethod
    def open_documents(self, column: str) -> DocumentReader | None:
        """Open a token column of this node's samples, to be read many documents at a time; `None` if that is not possible.

        From here on this column alone is used, and `Node.parameters` may name no other. The caller keeps the positions from
        which it reads, and does not draw from this node as well: where samples are read one at a time, the node moves. A node
        over children that give documents can give documents too: it picks and cuts the `Spans` of its children, which are
        arrays of numbers.
        """

    @abstractmethod
    def dtype_of(self, column: str) -> np.dtype[Any] | None:
        """Return the dtype of a token column if samples are dicts of that column alone and the dtype is always the same.

        `open_documents` then leaves nothing out. In all other cases return `None`.
        """


class HasTexts(Ability):
    """A node whose columns of strings may be read many at a time."""

    @abstractmethod
    def open_texts(self, column: str) -> DocumentReader | None:
        """Open a column of strings of this node's samples, to be read as their UTF-8 bytes; `None` if that is not possible.

        The caller decodes the bytes. If reading or decoding raises an error, it draws samples of the node, as it does with
        `None`: these raise the error with its row, or hold what the row has in place of a string. So `Node.parameters` does not
        depend on the way in which strings are read.
        """


# To write in place


class FillsBatch(Ability):
    """A node that writes its samples into the rows of a `BatchBuffer`."""

    written_columns: ColumnFormats
    """The columns of samples that are dicts of 1-D arrays of known length and dtype; empty if samples are something else."""

    @abstractmethod
    def write(self, buffer: BatchBuffer, row_index: int) -> None:
        """Draw the next sample into row ``row_index`` of a buffer of `written_columns`; an epoch ends as in `Node.next`."""


class WritesManySamples(Ability):
    """A node class with a function that writes samples of several of its instances in one call."""

    @staticmethod
    @abstractmethod
    def write_many(nodes: Sequence[Any], buffer: BatchBuffer, first: int) -> int:
        """Write the next sample of each node into the buffer, one per row from ``first`` on; stop at one that needs more work.

        Args:
            nodes: Nodes of this class, one for each row.
            buffer: The buffer to write into.
            first: The first row to write.

        Returns:
            The first row that was not written, because a copy is not enough. The caller uses `FillsBatch.write` for it.
        """


# To report, and to prefetch


class Reports(Ability):
    """A node with counters for a logger."""

    @abstractmethod
    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> Mapping[str, float]:
        """Return counts of what logical shards have drawn. Keys start with the kind of value, as in ``"rows/..."``.

        Args:
            rows: ``int64[M, slots]`` of this node.
            shards: ``int64[M]`` indices.
            samples: ``int64[M]`` samples that the root has delivered.
        """


class Prefetches(Ability):
    """A node that can begin to fetch data before it is drawn from."""

    @abstractmethod
    def prefetch(self, rows: Ints, shards: Ints) -> None:
        """Begin to fetch the data at positions from which this process is about to draw; return at once.

        Args:
            rows: ``int64[M, slots]``, positions of this node in any logical shards; not changed.
            shards: ``int64[M]``, their indices.
        """


class ChecksCache(Ability):
    """A node that keeps samples in the cache, and may know their size before it makes any."""

    @abstractmethod
    def check_cache(self, num_shards: int, num_workers: int) -> None:
        """Warn if the cache is too small for the samples that this node keeps.

        Args:
            num_shards: Number of logical shards of each process that makes samples.
            num_workers: Number of worker processes, which share the cache with the trainer's process.
        """


class VerifiesRows(Ability):
    """A node that may keep a digest of the rows that were read (`Shard.verify`)."""

    @abstractmethod
    def verify(self) -> None:
        """Raise ``DataStateError`` if the position has a digest, and it does not match the rows that were read."""


class RereadsDocument(Ability):
    """A node that reads ahead (`READS_AHEAD`) and can read a partly drawn document again without drawing a sample."""

    reveals_next_token: bool
    """True if a sample of this node reveals how the next one begins: by the label of its last token."""

    @abstractmethod
    def reread_document(self) -> None:
        """Read the partly drawn document again, so that the node can go on within it."""


# To change between the segments of a run; see `rescale_data.nodes.changing`


class NeedsHistory(Ability):
    """A node that needs to know which data or parameters earlier segments of a run used."""

    @abstractmethod
    def use_history(self, history: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Set the manifests (descriptions) of the source that this node reads, each valid from its epoch on.

        Args:
            history: ``(epoch, manifest)`` in order; the last one is the present manifest. Empty if there is no earlier one.
                For a node with a sample format: `rescale_data.nodes.sample_format.ParameterHistory`.
        """


class HasFormat(Ability):
    """A node with parameters that set only the format of its samples, such as ``seq_len``; it is `NeedsHistory`, too."""

    FORMAT: frozenset[str]
    """The `Node.parameters` that may differ when a state is loaded, and hold from then on."""

    @abstractmethod
    def convert_sample_format(self, rows: Ints) -> None:
        """Convert positions saved with the last sample format in the node's history; ``rows`` is a view, changed in place."""


class MayChange(Ability):
    """A node with parameters that may change between save and load; its position holds the values in use."""

    changeable: frozenset[str]
    """These `Node.parameters`; empty if this very node has none."""

    @abstractmethod
    def begin(self, row: View) -> None:
        """Write this node's present parameter values into its initial position ``row``; its other own slots stay 0."""

    @abstractmethod
    def apply_changes_at(self, position: View) -> None:
        """Apply changed parameter values from this position on, the beginning of a sample."""

    @abstractmethod
    def skip_blocked_rows(self, position: View) -> None:
        """Move this position, which is at the beginning of a sample, past the rows on a blocklist."""

    @abstractmethod
    def is_on_blocklist(self, position: View) -> bool:
        """True if the sample that was begun at this position is on a new blocklist."""

    @abstractmethod
    def is_sample_untraceable(self, position: View) -> bool:
        """True if the present blocklist and sources no longer show which sample begins at this position."""

    @abstractmethod
    def is_old_position(self, position: View) -> bool:
        """True if this position was written with another blocklist, or with the weight of a source that was removed."""

    @abstractmethod
    def is_node_change_due(self, position: View) -> bool:
        """True if a change between segments has not taken effect yet in this node's own slots of the position."""


class Mixes(Ability):
    """A node over several sources, which may come and go between the segments of a run (`checkpoint.load_changed`).

    It keeps its values for a child in own fields whose path ends in the child's name.
    """

    @abstractmethod
    def sample_id_slots(self) -> list[int]:
        """Return the slots of a position that identify the next sample, whatever sources are added or removed."""

    @abstractmethod
    def check_change(self, saved: Mapping[str, Any], rows: Ints) -> None:
        """Raise ``DataStateError`` if a changed parameter (`MayChange`) does not fit what has been drawn.

        Args:
            saved: The `Node.parameters` of this node in the state.
            rows: ``int64[N, slots]``, the positions of all logical shards in it.
        """

    @abstractmethod
    def earlier_parameters(self, saved: Mapping[str, Any], rows: Ints) -> Sequence[tuple[int, Mapping[str, Any]]]:
        """Return the earlier parameters that `NeedsHistory.use_history` needs for windows that were partly yielded with them.

        Args:
            saved: The `Node.parameters` of this node in the state, with the previous result of this method under "earlier".
            rows: ``int64[N, slots]``, the positions of all logical shards in it.
        """
