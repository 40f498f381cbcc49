"""The HTML page of ``rescale-data show --html``, one file with its pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise, starmap
from statistics import fmean
from typing import Any

from rescale_data.cli.render import CHECKPOINT_COLUMNS, ENTRY_COLUMNS, entry_row, summary_row
from rescale_data.layout.plan import format_size

STYLE = """
:root { color-scheme: light dark } body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2em auto }
div { overflow-x: auto } td, th { padding: .2em .9em .2em 0; text-align: left; white-space: nowrap }
svg { background: #8884; fill: #2f6fb0 }
"""
MAX_CELLS = 128  # the most that a row of a heat map has


class Markup(str):
    """HTML text that this module has made: `_table` escapes all other text, and leaves this as it is."""


def render_page(name: str, checkpoints: Sequence[Mapping[str, Any]], newest: Mapping[str, Any] | None) -> str:
    """Return the HTML page of a run's folder or of one checkpoint: sizes, metrics, contents of the newest checkpoint."""
    summary = f"{len(checkpoints)} checkpoints, {format_size(sum(about.get('bytes', 0) for about in checkpoints))}"
    body = [f"<h1>{escape(name)}</h1>", f"<p>{summary}</p>", _table(CHECKPOINT_COLUMNS, map(summary_row, checkpoints))]
    if newest is not None:
        body += [f"<h2>In {escape(newest['checkpoint']['name'])}</h2>"]
        body += [_table(ENTRY_COLUMNS, starmap(entry_row, newest["entries"].items()))]
        body += [line for loader, data in newest["data"].items() for line in _loader_section(loader, data)]
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(name)}</title><style>{STYLE}</style>'
    return "\n".join([head, *body, ""])


def _loader_section(loader_name: str, data: Mapping[str, Any]) -> list[str]:
    shards = data["shards"]
    summary = f"{data.get('samples', 0):,} samples, {data['steps']:,} global batches, {len(shards)} logical shards"
    body = [f"<h2>{escape(loader_name)}</h2>", f"<p>{summary}</p>"]
    if shards:
        body += [f"<h3>Samples of each logical shard: {min(shards):,} to {max(shards):,}</h3>"]
        body += [_heatmap(shards, max(*shards, 1), shards)]
    if data["rows"]:
        body += [
            "<h3>Progress of each source in each logical shard</h3>",
            "<p>A cell is a logical shard, or some neighbours. Full colour is an epoch, or the furthest shard.</p>",
            _table(("source", "epoch", "of the epoch", ""), [_progress_row(source, data) for source in data["rows"]]),
        ]
    if data["mixture"]:
        rows = [(key, f"{entry['share']:.1%}", f"{entry['weight']:.1%}") for key, entry in data["mixture"].items()]
        body += ["<h3>Mixture</h3>", _table(("source", "so far", "weight"), rows)]
    if data["left_out"]:
        counts = [(path, f"{count:,}") for path, count in data["left_out"].items()]
        body += ["<h3>Left out</h3>", _table(("what", "rows"), counts)]
    return body


def _progress_row(source: str, data: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return a table row: progress of ``source`` in all logical shards, in epochs if their length is known, else rows."""
    rows, (min_epoch, max_epoch) = data["rows"][source], data["epochs"][source]
    epoch = str(min_epoch) if min_epoch == max_epoch else f"{min_epoch} to {max_epoch}"
    shard_rows = data["of_rows"].get(source)
    if shard_rows is None:
        return source or "data", epoch, f"rows {min(rows):,} to {max(rows):,}", _heatmap(rows, max(*rows, 1), rows)
    values = [epoch - min_epoch + row / shard_rows for epoch, row in zip(data["epoch_of"][source], rows, strict=True)]
    summary = f"{fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})"
    return source or "data", epoch, summary, _heatmap(values, max(*values, 1), rows)


def _table(column_titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = ["".join(f"<td>{cell if isinstance(cell, Markup) else escape(cell)}</td>" for cell in row) for row in rows]
    titles = "".join(f"<th>{escape(title)}</th>" for title in column_titles)
    return f"<div><table><tr>{titles}</tr>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table></div>"


def _heatmap(values: Sequence[float], max_value: float, counts: Sequence[int]) -> Markup:
    """Return a heat map: a cell for each logical shard, or a few neighbours, as opaque as its value is near ``max_value``."""
    num_columns = min(MAX_CELLS, len(values))
    bounds = [len(values) * i // num_columns for i in range(num_columns + 1)]
    cells = [
        f'<rect x="{4 * i}" width="3" height="13" fill-opacity="{fmean(values[start:stop]) / max_value:.2f}">'
        f"<title>shard {start}{'' if stop == start + 1 else f' to {stop - 1}'}: {fmean(counts[start:stop]):,.0f}</title></rect>"
        for i, (start, stop) in enumerate(pairwise(bounds))
    ]
    return Markup(f'<svg width="{4 * num_columns}" height="13">{"".join(cells)}</svg>')
