"""Packed tokens a second beside other loaders, from the committed result of `benchmarks/bench_peers.py`.

python docs/pictures/speed.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from style import INK, RANKS, plt, save

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "peers.json"
TOKENS = 8 * 4096  # of a batch


def main() -> None:
    found = json.loads(RESULT.read_text())
    rows = {name: rounds for name, rounds in found["sections"]["packed"].items() if not isinstance(rounds, str)}
    speeds = {name: sorted(TOKENS / cpu for cpu, _ in rounds) for name, rounds in rows.items()}  # M tokens a second
    names = sorted(speeds, key=lambda name: median(speeds[name]))
    figure, axes = plt.subplots(figsize=(9.2, 0.32 * len(names) + 0.9))
    for y, name in enumerate(names):
        color = RANKS[0] if name.startswith("ours") else "#8a8f98" if name.startswith("memory") else RANKS[1]
        middle, values = median(speeds[name]), speeds[name]
        axes.barh(y, middle, color=color, height=0.7)
        axes.plot([values[0], values[-1]], [y, y], color=INK, lw=1)
        axes.text(values[-1] + 12, y, f"{middle:,.0f}", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("million tokens a second of CPU time, [8, 4096] int64, shuffled; median and range of the rounds")
    axes.set_title(found["machine"], fontsize=8, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    save(figure, "speed")


if __name__ == "__main__":
    main()
