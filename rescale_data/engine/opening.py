"""`Opening`: what a loader was given, from which its stream is opened on the ranks that there are, and on others."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from rescale_data.engine.feed import InProcess, InThread
from rescale_data.engine.ranks.meeting import is_in_a_file
from rescale_data.engine.recipe import Pipeline
from rescale_data.engine.runner import Collate, Runner
from rescale_data.engine.setup import Setup, set_up
from rescale_data.engine.stream import Stream
from rescale_data.engine.workers import Pool
from rescale_data.layout.layout import Layout

_FORKS = (
    "Workers are forked, and the ranks meet in a file (init_method='file://...', or a FileStore), which torch removes when the "
    "first worker ends: after that no collective of the loader comes about. Leave multiprocessing_context='forkserver', or "
    "give init_process_group another store (env://, tcp://)."
)


class Opening:
    """Makes the setup and the stream of a loader; workers live on as long as their number stays.

    Args:
        where: The mesh, the group or the numbers that say which ranks they are.
        keeps_order: Whether the order is that of the dataset, which only an aligned case keeps.
        micro_batch_size: As given; `None`: what follows from the ranks.
        prefetch_batches: Without workers: made ahead by a thread.
        workers: Of a `Pool`, by name.
        given: The rest of `set_up`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        where: Mapping[str, Any],
        *,
        keeps_order: bool,
        micro_batch_size: int | None,
        collate: Collate | None,
        prefetch_batches: int,
        pin_memory: bool,
        workers: Mapping[str, Any],
        **given: Any,
    ) -> None:
        self._set_up, self.where = partial(set_up, pipeline, **given), where
        self._keeps_order, self.micro_batch_size = keeps_order, micro_batch_size
        self._collate, self._prefetch_batches = collate, prefetch_batches
        self._pin = pin_memory and torch.accelerator.is_available()
        self._pool_of = partial(Pool, collate=collate, pin_memory=self._pin, **workers)
        self._pool: Pool | None = None

    def set_up(self, where: Mapping[str, Any], **sizes: Any) -> Setup:
        """With the sizes of a `Layout`, on these ranks (collective)."""
        setup = self._set_up(**sizes, **where)
        self.require_order(setup.layout)
        return setup

    def require_order(self, layout: Layout) -> None:
        if self._keeps_order and layout.misfit is not None:
            raise ValueError(
                f"shuffle=False keeps the order of the dataset where the case is aligned: {layout.misfit}."
            )

    def stream(self, setup: Setup) -> Stream:
        """What reads in a topology."""
        runner, k = Runner(setup.recipe, setup.schema), setup.layout.num_workers
        if self._pool is not None and self._pool.num_workers != k:
            self._pool.close()
            self._pool = None
        if k and self._pool is None:
            self._pool = self._pool_of(setup.recipe, num_workers=k)
            if self._pool.forks and setup.ranks.circle is not None and is_in_a_file():
                setup.ranks.warn(_FORKS)
        feed = InProcess(runner, self._collate, pin_memory=self._pin)
        ahead = InThread(feed, self._prefetch_batches) if self._prefetch_batches else feed
        return Stream(setup, runner, self._pool or ahead)
