"""Creates the stream of a loader: checks the arguments, and builds the feed that makes the batches."""

from __future__ import annotations

from dataclasses import replace

import torch

from rescale_data.engine.balance import Balance
from rescale_data.engine.balanced import BalancedFeed, as_samples
from rescale_data.engine.collate import pin
from rescale_data.engine.feed import Feed, FunctionFeed, InProcessFeed, InThreadFeed
from rescale_data.engine.options import Options
from rescale_data.engine.pool import Pool
from rescale_data.engine.ranks.meeting import is_file_store
from rescale_data.engine.recipe import Pipeline
from rescale_data.engine.runner import Runner
from rescale_data.engine.setup import Setup, make_setup
from rescale_data.engine.stream import Stream
from rescale_data.engine.transfer import is_accelerator, with_transfer

_FORK_WARNING = (
    "Workers are forked, and the ranks meet in a file (init_method='file://...', or a FileStore), which torch removes when the "
    "first worker ends: after that no collective of the loader comes about. Leave multiprocessing_context='forkserver', or "
    "give init_process_group another store (env://, tcp://)."
)


def open_stream(pipeline: Pipeline, options: Options) -> Stream:
    """Return the stream of micro batches of a new loader, at the start of the run (collective with a process group)."""
    setup = make_setup(pipeline, options)
    if options.shuffle is False and setup.layout.misfit_reason is not None:
        raise ValueError(
            f"shuffle=False keeps the order of the dataset where the case is aligned: {setup.layout.misfit_reason}."
        )
    runner = Runner(setup.recipe, setup.schema)
    pins_memory = torch.accelerator.is_available() and (options.pin_memory or is_accelerator(options.transfer))
    if options.balance is not None:
        feed: Feed = _balanced_feed(setup, options.balance, runner)
        feed = FunctionFeed(feed, pin) if pins_memory else feed
    elif options.num_workers:
        feed = _pool(setup, options, pin_memory=pins_memory)
    else:
        feed = InProcessFeed(runner, options.collate_fn)
        feed = FunctionFeed(feed, pin) if pins_memory else feed
    if options.transfer is not None:
        feed = with_transfer(feed, options.transfer, setup.ranks.rank, setup.ranks.world_size)
    if options.balance is not None and options.ahead:
        feed = InThreadFeed(feed, setup.layout.gradient_accumulation_steps)
    elif options.ahead and (options.transfer is not None or not options.num_workers):
        feed = InThreadFeed(feed, options.ahead)
    return Stream(setup, runner, feed)


def _balanced_feed(setup: Setup, balance: Balance, runner: Runner) -> Feed:
    """Return the feed of balanced steps, on top of a feed that reads ahead, so that not all ranks wait for one slow read."""
    options = setup.options
    if options.num_workers:
        inner_feed: Feed = _pool(setup, replace(options, collate_fn=as_samples), pin_memory=False)
    else:
        inner_feed = InProcessFeed(runner, as_samples)
        batches_ahead = max(options.ahead, setup.layout.gradient_accumulation_steps)
        inner_feed = InThreadFeed(inner_feed, batches_ahead) if options.ahead else inner_feed
    return BalancedFeed(inner_feed, setup, balance)


def _pool(setup: Setup, options: Options, *, pin_memory: bool) -> Pool:
    pool = Pool(setup.recipe, options, pin_memory=pin_memory)
    if pool.uses_fork and setup.ranks.communicator is not None and is_file_store():
        setup.ranks.warn(_FORK_WARNING)
    return pool
