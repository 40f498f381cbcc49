"""Checks that a trainer and its loader count the same data-parallel ranks."""

from __future__ import annotations

from rescale_data.engine.base_loader import call_with_stream
from rescale_data.loader import DataLoader


def require_ranks(loader: DataLoader, num_ranks: int, where_to_build: str) -> None:
    """Raise ``ValueError`` unless the loader serves its rows to as many data-parallel ranks as the trainer has.

    Args:
        where_to_build: The place where a loader for all of these ranks is built, for the message.
    """
    num_loader_ranks = call_with_stream(loader, lambda stream: stream.layout.dp_world_size)
    if num_ranks != num_loader_ranks:
        raise ValueError(
            f"The trainer has {num_ranks} data-parallel ranks, but the loader serves its rows to {num_loader_ranks}. Build it "
            f"{where_to_build} without dp_world_size=, or with mesh= of the data-parallel ranks."
        )
