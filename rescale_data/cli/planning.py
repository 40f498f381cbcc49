"""The command ``plan``: numbers of ranks that keep the order of a run's global batches, as plain values."""

from __future__ import annotations

from typing import Any

from rescale_data.layout.plan import Plan, plan


def fit_ranks(
    global_batch_size: int, rank_counts: list[int], gpus: int | None, gpus_per_rank: int, num_logical_shards: int | None
) -> dict[str, Any]:
    """Return, for each number of ranks, if it is allowed and keeps the order, and which micro batches and workers fit.

    Args:
        rank_counts: Numbers of data-parallel ranks; none of them, and no ``gpus``: all that keep the order.
        gpus: GPUs that are alive; the largest number of ranks that they can hold is looked for.
        gpus_per_rank: GPUs a data-parallel rank.

    Raises:
        ValueError: a number below 1, too few GPUs for one rank, or ``gpus`` where no number of ranks keeps the order.
    """
    options = plan(global_batch_size, num_logical_shards=num_logical_shards)
    aligned_rank_counts = sorted({option.dp_world_size for option in options})
    for value in rank_counts:
        if value < 1:
            raise ValueError(f"{value} ranks: give at least 1.")
    if gpus is not None and not aligned_rank_counts:
        raise ValueError(
            f"No number of ranks keeps the order with {global_batch_size} samples a global batch and "
            f"{options.num_logical_shards} logical shards: one has to be a multiple of the other."
        )
    best_fit = None if gpus is None else _find_largest_fit(aligned_rank_counts, gpus, gpus_per_rank)
    requested_rank_counts = [*rank_counts, *([] if best_fit is None else [best_fit["ranks"]])] or aligned_rank_counts
    return {
        "global_batch_size": global_batch_size,
        "num_logical_shards": options.num_logical_shards,
        "ranks": [
            _describe_ranks(options, aligned_rank_counts, num_ranks)
            for num_ranks in dict.fromkeys(requested_rank_counts)
        ],
        "largest": best_fit,
    }


def _find_largest_fit(aligned_rank_counts: list[int], gpus: int, model_parallel: int) -> dict[str, int]:
    fitting = [num_ranks for num_ranks in aligned_rank_counts if num_ranks * model_parallel <= gpus]
    if not fitting:
        raise ValueError(f"{gpus} GPUs hold no data-parallel rank of {model_parallel} GPUs.")
    return {"gpus": gpus, "model_parallel": model_parallel, "ranks": fitting[-1], "used": fitting[-1] * model_parallel}


def _describe_ranks(plan: Plan, aligned_rank_counts: list[int], num_ranks: int) -> dict[str, Any]:
    options = [option for option in plan if option.dp_world_size == num_ranks]
    sizes = sorted({option.micro_batch_size for option in options})
    workers_by_size = {size: {o.num_workers for o in options if o.micro_batch_size == size} for size in sizes}
    fewer_ranks = [n for n in aligned_rank_counts if n < num_ranks]
    more_ranks = [n for n in aligned_rank_counts if n > num_ranks]
    return {
        "ranks": num_ranks,
        # As `Layout` does
        "allowed": plan.global_batch_sizes[0] % num_ranks == 0 and plan.num_logical_shards >= num_ranks,
        "keeps_order": bool(options),
        "micro_batches": sizes,
        "workers": sorted(set.intersection(*workers_by_size.values())) if options else [],
        "nearest": [] if options else [*fewer_ranks[-1:], *more_ranks[:1]],
    }
