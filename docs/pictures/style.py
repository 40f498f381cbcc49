"""What the pictures share: a card that is readable on light and dark pages, and SVG that is the same from run to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RANKS = ["#4c78a8", "#f2a33c", "#59a14f", "#b07aa1", "#76b7b2", "#9c755f"]
INK, PAPER, FAINT, BAD = "#24292f", "#fbfbf8", "#d9d9d3", "#c8102e"

plt.rcParams.update(
    {
        "svg.hashsalt": "rescale_data", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 9,
        "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
        "figure.facecolor": PAPER, "axes.facecolor": PAPER, "savefig.facecolor": PAPER,
    }
)  # fmt: skip


def save(figure: Any, name: str) -> None:
    path = Path(__file__).parent / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight", pad_inches=0.15)
    text = path.read_text()
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
    print(path.name)
