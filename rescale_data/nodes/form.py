"""What form samples had in earlier legs of a run: scalars beside the state, from which tokens are counted on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rescale_data.state import Ints

BEFORE = "before"
"""Beside the parameters of a node in a state: what it has to know of earlier ones."""
LASTING = ("seq_len", "max_documents")
"""What the position of a packer depends on within a window."""
History: TypeAlias = Sequence[tuple[int, Mapping[str, Any]]]
"""``(samples, {"seq_len": ..., "tokens": ..., "shards": N, ...})``, oldest first: up to which sample of the run a form held,
and how many tokens all logical shards had delivered by then."""


def num_tokens(history: History, samples: Ints, seq_len: int) -> float:
    """Tokens with what pads them, of some logical shards that have delivered ``samples``; exact for all of them together."""
    if not history:
        return float(samples.sum()) * seq_len
    before, form = history[-1]
    share = len(samples) / form["shards"]
    return share * form["tokens"] + (float(samples.sum()) - share * before) * seq_len
