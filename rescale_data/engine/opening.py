"""From the arguments of a loader to the stream that it reads: the setup, and the feed that makes its batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rescale_data.engine.collate import pin
from rescale_data.engine.feed import Feed, InProcess, InThread, Mapped
from rescale_data.engine.pool import Pool
from rescale_data.engine.ranks.meeting import is_in_a_file
from rescale_data.engine.recipe import Pipeline
from rescale_data.engine.runner import Collate, Runner
from rescale_data.engine.setup import Setup, set_up
from rescale_data.engine.stream import Stream

_FORKS = (
    "Workers are forked, and the ranks meet in a file (init_method='file://...', or a FileStore), which torch removes when the "
    "first worker ends: after that no collective of the loader comes about. Leave multiprocessing_context='forkserver', or "
    "give init_process_group another store (env://, tcp://)."
)


def open_stream(
    pipeline: Pipeline,
    *,
    keeps_order: bool,
    collate: Collate | None,
    prefetch_batches: int,
    pin_memory: bool,
    workers: Mapping[str, Any],
    **given: Any,
) -> Stream:
    """Return the stream of a loader at the beginning of its run (collective where there is a process group).

    Args:
        keeps_order: True if the order is that of the dataset, which only an aligned case keeps.
        prefetch_batches: Without workers: the batches that a thread makes ahead.
        workers: Of a `Pool`, by name.
        given: The rest of `set_up`.
    """
    if prefetch_batches < 0 or (prefetch_batches and given["num_workers"]):
        raise ValueError(
            f"prefetch_batches={prefetch_batches}, num_workers={given['num_workers']}: it is for num_workers=0, 0 or more; "
            f"workers have prefetch_factor."
        )
    if workers["prefetch"] < 1:
        raise ValueError(
            f"prefetch_factor={workers['prefetch']}: give the messages that a worker may be ahead, at least 1."
        )
    setup = set_up(pipeline, **given)
    if keeps_order and setup.layout.misfit is not None:
        raise ValueError(
            f"shuffle=False keeps the order of the dataset where the case is aligned: {setup.layout.misfit}."
        )
    runner, pins = Runner(setup.recipe, setup.schema), pin_memory and torch.accelerator.is_available()
    if setup.layout.num_workers:
        return Stream(setup, runner, _pool(setup, collate, pins, workers))
    feed: Feed = InProcess(runner, collate)
    feed = Mapped(feed, pin) if pins else feed
    return Stream(setup, runner, InThread(feed, prefetch_batches) if prefetch_batches else feed)


def _pool(setup: Setup, collate: Collate | None, pin_memory: bool, workers: Mapping[str, Any]) -> Feed:
    pool = Pool(setup.recipe, collate, setup.layout.num_workers, pin_memory=pin_memory, **workers)
    if pool.forks and setup.ranks.circle is not None and is_in_a_file():
        setup.ranks.warn(_FORKS)
    return pool
