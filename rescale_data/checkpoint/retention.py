"""Rules that choose the checkpoints to keep, by step and metric, and the deletion of all others."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from rescale_data.checkpoint.storage.commit import Ownership
from rescale_data.checkpoint.storage.run_folder import RunFolder
from rescale_data.lease import RENEW_SECONDS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The rules of ``CheckpointManager`` for keeping checkpoints; the newest always stays, and nan is worse than any number.

    Raises:
        ValueError: a count that is no integer of at least 1, or a mode that is neither ``"min"`` nor ``"max"``.
    """

    keep_latest: int | None = 3
    keep_every: int | None = None
    keep_best: tuple[str, str, int] | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep_latest", self.keep_latest), ("keep_every", self.keep_every)):
            if value is not None and not _is_count(value):
                raise ValueError(f"{name}={value!r}: give an integer of at least 1, or None.")
        if self.keep_best is not None and not _is_best_rule(self.keep_best):
            raise ValueError(
                f'keep_best={self.keep_best!r}: give (metric, "min" or "max", integer of at least 1), or None.'
            )

    def select_steps_to_delete(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Return the steps that no rule keeps, oldest first, of checkpoints given as ``{step: metrics}``."""
        if self.keep_latest is None:
            return []
        steps = sorted(metrics)
        kept_steps = set(steps[-self.keep_latest :])
        if self.keep_best is not None:
            metric_name, mode, num_kept = self.keep_best
            kept_steps |= set(best_first(metrics, metric_name, mode)[:num_kept])
        if self.keep_every is not None:
            kept_steps |= {step for step in steps if step % self.keep_every == 0}
        return [step for step in steps if step not in kept_steps]

    def missing_metric_message(self, metrics: Mapping[int, Mapping[str, float]]) -> str:
        """Return an error message if checkpoints exist and none has the metric of ``keep_best``; else an empty text."""
        metric_names = {name for step_metrics in metrics.values() for name in step_metrics}
        if self.keep_best is None or not metrics or self.keep_best[0] in metric_names:
            return ""
        return (
            f"no checkpoint has the metric {self.keep_best[0]!r} of keep_best, so none is kept as the best; "
            f"they have {sorted(metric_names) or 'none'}"
        )


def best_first(metrics: Mapping[int, Mapping[str, float]], name: str, mode: str) -> list[int]:
    """Return the steps that have the metric, the best first; nan is worse than any number."""
    sign = 1.0 if mode == "min" else -1.0
    metric_scores = {step: sign * step_metrics[name] for step, step_metrics in metrics.items() if name in step_metrics}
    return sorted(metric_scores, key=lambda step: (math.isnan(metric_scores[step]), metric_scores[step], step))


def prune(owner: Ownership, folder: RunFolder, rules: Retention, saved_step: int, warned_topics: set[str]) -> None:
    """Delete the checkpoints that no rule keeps, except the step saved last; log errors and never raise.

    Args:
        warned_topics: The topics that were warned of already; new ones are added.
    """
    try:
        steps = owner.steps(folder.steps_with_folder())
        metrics = owner.metrics(steps) if rules.keep_best else {step: {} for step in steps}
        if (later_steps := sorted(step for step in metrics if step > saved_step)) and "later" not in warned_topics:
            warned_topics.add("later")
            logger.warning(_LATER_STEPS_MESSAGE, saved_step, folder.path, later_steps)
        steps_to_delete = rules.select_steps_to_delete(metrics)
        if steps_to_delete and (message := rules.missing_metric_message(metrics)) and "missing" not in warned_topics:
            warned_topics.add("missing")
            logger.warning("In %s %s. Give save() metrics of that name.", folder.path, message)
    except Exception as error:
        logger.warning(_NOT_DELETED_MESSAGE, folder.path, error)
        return
    for path, step in ((folder.checkpoint_path(step), step) for step in steps_to_delete if step != saved_step):
        try:
            if owner.delete(f"step-{step}") == "gone":
                logger.info("Deleted %s.", path)
        except Exception as error:  # one that cannot be deleted does not keep the others
            logger.warning(_NOT_DELETED_MESSAGE, path, error)
    owner.remove_obsolete()


def delete_steps(folder: RunFolder, steps: list[int], *, wait_for_holders: bool) -> dict[str, str]:
    """Delete steps of a run; return for each "deleted", "being read" or, if one look was not enough to know, "undecided".

    Args:
        wait_for_holders: Look twice, about a minute apart, at holders of other hosts.

    Raises:
        ValueError: Somebody saves to the run, or may do so.
    """
    owner = Ownership(folder.store, folder.path, wait=wait_for_holders)
    try:
        outcomes = {step: owner.delete(f"step-{step}") for step in steps}
        while wait_for_holders and "undecided" in outcomes.values():
            time.sleep(RENEW_SECONDS)
            outcomes |= {step: owner.delete(f"step-{step}") for step, state in outcomes.items() if state == "undecided"}
    finally:
        owner.close()
    state_words = {"gone": "deleted", "alive": "being read", "undecided": "undecided"}
    return {str(step): state_words[state] for step, state in outcomes.items()}


_NOT_DELETED_MESSAGE = "%s: what no rule keeps was not deleted; the next save tries again: %s"
_LATER_STEPS_MESSAGE = (
    "Step %s was saved, and %s holds the later steps %s: load_latest loads the last of them. Delete them if the run went back "
    "to an earlier step, or go on in another folder."
)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_best_rule(value: object) -> bool:
    rule = cast("tuple[object, ...]", value) if isinstance(value, tuple | list) else ()
    return len(rule) == 3 and isinstance(rule[0], str) and rule[1] in ("min", "max") and _is_count(rule[2])
