"""Save a state as one DCP checkpoint that exists wholly or not at all."""

from __future__ import annotations

import contextlib
import uuid
import warnings
from collections.abc import Generator, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from rescale_data.checkpoint.commit import Workspace, abandon, prepare
from rescale_data.checkpoint.entries import State, entries_of, nested
from rescale_data.checkpoint.failures import clear_error
from rescale_data.checkpoint.manifest import checked_metrics
from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.save_planner import CheckpointSavePlanner
from rescale_data.checkpoint.store import Store, StrPath, open_store
from rescale_data.checkpoint.tree import lost_in_names
from rescale_data.checkpoint.writer import CheckpointWriter, SaveInfo


def save(
    path: StrPath,
    state: State,
    *,
    overwrite: bool = False,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Save ``state`` at ``path``, with all ranks, and return when it is committed.

    The folder is a plain DCP checkpoint that ``torch.distributed.checkpoint.load`` reads, and ``rescale_data.json``, which
    lists every file with its size and checksum. Until the last step nothing is seen at ``path``: a save that fails or is
    killed leaves what was there.

    Args:
        path: A local folder that does not exist yet, or a URL that fsspec knows (``s3://bucket/run/step-100``).
        state: Names to modules, optimizers (with their model), anything ``Stateful``, tensors, plain values, and
            dicts of these.
        overwrite: Replace a checkpoint at ``path``.
        step: Of the trainer, for the manifest.
        metrics: Numbers for the manifest.
        process_group: The ranks that save; default all.
        storage_options: Passed on to fsspec.

    Raises:
        TypeError: ``state`` holds what has no place in a checkpoint.
        ValueError: ``path`` is taken, or an optimizer's parameters are in no module of ``state``.
        OSError: disk full, no permission; the message says what to do.
    """
    ranks = Ranks(process_group)
    store, final = open_store(path, storage_options)
    info = SaveInfo(world_size=ranks.size, step=step, metrics=checked_metrics(metrics))
    plain = plain_state(state)
    workspace = begin(store, final, ranks, overwrite=overwrite)
    write(plain, CheckpointWriter(store, workspace, info), ranks)


def plain_state(state: State) -> dict[str, Any]:
    """What DCP saves of ``state``; its tensors may be the live ones."""
    return nested([(entry.path, entry.plain()) for entry in entries_of(state)])


def begin(store: Store, final: str, ranks: Ranks, *, overwrite: bool) -> Workspace:
    """The workspace of one save, the same on all ranks."""
    try:
        return ranks.on_first(lambda: prepare(store, final, uuid.uuid4().hex, overwrite=overwrite))
    except OSError as error:
        raise clear_error(error, f"Saving {final}") from error


def write(plain: dict[str, Any], writer: CheckpointWriter, ranks: Ranks) -> None:
    """Write and commit, or remove what was written and raise why."""
    doing = f"Saving {writer.workspace.final}"
    writer.lost = lost_in_names(plain)
    try:
        with quiet(ranks):
            save_state(
                plain,
                storage_writer=writer,
                planner=CheckpointSavePlanner(),
                process_group=ranks.group,
                no_dist=not ranks.distributed,
            )
    except BaseException as error:
        if ranks.is_first:
            with contextlib.suppress(Exception):
                abandon(writer.fs.store, writer.workspace)
        raise clear_error(error, doing) from error


@contextlib.contextmanager
def quiet(ranks: Ranks) -> Generator[None]:
    """Without DCP's warning that there is no process group, which is no news to who started one process."""
    if not ranks.distributed:
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)", category=UserWarning)
    yield
