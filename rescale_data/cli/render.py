"""Output of the command line, printed or as an HTML page: tables, and bar charts of the shards' progress."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, starmap
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rescale_data.layout.plan import format_size

_BAR_CHARS = " ▁▂▃▄▅▆▇█"
_PAGE_WIDTH = 160  # characters


def show_list(console: Console, checkpoints: Sequence[Mapping[str, Any]]) -> None:
    columns = ("checkpoint", "state", "size", "ranks", "saved", "metrics")
    _print_table(console, columns, map(_checkpoint_row, checkpoints))


def _checkpoint_row(checkpoint: Mapping[str, Any]) -> list[str]:
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


def _entry_row(name: str, entry: Mapping[str, Any]) -> list[str]:
    tensor_counts = str(entry["tensors"]), f"{entry['elements']:,}", format_size(entry["bytes"])
    return [name, *tensor_counts, " ".join(entry["dtypes"]), str(entry["plain_values"])]


def show_checkpoints(
    console: Console, checkpoints: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None
) -> None:
    """Print a table of checkpoints, and what one of them holds, of which there is a summary."""
    show_list(console, checkpoints)
    if summary is None:
        return
    console.print(f"\nIn [bold]{escape(summary['checkpoint']['name'])}[/bold]")
    columns = ("entry", "tensors", "elements", "size", "dtypes", "plain values")
    _print_table(console, columns, starmap(_entry_row, summary["entries"].items()))
    for name, data in summary["data"].items():
        _show_loader_data(console, name, data)


def write_page(path: str, checkpoints: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None) -> str:
    """Write what `show_checkpoints` prints to an HTML page, and return its path."""
    console = Console(record=True, width=_PAGE_WIDTH, highlight=False, file=io.StringIO())
    show_checkpoints(console, checkpoints, summary)
    title = "<title>rescale-data show</title>"
    Path(path).write_text(console.export_html().replace("<head>", f"<head>\n{title}", 1), encoding="utf-8")
    return path


def show_plan(console: Console, result: Mapping[str, Any]) -> None:
    rows: list[tuple[str, ...]] = []
    for entry in result["ranks"]:
        b_values = entry["micro_batches"]
        shown_text = ", ".join(map(str, b_values if len(b_values) <= 8 else [*b_values[:6], "...", b_values[-1]]))
        nearest = " and ".join(map(str, entry["nearest"]))
        keeps_order = "yes" if entry["keeps_order"] else f"no; {nearest} would" if nearest else "no"
        allowed = "yes" if entry["allowed"] else "no"
        rows.append((str(entry["ranks"]), allowed, keeps_order, shown_text, ", ".join(map(str, entry["workers"]))))
    console.print(f"global batch {result['global_batch_size']}, {result['num_logical_shards']} logical shards")
    _print_table(
        console, ("ranks", "allowed", "same global batches", "micro batches", "workers, with any of these"), rows
    )
    if result["largest"]:
        shown_text = (
            "{gpus} GPUs, {model_parallel} a data-parallel rank: at most {ranks} ranks keep the order, on {used} GPUs"
        )
        console.print(shown_text.format(**result["largest"]))


def show_audit(console: Console, result: Mapping[str, Any], max_samples: int) -> None:
    served = result["served"]
    if served:
        rows = [
            (str(sample["step"]), str(sample["sample"]), str(sample["shard"]), "\n".join(sample["documents"]))
            for sample in served[:max_samples]
        ]
        _print_table(console, ("step", "sample", "shard", "documents"), rows)
    num_hidden_samples, (first_step, stop_step) = len(served) - max_samples, result["steps"]
    summary = f"{result['rows']} rows, drawn {result['drawn']} times; in " if "rows" in result else ""
    console.print(
        f"{summary}{len(served)} samples of steps {first_step} to {stop_step - 1}"
        + (f", {num_hidden_samples} not shown" if num_hidden_samples > 0 else "")
    )


def progress_bar(shard_values: Sequence[float], width: int) -> str:
    """Return a bar chart of the values of logical shards, one character for each shard or a few neighbours."""
    width = min(width, len(shard_values))
    bounds = [len(shard_values) * column // width for column in range(width + 1)]
    bar_means = [fmean(shard_values[start:stop]) for start, stop in pairwise(bounds)]
    max_mean = max(*bar_means, 1)
    return "".join(_BAR_CHARS[round(mean / max_mean * (len(_BAR_CHARS) - 1))] for mean in bar_means)


def _show_loader_data(console: Console, loader_name: str, data: Mapping[str, Any]) -> None:
    shards: list[int] = data["shards"]
    console.print(
        f"\n[bold]{escape(loader_name)}[/bold]: {data.get('samples', 0):,} samples, {data['steps']:,} global batches, "
        f"{len(shards)} logical shards"
    )
    width, left_out = max(10, console.width // 3), data["left_out"].items()
    samples_row = ("samples", "", f"{min(shards):,} to {max(shards):,}", progress_bar(shards, width))
    rows = [samples_row, *(_progress_row(source, data, width) for source in data["epochs"])]
    _print_table(console, ("source", "epoch", "of the epoch", "each logical shard"), rows)
    mixture = [(name, f"{item['share']:.1%}", f"{item['weight']:.1%}") for name, item in data["mixture"].items()]
    _print_table(console, ("mixture", "so far", "weight"), mixture)
    _print_table(console, ("left out", "rows"), [(name, f"{count:,}") for name, count in left_out])


def _progress_row(source: str, data: Mapping[str, Any], width: int) -> tuple[str, str, str, str]:
    """Return a table row: progress of ``source`` in all logical shards, in epochs if their length is known, else rows."""
    rows, (min_epoch, max_epoch) = data["rows"].get(source), data["epochs"][source]
    epoch = str(min_epoch) if min_epoch == max_epoch else f"{min_epoch} to {max_epoch}"
    if rows is None:
        return source or "data", epoch, "", ""
    rows_per_epoch = data["of_rows"].get(source)
    if rows_per_epoch is None:
        return source or "data", epoch, f"rows {min(rows):,} to {max(rows):,}", progress_bar(rows, width)
    values = [
        epoch - min_epoch + row / rows_per_epoch for epoch, row in zip(data["epoch_of"][source], rows, strict=True)
    ]
    summary = f"{fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})"
    return source or "data", epoch, summary, progress_bar(values, width)


def _print_table(console: Console, column_titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, unless it has no rows."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in column_titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    if table.row_count:
        console.print(table)
