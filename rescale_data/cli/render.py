"""Printed output of the command line: tables, and a bar chart of the shards' progress."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, starmap
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rescale_data.layout.plan import format_size

_LEVELS = " ▁▂▃▄▅▆▇█"


CHECKPOINT_COLUMNS = ("checkpoint", "state", "size", "ranks", "saved", "metrics")
ENTRY_COLUMNS = ("entry", "tensors", "elements", "size", "dtypes", "plain values")


def show_list(console: Console, checkpoints: Sequence[Mapping[str, Any]]) -> None:
    _print_table(console, CHECKPOINT_COLUMNS, map(summary_row, checkpoints))


def summary_row(checkpoint: Mapping[str, Any]) -> list[str]:
    """Return the table row of a checkpoint, with the columns `CHECKPOINT_COLUMNS`."""
    metrics = ", ".join(f"{name}={value:.4g}" for name, value in checkpoint.get("metrics", {}).items())
    ranks, created = str(checkpoint.get("world_size", "")), checkpoint.get("created")
    saved_at = "" if created is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created))
    return [
        checkpoint["name"],
        checkpoint["state"],
        format_size(checkpoint["bytes"]) if "bytes" in checkpoint else "",
        ranks,
        saved_at,
        metrics or checkpoint.get("detail", ""),
    ]


def entry_row(name: str, entry: Mapping[str, Any]) -> list[str]:
    """Return the table row of a top-level entry of a checkpoint, with the columns `ENTRY_COLUMNS`."""
    counts = str(entry["tensors"]), f"{entry['elements']:,}", format_size(entry["bytes"])
    return [name, *counts, " ".join(entry["dtypes"]), str(entry["plain_values"])]


def show_summary(console: Console, summary: Mapping[str, Any]) -> None:
    show_list(console, [summary["checkpoint"]])
    _print_table(console, ENTRY_COLUMNS, starmap(entry_row, summary["entries"].items()))
    for name, data in summary["data"].items():
        _show_loader_data(console, name, data)


def show_plan(console: Console, answer: Mapping[str, Any]) -> None:
    rows: list[tuple[str, ...]] = []
    for entry in answer["ranks"]:
        b_values = entry["micro_batches"]
        shown_text = ", ".join(map(str, b_values if len(b_values) <= 8 else [*b_values[:6], "...", b_values[-1]]))
        nearest = " and ".join(map(str, entry["nearest"]))
        keeps_order = "yes" if entry["keeps_order"] else f"no; {nearest} would" if nearest else "no"
        allowed = "yes" if entry["allowed"] else "no"
        rows.append((str(entry["ranks"]), allowed, keeps_order, shown_text, ", ".join(map(str, entry["workers"]))))
    console.print(f"global batch {answer['global_batch_size']}, {answer['num_logical_shards']} logical shards")
    _print_table(
        console, ("ranks", "allowed", "same global batches", "micro batches", "workers, with any of these"), rows
    )
    if answer["largest"]:
        shown_text = (
            "{gpus} GPUs, {model_parallel} a data-parallel rank: at most {ranks} ranks keep the order, on {used} GPUs"
        )
        console.print(shown_text.format(**answer["largest"]))


def show_audit(console: Console, answer: Mapping[str, Any], max_samples: int) -> None:
    served = answer["served"]
    if served:
        rows = [
            (str(sample["step"]), str(sample["sample"]), str(sample["shard"]), "\n".join(sample["documents"]))
            for sample in served[:max_samples]
        ]
        _print_table(console, ("step", "sample", "shard", "documents"), rows)
    num_hidden, (first_step, stop_step) = len(served) - max_samples, answer["steps"]
    summary = f"{answer['rows']} rows, drawn {answer['drawn']} times; in " if "rows" in answer else ""
    console.print(
        f"{summary}{len(served)} samples of steps {first_step} to {stop_step - 1}"
        + (f", {num_hidden} not shown" if num_hidden > 0 else "")
    )


def progress_bar(shard_samples: Sequence[int], width: int) -> str:
    """Return a bar chart of the samples of logical shards, one character for each shard or a few neighbours."""
    if not shard_samples:
        return ""
    width = min(width, len(shard_samples))
    bounds = [len(shard_samples) * column // width for column in range(width + 1)]
    means = [sum(shard_samples[start:stop]) / (stop - start) for start, stop in pairwise(bounds)]
    max_mean = max(*means, 1)
    return "".join(_LEVELS[round(mean / max_mean * (len(_LEVELS) - 1))] for mean in means)


def _show_loader_data(console: Console, loader_name: str, data: Mapping[str, Any]) -> None:
    epochs = ", ".join(
        f"{source or 'data'} {min_epoch}" + (f" to {max_epoch}" if max_epoch != min_epoch else "")
        for source, (min_epoch, max_epoch) in data["epochs"].items()
    )
    console.print(
        f"\n[bold]{escape(loader_name)}[/bold]: {data.get('samples', 0):,} samples, {data['steps']:,} global batches"
    )
    console.print(f"  epochs: {escape(epochs) or 'none'}")
    shards: list[int] = data["shards"]
    if shards:
        console.print(f"  {len(shards)} logical shards, {min(shards):,} to {max(shards):,} samples each")
        console.print(f"  |{progress_bar(shards, max(10, console.width - 6))}|")


def _print_table(console: Console, column_titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in column_titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
