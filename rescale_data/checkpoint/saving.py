"""Save a state as one DCP checkpoint that exists wholly or not at all."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from rescale_data.checkpoint.rank_values import refuse_disagreement
from rescale_data.checkpoint.ranks import Ranks, error_with_advice
from rescale_data.checkpoint.state import State, entries_of, state_dict_of
from rescale_data.checkpoint.storage import dcp
from rescale_data.checkpoint.storage.claims import ONLY_STEP, SaveId
from rescale_data.checkpoint.storage.commit import Ownership, require_free_target
from rescale_data.checkpoint.storage.manifest import SAVE_ID_PREFIX, Manifest, checked_metrics
from rescale_data.checkpoint.storage.open import open_store
from rescale_data.checkpoint.storage.store import FileRecord, Store, StrPath, join, split
from rescale_data.checkpoint.storage.values import warn_of_unloadable
from rescale_data.checkpoint.tree import unflatten_hints_of
from rescale_data.errors import checks_argument_types

logger = logging.getLogger(__name__)


@checks_argument_types
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
    """Save ``state`` as a checkpoint at ``path``, and return when it is committed; all ranks call it.

    The folder is a plain DCP checkpoint that ``torch.distributed.checkpoint.load`` reads, and a manifest, which lists every
    file with its size and checksum. Until the manifest is put, ``path`` is what it was: a save that fails or is killed leaves
    the checkpoint that was there.

    Args:
        path: A local folder that does not exist yet, or a URL that fsspec knows (``s3://bucket/run/step-100``).
        state: Names to modules, optimizers (with their model), anything ``Stateful``, tensors, plain values, and
            dicts of these.
        overwrite: Replace a checkpoint at ``path``.
        step: The trainer's step, for the manifest.
        metrics: Numbers for the manifest.
        process_group: The ranks that save; default all.
        storage_options: Passed on to fsspec.

    Raises:
        TypeError: ``state`` holds what has no place in a checkpoint.
        ValueError: ``path`` is taken, or is a step that its run's newest manager has saved; ranks differ in it, in ``step`` or
            in a value that is not ``PerRank``, an optimizer's parameters are in no module of ``state``, or a tensor is on the
            meta device, quantized, sparse, nested or partial.
        OSError: disk full, no permission; the message says what to do.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save(f"{folder}/step-1", {"model": model, "lr": 0.1}, step=1)
        ...     checkpoint.verify(f"{folder}/step-1")
        []
    """
    ranks = Ranks(process_group)
    store, final_path = open_store(path, storage_options, to_write=True)
    valid_metrics = ranks.on_all(lambda: checked_metrics(metrics))
    state_dict = savable_state_dict(state, ranks)
    write_checkpoint(store, final_path, state_dict, ranks, overwrite=overwrite, step=step, metrics=valid_metrics)


def savable_state_dict(state: State, ranks: Ranks) -> dict[str, Any]:
    """Return ``state`` as nested dicts of values that DCP can save. Its tensors may be the live ones.

    An error of one rank is raised on all.
    """
    # Twice: sharded modules have collectives in their get_value(), which all ranks must reach or none.
    entries = ranks.on_all(lambda: entries_of(state, ranks.rank))
    return ranks.on_all(lambda: state_dict_of(entries))


def save_from_one_process(path: StrPath, state_dict: dict[str, Any], storage_options: Mapping[str, Any] | None) -> None:
    """Save plain values and tensors from this process alone, even if a process group is initialized."""
    write_checkpoint(*open_store(path, storage_options, to_write=True), state_dict, Ranks(single_process=True))


def write_checkpoint(
    store: Store,
    final_path: str,
    state_dict: dict[str, Any],
    ranks: Ranks,
    *,
    run: Ownership | None = None,
    overwrite: bool = False,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Write and commit a checkpoint; on an error remove its files, and raise.

    Args:
        run: The owner of the run that the checkpoint is a step of, on the first rank; default: it is a run of its own.
    """
    step_name = ONLY_STEP if run is None else split(final_path)[1]
    ownerships: list[Ownership] = []
    begun_save: SaveId | None = None

    def begin_new_save() -> SaveId:
        require_free_target(store, final_path, overwrite=overwrite)
        ownerships.append(run or Ownership(store, final_path, has_one_checkpoint=True))
        return ownerships[0].begin_save(step_name)

    description = f"{final_path}{' (overwrite)' * overwrite}{'' if step is None else f' of step {step}'}"
    _compare_arguments(description, metrics or {}, ranks)
    refuse_disagreement(state_dict, ranks)
    if ranks.is_first:
        warn_of_unloadable(state_dict)
    try:
        begun_save = new_save = ranks.run_on_first(begin_new_save)
        file_records = _write_files(store, final_path, new_save, state_dict, ranks)
        manifest = Manifest(
            save_id=new_save.folder,
            files=file_records,
            world_size=ranks.world_size,
            step=step,
            metrics=metrics or {},
            created=time.time(),
            torch=str(torch.__version__),
            lost=unflatten_hints_of(state_dict),
        )
        ranks.run_on_first(lambda: ownerships[0].commit(step_name, new_save, manifest))
    except BaseException as error:
        for owner in ownerships:
            with contextlib.suppress(Exception):
                owner.discard_save(step_name, begun_save)
            with contextlib.suppress(OSError):
                owner.check_not_superseded()  # a newer owner may have removed the files
        raise error_with_advice(error, f"Saving {final_path}") from error
    for owner in ownerships:
        if run is None:
            owner.remove_obsolete()


def _compare_arguments(description: str, metrics: Mapping[str, float], ranks: Ranks) -> None:
    """Raise ``ValueError`` if ranks name different checkpoints; warn if their metrics differ: those of the first rank count."""
    descriptions, rank_metrics = zip(*ranks.on_each(lambda: (description, dict(sorted(metrics.items())))), strict=True)
    if len(set(descriptions)) > 1:
        target_list = ", ".join(sorted(set(descriptions))[:4])
        raise ValueError(
            f"All ranks save one checkpoint, and they name {len(set(descriptions))}: {target_list}. Give all the same."
        )
    other_metrics = next((values for values in rank_metrics if values and repr(values) != repr(rank_metrics[0])), None)
    if ranks.is_first and other_metrics is not None:
        logger.warning(
            "Saving %s: ranks give different metrics, %s on the first and %s on another one. The first rank's are kept, also "
            "for keep_best: reduce them over the ranks.", description, rank_metrics[0], other_metrics,
        )  # fmt: skip


def _write_files(store: Store, target: str, save: SaveId, state: dict[str, Any], ranks: Ranks) -> dict[str, FileRecord]:
    """Write the data files of all ranks; return the size and checksums of each file, by name."""
    store.written_files, name_prefix, folder = {}, f"{save.folder}/", join(target, save.folder)
    dcp.save(state, store, folder, ranks, name=target, save_id=SAVE_ID_PREFIX + save.folder, file_prefix=name_prefix)
    file_records = [file for rank_files in ranks.on_each(lambda: store.written_files) for file in rank_files.items()]
    return {name_prefix + split(path)[1]: record for path, record in file_records}
