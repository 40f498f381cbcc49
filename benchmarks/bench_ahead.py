"""Does it pay to make batches while a step computes: in a thread, in worker processes, or not at all?

    python benchmarks/bench_ahead.py [--quick]

Beside a training step of 5, 20 and 100 ms: asleep, as it is while a GPU computes, and busy in torch on the CPU. Batches
[8, 4096] come from packed Arrow, which takes little, and from JSON lines through a Python tokenizer, which takes much. Where
there is a GPU also beside a step that copies the batch there and computes on it, from pinned memory or not.
All contenders take their turns, each in a process of its own. Told is how much longer a step takes than the same step without
data, in milliseconds, and what of that it waits for its batch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import bench_peers as peers
import bench_read as read
import torch
from bench_peers import Contender, Corpus

import rescale_data as rd

STEPS = (5, 20, 100)
MODES: dict[str, dict[str, int]] = {"no thread": {}, "a thread": {"prefetch": 2}, "2 workers": {"num_workers": 2}}
KINDS = ["asleep", "busy"]
if torch.cuda.is_available():
    KINDS.append("GPU")
    MODES |= {f"{mode}, pinned": {**how, "pin_memory": True} for mode, how in MODES.items()}
READERS: dict[str, Callable[[Corpus], Any]] = {
    "Arrow": lambda corpus: partial(peers.packed, [rd.ArrowSource(corpus.folder / "arrow")]),
    "JSON lines": lambda corpus: partial(
        peers.json_pipeline, rd.JsonlSource(corpus.folder / "text.jsonl", index_dir=corpus.folder / "index")
    ),
}
Times = tuple[float, float]
"""Milliseconds of a step: waiting for its batch, and computing."""


def steps(corpus: Corpus, reader: str | None, mode: str) -> Callable[[tuple[str, int, float]], Times]:
    """Answers with the mean over steps of a kind, of so many milliseconds, for so many seconds."""
    batches: Iterator[Any] = iter(lambda: None, 0)  # without end
    if reader is not None:
        loader = rd.DataLoader(
            READERS[reader](corpus),
            global_batch_size=read.MICRO_BATCH,
            num_logical_shards=16,
            repeat=True,
            **MODES[mode],  # type: ignore[arg-type]
        )
        batches = iter(loader)
    weights = torch.randn(256, 256)
    large = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) if "GPU" in KINDS else weights

    def compute(kind: str, milliseconds: int, batch: Any) -> None:
        if kind == "asleep":
            time.sleep(milliseconds / 1e3)
            return
        if kind == "GPU":
            if batch is not None:
                batch["tokens"].to("cuda", non_blocking=True)
            for _ in range(milliseconds * 5):  # each of about 0.2 milliseconds
                torch.relu(large @ large)
            torch.cuda.synchronize()
            return
        for _ in range(milliseconds * 2):  # each of about half a millisecond
            torch.relu(weights @ weights)

    def answer(question: tuple[str, int, float]) -> Times:
        kind, milliseconds, seconds = question
        times: list[Times] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < 4:
            started = time.perf_counter()
            batch = next(batches)
            arrived = time.perf_counter()
            compute(kind, milliseconds, batch)
            times.append((arrived - started, time.perf_counter() - arrived))
        waited, computed = zip(*times[1:], strict=True)
        return statistics.fmean(waited) * 1e3, statistics.fmean(computed) * 1e3

    return answer


def measure(
    corpus: Corpus, seconds: float, rounds: int
) -> dict[tuple[str, int], dict[tuple[str | None, str], list[Times]]]:
    who: list[tuple[str | None, str]] = [(None, "alone"), *((reader, mode) for reader in READERS for mode in MODES)]
    contenders = {each: Contender(steps, corpus, *each) for each in who}
    found = {(kind, ms): {each: [] for each in who} for kind in KINDS for ms in STEPS}
    for number in range(-1, rounds):  # the first does not count
        for (kind, ms), times in found.items():
            for each, contender in contenders.items():
                value = contender.ask((kind, ms, seconds))
                if isinstance(value, str):
                    raise RuntimeError(f"{each}: {value}")
                if number >= 0:
                    times[each].append(value)
    for contender in contenders.values():
        contender.close()
    return found


def report(found: dict[tuple[str, int], dict[tuple[str | None, str], list[Times]]]) -> str:
    lines = ["| step | reader | " + " | ".join(MODES) + " |", "|---|---|" + "---|" * len(MODES)]
    for (kind, ms), times in found.items():
        alone = [computed for _, computed in times[None, "alone"]]
        for reader in READERS:
            cells = [_cell(times[reader, mode], alone) for mode in MODES]
            lines.append(f"| {ms} ms {kind} ({statistics.median(alone):.1f}) | {reader} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(times: list[Times], alone: list[float]) -> str:
    more = [waited + computed - a for (waited, computed), a in zip(times, alone, strict=True)]
    waited = statistics.median(waited for waited, _ in times)
    return f"{statistics.median(more):.2f} ({min(more):.2f} to {max(more):.2f}), waits {waited:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short rounds, to see that it runs")
    seconds, rounds = (0.1, 1) if parser.parse_args().quick else (0.4, 4)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(Path(folder) / "corpus")
        peers.write(corpus)
        found = measure(corpus, seconds, rounds)
    print(read.machine())
    print("Milliseconds that a step takes more than without data: median (range), and what it waits for its batch\n")
    print(report(found))


if __name__ == "__main__":
    main()
