"""What one writes first for Parquet: a packer in NumPy; `bench_read` and `bench_peers` compare with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.utils.data import IterableDataset


class NumpyPacker(IterableDataset[torch.Tensor]):
    """Row groups in random order, their documents shuffled and packed in NumPy; its state is its place and what is left."""

    def __init__(self, paths: list[Path], seq_len: int, eos_id: int) -> None:
        self._seq_len, self._eos = seq_len, np.array([eos_id], dtype=np.int32)
        self._groups = [(path, i) for path in paths for i in range(pq.read_metadata(path).num_row_groups)]
        self._at, self._sample = 0, 0
        self._left = np.zeros(0, np.int32)

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        order = np.random.default_rng(0).permutation(len(self._groups)).tolist()[first::step]
        for at in range(self._at, len(order)):
            tokens = np.concatenate([self._left, *self._documents(*self._groups[order[at]], at)])
            whole = len(tokens) // self._seq_len * self._seq_len
            rows = tokens[:whole].reshape(-1, self._seq_len)
            for number in range(self._sample, len(rows)):
                self._sample = number + 1
                yield torch.from_numpy(rows[number].astype(np.int64))
            self._left, self._at, self._sample = tokens[whole:], at + 1, 0
        self._at, self._left = 0, self._left[:0]

    def _documents(self, path: Path, group: int, at: int) -> Iterator[np.ndarray]:
        column = pq.ParquetFile(path).read_row_group(group, columns=["tokens"])["tokens"].chunk(0)
        values, ends = column.values.to_numpy(), column.offsets.to_numpy()
        for i in np.random.default_rng(at).permutation(len(column)).tolist():
            yield values[ends[i] : ends[i + 1]]
            yield self._eos

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at, "sample": self._sample, "left": self._left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at, self._sample, self._left = state["at"], state["sample"], state["left"]
