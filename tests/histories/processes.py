"""Random histories on real ranks, whose states are DTensors: ``python -m tests.histories.processes FIRST COUNT``."""

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from rescale_data.engine.stream import Stream
from tests.distributed.ranks import run_ranks
from tests.histories.__main__ import accepts
from tests.histories.books import Books, Reference, require
from tests.histories.crew import _take
from tests.histories.history import History
from tests.histories.plans import Pipeline, split
from tests.histories.ranks import Top

WORLD_SIZE = 4


def play(seed: int, folder: Path) -> str:
    """All ranks draw the same; those beyond W wait for the next segment."""
    h, books, rank, saved, recipe = History(random.Random(seed)), Books(), dist.get_rank(), "", None
    if h.blocks:
        return "with a blocklist"
    for segment in range(h.r.randint(2, 4)):
        top = h.top()._replace(k=0)
        group, taken, found = dist.new_group(list(range(top.w))), [], [""]
        num, name = h.r.choice([1, 5, 12, 40]), f"{folder}/{seed} {segment}"
        if rank < top.w:
            try:
                found, recipe = [_segment(h, top, group, num, saved, name, taken)], h.recipe  # type: ignore[attr-defined]
            except ValueError as error:
                if not accepts(error):
                    raise
                found = [f"refused: {str(error)[:60]}"]
        each: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(each, (found[0], taken))
        if any(text.startswith("refused") for text, _ in each):
            return next(text for text, _ in each if text.startswith("refused"))
        for batches in zip(*(batches for _, batches in each[: top.w]), strict=True):
            for epoch, shards, samples in batches:
                for shard, sample in zip(shards, samples, strict=True):
                    books.delivered[epoch, shard].append(sample)
        if rank == 0:
            Reference(recipe, {}).check(books, h.repeat)  # type: ignore[arg-type]
            require(len({text for text, _ in each[: top.w]}) == 1, each)
        saved = name
    return f"passed, {each[0][0]}"


def _segment(h: History, top: Top, group: Any, num: int, saved: str, name: str, taken: list[Any]) -> str:
    """What kind of state was saved at its end."""
    h.pipeline, h.prefetch = Pipeline(h.plan, h.files), 0
    loader = h.make(top, mesh=group)
    h.recipe = loader._stream.setup.recipe  # type: ignore[attr-defined]
    if saved:
        dcp.load({"loader": loader}, checkpoint_id=saved, process_group=group)
    stream: Any = loader._stream
    for _ in range(num):
        stream.taken, batch = [], None
        while batch is None:
            batch = next(iter(loader), None)
        ((micro_batch, epoch, _),) = stream.taken
        real = micro_batch.num_real
        taken.append((epoch, micro_batch.shards[:real], split(batch, top.b)[:real]))
    dcp.save({"loader": loader}, checkpoint_id=name, process_group=group)
    loader.close()
    return "saved"


def on_rank(first: int, count: int, folder: Path) -> list[str]:
    Stream.take = _take  # type: ignore[method-assign]
    return [play(seed, folder) for seed in range(first, first + count)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        of_ranks = run_ranks(WORLD_SIZE, Path(temporary), on_rank, int(sys.argv[1]), int(sys.argv[2]), Path(temporary))
        for number, line in enumerate(of_ranks[0], int(sys.argv[1])):
            print(number, line)
