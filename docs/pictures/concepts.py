"""The pictures of docs/concepts.md: a table of positions, who serves what, the end of an epoch.

python docs/pictures/concepts.py
"""

from __future__ import annotations

from style import FAINT, INK, RANKS, plt, save

import rescale_data as rd
from rescale_data.engine.states.codec import decode


def board(width: float, height: float, size: tuple[float, float]) -> tuple[plt.Figure, plt.Axes]:
    figure, axes = plt.subplots(figsize=size)
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    return figure, axes


def box(axes: plt.Axes, x: float, y: float, w: float, h: float, text: object = "", color: str = FAINT) -> None:
    axes.add_patch(plt.Rectangle((x + 0.04, y + 0.04), w - 0.08, h - 0.08, color=color, lw=0))
    axes.text(x + w / 2, y + h / 2, str(text), ha="center", va="center", color="white" if color in RANKS else INK)


def arrow(axes: plt.Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK, "lw": 1})


def table() -> None:
    """Rows of files, logical shards, the table, the checkpoint: positions from a real loader."""

    source = rd.DatasetSource([{"tokens": [i] * (i % 7 + 3)} for i in range(96)])

    def pipeline(shard: rd.Shard) -> rd.BaseNode:
        documents = rd.Reader(source, shard, shuffle=8)
        return rd.TokenPacker(documents, column="tokens", seq_len=16, eos_id=0)

    loader = rd.DataLoader(pipeline, global_batch_size=2, num_logical_shards=4, repeat=True)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    shards = decode(loader.state_dict()).values
    names = {"document": "source.row", "token": "offset", "samples": "samples"}
    figure, axes = board(21, 6.5, (9.2, 3))
    for i in range(4):
        y = 1.5 + 1.2 * i
        box(axes, 0.2, y, 3, 1, f"rows {24 * i} to {24 * i + 23}", RANKS[i])
        arrow(axes, (3.4, y + 0.5), (4.6, y + 0.5))
        box(axes, 4.7, y, 3.8, 1, f"pipeline of shard {i}", RANKS[i])
        arrow(axes, (8.6, y + 0.5), (9.8, y + 0.5))
        for j, field in enumerate(names.values()):
            box(axes, 10.4 + 2.1 * j, y, 2.1, 1, int(shards[field][i]))
        axes.text(10.1, y + 0.5, str(i), ha="center", va="center")
    for j, name in enumerate(names):
        axes.text(11.45 + 2.1 * j, 1.2, name, ha="center", va="bottom")
    axes.text(1.7, 0.5, "data", ha="center", fontweight="bold")
    axes.text(6.6, 0.5, "logical shards", ha="center", fontweight="bold")
    axes.text(13.5, 0.5, "table of positions", ha="center", fontweight="bold")
    axes.text(19.4, 0.5, "checkpoint", ha="center", fontweight="bold")
    for y, text in ((1.9, "model"), (3.2, "optimizer"), (4.5, "loader")):
        box(axes, 18.1, y, 2.6, 1.1, text, RANKS[0] if text == "loader" else FAINT)
    arrow(axes, (16.9, 4.2), (18.0, 5.0))
    save(figure, "table")


MANY, FEW = rd.DatasetSource(list(range(640))), rd.DatasetSource(list(range(48)))


class ShardOfRow:
    """What `Map` calls: which shard a sample comes from."""

    def __init__(self, shard: rd.Shard) -> None:
        self._index = shard.index

    def __call__(self, row: object) -> int:
        return self._index


def endless(shard: rd.Shard) -> rd.BaseNode:
    return rd.Map(rd.Reader(MANY, shard), ShardOfRow(shard))


def uneven(shard: rd.Shard) -> rd.BaseNode:
    """Shard i keeps 12 - 2 * i of its 12 rows."""
    rows = rd.Reader(FEW, shard, shuffle=False)
    return rd.Map(rd.Filter(rows, lambda row: row % 12 < 12 - 2 * shard.index), ShardOfRow(shard))


def serves() -> None:
    """Which shard gives each row of a global batch, N = 8 and O = 4, on 2 and on 4 ranks: two real runs."""
    figure, axes = board(21, 6.4, (9.2, 2.9))
    for x, ranks in ((1.6, 2), (12, 4)):
        axes.text(x + 4, 0.6, f"{ranks} ranks", ha="center", fontweight="bold")
        for rank in range(ranks):
            loader = rd.DataLoader(
                endless,
                global_batch_size=4,
                micro_batch_size=4 // ranks,
                num_logical_shards=8,
                dp_rank=rank,
                dp_world_size=ranks,
                repeat=True,
            )
            for step, batch in zip(range(4), loader, strict=False):
                for row, shard in enumerate(batch.tolist(), rank * 4 // ranks):
                    box(axes, x + 2 * step, 1.4 + row, 2, 1, f"shard {shard}", RANKS[rank])
        for step in range(4):
            axes.text(x + 2 * step + 1, 6, f"step {step}", ha="center")
    axes.text(1, 3.4, "rows of a global batch", ha="center", va="center", rotation=90)
    axes.text(10.8, 3.4, "=", ha="center", va="center", fontsize=18)
    save(figure, "serves")


def epoch_end() -> None:
    """An epoch whose shards end at different steps: 12, 10, 8 and 6 samples, global batches of 4, a real run."""
    loader = rd.DataLoader(uneven, global_batch_size=4, num_logical_shards=4, collate_fn=list)
    figure, axes = board(21, 6.6, (9.2, 3))
    steps = list(loader)
    for step, batch in enumerate(steps):
        for row, shard in enumerate(batch):
            box(axes, 1.6 + 1.75 * step, 1.4 + row, 1.75, 1, f"shard {shard}", RANKS[shard])
        axes.text(1.6 + 1.75 * step + 0.875, 6, f"step {step}", ha="center")
    even = next(i for i, batch in enumerate(steps) if batch != [0, 1, 2, 3])
    axes.text(1.6 + 0.875 * even, 0.6, "one sample of each shard", ha="center", fontweight="bold")
    middle = 1.6 + 1.75 * even
    axes.plot([middle, middle], [0.2, 5.6], color=INK, lw=1.2, ls=(0, (3, 2)))
    axes.text(middle + 0.875 * (len(steps) - even), 0.6, "the rest, dealt", ha="center", fontweight="bold")
    axes.text(1, 3.4, "rows of a global batch", ha="center", va="center", rotation=90)
    save(figure, "epoch_end")


if __name__ == "__main__":
    table()
    serves()
    epoch_end()
