"""Page of ``rescale-data show --html``: one file with pictures, which needs no other file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from statistics import fmean
from typing import Any

from rescale_data.cli.render import LISTED, listed, size

STYLE = """
:root { color-scheme: light dark } body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2em auto }
div { overflow-x: auto } td, th { padding: .2em .9em .2em 0; text-align: left; white-space: nowrap }
svg { background: #8884; fill: #2f6fb0 }
"""
CELLS = 128  # the most that a row of a heat map has


class Drawn(str):
    """Markup of ours; all other text is escaped."""


def page(name: str, checkpoints: Sequence[Mapping[str, Any]], newest: Mapping[str, Any] | None) -> str:
    """Return the page of a run's folder, or of one checkpoint: sizes and metrics, and what the newest holds."""
    about = f"{len(checkpoints)} checkpoints, {size(sum(one.get('bytes', 0) for one in checkpoints))}"
    body = [f"<h1>{escape(name)}</h1>", f"<p>{about}</p>", _table(LISTED, map(listed, checkpoints))]
    if newest is not None:
        parts = [
            (part, str(entry["tensors"]), f"{entry['elements']:,}", size(entry["bytes"]))
            for part, entry in newest["entries"].items()
        ]
        body += [f"<h2>In {escape(newest['checkpoint']['name'])}</h2>"]
        body += [_table(("part", "tensors", "elements", "size"), parts)]
        body += [line for loader, data in newest["data"].items() for line in _data(loader, data)]
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(name)}</title><style>{STYLE}</style>'
    return "\n".join([head, *body, ""])


def _data(name: str, data: Mapping[str, Any]) -> list[str]:
    shards = data["shards"]
    about = f"{data.get('samples', 0):,} samples, {data['steps']:,} global batches, {len(shards)} logical shards"
    body = [f"<h2>{escape(name)}</h2>", f"<p>{about}</p>"]
    if shards:
        body += [f"<h3>Samples of each logical shard: {min(shards):,} to {max(shards):,}</h3>"]
        body += [_heat(shards, max(*shards, 1), shards)]
    if data["rows"]:
        body += [
            "<h3>Progress of each source in each logical shard</h3>",
            "<p>A cell is a logical shard, or some neighbours. Full colour is an epoch, or the furthest shard.</p>",
            _table(("source", "epoch", "of the epoch", ""), [_progress(source, data) for source in data["rows"]]),
        ]
    if data["mixture"]:
        parts = [(part, f"{now['share']:.1%}", f"{now['weight']:.1%}") for part, now in data["mixture"].items()]
        body += ["<h3>Mixture</h3>", _table(("source", "so far", "weight"), parts)]
    if data["left_out"]:
        counts = [(path, f"{count:,}") for path, count in data["left_out"].items()]
        body += ["<h3>Left out</h3>", _table(("what", "rows"), counts)]
    return body


def _progress(source: str, data: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """A row of the heat map: ``source`` in all shards, as epochs where it is known how long one is, else as rows."""
    rows, (low, high) = data["rows"][source], data["epochs"][source]
    epoch = str(low) if low == high else f"{low} to {high}"
    share = data["of_rows"].get(source)
    if share is None:
        return source or "data", epoch, f"rows {min(rows):,} to {max(rows):,}", _heat(rows, max(*rows, 1), rows)
    values = [epoch - low + row / share for epoch, row in zip(data["epoch_of"][source], rows, strict=True)]
    about = f"{fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})"
    return source or "data", epoch, about, _heat(values, max(*values, 1), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = ["".join(f"<td>{cell if isinstance(cell, Drawn) else escape(cell)}</td>" for cell in row) for row in rows]
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f"<div><table><tr>{titles}</tr>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table></div>"


def _heat(values: Sequence[float], top: float, counts: Sequence[int]) -> Drawn:
    """One cell a logical shard, or for a few neighbours: the fuller, the further, of ``top``; its title is the count."""
    columns = min(CELLS, len(values))
    cuts = [len(values) * i // columns for i in range(columns + 1)]
    cells = [
        f'<rect x="{4 * i}" width="3" height="13" fill-opacity="{fmean(values[a:b]) / top:.2f}">'
        f"<title>shard {a}{'' if b == a + 1 else f' to {b - 1}'}: {fmean(counts[a:b]):,.0f}</title></rect>"
        for i, (a, b) in enumerate(pairwise(cuts))
    ]
    return Drawn(f'<svg width="{4 * columns}" height="13">{"".join(cells)}</svg>')
