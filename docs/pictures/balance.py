"""A step of eight ranks, dealt and balanced: the time of each micro batch of each rank, as the loader's planner has it.

python docs/pictures/balance.py
"""

from __future__ import annotations

import numpy as np
from style import FAINT, INK, RANKS, plt, save

from rescale_data.layout.step_plan import StepPlan

RANKS_OF_STEP, MICRO_BATCHES, MEAN = 8, 4, 4


def main() -> None:
    size = RANKS_OF_STEP * MICRO_BATCHES * MEAN
    tokens = np.clip(np.random.default_rng(1).lognormal(6.5, 0.8, size), 16, 8192).astype(np.int64)
    costs = tokens + tokens * tokens // 57_000
    owners = np.arange(size) * RANKS_OF_STEP // size
    dealt = owners, np.arange(size) // MEAN % MICRO_BATCHES
    plan = StepPlan(
        costs=costs, tokens=tokens, owners=owners, ranks=RANKS_OF_STEP, micro_batches=MICRO_BATCHES, max_tokens=MEAN * 8192
    )  # fmt: skip
    figure, axes = plt.subplots(2, 1, figsize=(9.2, 4.4), sharex=True)
    for panel, name, (rank, micro_batch) in zip(axes, ("dealt", "balanced"), (dealt, plan.assign()), strict=True):
        time = np.zeros((RANKS_OF_STEP, MICRO_BATCHES))
        np.add.at(time, (rank, micro_batch), costs)
        longest = time.max(axis=0)
        starts = np.cumsum(longest) - longest
        for m in range(MICRO_BATCHES):
            panel.barh(range(RANKS_OF_STEP), longest[m], left=starts[m], color=FAINT, height=0.8)
            panel.barh(range(RANKS_OF_STEP), time[:, m], left=starts[m], color=RANKS[m], height=0.8)
            panel.axvline(starts[m] + longest[m], color=INK, lw=0.8)
        panel.set_title(
            f"{name}: {longest.sum() / time.sum() * RANKS_OF_STEP:.2f} times an even share", loc="left", fontsize=9
        )
        panel.set_yticks(range(RANKS_OF_STEP), [f"rank {r}" for r in range(RANKS_OF_STEP)])
        panel.invert_yaxis()
        panel.tick_params(length=0)
        for side in ("top", "right", "left", "bottom"):
            panel.spines[side].set_visible(False)
    axes[1].set_xticks([])
    axes[1].set_xlabel("time of a step of four micro batches (a color each); grey: a rank waits for the slowest one")
    figure.tight_layout()
    save(figure, "balance")


if __name__ == "__main__":
    main()
