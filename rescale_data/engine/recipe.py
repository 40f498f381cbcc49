"""`Recipe`: all that a process needs to build the pipelines of logical shards; and the first columns of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakSet

from rescale_data.nodes.base import BaseNode, Node
from rescale_data.nodes.foreign import as_node, refuse_ranks
from rescale_data.shard import Shard
from rescale_data.state import Field

_built: WeakSet[Node[Any]] = WeakSet()
"""The nodes that a loader has: no other loader may take them."""

Pipeline: TypeAlias = Callable[[Shard], BaseNode[Any]]

History: TypeAlias = list[tuple[int, Mapping[str, Any]]]
Histories: TypeAlias = Mapping[str, History]
"""The data of each source, by the path of its reader: ``(epoch, manifest)`` for each epoch from which a manifest holds. By the
path of a packer, the forms that its samples had (`rescale_data.nodes.form.History`)."""

SAMPLES, DEALT, FIRST_SLOT = 0, 1, 2  # columns of the table: two of the loader's own, then the slots of the pipeline
OWN_FIELDS = (Field(("samples",), limits=(0, 2**62)), Field(("remainder",), limits=(-2, 2**62)))
STAMP = Field(("stamp",))
MOST_STAMPED = 1 << 62
"""The stamp of a row, ``samples * N + shard``, is always less than this."""
UNDEALT, ENDED = -1, -2
"""Values in the column DEALT. `UNDEALT`: no remainder is redistributed. `ENDED`: the last batch of the epoch was consumed, and
the rows begin the next epoch."""


@dataclass(frozen=True)
class Recipe:
    """The pipelines of N logical shards, not yet built. It pickles if the pipeline does."""

    pipeline: Pipeline
    num_logical_shards: int
    seed: int
    repeat: bool
    verify: bool = False
    global_batch_size: int = 1

    def build(self, shard: int) -> Node[Any]:
        """Return the root node of one logical shard."""
        try:
            given = Shard(shard, self.num_logical_shards, self.seed, self.repeat, self.verify, self.global_batch_size)
            root = as_node(self.pipeline(given))
            refuse_ranks(root, given)
            _refuse_twice(root)
            _refuse_others(root, given)
            return root
        except TypeError as error:
            error.add_note(f"while the pipeline of logical shard {shard} was built")
            raise


def _refuse_twice(root: Node[Any]) -> None:
    """Raise ``ValueError`` if one node stands at two places or in two pipelines: a node has one position."""
    seen: dict[int, tuple[str, ...]] = {}
    for path, node in root.walk():
        if (first := seen.setdefault(id(node), path)) is not path:
            raise ValueError(
                f"One {type(node).__name__} stands at two places of the pipeline, {path_name(first)} and {path_name(path)}, "
                f"and a node has one position. Make one for each: rd.Reader(source, shard), again."
            )
        if node in _built:
            raise ValueError(
                f"The pipeline returned a {type(node).__name__} ({path_name(path)}) that an earlier call had returned, and a "
                f"node has one position. Make all nodes anew in each call, without a cache; sources may be shared."
            )
        _built.add(node)


def _refuse_others(root: Node[Any], given: Shard) -> None:
    """Raise ``ValueError`` if a node reads the wrong logical shard: rows would come twice, or never."""
    for path, node in root.walk():
        of = node.of_shard
        if of is not None and (of.index, of.num_logical_shards) != (given.index, given.num_logical_shards):
            raise ValueError(
                f"{type(node).__name__} ({path_name(path)}) reads logical shard {of.index} of {of.num_logical_shards} in the "
                f"pipeline of {given.index} of {given.num_logical_shards}: rows would come twice, or never. Give it the shard "
                f"that the pipeline is called with: rd.Reader(source, shard)."
            )


def path_name(path: tuple[str, ...]) -> str:
    """Return the path of a node as text, for messages and JSON; the root of the pipeline is called ``root``."""
    return ".".join(path) or "root"
