"""Checks the arguments of a loader, and makes its `LoaderSetup`: the pipeline, its schema, the layout and the ranks."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from rescale_data.engine.balance import Balance
from rescale_data.engine.options import Options
from rescale_data.engine.ranks.find_ranks import find_ranks
from rescale_data.engine.ranks.ranks import Ranks
from rescale_data.engine.recipe import Pipeline, Recipe, path_name
from rescale_data.engine.runner import ShardRunner
from rescale_data.engine.schema import Schema
from rescale_data.layout.layout import Layout, default_num_logical_shards
from rescale_data.nodes.abilities import ChecksCache, VerifiesRows
from rescale_data.nodes.below import find_shard
from rescale_data.nodes.reader import Reader
from rescale_data.sources.decoded.cache import cache, new_dict_by_owner, owner_id
from rescale_data.sources.decoded.cache_demand import warn_if_thrashing
from rescale_data.sources.source import Source
from rescale_data.state import Ints

_MIN_ROWS, _EVEN_ROWS = 8, 20  # rows a shard; from 20 on, an endless stream gives all rows equally often, within 5 %
_warned: dict[int, bool] = new_dict_by_owner()
_log = logging.getLogger("rescale_data")


@dataclass(frozen=True)
class LoaderSetup:
    """The checked arguments of a loader, with the recipe, schema, layout and ranks that follow from them.

    Args:
        runner: Draws samples in this process: for the feed, and apart from it to skip and to count.
    """

    options: Options
    recipe: Recipe
    schema: Schema
    layout: Layout
    ranks: Ranks
    runner: ShardRunner

    def is_short_tail(self, samples_left: Ints | None) -> bool:
        """True if an epoch is known to have less than one global batch left, which will be dropped."""
        if samples_left is None or self.options.tail == "pad":
            return False
        return int(samples_left.sum()) < self.layout.global_batch_size

    @cached_property
    def epoch_size_is_known(self) -> bool:
        """True if the number of samples in an epoch can be computed from the pipeline without reading data."""
        return self.schema.epoch_end(self.schema.fresh_table(self.layout.num_logical_shards)) is not None


def make_setup(pipeline: Pipeline, options: Options) -> LoaderSetup:
    """Return the setup of a loader, with defaults; raise if the loader cannot run (collective with a process group)."""
    o = options.global_batch_size
    ranks = find_ranks(options.mesh, options.dp_rank, options.dp_world_size, options.timeout)
    _require_reachable_ranks(options.balance, ranks)
    layout = Layout(
        num_logical_shards=_num_logical_shards(options, ranks),
        global_batch_size=o,
        dp_world_size=ranks.world_size,
        micro_batch_size=_micro_batch_size(options, ranks),
        num_workers=options.num_workers,
    )
    recipe = Recipe(pipeline, layout.num_logical_shards, options.seed, options.repeat, options.verify, o)
    schema = Schema(recipe.build(0))  # shard 0 on every rank, so that the schema is the same in any topology
    _check_memory(schema, layout)
    setup = LoaderSetup(options, recipe, schema, layout, ranks, ShardRunner(recipe, schema))
    _check_epoch(setup)
    _check_steps_per_epoch(setup)
    _check_sources(setup)
    _compare_shards(setup)
    _warn_if_rows_unverified(setup)
    compared_options = ("num_workers", "seed", "repeat", "tail", "verify", "steps_per_epoch")
    ranks = ranks.with_new_loader(
        {
            "global_batch_size": o,
            "micro_batch_size": layout.micro_batch_size,
            "num_logical_shards": layout.num_logical_shards,
            **{name: getattr(options, name) for name in compared_options},
            "pipeline": schema.pipeline_json,
            "sources": schema.sources_json,
            "balance": None if options.balance is None else options.balance.comparable_settings(),
            # If it is not known, ranks agree on the epoch's end by messages.
            "epoch_size_is_known": setup.recipe.repeat or setup.epoch_size_is_known,
        }
    )
    if layout.unaligned_reason is not None:
        ranks.warn(
            "Not aligned: %s. Nothing is lost or repeated, but the order depends on this topology.",
            layout.unaligned_reason,
        )
    if options.balance is not None and options.balance.over == "rank" and layout.gradient_accumulation_steps == 1:
        ranks.warn(
            "rd.Balance(over='rank') changes nothing: a rank has one micro batch a step. Give over='host' or 'all'."
        )
    return replace(setup, ranks=ranks)


def _require_reachable_ranks(balance: Balance | None, ranks: Ranks) -> None:
    """Raise ``ValueError`` if balanced steps need other ranks, but there is no process group to reach them."""
    if balance is not None and ranks.simulated and (balance.over != "rank" or balance.weight is not None):
        raise ValueError(
            f"rd.Balance(over={balance.over!r}) with dp_rank={ranks.rank} and dp_world_size={ranks.world_size}, but there is "
            f"no process group in which ranks exchange costs. Start it, or give over='rank' without weight=."
        )


def _check_steps_per_epoch(setup: LoaderSetup) -> None:
    """Raise ``ValueError`` if `steps_per_epoch` is out of range, or if the pipeline itself knows the size of its epoch."""
    steps_per_epoch = setup.options.steps_per_epoch
    if steps_per_epoch is None:
        return
    max_steps = sys.maxsize // setup.layout.gradient_accumulation_steps  # len() counts so many batches
    if not 1 <= steps_per_epoch <= max_steps:
        raise ValueError(f"steps_per_epoch={steps_per_epoch}: give 1 to {max_steps}, or leave it out for no end.")
    if not setup.recipe.repeat and setup.epoch_size_is_known:
        raise ValueError(
            f"steps_per_epoch={steps_per_epoch}, but the pipeline knows how many samples an epoch has. Leave it out, or give "
            f"repeat=True."
        )


def _micro_batch_size(options: Options, ranks: Ranks) -> int:
    """Return the micro batch size b; raise ``ValueError`` if it was not given and there are several ranks."""
    o, w = options.global_batch_size, ranks.world_size
    if options.micro_batch_size is None and w > 1 and options.shuffle is not False:
        raise ValueError(
            f"micro_batch_size is missing: {w} dp ranks share global_batch_size={o}. Give the samples of one batch that fit "
            f"into the memory of a rank; dp_world_size * micro_batch_size divides global_batch_size."
        )
    return max(1, o // w) if options.micro_batch_size is None else options.micro_batch_size


def _num_logical_shards(options: Options, ranks: Ranks) -> int:
    o = options.global_batch_size
    if options.num_logical_shards is not None:
        return options.num_logical_shards
    if options.shuffle is False:
        return o * max(options.num_workers, 1)
    default_shards = default_num_logical_shards(o)
    ranks.info(
        "num_logical_shards=%d (by default), fixed from here on for the whole run: name it if the global batch "
        "may change.",
        default_shards,
    )
    return default_shards


def _check_memory(schema: Schema, layout: Layout) -> None:
    """Raise ``ValueError`` if the table of positions and its copies do not fit into the memory of this machine."""
    n, memory_bytes = layout.num_logical_shards, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    table_bytes = n * schema.fresh_table(1).nbytes
    if 4 * table_bytes > memory_bytes:
        raise ValueError(
            f"num_logical_shards={n}: their positions take {table_bytes / 1e9:.0f} GB in each rank and checkpoint, and this "
            f"machine has {memory_bytes / 1e9:.0f} GB. Give a small multiple of global_batch_size={layout.global_batch_size}."
        )


def _check_epoch(setup: LoaderSetup) -> None:
    """Raise ``ValueError`` if an epoch has less than one global batch, or if ranks could not agree on its end."""
    if setup.recipe.repeat:
        return
    for source in setup.schema.sources().values():
        source.require_saveable()  # the end of an epoch is read twice
    epoch_end = setup.schema.epoch_end(setup.schema.fresh_table(setup.layout.num_logical_shards))
    if epoch_end is None and setup.ranks.simulated:
        raise ValueError(
            f"repeat=False with a pipeline whose number of samples is not known (it packs or filters) needs a process group, "
            f"in which the ranks agree on the end of the epoch; dp_rank={setup.ranks.rank} and dp_world_size="
            f"{setup.ranks.world_size} were given without one. Start it, use repeat=True, or a single rank."
        )
    if epoch_end is not None and setup.is_short_tail(epoch_end[0]):
        raise ValueError(
            f"An epoch has {int(epoch_end[0].sum())} samples, less than one global batch of {setup.layout.global_batch_size}, "
            f"so tail='drop' would drop them all. Use a smaller global_batch_size, tail='pad', repeat=True or more data."
        )


def _warn_if_rows_unverified(setup: LoaderSetup) -> None:
    """Warn if `verify` cannot prove an epoch, because some rows are not read by a `Reader`."""
    leaf_nodes = {path: node for path, node in setup.schema.root.walk() if len([*node.walk()]) == 1}
    unproved = [path_name(path) for path, node in leaf_nodes.items() if not isinstance(node, VerifiesRows)]
    if setup.recipe.verify and unproved:
        setup.ranks.warn(
            "verify=True proves nothing of the rows of %s: only an rd.Reader keeps a digest of what it reads.", unproved
        )


def _check_sources(setup: LoaderSetup) -> None:
    """Warn if sources are small, or if the cache is too small for what shards read in turn and for samples that nodes keep."""
    layout, sources = setup.layout, setup.schema.sources()
    readers = [node for _, node in setup.schema.root.walk() if isinstance(node, Reader)]
    _warn_of_small_sources(readers)
    num_owned_shards = len(layout.owned_shards(setup.ranks.rank))
    sources_in_global_batch_order = [reader.source for reader in readers if reader.rows.global_batch_order]
    # shards that read a source in step all read the same fragment at the same time
    other_sources = {id(source): source for source in sources.values() if source not in sources_in_global_batch_order}
    plan_bytes = sum(reader.rows.plan_bytes for reader in readers)
    warn_if_thrashing(other_sources.values(), num_owned_shards, plan_bytes, num_workers=layout.num_workers)
    for source in sources.values():
        if isinstance(source, Source) and source.fragment_bytes:
            cache().register(source)  # as its first read would
    for _, node in setup.schema.root.walk():
        if isinstance(node, ChecksCache):
            node.check_cache(-(-num_owned_shards // layout.workers_per_rank), layout.num_workers)


def _compare_shards(setup: LoaderSetup) -> None:
    """Raise if logical shards begin in different states; warn if each opens its own sources."""
    layout, sources = setup.layout, setup.schema.sources()
    if layout.num_logical_shards < 2:
        return
    if find_shard(setup.schema.root) is None:
        setup.ranks.warn(
            "No node of the pipeline says which logical shard it reads: unless your own nodes make use of shard.index, each "
            "of the %d logical shards yields all of the data. Read it with rd.Reader(source, shard), or set `of_shard` in your "
            "node.",
            layout.num_logical_shards,
        )
    last_root = setup.recipe.build(layout.num_logical_shards - 1)
    setup.schema.require_same_state(last_root, layout.num_logical_shards - 1)
    last_sources = Schema(last_root).sources()
    if any(last_sources.get(path) is not source for path, source in sources.items()):
        setup.ranks.warn(
            "The pipeline makes a new source for each of %d logical shards, which reads every footer and caches every fragment "
            "anew. Make the source once, outside of the pipeline.",
            layout.num_logical_shards,
        )


def _warn_of_small_sources(readers: Iterable[Reader]) -> None:
    """Warn once about all sources that are small for N: a logical shard has few of their rows, or none in most epochs."""
    small = [node for node in readers if node.shard.repeat and _is_small(node) and owner_id(node.source) not in _warned]
    if not small:
        return
    _warned.update((owner_id(node.source), True) for node in small)
    smallest = min(small, key=lambda node: node.source.num_rows)
    name, num_rows, num_shards = smallest.source.name, smallest.source.num_rows, smallest.shard.num_logical_shards
    _log.warning(
        "%s has %d rows for %d logical shards, %.2f each: neighbours in a logical shard are few to shuffle, and where a shard "
        "has none in an epoch it goes on to the next. An endless stream (repeat=True) draws as much from a shard with %d rows "
        "as from one with %d. Give num_logical_shards=%d or less, more data, or repeat=False, where each epoch is whole.",
        name if len(small) == 1 else f"{name}, the smallest of {len(small)} small sources,", num_rows, num_shards,
        num_rows / num_shards, num_rows // num_shards, -(-num_rows // num_shards), max(1, num_rows // _EVEN_ROWS),
    )  # fmt: skip


def _is_small(reader: Reader) -> bool:
    num_rows, num_shards = reader.source.num_rows, reader.shard.num_logical_shards
    return num_rows < (_EVEN_ROWS if num_rows % num_shards else _MIN_ROWS) * num_shards
