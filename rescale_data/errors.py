"""The exceptions of this package, and `checks_argument_types`, which checks arguments by the function's annotations."""

from __future__ import annotations

import functools
import operator
import os
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar, get_type_hints

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])


AcceptedTypes: TypeAlias = tuple[tuple[type, ...], str]
"""The classes of the values that are accepted for an argument, the usual one first, and what to give, for messages."""

_TYPES_OF_ANNOTATIONS: dict[str, AcceptedTypes] = {
    "int": ((int, np.integer), "an int"),
    "float": ((float, int, np.integer, np.floating), "a number"),
    "bool": ((bool, np.bool_), "True or False"),
    "str": ((str,), "a string"),
    "str | os.PathLike": ((str, os.PathLike), "a path"),
    "Mapping | None": ((Mapping,), "a dict"),
}


class DataStateError(ValueError):
    """Error raised if the state of a checkpoint does not fit the run that loads it, or if the data cannot continue.

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
    """Error raised if files of a checkpoint have changed since they were saved.

    Attributes:
        problems: One sentence a file.
    """

    def __init__(self, message: str, problems: list[str] | None = None) -> None:
        super().__init__(message)
        self.problems = problems or [message]


def to_picklable(error: Exception) -> Exception:
    """Return the error, or a `RuntimeError` with the same text if it cannot be sent to another process."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def checks_argument_types(function: F) -> F:
    """Decorator of a function or dataclass: checks the types of arguments that have simple annotations.

    ``TypeError`` with name, value and kind. NumPy's numbers and bools arrive as Python's own. What is declared as anything
    else, such as a choice of several kinds, is the function's own to check.
    """
    if isinstance(function, type):
        cls: Any = function
        cls.__init__ = checks_argument_types(cls.__init__)
        # Fields of a base class are annotated by names that its own module may import alone
        hints = get_type_hints(cls)
        cls.__init__.__annotations__ = {name: hints.get(name) for name in cls.__init__.__annotations__}
        return cls
    hints: dict[str, str] = function.__annotations__
    accepted_types = {name: kind for name, annotation in hints.items() if (kind := _accepted_types(str(annotation)))}
    parameter_names = function.__code__.co_varnames[: function.__code__.co_argcount]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        positional = [_checked(accepted_types, name, value) for name, value in zip(parameter_names, args, strict=False)]
        keywords = {name: _checked(accepted_types, name, value) for name, value in kwargs.items()}
        return function(*positional, *args[len(positional) :], **keywords)

    return call  # type: ignore[return-value]


def _accepted_types(annotation: str) -> AcceptedTypes | None:
    """Return the accepted types of an annotation, given as text; `None` if the annotation is not simple."""
    annotation_text, previous_text = annotation, ""
    while previous_text != annotation_text:
        previous_text, annotation_text = annotation_text, re.sub(r"\[[^][]*\]", "", annotation_text)
    without_none = annotation_text.removesuffix(" | None")
    accepted = _TYPES_OF_ANNOTATIONS.get(annotation_text) or _TYPES_OF_ANNOTATIONS.get(without_none)
    if accepted is None or without_none == annotation_text:
        return accepted
    return (*accepted[0], type(None)), accepted[1]


def _checked(accepted_types: Mapping[str, AcceptedTypes], name: str, value: Any) -> Any:
    classes, type_description = accepted_types.get(name) or ((type(value),), "")
    if type(value) is classes[0]:
        return value
    is_bool = isinstance(value, bool | np.bool_) and classes[0] is not bool
    require_type(() if is_bool else classes, type_description, **{name: value})
    return value.item() if isinstance(value, np.generic) else value


def require_int(**values: object) -> list[int]:
    """Return the arguments as Python ints, also if NumPy integers were given; ``TypeError`` if one is no integer."""
    for name, value in values.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give an int.")
    return [operator.index(value) for value in values.values()]  # type: ignore[arg-type]


def require_type(classes: type | tuple[type, ...], type_description: str, **arguments: object) -> None:
    """Raise ``TypeError`` if an argument is of none of these classes; ``type_description`` says what to give."""
    for name, value in arguments.items():
        if not isinstance(value, classes):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give {type_description}.")


def require_callable(**arguments: object) -> None:
    """Raise ``TypeError`` if an argument is neither a function nor None."""
    for name, value in arguments.items():
        if value is not None and not callable(value):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}: give a function, or leave it out.")
