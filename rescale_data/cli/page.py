"""What ``rescale-data show --html`` writes: one page with pictures, which needs no other file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from math import inf, isfinite
from typing import Any

from rescale_data.cli.render import LISTED, listed, size, when

STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --paper: #fff; --faint: #8884; --bar: #2f6fb0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181c; --bar: #5a9bd8; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper) }
body { max-width: 960px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: .6em 0 } td, th { padding: .2em .9em .2em 0; text-align: left; white-space: nowrap }
.heat { background: var(--faint); fill: var(--bar) } p .heat, h3 + .heat { max-width: 100% }
.line { width: 100%; max-width: 600px; fill: none; stroke: var(--bar) } .line circle { fill: var(--bar) }
.line circle.gone { fill: var(--paper) } .line text { fill: var(--ink); stroke: none; font-size: 12px }
div { overflow-x: auto }
.bar { display: inline-block; height: .8em; background: var(--bar) }
.scale { display: block; position: relative; width: 204px }
.mark { position: absolute; border-right: 2px solid #c8102e; height: 1em }
h2 { margin-top: 1.8em } p.note { opacity: .75 }
"""
CELLS = 128  # the most that a row of a heat map has


class Drawn(str):
    """Markup of ours; all other text is escaped."""


def checkpoint_page(summary: Mapping[str, Any]) -> str:
    """A checkpoint: its parts, and how far each of its loaders is."""
    about = summary["checkpoint"]
    ranks = f"from {about['world_size']} ranks" if about.get("world_size", 1) > 1 else ""
    told = [about["state"], size(about.get("bytes")), ranks, when(about.get("created"))]
    return _page(about["name"], told, _contents(summary))


def run_page(
    name: str,
    checkpoints: Sequence[Mapping[str, Any]],
    pruned: Sequence[Mapping[str, Any]] = (),
    newest: Mapping[str, Any] | None = None,
) -> str:
    """A run's folder: steps that were kept and pruned, their sizes and metrics, and what the newest checkpoint holds."""
    kept = [about for about in checkpoints if about.get("step") is not None]
    there = {about["step"] for about in kept}
    gone = [about for about in pruned if about["step"] not in there]
    steps = sorted(
        [*((about, True) for about in kept), *((about, False) for about in gone)], key=lambda x: x[0]["step"]
    )
    told = [f"{len(checkpoints)} checkpoints", size(sum(about.get("bytes", 0) for about in checkpoints))]
    told += [f"{len(gone)} pruned"] if gone else []
    body = ["<p class=note>A full dot is a checkpoint that is there, an empty one was pruned.</p>"] if steps else []
    body += ["<h2>Steps over time</h2>", _line([(a["created"], a["step"], k) for a, k in steps], when)]
    body += ["<h2>Size by step</h2>", _line([(a["step"], a["bytes"], k) for a, k in steps], "{:g}".format, size, 0)]
    for metric in sorted({metric for about, _ in steps for metric in about["metrics"]}):
        points = [(about["step"], about["metrics"][metric], k) for about, k in steps if metric in about["metrics"]]
        body += [f"<h2>{escape(metric)} by step</h2>", _line(points, "{:g}".format)]
    body += ["<h2>Checkpoints</h2>", _table(LISTED, map(listed, checkpoints))]
    if newest is not None:
        body += [f"<h2>In {escape(newest['checkpoint']['name'])}</h2>", *_contents(newest)]
    return _page(name, told, body)


def _contents(summary: Mapping[str, Any]) -> list[str]:
    entries = summary["entries"]
    most = max((entry["bytes"] for entry in entries.values()), default=1) or 1
    parts = [
        (name, str(entry["tensors"]), f"{entry['elements']:,}", size(entry["bytes"]), _bar(entry["bytes"] / most))
        for name, entry in entries.items()
    ]
    body = [_table(("part", "tensors", "elements", "size", ""), parts)]
    for name, data in summary["data"].items():
        body += _data(name, data)
    return body


def _data(name: str, data: Mapping[str, Any]) -> list[str]:
    told = f"{data.get('samples', 0):,} samples, {data['steps']:,} global batches, {len(data['shards'])} logical shards"
    body = [f"<h2>{escape(name)}</h2>", f"<p>{told}</p>", "<h3>Samples of each logical shard</h3>"]
    body += [_heat(data["shards"], max([*data["shards"], 1])), _range(data["shards"])]
    if data["rows"]:
        body += [
            "<h3>Progress of each source in each logical shard</h3>",
            "<p class=note>A cell is a logical shard, or some neighbours. Full colour is an epoch, or the furthest shard.</p>",
            _table(("source", "epoch", "of the epoch", ""), [_progress(source, data) for source in data["rows"]]),
        ]
    if data["mixture"]:
        body += ["<h3>Mixture</h3>", "<p class=note>The bar is the share so far, the red line the weight now.</p>"]
        body += [
            _table(
                ("source", "so far", "weight", ""),
                [
                    (source, f"{part['share']:.1%}", f"{part['weight']:.1%}", _bar(part["share"], part["weight"]))
                    for source, part in data["mixture"].items()
                ],
            )
        ]
    if data["left_out"]:
        rows = [(path, f"{count:,}") for path, count in data["left_out"].items()]
        body += ["<h3>Left out</h3>", _table(("what", "rows"), rows)]
    return body


def _progress(source: str, data: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """A row of the heat map: ``source`` in all shards, as epochs where it is known how long one is, else as rows."""
    rows, (low, high) = data["rows"][source], data["epochs"][source]
    epoch = str(low) if low == high else f"{low} to {high}"
    share = data["of_rows"].get(source)
    if share is None:
        told, values, top = f"rows {min(rows):,} to {max(rows):,}", rows, max(*rows, 1)
    else:
        values = [epoch - low + row / share for epoch, row in zip(data["epoch_of"][source], rows, strict=True)]
        told, top = f"{sum(values) / len(values):.1%} ({min(values):.1%} to {max(values):.1%})", max(*values, 1)
    return source or "data", epoch, told, _heat(values, top, rows)


def _page(title: str, told: Iterable[str], body: Sequence[str]) -> str:
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return "\n".join([head, f"<h1>{escape(title)}</h1>", f"<p>{escape(', '.join(filter(None, told)))}</p>", *body, ""])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = ["".join(f"<td>{cell if isinstance(cell, Drawn) else escape(cell)}</td>" for cell in row) for row in rows]
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f"<div><table><tr>{titles}</tr>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table></div>"


def _bar(share: float, mark: float | None = None) -> Drawn:
    bar = Drawn(f'<span class="bar" style="width:{200 * share:.1f}px"></span>')
    if mark is None:
        return bar
    return Drawn(f'<span class="scale">{bar}<span class="mark" style="left:{200 * mark:.1f}px"></span></span>')


def _heat(values: Sequence[float], top: float, told: Sequence[int] | None = None) -> Drawn:
    """One cell a logical shard, or for a few neighbours: the fuller, the further, of ``top``. ``told``: what a cell says."""
    columns = min(CELLS, len(values))
    cuts = [len(values) * i // columns for i in range(columns + 1)]
    wide = max(3, min(14, 400 // max(1, columns)))
    cells = [
        f'<rect x="{wide * i}" width="{wide - 1}" height="13" fill-opacity="{_mean(values[a:b]) / top:.2f}">'
        f"<title>shard {a}{'' if b == a + 1 else f' to {b - 1}'}: {_mean((told or values)[a:b]):,.0f}</title></rect>"
        for i, (a, b) in enumerate(pairwise(cuts))
    ]
    return Drawn(
        f'<svg class="heat" viewBox="0 0 {wide * columns} 13" width="{wide * columns}" height="13" '
        f'preserveAspectRatio="none">{"".join(cells)}</svg>'
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _range(values: Sequence[int]) -> str:
    return f"<p class=note>{min(values):,} to {max(values):,}</p>" if values else ""


def _line(
    points: Sequence[tuple[float, float, bool]],
    of_x: Callable[[float], str],
    of_y: Callable[[float], str] = "{:.4g}".format,
    least: float = inf,
) -> str:
    """Points as (x, y, whether the dot is full), in the order of the line; what is not finite is left out, and said."""
    drawn = [point for point in points if isfinite(point[1])]
    if not drawn:
        return "<p class=note>No number to draw.</p>"
    (left, right), (low, high) = ((min(values), max(values)) for values in list(zip(*drawn, strict=True))[:2])
    low = min(low, least)
    spots = [
        (90 + 500 * (x - left) / (right - left or 1), 132 - 120 * (y - low) / (high - low or 1)) for x, y, _ in drawn
    ]
    dots = "".join(
        f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4"{"" if full else " class=gone"}>'
        f"<title>{escape(of_x(x))}: {escape(of_y(y))}{'' if full else ', pruned'}</title></circle>"
        for (cx, cy), (x, y, full) in zip(spots, drawn, strict=True)
    )
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    ends = [(82, 16, "end", of_y(high)), (82, 136, "end", of_y(low)), (90, 160, "start", of_x(left))]
    texts = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
        for x, y, anchor, text in [*ends, (590, 160, "end", of_x(right))]
    )
    left_out = len(points) - len(drawn)
    note = f"<p class=note>{left_out} values are not finite, and not drawn.</p>" if left_out else ""
    return f'<svg class="line" viewBox="0 0 600 166"><polyline points="{path}"/>{dots}{texts}</svg>{note}'
