"""The one exception class of our own."""


class DataStateError(ValueError):
    """The state of a checkpoint and the run that loads it do not fit, or the data cannot go on.

    The message says what was given, what is allowed, and the cure.
    """
