"""Plain values, which must be equal on all ranks, and `PerRank`, for values that differ between ranks.

DCP saves a value that is not sharded from one of the ranks that hold it. Where they differ, the others' is lost without a word.
So a plain value that differs is an error here. Ranks compare a digest of all, and those of each only where these differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Set
from enum import Enum
from typing import Any, cast

import numpy as np
import torch

from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.storage.values import is_plain
from rescale_data.checkpoint.tree import iterate_leaves

_RANK_KEY = re.compile(r"rank-(\d+)")


class PerRank:
    """Wrapper for a value that differs between ranks, such as the state of a random number generator.

    It is saved once a rank. At a load rank r gets the value of rank r of the run that saved; where that had fewer ranks, of
    rank r modulo their number, so that values repeat: seed anew what must differ.

    Args:
        value: A tensor, loaded in place; a ``Stateful``; or a plain value, which a load replaces.

    Example:
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> own = checkpoint.PerRank(torch.get_rng_state())
        >>> state = {"rng": own}  # checkpoint.save(path, state); checkpoint.load(path, state)
        >>> torch.set_rng_state(own.value)
    """

    def __init__(self, value: Any) -> None:
        self.value = value


def rank_key(rank: int) -> str:
    """Return the key under which the `PerRank` value of a rank is saved."""
    return f"rank-{rank}"


def source_rank(saved_names: Set[str], rank: int) -> int:
    """Return the saved rank whose `PerRank` value a rank loads: its own number, or modulo the number of saved ranks."""
    saved_ranks = sorted(int(match[1]) for name in saved_names if (match := _RANK_KEY.fullmatch(name)))
    return rank if rank in saved_ranks or not saved_ranks else saved_ranks[rank % len(saved_ranks)]


def refuse_disagreement(state_dict: Mapping[str, Any], ranks: Ranks) -> None:
    """Raise ``ValueError`` naming the plain values that differ between ranks; a collective.

    Compared are arrays, numbers, strings, enums, and tuples, sets, mappings and dataclasses of them and of tensors. Tensors
    with a name of their own are not: those of replicas are kept equal by what trains them, and their buffers may differ.
    """
    if ranks.world_size == 1:
        return
    plain_values = {
        ".".join(path): leaf
        for path, leaf in iterate_leaves(state_dict, is_plain)
        if not (isinstance(leaf, torch.Tensor) or any(map(_RANK_KEY.fullmatch, path)))
    }
    digests = {name: digest for name, leaf in plain_values.items() if (digest := _digest(leaf))}
    own_digest = hashlib.blake2b(repr(sorted(digests.items())).encode(), digest_size=16).digest()
    rank_digests = ranks.on_each(lambda: own_digest)
    if len(set(rank_digests)) == 1:
        return
    # Stages of a pipeline hold other names: one rank of each kind tells its own.
    is_first_of_kind = rank_digests.index(own_digest) == ranks.rank
    ranks_by_digest: dict[str, dict[bytes, int]] = {}
    for rank, digests_of_rank in enumerate(ranks.on_each(lambda: digests if is_first_of_kind else {})):
        for name, digest in digests_of_rank.items():
            ranks_by_digest.setdefault(name, {}).setdefault(digest, rank)
    differing_ranks = {name: sorted(values.values()) for name, values in ranks_by_digest.items() if len(values) > 1}
    if differing_ranks:
        lines = "\n  ".join(
            f"{name}, on ranks {pair[0]} and {pair[1]}" for name, pair in sorted(differing_ranks.items())[:20]
        )
        raise ValueError(
            f"{len(differing_ranks)} values are not the same on all ranks, and a checkpoint holds one of each:\n  {lines}\n"
            f"Wrap what is each rank's own into checkpoint.PerRank(value), or give it a name of its own on each rank."
        )


def _digest(value: Any) -> bytes:
    """Return a digest of 8 bytes of a value; no bytes for sharded tensors and unknown classes."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        flat_tensor = cast(torch.Tensor, value).detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        chunks = [f"{value.dtype} {value.shape}".encode(), flat_tensor.view(torch.uint8).numpy().tobytes()]
    elif is_plain(value) or isinstance(value, bytearray):
        chunks = [repr(value).encode()]
    elif isinstance(value, Enum):
        chunks = [value.name.encode()]
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        chunks = [f"{value.dtype} {value.shape}".encode(), value.tobytes()]
    elif isinstance(value, list | tuple):
        chunks = [*map(_digest, cast("list[Any]", value))]
    elif isinstance(value, set | frozenset):
        chunks = sorted(map(_digest, cast("set[Any]", value)))
    elif isinstance(value, Mapping):
        chunks = sorted(repr(key).encode() + _digest(item) for key, item in cast(Mapping[Any, Any], value).items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        chunks = [_digest(getattr(value, field.name)) for field in dataclasses.fields(value)]
    else:
        return b""
    return hashlib.blake2b(b"".join(len(item).to_bytes(8, "little") + item for item in chunks), digest_size=8).digest()
