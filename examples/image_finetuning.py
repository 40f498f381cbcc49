"""Fine-tuning on images for three epochs, interrupted on the way and resumed on another number of ranks.

    python examples/image_finetuning.py

A map-style dataset of images (drawn here, so that nothing is downloaded), a processor in the collate function that turns images
and captions of different sizes into a batch, and a small model. `for epoch in range(loader.epoch, 3)` is the whole of resuming:
the position belongs to the loader, so after a load the loop begins in the epoch that was interrupted. Ranks are
simulated in this process; a real run gives ``mesh=`` and saves the loader with DCP beside the model.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn

import rescale_data as rd
from rescale_data.testing import full_state_dict

SHAPES = ("circle", "square", "cross")
EPOCHS, GLOBAL_BATCH = 3, 24


class Shapes:
    """Map-style: ``{"image": PIL image of any size, "label": int, "number": int}``, row i a function of i."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        width, height = rng.integers(24, 48, 2).tolist()
        image, label = Image.new("RGB", (width, height), tuple(rng.integers(0, 80, 3).tolist())), index % 3
        pen, box = ImageDraw.Draw(image), (4, 4, width - 5, height - 5)
        color = tuple(rng.integers(160, 256, 3).tolist())
        if label == 0:
            pen.ellipse(box, fill=color)
        elif label == 1:
            pen.rectangle(box, fill=color)
        else:
            pen.line(box, fill=color, width=3)
            pen.line((box[0], box[3], box[2], box[1]), fill=color, width=3)
        return {"image": image, "label": label, "number": index}


class Processor:
    """Samples of any size -> a batch, as the processors of `transformers` do it; it runs where samples are made."""

    def __init__(self, size: int = 16) -> None:
        self.size = size

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        resized = [np.asarray(sample["image"].resize((self.size, self.size))) for sample in samples]
        pixels = torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2).float() / 127.5 - 1
        labels, numbers = (torch.tensor([sample[key] for sample in samples]) for key in ("label", "number"))
        return {"pixels": pixels, "labels": labels, "numbers": numbers}


class Run:
    """A model, an optimizer, and the loaders of all simulated ranks."""

    def __init__(self, num_rows: int, world_size: int, state: dict[str, Any] | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.Flatten())
        self.model.append(nn.Linear(16 * 9, len(SHAPES)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        dataset = Shapes(num_rows)
        self.loaders = [
            rd.DataLoader(
                dataset,
                global_batch_size=GLOBAL_BATCH,
                micro_batch_size=GLOBAL_BATCH // world_size,
                dp_rank=rank,
                dp_world_size=world_size,
                collate_fn=Processor(),
            )
            for rank in range(world_size)
        ]
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            for loader in self.loaders:
                loader.load_state_dict(state["loader"])

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": full_state_dict(self.loaders),
        }

    def train(self, stop_after: int | None = None) -> list[tuple[int, float, list[int]]]:
        """Steps up to the end of the last epoch, or so many: the epoch, the loss and the rows of each."""
        steps: list[tuple[int, float, list[int]]] = []
        for epoch in range(self.loaders[0].epoch, EPOCHS):
            for batches in zip(*self.loaders, strict=True):
                batch = {key: torch.cat([rank[key] for rank in batches]) for key in batches[0]}
                loss = nn.functional.cross_entropy(self.model(batch["pixels"]), batch["labels"])
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                steps.append((epoch, loss.item(), batch["numbers"].tolist()))
                if len(steps) == stop_after:
                    return steps
        return steps


def main(num_rows: int = 480) -> int:
    whole = Run(num_rows, 1).train()
    first = Run(num_rows, 4)
    begun = first.train(stop_after=num_rows // GLOBAL_BATCH + 5)
    rest = Run(num_rows, 6, first.state_dict()).train()
    resumed = begun + rest
    same = [step[::2] for step in resumed] == [step[::2] for step in whole]
    for epoch in range(EPOCHS):
        seen = Counter(number for at, _, numbers in resumed if at == epoch for number in numbers)
        loss = np.mean([loss for at, loss, _ in resumed if at == epoch])
        print(
            f"epoch {epoch}: mean loss {loss:.3f}, {len(seen)} images of {num_rows}, each once: {max(seen.values()) == 1}"
        )
    print(f"4 ranks for {len(begun)} steps, 6 for {len(rest)}: every batch is that of one rank: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=480, help="images of the dataset")
    raise SystemExit(main(parser.parse_args().rows))
