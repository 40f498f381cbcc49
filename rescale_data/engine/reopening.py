"""Checks that a loader can go on with changed arguments, by a new stream on the same ranks."""

from __future__ import annotations

from rescale_data.engine.stream import Stream


def require_reopenable(old_stream: Stream, new_stream: Stream) -> None:
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
    sizes, new_sizes = ((s.layout.global_batch_size, s.layout.micro_batch_size) for s in (old_stream, new_stream))
    is_balanced = old_stream.setup.options.balance is not None or new_stream.setup.options.balance is not None
    num_begun, per_step = old_stream.num_in_step, old_stream.layout.gradient_accumulation_steps
    if num_begun and (sizes != new_sizes or is_balanced):
        raise ValueError(
            f"reopen() within a step, with another global batch or micro batch: {num_begun} of its {per_step} micro batches "
            f"have been taken. Call it when loader.step is {old_stream.step + 1}, after {per_step - num_begun} more."
        )
