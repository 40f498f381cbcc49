"""Read values of a checkpoint in this process alone."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.storage import StorageReader

from rescale_data.checkpoint.failures import clear_error
from rescale_data.checkpoint.planner import CheckingLoadPlanner
from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.saving import quiet


def load_plain(plain: dict[str, Any], reader: StorageReader, *, flat: bool = False, trusted: bool = False) -> None:
    """Read what ``plain`` has placeholders for.

    Args:
        flat: The keys are flattened names, and the values no mappings.
        trusted: Unpickle values that could run code.

    Raises:
        ValueError: a value that is refused with ``trusted=False``.
        OSError: files that cannot be read.
    """
    planner = CheckingLoadPlanner([], trusted=trusted, flat=flat)
    try:
        with quiet(Ranks.alone()):
            load_state(plain, storage_reader=reader, planner=planner, no_dist=True)
    except BaseException as error:
        raise clear_error(error, "Reading the checkpoint") from error


def read_values(names: list[str], reader: StorageReader, *, trusted: bool) -> dict[str, Any]:
    """Plain values by flattened name."""
    values: dict[str, Any] = dict.fromkeys(names)
    if values:
        load_plain(values, reader, flat=True, trusted=trusted)
    return values
