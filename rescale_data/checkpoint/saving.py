"""Save a state as one DCP checkpoint that exists wholly or not at all."""

from __future__ import annotations

import contextlib
import uuid
import warnings
from collections.abc import Generator, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from rescale_data.checkpoint.devices import refuse_pickled
from rescale_data.checkpoint.entries import Entry, State, entries_of, nested
from rescale_data.checkpoint.failures import clear_error
from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.save_planner import CheckpointSavePlanner
from rescale_data.checkpoint.storage.commit import Workspace, abandon, prepare
from rescale_data.checkpoint.storage.manifest import checked_metrics
from rescale_data.checkpoint.storage.store import Store, StrPath, open_store
from rescale_data.checkpoint.storage.writer import CheckpointWriter, SaveInfo
from rescale_data.checkpoint.tree import lost_in_names
from rescale_data.checkpoint.unfit import refuse_unfit


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
    lists every file with its size and checksum. Until the last step nothing is seen at ``path``: a save that fails leaves what
    was there, and so does one that is killed, but that an object store's old checkpoint is gone while two small files are put.

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
        ValueError: ``path`` is taken, an optimizer's parameters are in no module of ``state``, or a tensor is on the meta
            device, quantized, sparse or nested.
        OSError: disk full, no permission; the message says what to do.
    """
    ranks = Ranks(process_group)
    store, final = open_store(path, storage_options)
    checked = ranks.together(lambda: checked_metrics(metrics))
    plain = plain_state(state, ranks)
    info = SaveInfo(world_size=ranks.size, step=step, metrics=checked)
    workspace = begin(store, final, ranks, overwrite=overwrite)
    write(plain, CheckpointWriter(store, workspace, info), ranks)


def plain_state(state: State, ranks: Ranks) -> dict[str, Any]:
    """What DCP saves of ``state``; its tensors may be the live ones. An error of one rank is raised on all."""
    # Twice: sharded modules have collectives in their plain(), which all ranks must reach or none.
    entries = ranks.together(lambda: entries_of(state))
    return ranks.together(lambda: _plain(entries))


def _plain(entries: list[Entry]) -> dict[str, Any]:
    values = [(entry.path, entry.plain()) for entry in entries]
    refuse_pickled(values)
    plain = nested(values)
    refuse_unfit(plain)
    return plain


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
