"""`StoredCheckpoint`: reads whole tensors of a checkpoint, a bounded number of bytes at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rescale_data.checkpoint.storage.open import CheckpointReader
from rescale_data.checkpoint.tree import UnflattenHints

DEFAULT_BUDGET_BYTES = 256 << 20


class StoredCheckpoint:
    """The values of a checkpoint, read on this process alone.

    Args:
        entry_name: The name of one top-level entry, to read this entry alone; default: all entries.

    Attributes:
        meta_tensors: A tensor on the meta device for each saved tensor, by flattened name.
        paths_by_name: The path in the nested state, by flattened name.
        unflatten_hints: The structure of the nested state that flattened names lose (`UnflattenHints`).

    Raises:
        ValueError: nothing is named ``entry_name``.
    """

    def __init__(self, reader: CheckpointReader, entry_name: str | None = None) -> None:
        root = () if entry_name is None else (entry_name,)
        self._reader, saved_contents = reader, reader.contents.subtree(root)
        self._key_by_name = {".".join(map(str, path)): key for key, path in saved_contents.paths.items()}
        if entry_name is not None and not self._key_by_name:
            top_names = sorted({str(path[0]) for path in reader.contents.paths.values()})
            raise ValueError(f"The checkpoint {reader.path} holds nothing named {entry_name!r}. It holds {top_names}.")
        self.paths_by_name = {short_name: saved_contents.paths[key] for short_name, key in self._key_by_name.items()}
        saved_values = {short_name: saved_contents.values[key] for short_name, key in self._key_by_name.items()}
        self.meta_tensors = {short_name: tensor for short_name, tensor in saved_values.items() if tensor is not None}
        unflatten_hints_of_all = reader.manifest.lost if reader.manifest else ()
        self.unflatten_hints: UnflattenHints = [
            (path[len(root) :], key) for path, key in unflatten_hints_of_all if (*path[:-1][: len(root)],) == root
        ]

    def values(self) -> dict[str, Any]:
        """Return all plain values, by flattened name."""
        return self._read([name for name in self.paths_by_name if name not in self.meta_tensors])

    def stream(self, names: list[str], byte_budget: int = DEFAULT_BUDGET_BYTES) -> Iterator[torch.Tensor]:
        """Yield the named tensors in order, read in batches of at most ``byte_budget`` bytes (or one larger tensor)."""
        for batch in self.name_batches(names, byte_budget):
            batch_values = self._read(batch)
            for name in batch:
                yield batch_values.pop(name)

    def num_bytes(self, name: str) -> int:
        return self.meta_tensors[name].nbytes

    def name_batches(self, names: Iterable[str], byte_budget: int) -> Iterator[list[str]]:
        """Yield ``names`` in order, in batches of tensors with at most ``byte_budget`` bytes (or one larger tensor)."""
        batch: list[str] = []
        batch_bytes = 0
        for name in names:
            if batch and batch_bytes + self.num_bytes(name) > byte_budget:
                yield batch
                batch, batch_bytes = [], 0
            batch.append(name)
            batch_bytes += self.num_bytes(name)
        if batch:
            yield batch

    def _read(self, names: list[str]) -> dict[str, Any]:
        return dict(zip(names, self._reader.values(self._key_by_name[name] for name in names).values(), strict=True))
