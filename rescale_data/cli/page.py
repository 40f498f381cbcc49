"""What ``rescale-data show --html`` writes: one page with pictures, which needs no other file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from rescale_data.cli.render import size, when

STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --paper: #fff; --faint: #8884; --bar: #2f6fb0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181c; --bar: #5a9bd8; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper) }
body { max-width: 960px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: .6em 0 } td, th { padding: .2em .9em .2em 0; text-align: left }
svg { max-width: 100%; height: auto; background: var(--faint) }
.bar { display: inline-block; height: .8em; background: var(--bar) }
.scale { display: block; position: relative; width: 204px }
.mark { position: absolute; border-right: 2px solid #c8102e; height: 1em }
h2 { margin-top: 1.8em } p.note { opacity: .75 }
"""
CELLS = 256  # the most that a row of a heat map has


def checkpoint_page(summary: Mapping[str, Any]) -> str:
    """A checkpoint: its parts, and how far each of its loaders is."""
    about = summary["checkpoint"]
    entries = summary["entries"]
    most = max((entry["bytes"] for entry in entries.values()), default=1) or 1
    parts = [
        (name, str(entry["tensors"]), f"{entry['elements']:,}", size(entry["bytes"]), _bar(entry["bytes"] / most))
        for name, entry in entries.items()
    ]
    body = [_table(("part", "tensors", "elements", "size", ""), parts)]
    for name, data in summary["data"].items():
        body += _data(name, data)
    told = [about["state"], size(about.get("bytes")), f"{about['world_size']} ranks" if "world_size" in about else ""]
    return _page(about["name"], [*told, when(about.get("created"))], body)


def run_page(name: str, checkpoints: Sequence[Mapping[str, Any]]) -> str:
    """A run's folder: the checkpoints that are there, their sizes, and each metric by step."""
    rows = [
        (
            about["name"],
            about["state"],
            size(about.get("bytes")),
            when(about.get("created")),
            ", ".join(f"{metric}={value:.4g}" for metric, value in about.get("metrics", {}).items()),
        )
        for about in checkpoints
    ]
    kept = [about for about in checkpoints if "step" in about and about["step"] is not None]
    body = [_table(("checkpoint", "state", "size", "saved", "metrics"), rows)]
    if len(kept) > 1:
        body += ["<h2>Steps over time</h2>", _line([(about["created"], about["step"]) for about in kept], when)]
        body += ["<p class=note>A dot is a checkpoint that was kept.</p>"]
    for metric in sorted({metric for about in kept for metric in about["metrics"]}):
        points = [(about["step"], about["metrics"][metric]) for about in kept if metric in about["metrics"]]
        body += [f"<h2>{escape(metric)} by step</h2>", _line(points, "{:g}".format)]
    return _page(name, [f"{len(checkpoints)} checkpoints"], body)


def _data(name: str, data: Mapping[str, Any]) -> list[str]:
    told = f"{data.get('samples', 0):,} samples, {data['steps']:,} global batches, {len(data['shards'])} logical shards"
    body = [
        f"<h2>{escape(name)}</h2>",
        f"<p>{told}</p>",
        "<h3>Samples of each logical shard</h3>",
        _heat(data["shards"]),
    ]
    for source, rows in data["rows"].items():
        low, high = data["epochs"][source]
        epochs = f"epoch {low}" if low == high else f"epochs {low} to {high}"
        body += [f"<h3>{escape(source or 'data')}: rows of each logical shard, {epochs}</h3>", _heat(rows)]
    if data["mixture"]:
        body += ["<h3>Mixture</h3>", "<p class=note>The bar is the share so far, the red line the weight.</p>"]
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


def _page(title: str, told: Iterable[str], body: Sequence[str]) -> str:
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return "\n".join([head, f"<h1>{escape(title)}</h1>", f"<p>{escape(', '.join(filter(None, told)))}</p>", *body, ""])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Text is escaped, what begins with a tag of ours is not."""
    cells = ["".join(f"<td>{cell if cell.startswith('<span') else escape(cell)}</td>" for cell in row) for row in rows]
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f"<table><tr>{titles}</tr>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def _bar(share: float, mark: float | None = None) -> str:
    bar = f'<span class="bar" style="width:{200 * share:.1f}px"></span>'
    if mark is None:
        return bar
    return f'<span class="scale">{bar}<span class="mark" style="left:{200 * mark:.1f}px"></span></span>'


def _heat(values: Sequence[int]) -> str:
    """One cell a logical shard, or for a few neighbours: the fuller, the further."""
    if not values:
        return ""
    columns = min(CELLS, len(values))
    cuts = [len(values) * i // columns for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    top, across = max(*means, 1), min(64, columns)
    cells = [
        f'<rect x="{14 * (i % across)}" y="{14 * (i // across)}" width="13" height="13" fill="#2f6fb0" '
        f'fill-opacity="{mean / top:.2f}"><title>shard {a}{"" if b == a + 1 else f" to {b - 1}"}: {mean:,.0f}</title></rect>'
        for i, (mean, (a, b)) in enumerate(zip(means, pairwise(cuts), strict=True))
    ]
    tall = 14 * -(-columns // across)
    told = f"<p class=note>{min(values):,} to {max(values):,}</p>"
    return f'<svg width="{14 * across}" height="{tall}" viewBox="0 0 {14 * across} {tall}">{"".join(cells)}</svg>{told}'


def _line(points: Sequence[tuple[float, float]], label: Callable[[float], str]) -> str:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    wide, tall = (max(xs) - min(xs)) or 1, (max(ys) - min(ys)) or 1
    spots = [(20 + 560 * (x - min(xs)) / wide, 140 - 120 * (y - min(ys)) / tall) for x, y in points]
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#2f6fb0"><title>{escape(label(a))}: {b:.6g}</title></circle>'
        for (x, y), (a, b) in zip(spots, points, strict=True)
    )
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    drawn = f'<polyline points="{path}" fill="none" stroke="#2f6fb0" stroke-width="1.5"/>{dots}'
    told = f"<p class=note>{escape(label(min(xs)))} to {escape(label(max(xs)))}; {min(ys):.6g} to {max(ys):.6g}</p>"
    return f'<svg width="600" height="160" viewBox="0 0 600 160">{drawn}</svg>{told}'
