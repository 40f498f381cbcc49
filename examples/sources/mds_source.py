"""Mosaic's MDS shards, compressed or not, as a source: ``rd.DataLoader(MdsSource("folder"), global_batch_size=...)``.

Written from the format alone (an `index.json` beside the shards): the package that wrote them is not needed.
"""

from __future__ import annotations

import bz2
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import rescale_data as rd
from rescale_data.sources.decoded.cache import cache, open_files, owner_id

CODECS = {"zstd": "zstd", "gz": "gzip", "br": "brotli", "snappy": "snappy"}
PLAIN = {"bytes": bytes, "jpeg": bytes, "png": bytes, "str": bytes.decode, "json": json.loads, "str_int": int}


class MdsSource(rd.Source):
    """The samples of a folder of shards, in the order of its index. Pictures stay bytes: decode them in an `rd.Map`."""

    def __init__(self, folder: str | Path, *, cache_bytes: int = 2**30) -> None:
        self.folder, self.cache_bytes = Path(folder), cache_bytes  # of decompressed shards, over all sources
        self.name = self.folder.name
        self._shards = json.loads((self.folder / "index.json").read_text())["shards"]
        self.fragments = np.cumsum([0, *(shard["samples"] for shard in self._shards)], dtype=np.int64)
        self.num_rows = int(self.fragments[-1])

    def manifest(self) -> dict[str, Any]:
        files = [[s["raw_data"]["basename"], s["raw_data"]["bytes"], s["samples"]] for s in self._shards]
        return {"format": "mds", "files": files}

    def row(self, index: int) -> dict[str, Any]:
        number, at = self._find(index)
        shard, data = self._shards[number], self._bytes(number)
        begin = int(data[4 + 4 * at :][:4].view(np.uint32)[0])  # behind the number of samples
        num_sizes = shard["column_sizes"].count(None)
        sizes = iter(data[begin:][: 4 * num_sizes].view(np.uint32).tolist())
        row, begin = dict[str, Any](), begin + 4 * num_sizes
        described = (shard[f"column_{what}"] for what in ("names", "encodings", "sizes"))
        for name, encoding, size in zip(*described, strict=True):
            size = next(sizes) if size is None else size
            row[name], begin = decoded(encoding, np.array(data[begin : begin + size])), begin + size
        return row

    def locate(self, index: int) -> str:
        number, at = self._find(index)
        return f"{self.folder / self._shards[number]['raw_data']['basename']}, sample {at}"

    def _find(self, index: int) -> tuple[int, int]:
        number = int(np.searchsorted(self.fragments, index, side="right")) - 1
        return number, index - int(self.fragments[number])

    def _bytes(self, number: int) -> np.ndarray:
        """Return ``uint8[bytes]`` of a shard: a memory map, or what this process keeps of the compressed file."""
        shard, key = self._shards[number], (owner_id(self), number)
        raw, packed = self.folder / shard["raw_data"]["basename"], shard["zip_data"]
        if packed is None:
            return open_files().get_or_make(key, lambda: np.memmap(raw, np.uint8, "r"))
        codec, size = shard["compression"].partition(":")[0], shard["raw_data"]["bytes"]
        cache().register(self)
        return cache().get_or_make(key, lambda: unpacked(self.folder / packed["basename"], codec, size))


def unpacked(file: Path, codec: str, size: int) -> np.ndarray:
    """Return ``uint8[size]``."""
    data = file.read_bytes()
    raw = bz2.decompress(data) if codec == "bz2" else pa.decompress(data, size, CODECS[codec])
    return np.frombuffer(raw, np.uint8)


def decoded(encoding: str, data: np.ndarray) -> Any:
    """Return the value of a column, of ``uint8[bytes]`` that it owns."""
    kind, _, form = encoding.partition(":")
    if kind == "ndarray":
        return array(*form.partition(":")[::2], data)
    if kind in PLAIN:
        return PLAIN[kind](bytes(data))
    if kind.rstrip("0123456789") not in ("int", "uint", "float"):
        raise ValueError(f"A column is encoded as {encoding!r}: write bytes, json, a number or an ndarray.")
    return data.view(kind)[0].item()  # "int" has 64 bits


def array(dtype: str, shape: str, data: np.ndarray) -> np.ndarray:
    """Return an array, whose dtype and shape stand before its values where the encoding does not say them."""
    if not dtype:
        bits, kind = int(data[0]) & ~7, ("uint", "int", "float")[data[0] % 8]
        dtype, data = f"{kind}{bits}", data[1:]
    sizes = [int(size) for size in shape.split(",") if size]
    if not sizes:
        num_dims, width = divmod(int(data[0]), 4)
        end = 1 + num_dims * 2**width
        sizes, data = data[1:end].view(f"uint{8 << width}").tolist(), data[end:]
    return data.view(dtype).reshape(sizes)
