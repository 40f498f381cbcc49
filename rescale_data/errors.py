"""The exceptions of our own, and the check of arguments by their kind: `checks_kinds` of what a function is declared with."""

from __future__ import annotations

import functools
import operator
import os
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])


class Kind(NamedTuple):
    """The kinds of value that an argument may have.

    Args:
        exact: Types of values that pass as they are.
        classes: Of all values that pass; those of NumPy become Python's own.
        words: What to give, for the message.
    """

    exact: frozenset[type]
    classes: tuple[type, ...]
    words: str


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int, np.integer), "an int"),
    "float": ((float, int, np.integer, np.floating), "a number"),
    "bool": ((bool, np.bool_), "True or False"),
    "str": ((str,), "a string"),
    "str | os.PathLike": ((str, os.PathLike), "a path"),
    "Mapping | None": ((Mapping,), "a dict"),
}


class DataStateError(ValueError):
    """The state of a checkpoint and the run that loads it do not fit, or the data cannot go on.

    The message says what was given, what is allowed, and the cure.

    Example:
        >>> import rescale_data as rd
        >>> loader = rd.DataLoader(range(8), global_batch_size=4, seed=1)
        >>> try:
        ...     loader.load_state_dict(rd.DataLoader(range(8), global_batch_size=4, seed=2).state_dict())
        ... except rd.DataStateError:
        ...     print("This is the state of another run.")
        This is the state of another run.
    """


class DamagedCheckpointError(ValueError):
    """Files of a checkpoint have changed since they were saved.

    Attributes:
        problems: One sentence a file.
    """

    def __init__(self, message: str, problems: list[str] | None = None) -> None:
        super().__init__(message)
        self.problems = problems or [message]


def picklable(error: Exception) -> Exception:
    """The error, or one with the same words that can be sent to another process."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def checks_kinds(function: F) -> F:
    """The same function or dataclass, which checks the kinds of its arguments by their annotations where these are simple.

    ``TypeError`` with name, value and kind. NumPy's numbers and bools arrive as Python's own. What is declared as anything
    else, such as a choice of several kinds, is the function's own to check.
    """
    if isinstance(function, type):
        made: Any = function
        made.__init__ = checks_kinds(made.__init__)
        return made
    given: dict[str, str] = function.__annotations__
    kinds = {name: kind for name, annotation in given.items() if (kind := _kind(str(annotation)))}
    names = function.__code__.co_varnames[: function.__code__.co_argcount]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = [_checked(kinds, name, value) for name, value in zip(names, args, strict=False)]
        named = {name: _checked(kinds, name, value) for name, value in kwargs.items()}
        return function(*first, *args[len(first) :], **named)

    return call  # type: ignore[return-value]


def _kind(annotation: str) -> Kind | None:
    """Return the `Kind` of an annotation as it is written; `None` where it is not simple."""
    plain, before = annotation, ""
    while before != plain:
        before, plain = plain, re.sub(r"\[[^][]*\]", "", plain)
    needed = plain.removesuffix(" | None")
    classes, words = _KINDS.get(plain) or _KINDS.get(needed) or ((), "")
    none = (type(None),) if needed != plain else ()
    return Kind(frozenset({classes[0], *none}), (*classes, *none), words) if classes else None


def _checked(kinds: Mapping[str, Kind], name: str, value: Any) -> Any:
    kind = kinds.get(name)
    if kind is None or type(value) in kind.exact:
        return value
    is_bool = isinstance(value, bool | np.bool_) and bool not in kind.exact
    require(() if is_bool else kind.classes, kind.words, **{name: value})
    return value.item() if isinstance(value, np.generic) else value


def require_int(**values: object) -> list[int]:
    """Arguments by name as Python's own ints, also where NumPy's were given; ``TypeError`` where one is no int."""
    for name, value in values.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give an int.")
    return [operator.index(value) for value in values.values()]  # type: ignore[arg-type]


def require(classes: type | tuple[type, ...], words: str, **given: object) -> None:
    """``TypeError`` where an argument, by name, is of none of these classes; ``words`` say what to give."""
    for name, value in given.items():
        if not isinstance(value, classes):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give {words}.")


def require_callable(**given: object) -> None:
    """``TypeError`` unless the argument is a function."""
    for name, value in given.items():
        if value is not None and not callable(value):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}: give a function, or leave it out.")
