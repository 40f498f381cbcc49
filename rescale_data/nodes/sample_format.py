"""Sample formats (such as `seq_len`) of earlier segments, saved in states so that tokens of the whole run can be counted.

A packer of windows may be within a window that was packed in other formats before. One integer holds how many of its samples
were yielded in each format: the lowest 21 bits are for the present format, the higher ones for up to two earlier formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from rescale_data.errors import DataStateError
from rescale_data.state import Ints

EARLIER_PARAMETERS_KEY = "earlier"
"""Key in a state, next to the parameters of a node, for the earlier parameters that the node still needs."""
_BITS_PER_COUNT = 21
MAX_SAMPLES = 2**_BITS_PER_COUNT - 1
"""Largest number of samples in a window."""

WINDOW_PARAMETERS = ("seq_len", "max_documents", "limits")
"""Parameters on which the position of a packer depends within a window."""
ParameterHistory: TypeAlias = Sequence[tuple[int, Mapping[str, Any]]]
"""``(samples, {"seq_len": ..., "tokens": ..., "shards": N, ...})``, oldest first: the sample of the run up to which a
format held, and the tokens that all logical shards had delivered by then."""


BAD_STATE_MESSAGE = (
    "The state is within a window of samples that has fewer than it says: the state was changed or damaged, or the data is not "
    "what it was when the state was saved. Load another checkpoint."
)


def num_tokens(history: ParameterHistory, samples_per_shard: Ints, seq_len: int) -> float:
    """Return the number of tokens, with padding, in samples delivered by some logical shards; exact if all N are given."""
    if not history:
        return float(samples_per_shard.sum()) * seq_len
    samples_before, sample_format = history[-1]
    of_total = len(samples_per_shard) / sample_format["shards"]
    return of_total * sample_format["tokens"] + (float(samples_per_shard.sum()) - of_total * samples_before) * seq_len


class Format(NamedTuple):
    """A sample format in which a window was packed, and the number of samples that were yielded in this format."""

    seq_len: int
    max_documents: int
    limits: Mapping[str, int]
    num_samples_emitted: int = 0


def formats(counts_by_format: int, history: ParameterHistory, present_format: Format) -> Iterator[Format]:
    """Yield the earlier formats in which samples of a window were yielded, oldest first, then ``present_format``."""
    for formats_ago in (2, 1):
        num_emitted = counts_by_format >> (formats_ago * _BITS_PER_COUNT) & MAX_SAMPLES
        if num_emitted:
            if formats_ago > len(history):
                raise DataStateError(BAD_STATE_MESSAGE)
            old = history[-formats_ago][1]
            yield Format(old["seq_len"], old["max_documents"], old.get("limits", {}), num_emitted)
    yield present_format


def begin_format(counts_by_format: Ints) -> None:
    """Begin a new sample format: count the samples yielded so far under the previous one, in place."""
    if (counts_by_format >> (2 * _BITS_PER_COUNT)).any():
        raise DataStateError(
            "A third change of seq_len, max_documents or limits within one window of a WholeDocumentPacker. Train on with the "
            "format before until the logical shards have begun their next windows."
        )
    counts_by_format <<= _BITS_PER_COUNT
