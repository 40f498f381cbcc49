"""How even the global batches of a mixture are, beside independent draws: a real run of 20 sources with weights 1/k.

python docs/pictures/mixture.py
"""

from __future__ import annotations

import functools

import numpy as np
from style import FAINT, INK, RANKS, plt, save

import rescale_data as rd

NUM_SOURCES, BATCH, SHARDS, STEPS = 20, 256, 1024, 24
SOURCES = {f"s{k:02d}": rd.DatasetSource([k] * 20_480, name=f"s{k:02d}") for k in range(NUM_SOURCES)}
WEIGHTS = {name: 1 / (k + 1) for k, name in enumerate(SOURCES)}


def mixture(shard: rd.Shard) -> rd.BaseNode[int]:
    return rd.WeightedSampler({name: rd.Reader(source, shard) for name, source in SOURCES.items()}, WEIGHTS)


def main() -> None:
    loader = rd.DataLoader(mixture, global_batch_size=BATCH, num_logical_shards=SHARDS, repeat=True)
    stream = iter(loader)
    count = functools.partial(np.bincount, minlength=NUM_SOURCES)
    counts = np.array([count(next(stream).numpy()) for _ in range(STEPS)])
    shares = np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values())
    drawn = np.random.default_rng(0).multinomial(BATCH, shares, STEPS)
    figure, axes = plt.subplots(figsize=(9.2, 2.9))
    for found, color, name in ((drawn, FAINT, "independent draws"), (counts, RANKS[0], "rd.WeightedSampler")):
        off = found - BATCH * shares
        steps = np.repeat(np.arange(STEPS), NUM_SOURCES)
        axes.plot(steps, off.ravel(), "o", ms=3.2, color=color, label=f"{name}: at most {np.abs(off).max():.1f} off")
    axes.axhline(0, color=INK, lw=0.6)
    axes.set_xlabel("step")
    axes.set_ylabel("samples off its share")
    axes.set_title(
        f"20 sources, weights 1/k, global batches of {BATCH}: a point a source and step", fontsize=9, loc="left"
    )
    axes.legend(loc="upper right", frameon=False, ncols=2)
    axes.set_ylim(-20, 26)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save(figure, "mixture")


if __name__ == "__main__":
    main()
