"""`Guard`: what becomes of an error in a function of the user's or in reading a row, and where its sample came from."""

from __future__ import annotations

import logging
from typing import Any, Literal, NoReturn, TypeAlias

from rescale_data.nodes.base import Node

OnError: TypeAlias = Literal["raise", "skip"]

_LOGGED_IN_FULL = 10
_log = logging.getLogger("rescale_data")


class Guard:
    """Raises an error with the place of its sample, or logs it.

    Args:
        node: The node that called the function.
        on_error: "raise", or "skip" to leave out the sample. Then `caught` returns and the node counts.
        note: What was done with the sample, for the error's note; default: it was given to the node's function.
    """

    def __init__(self, node: Node[Any], on_error: OnError, note: str = "") -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error={on_error!r}: give 'raise', or 'skip' to leave out samples that raise.")
        self.skips = on_error == "skip"
        self._name = type(node).__name__
        self._note = note or f"in the function of {self._name}, given"

    def caught(self, error: Exception, where: str, num_before: int) -> None:
        """Raise ``error``, or log that its sample is left out.

        Args:
            where: What `Node.locate` says of the sample.
            num_before: How many this logical shard has left out before. The first few are logged, then ever fewer.
        """
        where = where or "a sample whose place is not known"
        if not self.skips:
            _raise(error, f"{self._note} {where}")
        number = num_before + 1
        if number <= _LOGGED_IN_FULL or not number & num_before:
            _log.warning(
                "%s left out %s (number %d of its logical shard): %s: %s",
                self._name, where, number, type(error).__name__, error,
            )  # fmt: skip


def add_place(error: Exception, node: str, where: str) -> None:
    """Note on an error of ``node`` in what a sample holds where that sample comes from, as far as that is known."""
    if where:
        error.add_note(f"in {node}, given {where}")


def _raise(error: Exception, note: str) -> NoReturn:
    if isinstance(error, StopIteration):  # it would end the epoch
        error = RuntimeError("it raised StopIteration")
    error.add_note(note)
    raise error
