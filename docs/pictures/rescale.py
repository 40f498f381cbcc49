"""Rows of global batches before and after a rescale, from two real runs: ours, and one state a rank.

python docs/pictures/rescale.py
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

import torch
from style import BAD, FAINT, INK, RANKS, plt, save
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import rescale_data as rd
from rescale_data.testing import full_state_dict

BATCH, STEPS, STOP, BEFORE, AFTER = 24, 10, 5, 4, 2
ROWS = list(range(BATCH * STEPS))
Batches = list[list[list[int]]]  # by step and rank


def ours() -> Batches:
    def loaders(ranks: int) -> list[rd.DataLoader]:
        return [
            rd.DataLoader(
                ROWS,
                global_batch_size=BATCH,
                micro_batch_size=BATCH // ranks,
                num_logical_shards=4 * BATCH,
                dp_rank=rank,
                dp_world_size=ranks,
            )
            for rank in range(ranks)
        ]

    def train(these: list[rd.DataLoader], steps: int) -> Batches:
        iterators = [iter(loader) for loader in these]
        return [[torch.as_tensor(next(each)).tolist() for each in iterators] for _ in range(steps)]

    first = loaders(BEFORE)
    batches = train(first, STOP)
    state = full_state_dict(first)
    second = loaders(AFTER)
    for loader in second:
        loader.load_state_dict(state)
    batches += train(second, STEPS - STOP)
    alone = train(loaders(1), STEPS)
    if [list(chain(*step)) for step in batches] != [list(chain(*step)) for step in alone]:
        raise SystemExit("the global batches differ from those of one rank that never stopped")
    return batches


def one_state_a_rank() -> Batches:
    def loaders(ranks: int) -> list[StatefulDataLoader[int]]:
        samplers = [DistributedSampler(ROWS, ranks, rank, shuffle=True, seed=0) for rank in range(ranks)]  # type: ignore[arg-type]
        return [StatefulDataLoader(ROWS, batch_size=BATCH // ranks, sampler=sampler) for sampler in samplers]  # type: ignore[arg-type]

    first = loaders(BEFORE)
    iterators = [iter(loader) for loader in first]
    batches = [[next(each).tolist() for each in iterators] for _ in range(STOP)]
    states = [loader.state_dict() for loader in first]
    second = loaders(AFTER)
    for loader, state in zip(second, states, strict=False):
        loader.load_state_dict(state)
    left = [[batch.tolist() for batch in loader] for loader in second]
    return batches + [list(step) for step in zip(*left, strict=True)]


def draw(axes: plt.Axes, batches: Batches, title: str) -> None:
    seen: Counter[int] = Counter()
    for step, parts in enumerate(batches[:STEPS]):
        row = 0
        for rank, part in enumerate(parts):
            for number in part:
                again = seen[number] > 0
                seen[number] += 1
                axes.add_patch(plt.Rectangle((step + 0.06, row + 0.08), 0.88, 0.84, color=RANKS[rank], lw=0))
                if again:
                    axes.plot([step + 0.1, step + 0.9], [row + 0.12, row + 0.88], color=BAD, lw=1.6)
                    axes.plot([step + 0.1, step + 0.9], [row + 0.88, row + 0.12], color=BAD, lw=1.6)
                row += 1
    trained = sum(len(part) for step in batches[:STEPS] for part in step)
    twice, never = trained - len(seen), len(ROWS) - len(seen)
    axes.axvline(STOP, color=INK, lw=1.2, ls=(0, (3, 2)))
    axes.text(STOP / 2, -0.7, f"{BEFORE} ranks", ha="center", va="bottom")
    axes.text((STOP + STEPS) / 2, -0.7, f"{AFTER} ranks", ha="center", va="bottom")
    axes.set(xlim=(0, STEPS), ylim=(BATCH, 0), xlabel="step", yticks=[0, BATCH], xticks=[i + 0.5 for i in range(STEPS)])
    axes.set_xticklabels(range(STEPS))
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_color(FAINT)
    good = twice == never == 0
    axes.set_title(title, pad=40, fontsize=11, fontweight="bold")
    axes.text(
        STEPS / 2, -2.4, f"{twice} rows twice, {never} never", ha="center", va="bottom", color=INK if good else BAD,
        fontsize=10,
    )  # fmt: skip


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 4.2), sharey=True)
    draw(left, ours(), "rescale_data")
    draw(right, one_state_a_rank(), "one state a rank (StatefulDataLoader)")
    left.set_ylabel(f"the {BATCH} rows of a global batch")
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, color=color) for color in RANKS[:BEFORE]]
        + [plt.Line2D([], [], color=BAD, marker="x", ls="", mew=2)],
        [*(f"trained by rank {rank}" for rank in range(BEFORE)), "trained before"],
        loc="lower center", ncols=5, frameon=False, bbox_to_anchor=(0.5, -0.06),
    )  # fmt: skip
    figure.tight_layout(w_pad=2.5)
    save(figure, "rescale")


if __name__ == "__main__":
    main()
