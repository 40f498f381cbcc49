"""What it takes to run any logical shard anywhere: the user's pipeline and what the loader learned from its first shard."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from rescale_data.nodes.base import BaseNode, Node, as_node
from rescale_data.shard import Shard
from rescale_data.sources.source import Source
from rescale_data.state import Field, Ints

Pipeline: TypeAlias = Callable[[Shard], BaseNode[Any]]

SAMPLES, DEALT, FIRST_SLOT = 0, 1, 2  # columns of the table: two of the loader's own, then the slots of the pipeline
OWN_FIELDS = (Field(("samples",)), Field(("dealt",)))
STAMP = Field(("stamp",))
UNDEALT = -1
STRINGS = ("sources", "pipeline", "fields")
"""What `Schema` says in JSON, part of a state under these names."""


@dataclass(frozen=True)
class Recipe:
    """The pipelines of N logical shards, not yet built. Pickles where the pipeline does."""

    pipeline: Pipeline
    num_logical_shards: int
    seed: int
    repeat: bool
    verify: bool = False

    def build(self, shard: int) -> Node[Any]:
        """The root node of one logical shard."""
        try:
            return as_node(self.pipeline(Shard(shard, self.num_logical_shards, self.seed, self.repeat, self.verify)))
        except TypeError as error:
            error.add_note(f"while the pipeline of logical shard {shard} was built")
            raise


class Schema:
    """What holds for every logical shard of a pipeline: the columns of the table, the sources and the parameters.

    It is known before any data is read, from the pipeline of one shard, and asked from then on in place of
    that pipeline.
    """

    def __init__(self, root: Node[Any]) -> None:
        self.root = root
        self.fields = (*OWN_FIELDS, *root.fields)
        keys = [field.key for field in (*self.fields, STAMP)]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise TypeError(
                f"The pipeline's state has the paths {twice}, which the table of all logical shards uses itself or which "
                f"occur twice. Rename these fields of your node."
            )

    def fresh_table(self, num_logical_shards: int) -> Ints:
        """The positions of a run that has delivered nothing: ``int64[N, columns]``."""
        row = np.concatenate([[0, UNDEALT], np.array(self.root.initial(), dtype=np.int64)])
        return np.tile(row, (num_logical_shards, 1))

    def epoch_end(self, table: Ints) -> tuple[Ints, Ints] | None:
        """Samples left in the epoch and the slots at which the next begins, of all shards; `None` where it must be read."""
        return self.root.epoch_end(table[:, FIRST_SLOT:], np.arange(len(table), dtype=np.int64))

    def sources(self) -> dict[str, Source]:
        """The sources of the pipeline by the path of the node that reads each."""
        return {path_name(path): node.reads for path, node in self.root.walk() if node.reads is not None}

    def progress(self, table: Ints, shards: Ints) -> dict[str, float]:
        """What the given shards have drawn; values of several readers of one source add up."""
        total: dict[str, float] = {}
        for path, node in self.root.walk():
            rows = _slots_at(self.root, table[shards, FIRST_SLOT:], path)
            if rows is None:
                continue
            for key, value in node.progress(rows, shards, table[shards, SAMPLES]).items():
                merge = min if key.startswith("epoch_min/") else max if key.startswith("epoch_max/") else float.__add__
                total[key] = merge(total[key], float(value)) if key in total else float(value)
        return total

    @cached_property
    def sources_json(self) -> str:
        return _json({path: dict(source.manifest()) for path, source in self.sources().items()})

    @cached_property
    def pipeline_json(self) -> str:
        return _json(
            {path_name(path): {"node": type(node).__name__, **node.parameters()} for path, node in self.root.walk()}
        )

    @cached_property
    def fields_json(self) -> str:
        return _json({field.key: field.describe() for field in (*self.fields, STAMP)})


def _slots_at(root: Node[Any], rows: Ints, path: tuple[str, ...]) -> Ints | None:
    """The slots of the node at ``path``; `None` where it lives inside a foreign node."""
    try:
        return root.columns(rows, path)
    except KeyError:
        return None


def path_name(path: tuple[str, ...]) -> str:
    """A node's path in messages and JSON; the root of the pipeline has none of its own."""
    return ".".join(path) or "root"


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
