"""Forms that samples had in earlier legs of a run: scalars alongside the state, from which tokens are counted on.

A packer of windows is within one that may have been packed in other forms before. How many samples it has yielded in each is
one integer: 21 bits for the form of now, then, where it has changed, those before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from rescale_data.errors import DataStateError
from rescale_data.state import Ints

BEFORE = "earlier"
"""Beside the parameters of a node in a state: what it has to know of earlier ones."""
_DIGIT = 21
MOST = 2**_DIGIT - 1
"""Samples of a window."""

LASTING = ("seq_len", "max_documents", "limits")
"""What the position of a packer depends on within a window."""
History: TypeAlias = Sequence[tuple[int, Mapping[str, Any]]]
"""``(samples, {"seq_len": ..., "tokens": ..., "shards": N, ...})``, oldest first: up to which sample of the run a form held,
and how many tokens all logical shards had delivered by then."""


CHANGED = (
    "The state is within a window of samples that has fewer than it says: the state was changed or damaged, or the data is not "
    "what it was when the state was saved. Load another checkpoint."
)


def num_tokens(history: History, samples: Ints, seq_len: int) -> float:
    """Tokens with what pads them, of some logical shards that have delivered ``samples``; exact for all of them together."""
    if not history:
        return float(samples.sum()) * seq_len
    before, form = history[-1]
    share = len(samples) / form["shards"]
    return share * form["tokens"] + (float(samples.sum()) - share * before) * seq_len


class Stage(NamedTuple):
    """A form that a window was packed in, and how many samples of it were yielded."""

    seq_len: int
    max_documents: int
    limits: Mapping[str, int]
    num_emitted: int = 0


def stages(emitted: int, history: History, now: Stage) -> Iterator[Stage]:
    """The forms of which samples of a window were yielded, and that of now."""
    for back in (2, 1):
        num_emitted = emitted >> (back * _DIGIT) & MOST
        if num_emitted:
            if back > len(history):
                raise DataStateError(CHANGED)
            form = history[-back][1]
            yield Stage(form["seq_len"], form["max_documents"], form.get("limits", {}), num_emitted)
    yield now


def begin_form(emitted: Ints) -> None:
    """Count what windows have yielded as of the form before."""
    if (emitted >> (2 * _DIGIT)).any():
        raise DataStateError(
            "A third change of seq_len, max_documents or limits within one window of a WholeDocumentPacker. Train on with the "
            "form before until the logical shards have begun their next windows."
        )
    emitted <<= _DIGIT
