"""Checks that a loader can go on with changed arguments, by a new stream on the same ranks."""

from __future__ import annotations

from rescale_data.engine.stream import Stream


def require_reopenable(was: Stream, now: Stream) -> None:
    """Raise ``ValueError`` if ``reopen()`` without a state cannot replace the stream ``was`` by ``now``."""
    _require_same_ranks(was, now)
    _require_step_boundary(was, now)


def _require_same_ranks(was: Stream, now: Stream) -> None:
    old, new = was.ranks, now.ranks
    if (old.rank, old.world_size, old.communicator) != (new.rank, new.world_size, new.communicator):
        raise ValueError(
            f"reopen() as rank {new.rank} of {new.world_size}, which was rank {old.rank} of {old.world_size} of other "
            f"processes or an earlier process group: give state=, one state_dict() of the old ranks, the same on all new "
            f"ones."
        )


def _require_step_boundary(was: Stream, now: Stream) -> None:
    """Raise ``ValueError`` within a step if the sizes of the micro batches change, or if steps are balanced."""
    old, new, begun = was.layout, now.layout, was.begun
    sizes = (old.global_batch_size, old.micro_batch_size) != (new.global_batch_size, new.micro_batch_size)
    if begun and (sizes or was.setup.balance is not None or now.setup.balance is not None):
        in_step = old.gradient_accumulation_steps
        raise ValueError(
            f"reopen() within a step, with another global batch or micro batch: {begun} of its {in_step} micro batches "
            f"have been taken. Call it when loader.step is {was.step + 1}, after {in_step - begun} more."
        )
