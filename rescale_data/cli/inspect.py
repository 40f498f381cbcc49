"""Summaries of a checkpoint or of a run's folder, as plain values."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from rescale_data.checkpoint.data_state import read_data_state
from rescale_data.checkpoint.storage.claims import STEP_PATTERN
from rescale_data.checkpoint.storage.dcp import Contents
from rescale_data.checkpoint.storage.manifest import METADATA, manifest_at
from rescale_data.checkpoint.storage.open import CheckpointReader, open_store, read_checkpoint, verify
from rescale_data.checkpoint.storage.run_folder import RunFolder
from rescale_data.checkpoint.storage.store import Store, StrPath, join
from rescale_data.engine.recipe import path_name
from rescale_data.engine.states.codec import SavedState, data_state_paths, decode
from rescale_data.errors import DamagedCheckpointError
from rescale_data.nodes.mixture.rules import from_json, weights_at
from rescale_data.sources.fragmented import num_rows

SKIP_COUNTERS = ("filtered", "skipped", "short", "long", "blocked", "untrained")


def list_checkpoints(folder: StrPath) -> list[dict[str, Any]]:
    """Return one dict for each checkpoint in a run's folder, ordered by step and then by name.

    Raises:
        FileNotFoundError: no such folder, or no checkpoint in it.
        ValueError: a checkpoint, and not a folder of checkpoints.
    """
    store, path = open_store(folder)
    RunFolder.open_existing(store, path)
    names = [name for name in store.names(path) if not name.startswith(".")]
    sorted_names = sorted(
        names, key=lambda name: (int(step[1]) if (step := STEP_PATTERN.fullmatch(name)) else float("inf"), name)
    )
    descriptions = [_describe_checkpoint(store, join(path, name)) for name in sorted_names]
    checkpoints = [description for description in descriptions if description is not None]
    if not checkpoints:
        raise FileNotFoundError(
            f"No checkpoint in {path}: it holds {names[:5]}. Give the folder of a run, which holds a checkpoint a step."
        )
    return checkpoints


def summarize(path: StrPath) -> dict[str, Any]:
    """Return a summary of a checkpoint: ``checkpoint``, ``entries`` by top-level name, and ``data`` by loader.

    Raises:
        FileNotFoundError: no checkpoint at ``path``.
        ValueError: damaged files.
    """

    def summary(reader: CheckpointReader) -> dict[str, Any]:
        loader_names = [".".join(root) for root in data_state_paths(reader.contents.paths.values())]
        data = {name: summarize_data(decode(read_data_state(path, name=name))) for name in loader_names}
        checkpoint, entries = _describe_checkpoint(reader.store, reader.path), _summarize_entries(reader.contents)
        return {"checkpoint": checkpoint, "entries": entries, "data": data}

    return read_checkpoint(path, summary)


def summarize_run(path: StrPath) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return the checkpoints at ``path``, a checkpoint or a run's folder, and a summary of the newest readable one, or None.

    Raises:
        FileNotFoundError: nothing at ``path``.
        ValueError: damaged files.
    """
    store, folder = open_store(path)
    if _describe_checkpoint(store, folder) is None and store.names(folder):
        return list_checkpoints(path), _summarize_newest(store, folder)
    summary = summarize(path)
    return [summary["checkpoint"]], summary


def _summarize_newest(store: Store, folder: str) -> dict[str, Any] | None:
    """Return the summary of a run's newest readable checkpoint, or None."""
    run_folder = RunFolder(store, folder)
    for step in reversed(run_folder.steps()):
        with contextlib.suppress(ValueError, OSError):
            return summarize(run_folder.checkpoint_path(step))
    return None


def verify_checkpoint(path: StrPath) -> dict[str, Any]:
    """Verify a checkpoint; return its ``problems``, and ``checked``: ``"checksums"`` or ``"sizes"``."""
    problems = verify(path)
    has_checksums = bool(problems) or manifest_at(*open_store(path)) is not None
    return {"path": str(path), "checked": "checksums" if has_checksums else "sizes", "problems": problems}


def _summarize_entries(contents: Contents) -> dict[str, dict[str, Any]]:
    """Return the counts, bytes and dtypes of tensors under each top-level name of a checkpoint."""
    values_by_name = defaultdict[str, list[torch.Tensor | None]](list)
    for key, path in contents.paths.items():
        values_by_name[str(path[0])].append(contents.values[key])
    return {name: _count_tensors(values) for name, values in values_by_name.items()}


def _count_tensors(values: list[torch.Tensor | None]) -> dict[str, Any]:
    tensors = [value for value in values if value is not None]
    return {
        "tensors": len(tensors),
        "elements": sum(tensor.numel() for tensor in tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "plain_values": len(values) - len(tensors),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}),
    }


def summarize_data(state: SavedState) -> dict[str, Any]:
    """Return a loader's progress: ``samples``, ``step``, ``epochs`` by source (lowest, highest), ``shards`` (samples).

    ``rows``: where each shard is in its epoch, by source; ``totals``: of how many, on average, where the source knows.
    ``epoch_of``: the epoch of each shard, by source. ``mixture``: shares so far and weights. ``left_out``: rows by reason.
    """
    shard_columns, header = state.values, state.header
    epochs = {
        key.removesuffix("epoch").rstrip("."): rows
        for key, rows in shard_columns.items()
        if key.endswith(".epoch") or key == "epoch"
    }
    row_keys = {name: f"{name}.row" if name else "row" for name in epochs}
    sources = {"" if path == path_name(()) else path: source for path, source in header["sources"].items()}
    totals = {name: rows for name, source in sources.items() if name in row_keys and (rows := _rows_per_epoch(source))}
    left_out = {key: int(rows.sum()) for key, rows in shard_columns.items() if key.rpartition(".")[2] in SKIP_COUNTERS}
    return {
        **{key: value for key, value in header.items() if isinstance(value, int)},
        "steps": header["samples"] // header["global_batch_size"],
        "epochs": {name: [int(rows.min()), int(rows.max())] for name, rows in epochs.items() if rows.numel()},
        "shards": shard_columns["samples"].tolist(),
        "rows": {name: shard_columns[key].tolist() for name, key in row_keys.items() if key in shard_columns},
        "of_rows": {name: rows / max(1, shard_columns["samples"].numel()) for name, rows in totals.items()},
        "epoch_of": {name: rows.flatten().tolist() for name, rows in epochs.items()},
        "mixture": _mixture_shares(shard_columns, header["pipeline"]),
        "left_out": {key: count for key, count in left_out.items() if count},
    }


def _rows_per_epoch(source: Mapping[str, Any]) -> int:
    """Return a source's number of rows in an epoch, from its entry in a loader's state; 0 if it is not recorded."""
    newest_entry = source["by_epoch"][-1][1] if "by_epoch" in source else source
    try:  # a source of somebody's own may say anything
        return int(newest_entry.get("rows") or num_rows(newest_entry))
    except (TypeError, ValueError, LookupError, AttributeError):
        return 0


def _mixture_shares(shards: Mapping[str, torch.Tensor], pipeline: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the ``share`` so far (of tokens or draws) and the ``weight`` from now on of each source of a mixture."""
    shares: dict[str, dict[str, float]] = {}
    for path, node in pipeline.items():
        if node.get("node") != "WeightedSampler":
            continue
        prefix = "" if path == path_name(()) else f"{path}."
        unit = "tokens" if node["unit"] == "tokens" else "drawn"
        drawn = {
            key.removeprefix(f"{prefix}{unit}."): rows.long()
            for key, rows in shards.items()
            if key.startswith(f"{prefix}{unit}.")
        }
        num_drawn = sum(rows.sum() for rows in drawn.values()) if unit == "tokens" else shards[f"{prefix}draws"].sum()
        epoch_by_source = {
            name: int(rows.min())
            for name in drawn
            for key, rows in shards.items()
            if key.startswith(f"{prefix}{name}.") and key.endswith("epoch")
        }
        weight_rule = from_json(node)
        weights = weights_at(weight_rule, weight_rule.sources, int(num_drawn), 1, epoch_by_source).source_weights
        total_by_source = {name: int(torch.maximum(rows, ~rows).sum()) for name, rows in drawn.items()}
        for name, weight in zip(weight_rule.sources, weights, strict=True):
            share = total_by_source[name] / max(1, sum(total_by_source.values()))
            shares[f"{prefix}{name}".removeprefix("source.")] = {"share": share, "weight": weight / (sum(weights) or 1)}
    return shares


def _describe_checkpoint(store: Store, path: str) -> dict[str, Any] | None:
    """Return the name, step, size, time and metrics of a checkpoint; None if there is none."""
    name = path.rpartition("/")[2]
    try:
        manifest = manifest_at(store, path)
    except ValueError as error:
        state_word = "damaged" if isinstance(error, DamagedCheckpointError) else "too new"
        return {"name": name, "state": state_word, "detail": str(error)}
    if manifest is None:
        if not store.is_file(join(path, METADATA)):
            return None
        return {"name": name, "state": "no manifest", "detail": "of another tool, or never finished"}
    return {
        "name": name,
        "state": "committed",
        "step": manifest.step,
        "bytes": sum(record.size for record in manifest.files.values()),
        "files": len(manifest.files),
        "created": manifest.created,
        "world_size": manifest.world_size,
        "torch": manifest.torch,
        "metrics": dict(manifest.metrics),
    }
