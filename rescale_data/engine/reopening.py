"""Checks that a loader can go on with changed arguments, by a new stream on the same ranks."""

from __future__ import annotations

from rescale_data.engine.stream import Stream


def require_reopenable(old_stream: Stream, new_stream: Stream) -> None:
    """Raise ``ValueError`` if ``reopen()`` without a state cannot replace ``old_stream`` by ``new_stream``."""
    _require_same_ranks(old_stream, new_stream)
    _require_step_boundary(old_stream, new_stream)


def _require_same_ranks(old_stream: Stream, new_stream: Stream) -> None:
    old, new = old_stream.ranks, new_stream.ranks
    if (old.rank, old.world_size, old.communicator) != (new.rank, new.world_size, new.communicator):
        raise ValueError(
            f"reopen() as rank {new.rank} of {new.world_size}, which was rank {old.rank} of {old.world_size} of other "
            f"processes or an earlier process group: give state=, one state_dict() of the old ranks, the same on all new "
            f"ones."
        )


def _require_step_boundary(old_stream: Stream, new_stream: Stream) -> None:
    """Raise ``ValueError`` within a step if the sizes of the micro batches change, or if steps are balanced."""
    old, new, begun = old_stream.layout, new_stream.layout, old_stream.num_in_step
    sizes_differ = (old.global_batch_size, old.micro_batch_size) != (new.global_batch_size, new.micro_batch_size)
    if begun and (sizes_differ or old_stream.setup.balance is not None or new_stream.setup.balance is not None):
        per_step = old.gradient_accumulation_steps
        raise ValueError(
            f"reopen() within a step, with another global batch or micro batch: {begun} of its {per_step} micro batches "
            f"have been taken. Call it when loader.step is {old_stream.step + 1}, after {per_step - begun} more."
        )
