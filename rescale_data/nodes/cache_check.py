"""`CacheCheck`: warns if samples that a node makes in advance do not fit the cache, and so are made repeatedly."""

from __future__ import annotations

import logging
from typing import Any

from rescale_data.nodes.base import Node
from rescale_data.sources.decoded.cache import cache, num_processes, owner_id
from rescale_data.sources.decoded.cache_demand import served_shards

_DROPS_BEFORE_WARNING = 2  # drops at which it warns: one drop may be a cleared cache or a large fragment
_log = logging.getLogger("rescale_data")
_warned_keys: set[tuple[str, int]] = set()


class CacheCheck:
    """Warns once if the cache cannot keep the samples that a node makes in advance in each logical shard, or evicts them.

    Args:
        node: The node.
        argument_name: Name of the node's argument that sets how many samples are made at a time.
        num_samples: The value of that argument.
    """

    __slots__ = ("_argument", "_is_size_checked", "_node", "_num_evictions", "_num_samples")

    def __init__(self, node: Node[Any], argument_name: str, num_samples: int) -> None:
        self._node, self._argument, self._num_samples = node, argument_name, num_samples
        self._is_size_checked, self._num_evictions = False, 0

    def warn_if_full(self, nbytes: int, num_samples: int, *, was_evicted: bool) -> None:
        """Warn once if the cache is too small for a full window of samples in each shard, or evicts samples.

        The size is checked when the full number of samples has been made for the first time.

        Args:
            nbytes: Bytes of all samples that were made now.
            num_samples: Number of these samples.
            was_evicted: True if they were made before, and the cache evicted them.
        """
        self._num_evictions += was_evicted
        is_evicting = was_evicted and self._num_evictions >= _DROPS_BEFORE_WARNING
        if not is_evicting and (self._is_size_checked or num_samples < self._num_samples):
            return
        self._is_size_checked, num_shards = True, self._num_shards()
        num_bytes = nbytes * self._num_samples // max(1, num_samples) * num_shards
        if is_evicting or num_bytes > cache().budget:
            self._warn(num_bytes, num_shards)

    def warn_if_too_small(self, sample_bytes: int, num_shards: int, num_workers: int) -> None:
        """Warn once if the cache is too small for the samples of all shards of a process, before any is made.

        Args:
            sample_bytes: Bytes of each sample.
            num_shards: Number of logical shards of each process that makes samples.
            num_workers: Number of worker processes, which will share the cache with this process.
        """
        num_bytes = sample_bytes * self._num_samples * num_shards
        if num_bytes > cache().budget // (1 + num_workers):
            self._warn(num_bytes, num_shards, 1 + num_workers)

    def _num_shards(self) -> int:
        """Return the largest number of logical shards of this process that read one source of the node."""
        sources = [(node.reads, node.of_shard) for _, node in self._node.walk() if node.reads is not None]
        shards_per_source = [
            len(served_shards(owner_id(source), 1 if shard is None else shard.num_logical_shards))
            for source, shard in sources
        ]
        return max(shards_per_source, default=1)

    def _warn(self, num_bytes: int, num_shards: int, num_new_parts: int = 1) -> None:
        key, budget = (type(self._node).__name__, self._num_samples), cache().budget // num_new_parts
        if key in _warned_keys:
            return
        _warned_keys.add(key)
        num_fitting = max(1, self._num_samples * (budget // 2) // max(num_bytes, budget // 2 + 1))
        _log.warning(
            "%s(%s=%d): what is made ahead does not fit the cache, and is made again at each draw. For the %d logical shards "
            "of this process it takes about %d bytes, and half of its part of cache_bytes, %d, is for all such nodes. "
            "Give %s=%d, a source with cache_bytes=%d, or run fewer shards in a rank (more ranks).",
            *key[:1], self._argument, self._num_samples, num_shards, num_bytes, budget, self._argument, num_fitting,
            2 * max(num_bytes, budget) * num_processes() * num_new_parts,
        )  # fmt: skip
