"""Does reading from an object store keep up with reading from a local disk?

    python benchmarks/bench_s3.py [--quick]        (pip install -e '.[s3]')

A server that speaks S3 (moto's) runs on loopback. One process reads rows of each format from a local folder and from the
server, asked by s3fs: as fast as it can, and beside training that waits for its accelerator half a millisecond
each batch, which is still more than ten thousand rows a second. The server, and what asks it, need about as much of a
processor as the reader: where there are two cores, all of both is then in use, and the first comparison says more of the
server than of the reader.
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
from bench_remote import SHARDS, rate, share
from corpora import FORMATS, Corpus, source_of, write

REGION = "eu-west-1"
STEP_SECONDS = 0.0005


@contextmanager
def server() -> Iterator[str]:
    """Host and port of an S3 server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = "{}:{}".format(*free.getsockname())
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", host.partition(":")[2]],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while socket.socket().connect_ex(("127.0.0.1", int(host.partition(":")[2]))):
            time.sleep(0.1)
        yield host
    finally:
        process.terminate()
        process.wait()


def upload(bucket: s3fs.S3FileSystem, kind: str, folder: Path) -> None:
    bucket.mkdirs(f"s3://{kind}")
    for path in folder.iterdir():
        bucket.put_file(str(path), f"s3://{kind}/{path.name}")


def sources(kind: str, folder: Path, host: str) -> dict[str, Any]:
    """The contenders, with a cache that holds a part of what they read."""
    write(kind, folder, Corpus(num_rows=80_000))
    options = {
        "key": "test",
        "secret": "test",
        "client_kwargs": {"endpoint_url": f"http://{host}", "region_name": REGION},
    }
    upload(s3fs.S3FileSystem(**options), kind, folder)
    index = folder.parent / "index"
    room = 4 * SHARDS * source_of(kind, str(folder), index).fragment_bytes
    return {
        "local": source_of(kind, str(folder), index, cache_bytes=room),
        "s3fs": source_of(kind, f"s3://{kind}", index, cache_bytes=room, storage_options=options),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    quick = parser.parse_args().quick
    rounds, num_rows = (3, 80_000) if quick else (9, 80_000)
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':10}{'as fast as it can':^72}{'beside training':^48}")
    names = ("local", "s3fs")
    print(
        f"{'rows/s':10}"
        + "".join(f"{name:>9}" for name in names)
        + "".join(f"{n + ' / local':>24}" for n in names[1:]) * 2
    )
    with tempfile.TemporaryDirectory() as root, server() as host:
        for kind in FORMATS:
            contenders = sources(kind, Path(root) / kind, host)
            fast: dict[str, list[float]] = {name: [] for name in names}
            trained: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(rounds):
                for name, source in contenders.items():
                    fast[name].append(rate(source, kind, num_rows))
                    trained[name].append(rate(source, kind, num_rows // 2, lambda: time.sleep(STEP_SECONDS)))
            shown = "".join(f"{statistics.median(fast[name]):>9,.0f}" for name in names)
            shares = [share(found[name], found["local"]) for found in (fast, trained) for name in names[1:]]
            print(f"{kind:10}{shown}" + "".join(f"{share:>24}" for share in shares), flush=True)


if __name__ == "__main__":
    main()
