"""The exceptions of our own, and the check of arguments that are counts."""

import operator
from collections.abc import Mapping

import numpy as np


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
    """Files of a checkpoint are not those that were saved.

    Attributes:
        problems: One sentence a file.
    """

    def __init__(self, message: str, problems: list[str] | None = None) -> None:
        super().__init__(message)
        self.problems = problems or [message]


def require_int(**values: object) -> list[int]:
    """Arguments by name as Python's own ints, also where NumPy's were given; ``TypeError`` where one is no int."""
    for name, value in values.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give an int.")
    return [operator.index(value) for value in values.values()]  # type: ignore[arg-type]


def int_or_none(**values: object) -> list[int | None]:
    """`require_int` of arguments that may be left out."""
    return [None if value is None else require_int(**{name: value})[0] for name, value in values.items()]


def require_bool(**values: object) -> None:
    """``TypeError`` where an argument, by name, is no bool."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give True or False.")


def require_mappings(**given: object) -> None:
    """``TypeError`` where an argument, by name, is not a dict or the like."""
    for name, value in given.items():
        if not isinstance(value, Mapping):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give a dict.")


def require_callable(**given: object) -> None:
    """``TypeError`` of what is given and is no function."""
    for name, value in given.items():
        if value is not None and not callable(value):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}: give a function, or leave it out.")
