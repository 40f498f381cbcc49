"""What `loader.progress()` tells, in TensorBoard: shares of a mixture, epochs, rows that were filtered, seconds of waiting.

    pip install tensorboard && python examples/progress_tensorboard.py && tensorboard --logdir runs

Look for `share/books`: it is 0 until step 95 or so, when the schedule brings that source in.
"""

from __future__ import annotations

import sys
from typing import Any

import rescale_data as rd

ROWS = {"web": 20_000, "code": 8_000, "books": 4_000}
SOURCES = {
    name: rd.DatasetSource([{"tokens": [i % 97] * (i % 40 + 5)} for i in range(rows)], name=name)
    for name, rows in ROWS.items()
}
BOOKS_LATER = rd.Schedule(
    [(0, {"web": 0.6, "code": 0.4, "books": 0.0}), (8_000, {"web": 0.4, "code": 0.3, "books": 0.3})]
)


def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
    readers: dict[str, Any] = {name: rd.Reader(source, shard) for name, source in SOURCES.items()}
    readers["web"] = rd.Filter(readers["web"], long_enough)
    mixture = rd.WeightedSampler(readers, BOOKS_LATER)
    return rd.TokenPacker(mixture, column="tokens", seq_len=128, eos_id=0)


def long_enough(row: dict[str, Any]) -> bool:
    return len(row["tokens"]) > 8


def main(folder: str = "runs/mixture") -> None:
    from torch.utils.tensorboard import SummaryWriter

    loader = rd.DataLoader(pipeline, global_batch_size=16, num_logical_shards=64, repeat=True)
    with SummaryWriter(folder) as writer:
        for step, _ in zip(range(200), loader, strict=False):
            if step % 5 == 0:
                for name, value in loader.progress().items():
                    writer.add_scalar(f"data/{name}" if "/" not in name else name, value, step)
    print(f"200 steps of {', '.join(ROWS)} are in {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
