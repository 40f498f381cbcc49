"""A Hugging Face `datasets` stream on 4 ranks, then on 2, then on 8: every row once, and nothing is read again.

    pip install -e '.[hf]' && python examples/hf_stream.py

The stream reads Parquet files that are written here; ``load_dataset("allenai/c4", "en", split="train", streaming=True)`` is
used alike. Each of its files is a stream of its own, which belongs to one logical shard, so there may be no more logical shards
than files. A stream is resumed by its own ``state_dict()``, which lies in the loader's state. Ranks are simulated in this
process; a real run gives ``mesh=`` and saves the loader with DCP beside the model.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the files are here

import datasets

import rescale_data as rd
from rescale_data.testing import full_state_dict

FILES, ROWS = 16, 30
SEGMENTS = ((4, 10), (2, 8), (8, 12))  # ranks, steps


def write(folder: Path) -> list[str]:
    for number in range(FILES):
        rows = [{"text": f"Row {i} of file {number}."} for i in range(ROWS)]
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{number:02d}.parquet")
    return sorted(map(str, folder.glob("*.parquet")))


def pipeline(shard: rd.Shard, source: rd.IterableSource) -> rd.BaseNode[Any]:
    return rd.Map(rd.StreamReader(source, shard), lower)


def lower(row: dict[str, str]) -> dict[str, str]:
    return {"text": row["text"].lower()}


def loader_of(source: rd.IterableSource, rank: int, world_size: int) -> rd.DataLoader:
    return rd.DataLoader(
        functools.partial(pipeline, source=source),
        global_batch_size=16,
        micro_batch_size=16 // world_size,
        num_logical_shards=FILES,
        dp_rank=rank,
        dp_world_size=world_size,
        repeat=True,
    )


def main() -> int:
    datasets.disable_progress_bars()
    seen: Counter[str] = Counter()
    state: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder))
        stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=folder)
        for world_size, steps in SEGMENTS:
            source = rd.IterableSource(stream)
            loaders = [loader_of(source, rank, world_size) for rank in range(world_size)]
            if state is not None:
                for loader in loaders:
                    loader.load_state_dict(state)
            for batches in (iter(loader) for loader in loaders):
                for _ in range(steps):
                    seen.update(next(batches)["text"])
            state = full_state_dict(loaders)
            print(f"{world_size} ranks, {steps} steps: {len(seen)} rows so far, none twice: {max(seen.values()) == 1}")
    once = len(seen) == FILES * ROWS and set(seen.values()) == {1}
    print(f"all of {FILES * ROWS} rows, each once: {once}")
    return 0 if once else 1


if __name__ == "__main__":
    raise SystemExit(main())
