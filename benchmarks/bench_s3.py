"""Does reading from an object store keep up with a local disk, and with what the store gives at all?

    python benchmarks/bench_s3.py [--quick]        (pip install -e '.[s3]')

A server that speaks S3 (moto's) runs on loopback in a process of its own. One process reads rows of each format from a local
folder and from the server: as fast as it can, and with a training step after each batch, some products of matrices that take
about twice as long as reading it locally. "plain" is s3fs alone, which fetches the same bytes, 16 requests of 1 MiB at a time,
and throws them away; "in turn" is how fast one core is that does this and then reads locally, which bounds the first comparison
where there is no core to spare: what s3fs computes is Python, too.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import s3fs
import torch
from bench_remote import SHARDS, rate, share
from corpora import FORMATS, Corpus, source_of, write

PIECE, AT_ONCE = 2**20, 16


@contextmanager
def server() -> Iterator[dict[str, Any]]:
    """An S3 server; what fsspec needs to find it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        client = {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": "eu-west-1"}
        yield {"key": "test", "secret": "test", "client_kwargs": client}
    finally:
        process.terminate()
        process.wait()


def upload(bucket: s3fs.S3FileSystem, kind: str, folder: Path) -> None:
    bucket.mkdirs(f"s3://{kind}")
    for path in folder.iterdir():
        bucket.put_file(str(path), f"s3://{kind}/{path.name}")


def plain(bucket: s3fs.S3FileSystem, kind: str) -> float:
    """Bytes a second of s3fs alone."""
    sizes = {path: bucket.size(path) for path in bucket.ls(f"s3://{kind}")}
    places = [
        (path, start, min(start + PIECE, size)) for path, size in sizes.items() for start in range(0, size, PIECE)
    ]
    started = time.perf_counter()
    got = bucket.cat_ranges(*map(list, zip(*places, strict=True)), batch_size=AT_ONCE)
    return sum(map(len, got)) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    matrix = torch.rand(160, 160)
    corpus, rounds = Corpus(num_rows=80_000), 3 if quick else 5
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {corpus.num_rows:,} rows")
    print(
        f"{'rows/s':10}{'local':>9}{'S3':>9}{'plain':>9}{'S3 / in turn':>22}{'S3 / local':>22}{'and with training':>22}"
    )
    with tempfile.TemporaryDirectory() as root, server() as options:
        bucket = s3fs.S3FileSystem(**options)
        for kind in FORMATS:
            folder, index = Path(root) / kind, Path(root) / "index"
            write(kind, folder, corpus)
            upload(bucket, kind, folder)
            row_bytes = sum(path.stat().st_size for path in folder.iterdir()) / corpus.num_rows
            room = 4 * SHARDS * source_of(kind, str(folder), index).fragment_bytes
            near = source_of(kind, str(folder), index, cache_bytes=room)
            far = source_of(kind, f"s3://{kind}", index, cache_bytes=room, storage_options=options)
            num_rows = corpus.num_rows * (1 if quick else 2)
            rates: dict[str, list[float]] = {name: [] for name in ("local", "S3", "plain", "training", "S3, training")}
            for _ in range(rounds):
                rates["local"].append(rate(near, kind, num_rows))
                rates["S3"].append(rate(far, kind, num_rows))
                rates["plain"].append(plain(bucket, kind) / row_bytes)
                rates["training"].append(rate(near, kind, num_rows, lambda: matrix @ matrix))
                rates["S3, training"].append(rate(far, kind, num_rows, lambda: matrix @ matrix))
            in_turn = [1 / (1 / a + 1 / b) for a, b in zip(rates["local"], rates["plain"], strict=True)]
            shown = "".join(f"{statistics.median(rates[name]):>9,.0f}" for name in ("local", "S3", "plain"))
            shares = share(rates["S3"], in_turn), share(rates["S3"], rates["local"])
            trained = share(rates["S3, training"], rates["training"])
            print(f"{kind:10}{shown}" + "".join(f"{share:>22}" for share in (*shares, trained)), flush=True)


if __name__ == "__main__":
    main()
