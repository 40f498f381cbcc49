"""`Recipe`: arguments from which any process builds a logical shard's pipeline; and the table columns before the nodes' own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rescale_data.nodes.base import BaseNode, Node, record_loader
from rescale_data.nodes.foreign import as_node, refuse_rank_readers
from rescale_data.shard import Shard
from rescale_data.state import Field

Pipeline: TypeAlias = Callable[[Shard], BaseNode[Any]]

VersionLog: TypeAlias = list[tuple[int, Mapping[str, Any]]]
VersionLogs: TypeAlias = Mapping[str, VersionLog]
"""The manifests (descriptions of the data) of each source, by the path of its reader: ``(first epoch, manifest)`` pairs.

By the path of a packer, the formats that its samples had (`rescale_data.nodes.sample_format.ParameterHistory`)."""

# Columns of the table: two of the loader's own, then the slots of the pipeline
SAMPLES, REMAINDER_COLUMN, FIRST_SLOT = (0, 1, 2)
LOADER_FIELDS = (Field(("samples",), limits=(0, 2**62)), Field(("remainder",), limits=(-2, 2**62)))
STAMP = Field(("stamp",))
STAMP_LIMIT = 1 << 62
"""The exclusive upper bound of the stamp of a table row, ``samples * N + shard``."""
NO_REMAINDER, EPOCH_ENDED = -1, -2
"""Special values in the table column REMAINDER, which else counts the samples to redistribute.

`NO_REMAINDER`: no remainder is redistributed. `EPOCH_ENDED`: the last batch of the epoch was consumed, and the rows begin
the next epoch."""


@dataclass(frozen=True)
class Recipe:
    """The pipeline function and the arguments from which any process builds the nodes of a logical shard; it can be pickled."""

    pipeline: Pipeline
    num_logical_shards: int
    seed: int
    repeat: bool
    verify: bool = False
    global_batch_size: int = 1

    def build(self, index: int) -> Node[Any]:
        """Return the root node of a newly built pipeline of one logical shard."""
        try:
            shard = Shard(index, self.num_logical_shards, self.seed, self.repeat, self.verify, self.global_batch_size)
            root = as_node(self.pipeline(shard))
            refuse_rank_readers(root, shard)
            _require_unique_nodes(root)
            _require_own_shard(root, shard)
            return root
        except TypeError as error:
            error.add_note(f"while the pipeline of logical shard {index} was built")
            raise


def _require_unique_nodes(root: Node[Any]) -> None:
    """Raise ``ValueError`` if one node occurs twice in the pipeline, or was returned by an earlier call."""
    paths: dict[int, tuple[str, ...]] = {}
    for path, node in root.walk():
        first_path = paths.setdefault(id(node), path)
        if not record_loader(node):
            reuse = (
                f"stands at {path_name(first_path)}, too" if first_path is not path else "an earlier call had returned"
            )
            raise ValueError(
                f"The pipeline has a {type(node).__name__} ({path_name(path)}) that {reuse}, and a node has one position. Make "
                f"one for each place, anew in each call and without a cache: rd.Reader(source, shard); sources may be shared."
            )


def _require_own_shard(root: Node[Any], shard: Shard) -> None:
    """Raise ``ValueError`` if a node reads another logical shard than the one that the pipeline is built for."""
    for path, node in root.walk():
        actual = node.of_shard
        if actual is not None and (actual.index, actual.num_logical_shards) != (shard.index, shard.num_logical_shards):
            raise ValueError(
                f"{type(node).__name__} ({path_name(path)}) reads logical shard {actual.index} of "
                f"{actual.num_logical_shards} in the pipeline of {shard.index} of {shard.num_logical_shards}: rows would "
                f"come twice, or never. Give it the shard that the pipeline is called with: rd.Reader(source, shard)."
            )


def path_name(path: tuple[str, ...]) -> str:
    """Return the path of a node as dotted text, for messages and JSON; the root is called ``root``."""
    return ".".join(path) or "root"
