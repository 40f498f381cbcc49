"""torchtitan (0.3, and main of August 2026): a dataloader component that resumes at another data-parallel degree.

The state lies in torchtitan's own checkpoints, where it is the same for every rank. ``repeat=False`` works at any degree: all
ranks end an epoch after the same batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import tyro

from rescale_data.integrations.causal_lm import positions
from rescale_data.loader import DataLoader
from rescale_data.nodes.base import BaseNode

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ImportError:  # its main branch
    from torchtitan.components.data.loader import BaseDataLoader


class RescaleDataLoader(BaseDataLoader):
    """`rescale_data.DataLoader` in a trainer's config: ``dataloader=RescaleDataLoader.Config(pipeline=, global_batch_size=)``.

    It yields what the trainer wants: ``{"input", "positions"}, labels``, each ``int64[b, seq_len]`` in 0.3, flat in later ones.
    Positions begin anew in each document where samples have ``doc_ids`` (``TokenPacker(doc_ids=True)``).

    Example:
        >>> RescaleDataLoader.Config(pipeline=print, global_batch_size=64).repeat
        True
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """The arguments of `rescale_data.DataLoader` that torchtitan itself does not have."""

        pipeline: Annotated[Callable[..., BaseNode[Any]], tyro.conf.Suppress]
        """``(tokenizer, seq_len, shard) -> node`` of ``{"tokens", "labels"}``, as `TokenPacker(labels=True)` makes them."""
        global_batch_size: int
        """Sequences of an optimizer step over all ranks, as in torchtitan's own config, which loaders do not receive."""
        num_logical_shards: int | None = None
        num_workers: int = 0
        seed: int = 42
        repeat: bool = True

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, tokenizer: Any = None, seq_len: int = 0,
        local_batch_size: int = 0, max_context_length: int = 0, num_tokens_per_batch: int = 0,
        snapshot_every_n_steps: int | None = None, **ignored_arguments: Any,
    ) -> None:  # fmt: skip
        self._flattens_batches = bool(max_context_length)
        sequence_length = seq_len or max_context_length
        self.loader = DataLoader(
            functools.partial(config.pipeline, tokenizer, sequence_length),
            global_batch_size=config.global_batch_size,
            micro_batch_size=local_batch_size or num_tokens_per_batch // sequence_length,
            num_logical_shards=config.num_logical_shards,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            num_workers=config.num_workers,
            seed=config.seed,
            repeat=config.repeat,
        )

        micro_batches = self.loader.gradient_accumulation_steps
        if (snapshot_every_n_steps or 0) % micro_batches:
            raise ValueError(
                f"torchtitan saves every {snapshot_every_n_steps} batches, but with global_batch_size="
                f"{config.global_batch_size} the loader takes {micro_batches} a step: a checkpoint would lie within one. Give "
                f"RescaleDataLoader.Config the global_batch_size of training."
            )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self.loader:
            tensors = batch["tokens"], _positions(batch), batch["labels"]
            tokens, positions, labels = [tensor.flatten() for tensor in tensors] if self._flattens_batches else tensors
            yield {"input": tokens, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:  # torchtitan's checkpoints may hold none
            self.loader.load_state_dict(state_dict)

    def close(self) -> None:
        self.loader.close()


def _positions(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return positions, ``int64[b, seq_len]``: from the batch, or counted from the beginning of each document."""
    if "positions" in batch:
        return batch["positions"]
    return positions(batch.get("doc_ids", torch.zeros_like(batch["tokens"])))
