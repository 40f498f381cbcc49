"""Train on 4 ranks, go on from the checkpoint with 2, then with 6, and compare every batch with a run that never stopped.

    python examples/rescaling_demo.py                          # 4, 2 and 6 ranks on this machine's CPU
    python examples/rescaling_demo.py --world-sizes 4,3,5      # 5 ranks cannot share 24 samples: another global batch
    python examples/rescaling_demo.py --data ~/my-corpus       # a folder of text, JSON lines, Parquet or Arrow files

`pipeline` and `train` are what a training script of yours would hold. The rest starts processes and checks.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from demo.corpus import Corpus, build_corpus
from demo.model import Decoder
from demo.ranks import RankFailedError, run_ranks
from demo.record import PROGRESS, Recorder
from demo.report import report
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rescale_data as rd

SEQ_LEN = 128
SEED = 0
GLOBAL_BATCH_SIZE = 24  # divides by 1, 2, 3, 4, 6, 8, 12 and 24 ranks
LARGEST_MICRO_BATCH = 6  # what would fit into a GPU's memory
WORKERS = (1, 2, 0)  # of the first segment, the second, ...
MAX_RANKS = 16


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of the run on one topology."""

    corpus: Corpus
    num_logical_shards: int
    global_batch_size: int
    world_size: int
    num_workers: int
    stop: int  # the step before which it ends
    folder: Path
    load_from: Path | None = None

    @property
    def micro_batch_size(self) -> int:
        samples = self.global_batch_size // self.world_size
        return max(b for b in range(1, LARGEST_MICRO_BATCH + 1) if samples % b == 0)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"


def pipeline(source: rd.Source, eos_id: int, shard: rd.Shard) -> rd.BaseNode[Any]:
    """One logical shard: documents in shuffled order, end to end, cut into samples of SEQ_LEN tokens. No ranks in here."""
    documents = rd.Reader(source, shard, shuffle=64)
    return rd.TokenPacker(documents, column="tokens", seq_len=SEQ_LEN, eos_id=eos_id, labels=True)


def train(rank: int, segment: Segment) -> None:
    """One rank of one segment, from its checkpoint to the next."""
    dist.init_process_group("gloo", f"file://{segment.folder}/rendezvous", rank=rank, world_size=segment.world_size)
    mesh = init_device_mesh("cpu", (segment.world_size,), mesh_dim_names=("dp",))

    torch.manual_seed(SEED)
    model = Decoder(segment.corpus.vocabulary, SEQ_LEN)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    source = rd.ParquetSource(segment.corpus.folder)
    loader = rd.DataLoader(
        functools.partial(pipeline, source, segment.corpus.eos_id),
        global_batch_size=segment.global_batch_size,
        micro_batch_size=segment.micro_batch_size,
        num_logical_shards=segment.num_logical_shards,  # all but this one may change from segment to segment
        mesh=mesh,
        num_workers=segment.num_workers,
        seed=SEED,
        repeat=True,
    )
    recorder, clock = Recorder(segment.folder, rank), Stopwatch()
    with loader:
        if segment.load_from:
            load_checkpoint(segment.load_from, model, optimizer, loader)
            clock.lap("load_seconds")
        batches = iter(loader)
        loader.peek()
        clock.lap("first_batch_seconds")

        for _ in range(loader.step, segment.stop):
            for micro_batch in range(loader.gradient_accumulation_steps):
                batch = next(batches)
                model.set_requires_gradient_sync(micro_batch == loader.gradient_accumulation_steps - 1)
                loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
                (loss / loader.gradient_accumulation_steps).backward()
                recorder.micro_batch(batch, loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()

        save_checkpoint(segment.checkpoint, model, optimizer, loader)
        recorder.write({**clock.laps, **loader.progress()})
    dist.destroy_process_group()


def save_checkpoint(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: rd.DataLoader
) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "loader": loader}, checkpoint_id=path)


def load_checkpoint(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: rd.DataLoader
) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state, "loader": loader}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


# What follows is the demo around it.


class Stopwatch:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


def run_rank(rank: int, segment: Segment) -> None:
    """`train` in a process of its own."""
    torch.set_num_threads(1)
    logging.basicConfig(format="  rescale_data says: %(message)s", stream=sys.stdout)  # its warnings, from rank 0
    train(rank, segment)


def plan_segments(world_sizes: list[int], steps: int, corpus: Corpus, folder: Path) -> list[Segment]:
    """A segment for each world size, each from the checkpoint of the one before."""
    segments: list[Segment] = []
    global_batch_size = GLOBAL_BATCH_SIZE
    for number, world_size in enumerate(world_sizes):
        global_batch_size = nearest_multiple(global_batch_size, world_size)
        segments.append(
            Segment(
                corpus=corpus,
                num_logical_shards=num_logical_shards(world_sizes),
                global_batch_size=global_batch_size,
                world_size=world_size,
                num_workers=WORKERS[number % len(WORKERS)],
                stop=(number + 1) * steps,
                folder=folder / f"segment{number}",
                load_from=segments[-1].checkpoint if segments else None,
            )
        )
    return segments


def plan_reference(segments: list[Segment], folder: Path) -> Segment:
    """One rank, without interruption, up to where the global batch changes: batches of another size cannot be equal."""
    same = itertools.takewhile(lambda segment: segment.global_batch_size == segments[0].global_batch_size, segments)
    stop = list(same)[-1].stop
    return replace(segments[0], world_size=1, num_workers=0, stop=stop, folder=folder / "reference")


def num_logical_shards(world_sizes: list[int]) -> int:
    """N = 4 * O, so that 0, 1, 2 and 4 workers keep the order."""
    return 4 * nearest_multiple(GLOBAL_BATCH_SIZE, world_sizes[0])


def nearest_multiple(value: int, factor: int) -> int:
    return max(1, round(value / factor)) * factor


def run(segment: Segment, name: str) -> None:
    start = "goes on from the checkpoint" if segment.load_from else "begins"
    ranks = f"{segment.world_size} rank{'s' * (segment.world_size > 1)}"
    topology = f"{ranks} x {segment.num_workers} worker{'s' * (segment.num_workers != 1)}"
    print(f"{name}: {topology}, {start}, to step {segment.stop - 1} ...", flush=True)
    segment.folder.mkdir()
    started = time.perf_counter()

    shown = ""

    def tick() -> None:
        nonlocal shown
        told = segment.folder / PROGRESS
        text = told.read_text() if told.exists() else "processes start"
        if text == shown and not sys.stdout.isatty():
            return  # a file needs no sign of life
        shown = text
        print(f"  {time.perf_counter() - started:3.0f} s: {text}", flush=True)

    run_ranks(segment.world_size, run_rank, segment, tick=tick)
    print(f"  done in {time.perf_counter() - started:.0f} s", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Rescale a training run, and compare every batch with one that never stopped."
    )
    parser.add_argument(
        "--data",
        type=existing,
        help="text, JSON lines, Parquet or Arrow: a folder or a file (default: Python's own library)",
    )
    parser.add_argument(
        "--world-sizes", type=world_sizes, default=[4, 2, 6], help="ranks of each segment (default: 4,2,6)"
    )
    parser.add_argument("--steps", type=positive, default=8, help="optimizer steps of each segment (default: 8)")
    return parser.parse_args(arguments)


def existing(text: str) -> Path:
    path = Path(text).expanduser()
    if not text or not path.exists():
        raise argparse.ArgumentTypeError(f"there is no {text!r}")
    return path


def positive(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def world_sizes(text: str) -> list[int]:
    sizes = [positive(part) for part in text.split(",")]
    if max(sizes) > MAX_RANKS:
        raise argparse.ArgumentTypeError(
            f"{max(sizes)} ranks are {max(sizes)} processes on this machine; give at most {MAX_RANKS}"
        )
    return sizes


def demo(options: argparse.Namespace, folder: Path) -> bool:
    """Run all segments and the reference in ``folder``; whether the promises held."""
    corpus = build_corpus(options.data, folder / "corpus", num_logical_shards(options.world_sizes))
    segments = plan_segments(options.world_sizes, options.steps, corpus, folder)
    print(f"corpus: {corpus.description}")
    print(
        f"run: {segments[0].global_batch_size} samples of {SEQ_LEN} tokens a step, "
        f"from {segments[0].num_logical_shards} logical shards"
    )
    for number, segment in enumerate(segments):
        run(segment, f"segment {number}")
    reference = plan_reference(segments, folder)
    run(reference, "reference")
    return report(
        segments, reference, functools.partial(pipeline, rd.ParquetSource(corpus.folder), corpus.eos_id), SEED
    )


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="rescaling-demo-") as folder:
        try:
            return 0 if demo(options, Path(folder)) else 1
        except KeyboardInterrupt:
            print("interrupted; all processes are stopped", file=sys.stderr)
            return 130
        except (RankFailedError, ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
