"""`Recipe`: all that runs a logical shard in any process; and the first columns of a row of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rescale_data.nodes.base import BaseNode, Node
from rescale_data.nodes.foreign import as_node, refuse_ranks
from rescale_data.shard import Shard
from rescale_data.state import Field

Pipeline: TypeAlias = Callable[[Shard], BaseNode[Any]]

History: TypeAlias = list[tuple[int, Mapping[str, Any]]]
Histories: TypeAlias = Mapping[str, History]
"""Of what a source consists, ``(epoch, manifest)`` by the epoch from which that holds; by the path of its reader. By that of
a packer, what form its samples had (`rescale_data.nodes.form.History`)."""

SAMPLES, DEALT, FIRST_SLOT = 0, 1, 2  # columns of the table: two of the loader's own, then the slots of the pipeline
OWN_FIELDS = (Field(("samples",), limits=(0, 2**62)), Field(("remainder",), limits=(-2, 2**62)))
STAMP = Field(("stamp",))
MOST_STAMPED = 1 << 62
"""No stamp of a row, `samples` times N and the shard, is as large."""
UNDEALT, ENDED = -1, -2
"""In DEALT: nothing is dealt; the last batch of the epoch was taken, and the rows begin the next."""


@dataclass(frozen=True)
class Recipe:
    """The pipelines of N logical shards, not yet built. Pickles where the pipeline does."""

    pipeline: Pipeline
    num_logical_shards: int
    seed: int
    repeat: bool
    verify: bool = False
    global_batch_size: int = 1

    def build(self, shard: int) -> Node[Any]:
        """The root node of one logical shard."""
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
    """``ValueError`` where one node stands at two places or in two pipelines: it has one position."""
    seen: dict[int, tuple[str, ...]] = {}
    for path, node in root.walk():
        if (first := seen.setdefault(id(node), path)) is not path:
            raise ValueError(
                f"One {type(node).__name__} stands at two places of the pipeline, {path_name(first)} and {path_name(path)}, "
                f"and a node has one position. Make one for each: rd.Reader(source, shard), again."
            )
        if node.is_built:
            raise ValueError(
                f"The pipeline returned a {type(node).__name__} ({path_name(path)}) that an earlier call had returned, and a "
                f"node has one position. Make all nodes anew in each call, without a cache; sources may be shared."
            )
        node.is_built = True


def _refuse_others(root: Node[Any], given: Shard) -> None:
    """``ValueError`` where a node reads another logical shard than it should: rows would come twice, or never."""
    for path, node in root.walk():
        of = node.of_shard
        if of is not None and (of.index, of.num_logical_shards) != (given.index, given.num_logical_shards):
            raise ValueError(
                f"{type(node).__name__} ({path_name(path)}) reads logical shard {of.index} of {of.num_logical_shards} in the "
                f"pipeline of {given.index} of {given.num_logical_shards}: rows would come twice, or never. Give it the shard "
                f"that the pipeline is called with: rd.Reader(source, shard)."
            )


def path_name(path: tuple[str, ...]) -> str:
    """A node's path in messages and JSON; the root of the pipeline has none of its own."""
    return ".".join(path) or "root"
