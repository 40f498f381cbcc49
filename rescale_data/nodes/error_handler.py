"""`ErrorHandler`: handles an error in a user's function or in reading a row, and adds the sample's source and row to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, NoReturn, TypeAlias

from rescale_data.nodes.base import Node

OnError: TypeAlias = Literal["raise", "skip"] | Callable[[Exception, str], Any]
"""The way to handle a sample whose function raises, or a row that cannot be read. "raise" raises the error with the place of
the row. "skip" leaves the sample out, unless the error is one of the program (`PROGRAM_ERRORS`). A function receives the error
and the place: it raises, returns a value to use in place of the result, or returns `None` to leave the sample out."""

PROGRAM_ERRORS = (NameError, AttributeError, ImportError, NotImplementedError, SyntaxError, MemoryError)
"""Errors of the program, not of the data: because of them "skip" would leave out every sample."""

_NUM_SKIPS_ALL_LOGGED = 10
_log = logging.getLogger("rescale_data")


class ErrorHandler:
    """Handles the error of one sample: raises it with the sample's source and row, or logs it and skips the sample.

    Args:
        node_class: Class of the node that called the function.
        on_error: See `OnError`.
        note: Words for the error's note, before the place of the sample. Default: the sample was given to the node's function.
        faults: Errors that "skip" raises in addition to `PROGRAM_ERRORS`.
    """

    __slots__ = ("_always_raised_types", "_name", "_note", "_on_error", "skips")

    def __init__(
        self, node_class: type[Node[Any]], on_error: OnError, note: str = "", faults: tuple[type[Exception], ...] = ()
    ) -> None:
        if on_error not in ("raise", "skip") and not callable(on_error):
            raise ValueError(
                f"on_error={on_error!r}: give 'raise', 'skip' to leave out samples that raise, or a function of the error and "
                f"the place of the sample, which decides."
            )
        self._on_error, self._always_raised_types = on_error, (*PROGRAM_ERRORS, *faults)
        self.skips = on_error != "raise"
        self._name = node_class.__name__
        self._note = note or f"in the function of {self._name}, given"

    def handle_error(self, error: Exception, location: str, skip_count: int) -> Any:
        """Raise ``error``, or return the value to use in place of the failed result; `None` skips the sample.

        `None` means that the sample is left out; the node then counts it.

        Args:
            error: The error that was caught.
            location: The place of the sample, from `Node.locate`.
            skip_count: Number of samples that this logical shard left out before. The first few are logged, then ever fewer.
        """
        location = location or "a sample whose place is not known"
        if not self.skips or (self._on_error == "skip" and isinstance(error, self._always_raised_types)):
            _raise_with_note(error, f"{self._note} {location}")
        replacement = self._on_error(error, location) if callable(self._on_error) else None
        if replacement is not None:
            return replacement
        skip_number = skip_count + 1
        if skip_number <= _NUM_SKIPS_ALL_LOGGED or not skip_number & skip_count:
            _log.warning(
                "%s left out %s (number %d of its logical shard): %s: %s",
                self._name, location, skip_number, type(error).__name__, error,
            )  # fmt: skip
        return None


def error_handler(
    node: Node[Any], on_error: OnError, note: str = "", faults: tuple[type[Exception], ...] = ()
) -> ErrorHandler:
    """Return the `ErrorHandler` that raises or skips the errors of a node's samples.

    Nodes of one class that raise all errors, and add the same note to them, share a handler.
    """
    if on_error == "raise":
        return _shared_handler(type(node), "raise", note)
    return ErrorHandler(type(node), on_error, note, faults)


_shared_handler = lru_cache(maxsize=64)(ErrorHandler)


def describe(sample: object) -> str:
    """Describe a sample that lacks a column, for error messages: its keys, or its type."""
    return f"the keys {list(sample)}" if isinstance(sample, Mapping) else f"a {type(sample).__name__}"


def add_location_note(error: Exception, node_name: str, location: str) -> None:
    """Add a note with the sample's source and row to an error; do nothing if these are not known.

    Args:
        error: An error in the content of the sample.
        node_name: Name of the node that raised it.
        location: The place, from `Node.locate`.
    """
    if location:
        error.add_note(f"in {node_name}, given {location}")


def _raise_with_note(error: Exception, note: str) -> NoReturn:
    if isinstance(error, StopIteration):  # it would end the epoch
        error = RuntimeError("it raised StopIteration")
    error.add_note(note)
    raise error
