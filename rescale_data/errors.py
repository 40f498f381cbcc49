"""The exceptions of our own, and the check of arguments that are counts."""

import numpy as np


class DataStateError(ValueError):
    """The state of a checkpoint and the run that loads it do not fit, or the data cannot go on.

    The message says what was given, what is allowed, and the cure.
    """


class DamagedCheckpointError(ValueError):
    """Files of a checkpoint are not those that were saved.

    Attributes:
        problems: One sentence a file.
    """

    def __init__(self, message: str, problems: list[str] | None = None) -> None:
        super().__init__(message)
        self.problems = problems or [message]


def require_int(**values: object) -> None:
    """``TypeError`` where an argument, by name, is no int."""
    for name, value in values.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give an int.")


def require_bool(**values: object) -> None:
    """``TypeError`` where an argument, by name, is no bool."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give True or False.")
