"""What does it cost not to cut documents, in padding and in time?

    python benchmarks/bench_packing.py [--quick]

Documents of log-normal length (median 400 tokens, mean 820) from Arrow files, in samples of 4,096 tokens. Next to
`rd.WholeDocumentPacker` (best fit decreasing, windows of several sizes): first fit in the order of the documents in the same
windows, what one writes first; and `rd.TokenPacker`, which cuts. Padding is the share of tokens that are none. Of a
cutting packer the other price is given: the share of tokens whose document begins in another sample, where attention cannot
see it. All take long documents in pieces of 4,096. Times are of one process, in turns, round after round.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import rescale_data as rd
from rescale_data.nodes.packing.fit import best_fit
from rescale_data.sources.decoded.cache import cache

SEQ_LEN, EOS = 4096, 2
WINDOWS = (64, 256, 1024, 4096)


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Each item into the first bin that has room for it."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item, length in enumerate(lengths):
        at = next((i for i, free in enumerate(room) if free >= length), len(room))
        if at == len(room):
            room.append(capacity)
            bins.append([])
        room[at] -= length
        bins[at].append(item)
    return bins


def padding(
    pieces: Sequence[int], window: int, pack: Callable[[Sequence[int]], list[list[int]]]
) -> tuple[float, float]:
    """The share of padding, and the seconds that packing took for a million tokens."""
    started, samples = time.perf_counter(), 0
    for first in range(0, len(pieces), window):
        samples += len(pack(pieces[first : first + window]))
    seconds = time.perf_counter() - started
    return 1 - sum(pieces) / (samples * SEQ_LEN), seconds / sum(pieces) * 1e6


def beginning_elsewhere(pieces: Sequence[int]) -> float:
    """The share of tokens whose piece begins in another sample, where documents are cut."""
    ends = np.cumsum(pieces)
    inside = np.minimum(ends - (ends - 1) // SEQ_LEN * SEQ_LEN, pieces)
    return float(np.where(inside < pieces, inside, 0).sum() / ends[-1])


def write(folder: Path, num_documents: int) -> rd.ArrowSource:
    rng = np.random.default_rng(0)
    lengths = np.maximum(rng.lognormal(np.log(400), 1.2, num_documents), 8).astype(int)
    tokens = rng.integers(3, 50_000, lengths.sum()).astype(np.uint16)
    array = pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), pa.array(tokens))
    table = pa.table({"tokens": array})
    with pa.ipc.new_file(folder / "corpus.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=1024)
    return rd.ArrowSource(folder)


def pieces_of(source: rd.ArrowSource) -> list[int]:
    """Lengths with EOS, in the order of a shard, long ones in pieces as `WholeDocumentPacker` makes them."""
    lengths = [len(row["tokens"]) + 1 for row in rd.Reader(source, rd.Shard())]
    return [min(SEQ_LEN, n - at) for n in lengths for at in range(0, n, SEQ_LEN)]


def seconds(node: Iterator[Any], num_samples: int) -> float:
    """Of a million tokens that are no padding, after a first sample."""
    next(node)
    started, used = time.perf_counter(), 0
    for _ in range(num_samples):
        sample = next(node)
        used += int((sample["doc_ids"] >= 0).sum())
    return (time.perf_counter() - started) / used * 1e6


def throughput(source: rd.ArrowSource, num_samples: int, rounds: int) -> dict[str, list[float]]:
    shard = rd.Shard(repeat=True)

    def whole(window: int) -> rd.BaseNode[Any]:
        return rd.WholeDocumentPacker(
            rd.Reader(source, shard), column="tokens", seq_len=SEQ_LEN, eos_id=EOS, window=window, labels=True
        )

    def cutting() -> rd.BaseNode[Any]:
        return rd.TokenPacker(
            rd.Reader(source, shard), column="tokens", seq_len=SEQ_LEN, eos_id=EOS, labels=True, doc_ids=True
        )

    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, build in (("cutting", cutting), *((f"best fit, {w}", lambda w=w: whole(w)) for w in WINDOWS)):
            cache().clear()
            found.setdefault(name, []).append(seconds(iter(build()), num_samples))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer documents and rounds")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder), 10_000 if quick else 50_000)
        pieces = pieces_of(source)
        print(
            f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, NumPy {np.__version__}"
        )
        print(f"{len(pieces):,} documents and pieces, {sum(pieces):,} tokens, seq_len {SEQ_LEN}\n")
        print("window     best fit  first fit   padding      best fit  first fit   seconds to pack a million tokens")
        for window in WINDOWS:
            (best, best_s), (first, first_s) = (
                padding(pieces, window, lambda lengths: best_fit(lengths, SEQ_LEN, SEQ_LEN)),
                padding(pieces, window, lambda lengths: first_fit(lengths, SEQ_LEN)),
            )
            print(f"{window:6d}     {best:8.2%}  {first:9.2%}                {best_s:8.4f}  {first_s:9.4f}")
        lost = beginning_elsewhere(pieces)
        print(
            f"\ncutting: no padding; {lost:.1%} of tokens are in another sample than the beginning of their document\n"
        )
        print("seconds a million tokens, whole node (labels and doc_ids too): median (least - most)")
        for name, values in throughput(source, 100 if quick else 400, 3 if quick else 7).items():
            print(f"{name:16s} {statistics.median(values):.4f}  ({min(values):.4f} - {max(values):.4f})")


if __name__ == "__main__":
    main()
