"""Which documents were in the batch of a step."""

from __future__ import annotations

import itertools
from typing import Any

from rescale_data.loader import DataLoader
from rescale_data.nodes.provenance import PROVENANCE


def step_documents(loader: DataLoader, step: int) -> list[list[str]]:
    """Where each sample of this rank comes from in the global batch of a step: a line for each of its documents.

    The loader goes to the step without training, and then back to where it was; an iterator over it is invalid then. With
    a single rank that is the whole global batch, whatever the ranks of the run were.

    Args:
        loader: Its readers have ``provenance=True``, which leaves the order as it is; give it the seed, ``num_logical_shards``
            and ``global_batch_size`` of the run, and load a checkpoint from before the step (from the last change of the batch
            size or of weights at least; without any, it starts with the run).
        step: The step to look at, counted like `DataLoader.step`: the batch that was taken when ``loader.step == step``.

    Raises:
        ValueError: The loader is past the step already, or its samples do not say where they come from.

    Example:
        >>> import rescale_data as rd
        >>> source = rd.SyntheticSource(64, length=8)
        >>> loader = rd.DataLoader(lambda shard: rd.Reader(source, shard, provenance=True), global_batch_size=2)
        >>> rd.step_documents(loader, 1)
        [['synthetic: synthetic row 12'], ['synthetic: synthetic row 47']]
    """
    whole = loader.setup.layout.global_batch_size
    begun = loader.stream.clock.begun(whole)
    if step < loader.step + (begun > 0):
        raise ValueError(
            f"The loader is at step {loader.step}, past step {step}. Load an older checkpoint, or build a new loader to begin "
            f"with step 0."
        )
    state = loader.state_dict()
    try:
        loader.skip((step - loader.step) * whole - begun)
        batches = list(itertools.islice(loader, loader.gradient_accumulation_steps))
    finally:
        loader.load_state_dict(state)
    return [lines.splitlines() for batch in batches for lines in _provenance(batch)]


def _provenance(batch: Any) -> list[str]:
    if not isinstance(batch, dict) or PROVENANCE not in batch:
        raise ValueError(
            f"The batches have no {PROVENANCE!r}. Build the pipeline with rd.Reader(..., provenance=True), and with functions "
            f"and a collate_fn that hand it on."
        )
    return list(batch[PROVENANCE])
