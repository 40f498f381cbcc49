"""Read untrusted pickles into records: nothing that a pickle names is imported, and no code in it runs."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")


class UnknownClassError(ValueError):
    """Error raised because a pickle names a class or function that is not allowed."""


class RecordType(type):
    """Metaclass of record classes; their attributes are read-only, even if a pickle tries to set them."""

    pickled_name: str

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"{name} of {cls.__name__} is set")


class Record(metaclass=RecordType):
    """An object of a pickle as plain data: its constructor's arguments, its state and its items.

    Attributes:
        pickled_name: The name of the class in the pickle.
        constructor_called: True if the class was called, False if the object was made without its constructor.
    """

    __slots__ = ("args", "constructor_called", "items", "state")
    pickled_name = ""
    args: tuple[Any, ...]
    constructor_called: bool
    items: list[tuple[Any, Any]]
    state: Any

    def __new__(cls, *args: Any) -> Record:
        record = super().__new__(cls)
        record.args, record.constructor_called, record.items, record.state = args, False, [], None
        return record

    def __init__(self, *_: Any) -> None:
        self.constructor_called = True

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))


class RecordUnpickler(pickle.Unpickler):
    """Unpickler that makes a `Record` of each object in place of importing its class.

    Args:
        is_known_class: True for a name (``module.qualname``) that may occur; any other is an `UnknownClassError`.
        load_storage: Returns the storage for a reference in the pickle.
    """

    def __init__(
        self, content: bytes, is_known_class: Callable[[str], bool], load_storage: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(io.BytesIO(content))
        self._is_known_class, self._load_storage = is_known_class, load_storage

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        qualified_name = f"{'builtins' if module_name == '__builtin__' else module_name}.{global_name}"
        if not self._is_known_class(qualified_name):
            raise UnknownClassError(qualified_name)
        return _record_class(qualified_name)

    def persistent_load(self, pid: Any) -> Any:
        if self._load_storage is None:
            raise ValueError(f"a reference to {pid!r}")
        return self._load_storage(pid)


@functools.cache
def _record_class(name: str) -> Any:
    return RecordType(name.rpartition(".")[2], (Record,), {"__slots__": (), "pickled_name": name})


def user_safe_globals() -> dict[str, Any]:
    """Return the classes and functions given to ``torch.serialization.add_safe_globals``, by name."""
    allowed = [entry if isinstance(entry, tuple) else (entry, "") for entry in torch.serialization.get_safe_globals()]
    return {name or f"{entry.__module__}.{entry.__qualname__}": entry for entry, name in allowed}


def checked_sizes(values: Any) -> tuple[int, ...]:
    """Return sizes or strides as a tuple; raise ``ValueError`` unless all are integers of at least 0."""
    if not isinstance(values, tuple | list) or not all(type(n) is int and n >= 0 for n in cast("list[Any]", values)):
        raise ValueError(f"{values!r} are no sizes")
    return tuple(cast("list[int]", values))


def checked(value: Any, expected_type: type[T]) -> T:
    """Return ``value`` if it is an instance of ``expected_type``; raise ``ValueError`` for any other."""
    if not isinstance(value, expected_type):
        raise ValueError(f"{value!r} in place of a {expected_type.__name__}")
    return value


def dtype_of(name: str) -> torch.dtype | None:
    """Return torch's dtype of this name (``torch.float32``), or None."""
    dtype = vars(torch).get(name.removeprefix("torch.")) if name.startswith("torch.") else None
    return dtype if isinstance(dtype, torch.dtype) else None
