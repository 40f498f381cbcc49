"""Opens the stream of a loader, new or in place of another: checks the arguments, and builds the feed of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rescale_data.engine.balance import Balance
from rescale_data.engine.balanced import BalancedFeed, leave_uncollated
from rescale_data.engine.collate import pin
from rescale_data.engine.feed import BatchFeed, FunctionFeed, InProcessFeed, InThreadFeed
from rescale_data.engine.options import Options
from rescale_data.engine.pool import WorkerFeed
from rescale_data.engine.ranks.meeting import is_file_store
from rescale_data.engine.recipe import Pipeline, VersionLogs
from rescale_data.engine.segment import LookAhead
from rescale_data.engine.setup import LoaderSetup, make_setup
from rescale_data.engine.states.load import load_state_dict
from rescale_data.engine.states.statedict import state_dict
from rescale_data.engine.stream import Stream
from rescale_data.engine.transfer import with_transfer
from rescale_data.state import Ints

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
    if options.balance is None:
        feed = _reading_feed(setup, options, pin_memory=options.pins_batches)
    else:
        feed = _balanced_feed(setup, options.balance)
    has_workers = isinstance(feed, WorkerFeed)
    if options.pins_batches and not has_workers:
        feed = FunctionFeed(feed, pin)
    if options.transfer is not None:
        feed = with_transfer(feed, options.transfer, setup.ranks.rank, setup.ranks.world_size)
    if options.batches_ahead and (options.transfer is not None or not has_workers):
        batches_per_step = setup.layout.gradient_accumulation_steps
        feed = InThreadFeed(feed, options.batches_ahead if options.balance is None else batches_per_step)
    return Stream(setup, feed)


def _balanced_feed(setup: LoaderSetup, balance: Balance) -> BatchFeed:
    """Return the feed of balanced steps, on top of a feed that reads ahead, so that not all ranks wait for one slow read."""
    options = setup.options
    feed = _reading_feed(setup, replace(options, collate_fn=leave_uncollated), pin_memory=False)
    if options.batches_ahead and not options.num_workers:
        feed = InThreadFeed(feed, max(options.batches_ahead, setup.layout.gradient_accumulation_steps))
    return BalancedFeed(feed, setup, balance)


def _reading_feed(setup: LoaderSetup, options: Options, *, pin_memory: bool) -> BatchFeed:
    if not options.num_workers:
        return InProcessFeed(setup.runner, options.collate_fn)
    worker_feed = WorkerFeed(setup.recipe, options, pin_memory=pin_memory)

    def draw_in_workers(table: Ints, histories: VersionLogs, shards: Sequence[int], num_samples: int) -> list[Any]:
        lookahead = LookAhead(setup.layout, 0, len(shards), histories=histories, shards=shards, num_samples=num_samples)
        return worker_feed.look_ahead(lookahead, table)

    setup.runner.draw_in_workers = draw_in_workers
    if worker_feed.uses_fork and setup.ranks.communicator is not None and is_file_store():
        setup.ranks.warn(_FORK_WARNING)
    return worker_feed


def continue_stream(stream: Stream, old: Stream, state: Mapping[str, Any] | None, delivered: int) -> None:
    """Move a new stream to a state (`DataLoader.reopen`); on failure, change nothing.

    Without a state, move it to the position of `old`; the ranks must stay the same.
    """
    if state is None:
        if delivered:
            raise ValueError(f"reopen(delivered={delivered}): samples that came after a state, so give that, too.")
        _require_reopenable(old, stream)
    load_state_dict(stream, state_dict(old.cursor, old.ends) if state is None else state, delivered)
    if state is None:  # keep whether the end of the epoch was seen here
        is_end_seen = not (old.is_at_end_of_steps and old.epoch_ended)
        stream.cursor = stream.cursor._replace(resumed=old.cursor.resumed, end_of_steps_seen=is_end_seen)
    stream.last_batch_samples = old.last_batch_samples


def _require_reopenable(old_stream: Stream, new_stream: Stream) -> None:
    """Raise ``ValueError`` if ``reopen()`` without a state cannot replace ``old_stream`` by ``new_stream``.

    The ranks stay. Within a step so do the sizes of the micro batches, and steps are not balanced.
    """
    old, new = old_stream.ranks, new_stream.ranks
    if (old.rank, old.world_size, old.communicator) != (new.rank, new.world_size, new.communicator):
        raise ValueError(
            f"reopen() as rank {new.rank} of {new.world_size}, which was rank {old.rank} of {old.world_size} of other "
            f"processes or an earlier process group: give state=, one state_dict() of the old ranks, the same on all new "
            f"ones."
        )
    old_sizes, new_sizes = ((s.layout.global_batch_size, s.layout.micro_batch_size) for s in (old_stream, new_stream))
    is_balanced = old_stream.setup.options.balance is not None or new_stream.setup.options.balance is not None
    num_taken, per_step = old_stream.num_in_step, old_stream.layout.gradient_accumulation_steps
    if num_taken and (old_sizes != new_sizes or is_balanced):
        raise ValueError(
            f"reopen() within a step, with another global batch or micro batch: {num_taken} of its {per_step} micro batches "
            f"have been taken. Call it when loader.step is {old_stream.step + 1}, after {per_step - num_taken} more."
        )
