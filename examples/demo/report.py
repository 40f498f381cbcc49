"""The checks of the demo, and its tables."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

import rescale_data as rd
from demo.corpus import Corpus, read_rows
from demo.record import digest, read

LOSS_TOLERANCE = 1e-3


class Segment(Protocol):
    """What the report needs to know of a segment."""

    @property
    def corpus(self) -> Corpus: ...
    @property
    def num_logical_shards(self) -> int: ...
    @property
    def global_batch_size(self) -> int: ...
    @property
    def micro_batch_size(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def folder(self) -> Path: ...
    @property
    def checkpoint(self) -> Path: ...


class Run:
    """What the ranks of one segment wrote down.

    Attributes:
        batches: The global batch of each step: the digests of its samples in rank order.
        losses: The mean of all ranks at each step.
    """

    def __init__(self, segment: Segment) -> None:
        ranks = read(segment.folder)
        steps = list(zip(*(rank["steps"] for rank in ranks), strict=True))
        self.segment = segment
        self.batches = [[sample for rank in step for sample in rank["samples"]] for step in steps]
        self.losses = [float(np.mean([rank["loss"] for rank in step])) for step in steps]
        self.facts = {name: max(rank["facts"][name] for rank in ranks) for name in ranks[0]["facts"]}
        self.samples = Counter(sample for batch in self.batches for sample in batch)


def report(
    segments: Sequence[Segment], reference: Segment, pipeline: Callable[[rd.Shard], rd.BaseNode[Any]], seed: int
) -> bool:
    """Print what happened; whether all promises held."""
    runs, alone = [Run(segment) for segment in segments], Run(reference)
    shards = Shards(pipeline, segments[0].num_logical_shards, seed)
    findings = [*_steps(runs, alone), *_print_segments(runs, shards), _rows(runs[-1], shards)]
    print()
    for held, text in findings:
        print(f"{'ok  ' if held else 'FAIL'}  {text}")
    return all(held for held, _ in findings)


Finding = tuple[bool, str]


def _steps(runs: list[Run], alone: Run) -> list[Finding]:
    """One line a step: the global batch and the loss of the rescaled run, beside the run of one rank."""
    print("\n step  ranks x workers  global batch  on 1 rank      loss  on 1 rank  difference")
    batches = [batch for run in runs for batch in run.batches]
    losses = [loss for run in runs for loss in run.losses]
    topologies = [f"{run.segment.world_size} x {run.segment.num_workers}" for run in runs for _ in run.batches]
    identical, largest, compared = 0, 0.0, len(alone.batches)
    for step, (topology, batch, loss) in enumerate(zip(topologies, batches, losses, strict=True)):
        other, other_loss, gap = "-", "-", "-"
        if step < compared:
            same, difference = batch == alone.batches[step], loss - alone.losses[step]
            identical, largest = identical + same, max(largest, abs(difference))
            other = "identical" if same else _hash(alone.batches[step])
            other_loss, gap = f"{alone.losses[step]:.4f}", f"{difference:.1e}"
        print(f"{step:5}  {topology:>15}  {_hash(batch):>12}  {other:>9}  {loss:8.4f}  {other_loss:>9}  {gap:>10}")
    findings = [
        (
            identical == compared,
            f"{identical} of {compared} global batches: bit-identical to those of 1 rank that never stopped, row by row",
        ),
        (
            largest <= LOSS_TOLERANCE,
            f"losses differ by {largest:.1e} at most; floats are summed in another order, {LOSS_TOLERANCE:.0e} is allowed",
        ),
    ]
    if compared < len(batches):
        findings.append(
            (True, f"from step {compared} on a global batch has another size: no batch can equal the 1-rank run's")
        )
    return findings


def _print_segments(runs: list[Run], shards: Shards) -> list[Finding]:
    """One line a segment: its topology, what it drew, and what its resume cost."""
    print(
        "\n  segment  ranks x workers  global batch  micro batch  accumulation  samples  repeated  lost  dcp.load s  "
        "first batch s"
    )
    before = np.zeros(shards.num_logical_shards, dtype=np.int64)
    repeated_of_all = lost_of_all = 0
    for number, run in enumerate(runs):
        after = delivered(run.segment)
        due = shards.samples(before, after)
        repeated, lost = (run.samples - due).total(), (due - run.samples).total()
        print(f"{number:9}  {_describe(run)}  {run.samples.total():7}  {repeated:8}  {lost:4}  {_seconds(run)}")
        before, repeated_of_all, lost_of_all = after, repeated_of_all + repeated, lost_of_all + lost
    print("  (the first batch includes the start of the worker processes, where there are any)")
    table, texts = state_bytes(runs[-1].segment)
    n = shards.num_logical_shards
    return [
        (
            not repeated_of_all and not lost_of_all,
            f"{sum(run.samples.total() for run in runs)} samples, each the next one of its logical shard: {repeated_of_all} "
            f"repeated, {lost_of_all} lost",
        ),
        (
            True,
            f"data state: {table:,} bytes, {table // n} for each of {n} logical shards; {texts} that name files and pipeline",
        ),
    ]


def _describe(run: Run) -> str:
    segment = run.segment
    accumulation = segment.global_batch_size // (segment.world_size * segment.micro_batch_size)
    topology = f"{segment.world_size} x {segment.num_workers}"
    return f"{topology:>15}  {segment.global_batch_size:12}  {segment.micro_batch_size:11}  {accumulation:12}"


def _seconds(run: Run) -> str:
    load = run.facts.get("load_seconds")
    return f"{'-' if load is None else f'{load:.2f}':>10}  {run.facts['first_batch_seconds']:13.2f}"


def _rows(last: Run, shards: Shards) -> Finding:
    """Whether the documents in the samples are rows of the corpus, as pyarrow reads them, and none came twice in an epoch."""
    corpus = Counter(read_rows(last.segment.corpus))
    seen = shards.documents(last.segment.corpus.eos_id)
    epochs = 1 + int(last.facts[next(name for name in last.facts if name.startswith("epoch_max/"))])
    most = max(seen.values(), default=0)
    held = most <= epochs and not seen.keys() - corpus.keys()
    often = "once" if epochs == 1 else f"once an epoch in {epochs} epochs"
    return (
        held,
        f"{len(seen)} of {len(corpus)} rows were read to their end, each {often}, as they are in the Parquet files",
    )


class Shards:
    """What each logical shard yields when its pipeline runs alone, without a loader: the samples that should have come."""

    def __init__(self, pipeline: Callable[[rd.Shard], rd.BaseNode[Any]], num_logical_shards: int, seed: int) -> None:
        self.num_logical_shards = num_logical_shards
        self._nodes = [pipeline(rd.Shard(i, num_logical_shards, seed, repeat=True)) for i in range(num_logical_shards)]
        self._digests: list[list[str]] = [[] for _ in self._nodes]
        self._tokens: list[list[np.ndarray]] = [[] for _ in self._nodes]

    def samples(self, first: np.ndarray, stop: np.ndarray) -> Counter[str]:
        """Samples ``first[i] .. stop[i]-1`` of every shard i."""
        found: Counter[str] = Counter()
        for i, node in enumerate(self._nodes):
            while len(self._digests[i]) < stop[i]:
                sample = next(node)
                self._digests[i].append(digest(sample))
                self._tokens[i].append(sample["tokens"].numpy().astype(np.int32))
            found.update(self._digests[i][first[i] : stop[i]])
        return found

    def documents(self, eos_id: int) -> Counter[bytes]:
        """The documents that have ended in the samples so far, as the bytes of their int32 tokens."""
        found: Counter[bytes] = Counter()
        for samples in self._tokens:
            tokens = np.concatenate([*samples, np.zeros(0, dtype=np.int32)])
            parts = np.split(tokens, np.flatnonzero(tokens == eos_id) + 1)
            found.update(part[:-1].tobytes() for part in parts[:-1])
        return found


def delivered(segment: Segment) -> np.ndarray:
    """How many samples of each logical shard had been delivered at the end of a segment: a column of the loader's table."""
    table = torch.zeros(_table(segment).size, dtype=torch.int64)
    _load({"loader.table": table}, segment)
    return table[:, 1].numpy()  # stamp, samples, ...


def state_bytes(segment: Segment) -> tuple[int, int]:
    """Bytes of the loader's table in a checkpoint, and of the header that describes its columns, files and pipeline."""
    text = {"loader.header": ""}
    _load(text, segment)
    return _table(segment).size.numel() * 8, len(text["loader.header"])


def _table(segment: Segment) -> Any:
    return dcp.FileSystemReader(segment.checkpoint).read_metadata().state_dict_metadata["loader.table"]


def _load(state: dict[str, Any], segment: Segment) -> None:
    with warnings.catch_warnings(action="ignore"):  # that this process is not one of several
        dcp.load(state, checkpoint_id=segment.checkpoint, no_dist=True)


def _hash(batch: list[str]) -> str:
    return hashlib.blake2b("".join(batch).encode(), digest_size=4).hexdigest()
