"""A checkpoint as a stream of whole tensors, a bounded number of bytes at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from rescale_data.checkpoint.storage.open import opened
from rescale_data.checkpoint.storage.store import StrPath
from rescale_data.checkpoint.tree import Lost
from rescale_data.engine.states.codec import data_states

BUDGET = 256 << 20


class StoredCheckpoint(contextlib.ExitStack):
    """A DCP folder that is read on this process alone, without running code from it; retention spares it until ``close``.

    Args:
        path: Of the folder.
        name: Of one top-level entry, which is then all that there is, without its name; default everything.

    Attributes:
        tensors: On the meta device, by flattened name.
        paths: Path in the nested state, by flattened name.
        lost: What the names do not tell of the nested state.

    Raises:
        FileNotFoundError: no checkpoint at ``path``.
        ReplacedError: while it is read, another checkpoint took its place.
        ValueError: damaged files, or nothing named ``name``.
    """

    def __init__(self, path: StrPath, *, name: str | None, storage_options: Mapping[str, Any] | None) -> None:
        super().__init__()
        self._reader = self.enter_context(opened(path, storage_options=storage_options))
        self.folder = self._reader.path
        try:
            self._look(name)
        except BaseException:
            self.close()
            raise

    def _look(self, name: str | None) -> None:
        saved, root = self._reader.contents, () if name is None else (name,)
        self._paths, self._saved = list(saved.paths.values()), saved.under(root)
        self._keys = {".".join(map(str, path)): key for key, path in self._saved.paths.items()}
        if not self._keys:
            tops = sorted({str(path[0]) for path in self._paths})
            raise ValueError(f"The checkpoint {self.folder} holds nothing named {name!r}. It holds {tops}.")
        self.paths = {short: self._saved.paths[key] for short, key in self._keys.items()}
        found = {short: self._saved.values[key] for short, key in self._keys.items()}
        self.tensors = {short: tensor for short, tensor in found.items() if tensor is not None}
        lost = self._reader.manifest.lost if self._reader.manifest else ()
        self.lost: Lost = [(path[len(root) :], key) for path, key in lost if (*path[:-1][: len(root)],) == root]
        self._plain = [short for short in found if short not in self.tensors]

    def __exit__(self, *_: object) -> None:
        super().__exit__(None, None, None)  # an error in here is no error of the reader

    def values(self) -> dict[str, Any]:
        """What is no tensor, by flattened name."""
        return self._read(self._plain)

    def stream(self, names: list[str], budget: int = BUDGET) -> Iterator[torch.Tensor]:
        """The tensors of ``names`` in order, read in batches of at most ``budget`` bytes, or of one tensor."""
        for batch in self.batches(names, budget):
            read = self._read(batch)
            for name in batch:
                yield read.pop(name)

    def data_states(self) -> list[str]:
        """Names of the loaders whose states are in the checkpoint."""
        return [".".join(root) for root in data_states(self._paths)]

    def num_bytes(self, name: str) -> int:
        return self.tensors[name].nbytes

    def batches(self, names: Iterable[str], budget: int) -> Iterator[list[str]]:
        """``names`` in their order, each batch of at most ``budget`` bytes, or of one tensor."""
        batch: list[str] = []
        size = 0
        for name in names:
            if batch and size + self.num_bytes(name) > budget:
                yield batch
                batch, size = [], 0
            batch.append(name)
            size += self.num_bytes(name)
        if batch:
            yield batch

    def _read(self, names: list[str]) -> dict[str, Any]:
        return dict(zip(names, self._reader.values(self._keys[name] for name in names).values(), strict=True))
