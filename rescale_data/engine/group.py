"""Uniform batches: where a mixture may choose one source for several neighbouring rows (``WeightedSampler(group=)``)."""

from __future__ import annotations

import numpy as np

from rescale_data.engine.recipe import path_name
from rescale_data.engine.schema import Schema
from rescale_data.errors import DataStateError
from rescale_data.layout.clock import Clock
from rescale_data.layout.layout import Layout
from rescale_data.nodes.mixture.row import NUM
from rescale_data.state import Ints


def require_group(schema: Schema, layout: Layout) -> None:
    """``ValueError`` where the rows of a global batch could not be such groups."""
    g, o, n, b = schema.group, layout.global_batch_size, layout.num_logical_shards, layout.micro_batch_size
    if g == 1:
        return
    root = schema.root
    while root.one_for_one:
        root = root.children["source"]
    if root.group != g:
        path = next(path_name(path) for path, node in schema.root.walk() if node.group > 1)
        wrong = f"the mixture {path!r} is not the root of the pipeline, nor below nodes of one sample a sample"
    elif n % o:
        wrong = f"num_logical_shards={n} is not a multiple of global_batch_size={o}"
    elif o % g or b % g:
        wrong = f"group={g} does not divide global_batch_size={o} and micro_batch_size={b}"
    elif layout.misfit is not None:
        wrong = f"the case is not aligned: {layout.misfit}"
    else:
        return
    raise ValueError(f"WeightedSampler(group={g}): {wrong}. Neighbouring rows would be of several sources.")


def require_whole_round(schema: Schema, table: Ints, before: Clock, after: Clock, global_batch_size: int) -> None:
    """``DataStateError`` where steps are to be counted anew, and not all shards of a group have drawn as often.

    Args:
        before: The clock of the state, saved with ``global_batch_size``.
        after: That with which the run is to go on.
    """
    draws = [schema.slots_at(table, path) for path, node in schema.root.walk() if node.group > 1]
    if after.origin == before.origin or not any(np.ptp(rows[:, NUM]) for rows in draws if rows is not None):
        return
    rounds = -(-(before.samples - before.origin) // len(table))
    step = before.step + rounds * len(table) // global_batch_size
    raise DataStateError(
        f"The state is of step {before.global_step(global_batch_size)}, at which the logical shards have not all delivered as "
        f"many samples, and another global batch, or another topology within a step, would tear the groups of "
        f"WeightedSampler(group={schema.group}) apart. Go on with the saved ones to step {step}, save there, and change then."
    )
