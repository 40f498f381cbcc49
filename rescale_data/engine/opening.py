"""Creates the stream of a loader: checks the arguments, and builds the feed that makes the batches."""

from __future__ import annotations

from dataclasses import replace

from rescale_data.engine.balance import Balance
from rescale_data.engine.balanced import BalancedFeed, keep_samples
from rescale_data.engine.collate import pin
from rescale_data.engine.feed import BatchFeed, FunctionFeed, InProcessFeed, InThreadFeed
from rescale_data.engine.options import Options
from rescale_data.engine.pool import WorkerFeed
from rescale_data.engine.ranks.meeting import is_file_store
from rescale_data.engine.recipe import Pipeline
from rescale_data.engine.runner import ShardRunner
from rescale_data.engine.setup import LoaderSetup, make_setup
from rescale_data.engine.stream import Stream
from rescale_data.engine.transfer import with_transfer

_FORK_WARNING = (
    "Workers are forked, and the ranks meet in a file (init_method='file://...', or a FileStore), which torch removes when the "
    "first worker ends: after that no collective of the loader comes about. Leave multiprocessing_context='forkserver', or "
    "give init_process_group another store (env://, tcp://)."
)


def open_stream(pipeline: Pipeline, options: Options) -> Stream:
    """Return the stream of micro batches of a new loader, at the start of the run (collective with a process group)."""
    setup = make_setup(pipeline, options)
    if options.shuffle is False and setup.layout.unaligned_reason is not None:
        raise ValueError(
            f"shuffle=False keeps the order of the dataset where the case is aligned: {setup.layout.unaligned_reason}."
        )
    runner = ShardRunner(setup.recipe, setup.schema)
    if options.balance is None:
        feed = _reading_feed(setup, options, runner, pin_memory=options.pins_batches)
    else:
        feed = _balanced_feed(setup, options.balance, runner)
    is_pool = isinstance(feed, WorkerFeed)
    if options.pins_batches and not is_pool:
        feed = FunctionFeed(feed, pin)
    if options.transfer is not None:
        feed = with_transfer(feed, options.transfer, setup.ranks.rank, setup.ranks.world_size)
    if options.ahead and (options.transfer is not None or not is_pool):
        one_step = setup.layout.gradient_accumulation_steps
        feed = InThreadFeed(feed, options.ahead if options.balance is None else one_step)
    return Stream(setup, runner, feed)


def _balanced_feed(setup: LoaderSetup, balance: Balance, runner: ShardRunner) -> BatchFeed:
    """Return the feed of balanced steps, on top of a feed that reads ahead, so that not all ranks wait for one slow read."""
    options = setup.options
    feed = _reading_feed(setup, replace(options, collate_fn=keep_samples), runner, pin_memory=False)
    if options.ahead and not options.num_workers:
        feed = InThreadFeed(feed, max(options.ahead, setup.layout.gradient_accumulation_steps))
    return BalancedFeed(feed, setup, balance)


def _reading_feed(setup: LoaderSetup, options: Options, runner: ShardRunner, *, pin_memory: bool) -> BatchFeed:
    if not options.num_workers:
        return InProcessFeed(runner, options.collate_fn)
    pool = WorkerFeed(setup.recipe, options, pin_memory=pin_memory)
    if pool.uses_fork and setup.ranks.communicator is not None and is_file_store():
        setup.ranks.warn(_FORK_WARNING)
    return pool
