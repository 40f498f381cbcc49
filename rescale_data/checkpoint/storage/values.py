"""Plain values in a checkpoint: read without running code; a save warns of values that cannot be read so.

    a file of torch.save ──► records (``records.py``) ──► values, by the makers that are listed here

No constructor of torch or NumPy sees an argument that was not checked: dtypes are made of their code alone, arrays and tensors
of bytes whose number is right. A class that ``torch.serialization.add_safe_globals`` was given is called with such values.
"""

from __future__ import annotations

import io
import logging
import mmap
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from enum import EnumType
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch

from rescale_data.checkpoint.storage import numpy_records
from rescale_data.checkpoint.storage.records import (
    Record,
    RecordUnpickler,
    UnknownClassError,
    allowed_by_user,
    checked,
    counts,
    dtype_of,
)
from rescale_data.checkpoint.tree import leaves

_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_LEAVES = (*_PLAIN, bytearray)
_warned: set[str] = set()
_log = logging.getLogger("rescale_data")


class Memory(mmap.mmap):
    """The bytes of a file of ``torch.save``, which the tensors in it share."""

    def seekable(self) -> bool:
        return True

    @classmethod
    def empty(cls, size: int) -> Memory:
        """Return room for ``size`` bytes, of this process alone: pages that may be shared take longer."""
        return cls(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    @classmethod
    def of(cls, content: bytes) -> Memory:
        """Return a copy of ``content``."""
        memory = cls.empty(len(content))
        memory[: len(content)] = content
        return memory

    @classmethod
    def of_file(cls, path: str) -> Memory:
        """Return the mapped file at ``path``, which is read where it is used."""
        with open(path, "rb") as stream:
            return cls(stream.fileno(), 0, access=mmap.ACCESS_COPY)


def load_safely(memory: Memory) -> Any:
    """Read what ``torch.save`` wrote without running code. Its tensors are not copied.

    Raises:
        ValueError: the file is damaged or in the format before torch 1.6, or a value in it could run code.
    """
    try:
        return _Archive(memory).value()
    except UnknownClassError as error:
        name = str(error)
        raise ValueError(
            f"it holds {name}, which could run code; if it is a class of yours, allow it by "
            f"torch.serialization.add_safe_globals([{name.rpartition('.')[2]}])"
        ) from error
    except Exception as error:  # what a changed byte makes of a pickle is not to be foreseen
        raise ValueError(f"it is damaged, or no file of torch.save: {type(error).__name__}: {error}") from error


class _Storage(NamedTuple):
    """The bytes that tensors share, and the dtype of their elements; None where each tensor says it."""

    content: torch.UntypedStorage
    dtype: torch.dtype | None


class _Archive:
    """A file of ``torch.save``: a zip archive with a pickle and a record for each storage."""

    def __init__(self, memory: Memory) -> None:
        with zipfile.ZipFile(cast("IO[bytes]", memory)) as archive:
            self._records = {info.filename: info for info in archive.infolist()}
            name = next(name for name in self._records if name.split("/")[1:] == ["data.pkl"])
            self._folder = name.removesuffix("data.pkl")
            self._pickle = archive.read(self._stored(name))
            if (order := f"{self._folder}byteorder") in self._records and archive.read(self._stored(order)) == b"big":
                raise ValueError("it was written on a machine with big-endian numbers")
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._storages: dict[tuple[str, str], _Storage] = {}

    def value(self) -> Any:
        """Return the value in the pickle."""
        allowed = allowed_by_user()

        def is_known(name: str) -> bool:
            return name in _MAKERS or name in _NAMES or name in allowed or dtype_of(name) is not None

        return _Builder(allowed)(RecordUnpickler(self._pickle, is_known, self._storage).load())

    def _stored(self, name: str) -> zipfile.ZipInfo:
        info = self._records[name]
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError(f"its record {name} is compressed")
        return info

    def _storage(self, pid: Any) -> _Storage:
        """Return the storage that ``("storage", class, key, device, number of elements)`` names."""
        kind, cls, key, _, count = pid
        dtype = _STORAGES[cls.stands_for]
        if kind != "storage" or type(count) is not int or count < 0:
            raise ValueError(f"{pid!r} is no storage")
        if (known := self._storages.get((key, cls.stands_for))) is not None:
            return known
        info = self._stored(f"{self._folder}data/{key}")
        size = count * (dtype or torch.uint8).itemsize
        if size != info.file_size:
            raise ValueError(f"{size} bytes of a storage, and its record has {info.file_size}")
        start = info.header_offset + 30  # a local header without the name and the extra field, whose lengths end it
        lengths = self._bytes[start - 4 : start].tolist()
        start += lengths[0] + 256 * lengths[1] + lengths[2] + 256 * lengths[3]
        if start + size > len(self._bytes):
            raise ValueError(f"its record {info.filename} is cut")
        content: Any = self._bytes.untyped_storage()[start : start + size] if size else torch.UntypedStorage(0)
        return self._storages.setdefault((key, cls.stands_for), _Storage(content, dtype))


class _Builder:
    """Makes values of records, each once, so that what was one object is one object again."""

    def __init__(self, allowed: Mapping[str, Any]) -> None:
        self._allowed = allowed
        self._done: dict[int, tuple[Any, Any]] = {}  # with the record, so that no other gets its id

    def __call__(self, value: Any) -> Any:
        if type(value) in _LEAVES:
            return value
        if id(value) not in self._done:
            self.done(value, self._made(value))
        return self._done[id(value)][1]

    def done(self, record: Any, value: Any) -> Any:
        """Note that ``value`` is what ``record`` becomes; a container before its content, which may hold it."""
        self._done[id(record)] = record, value
        return value

    def each(self, values: Iterable[Any]) -> list[Any]:
        """Return the values of several records."""
        return [self(value) for value in values]

    def _made(self, value: Any) -> Any:
        if isinstance(value, Record):
            maker = _MAKERS.get(value.stands_for)
            return maker(self, value) if maker else self._of_user(value)
        if isinstance(value, type):
            return self._global(cast(type[Record], value).stands_for)
        if type(value) in (tuple, set, frozenset):
            return type(value)(self.each(value))
        self.done(value, value)
        if type(value) is list:
            value[:] = self.each(value)
        elif type(value) is dict:
            items = [(self(key), self(inner)) for key, inner in value.items()]
            value.clear()
            value.update(items)
        else:
            raise ValueError(f"a {type(value).__name__} is no value")
        return value

    def _global(self, name: str) -> Any:
        if (dtype := dtype_of(name)) is not None:
            return dtype
        if name in self._allowed:
            return self._allowed[name]
        raise UnknownClassError(name)

    def _of_user(self, record: Record) -> Any:
        """Make an object of a class that the user has allowed, as ``pickle`` does."""
        cls, args = self._global(record.stands_for), self.each(record.args)
        made: Any = self.done(record, cls(*args) if record.called else cls.__new__(cls, *args))
        if record.state is None:
            return made
        state = self(record.state)
        if hasattr(made, "__setstate__"):
            made.__setstate__(state)
            return made
        plain, slots = state if isinstance(state, tuple) else (state, None)
        for name, inner in {**(plain or {}), **(slots or {})}.items():
            object.__setattr__(made, name, inner)
        return made


def _dict(build: _Builder, record: Record) -> Any:
    made = build.done(
        record, {"OrderedDict": OrderedDict, "Counter": Counter}[type(record).__name__](*build.each(record.args))
    )
    made.update((build(key), build(value)) for key, value in record.items)
    if record.state is not None:
        vars(made).update(build(record.state))  # torch notes versions of modules there
    return made


def _plain(make: Callable[..., Any], *kinds: tuple[type, ...]) -> Callable[[_Builder, Record], Any]:
    """Return a maker that calls ``make`` with arguments of exactly one of these lists of types."""

    def maker(build: _Builder, record: Record) -> Any:
        args = build.each(record.args)
        if tuple(map(type, args)) not in kinds:
            raise ValueError(f"{record.stands_for} of {args!r}")
        return make(*args)

    return maker


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError(f"bytes in {encoding!r}")
    return text.encode(encoding)


def _tensor(build: _Builder, record: Record) -> torch.Tensor:
    """Make a tensor of (storage, offset, size, stride, requires_grad, hooks[, dtype][, metadata])."""
    storage, start, size, stride, grad, _, *rest = record.args
    if not isinstance(storage, _Storage):
        raise ValueError(f"a tensor of {storage!r}")
    given = cast(torch.dtype, build(rest.pop(0))) if record.stands_for.endswith("v3") else storage.dtype
    dtype = given if isinstance(given, torch.dtype) else torch.uint8
    metadata = build(rest[0]) if rest else None
    if metadata and set(metadata) - {"conj", "neg"}:
        raise ValueError(f"a tensor with {metadata!r}")
    (first,), sizes, strides = counts((start,)), counts(build(size)), counts(build(stride))
    last = first + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    if 0 not in sizes and (last + 1) * dtype.itemsize > len(storage.content):
        raise ValueError(f"a tensor of shape {list(sizes)} in {len(storage.content)} bytes")
    made = torch.empty(0, dtype=dtype, device="cpu").set_(storage.content, first, sizes, strides)  # type: ignore[call-overload]
    if metadata and metadata.get("conj"):
        made = made.conj()
    if metadata and metadata.get("neg"):
        raise ValueError("a negated view")
    return made.requires_grad_() if grad is True else made


def _parameter(build: _Builder, record: Record) -> torch.nn.Parameter:
    data, grad, _ = record.args
    return torch.nn.Parameter(checked(build(data), torch.Tensor), requires_grad=grad is True)


def _with_attributes(build: _Builder, record: Record) -> torch.Tensor:
    """Make a tensor of (function, class, arguments, attributes)."""
    function, cls, args, state = record.args
    if cls.stands_for not in _NAMES:
        raise UnknownClassError(cls.stands_for)
    made = checked(_MAKERS[function.stands_for](build, function(*args)), torch.Tensor)
    vars(made).update(build(state))
    return made


def _on_cpu(build: _Builder, record: Record) -> torch.Tensor:
    return checked(build(record.args[0]), torch.Tensor)


def _member(build: _Builder, record: Record) -> Any:
    """Make the member of an enum that the user has allowed, of (class, name), as Python 3.11.0 to 3.11.3 write it."""
    enum, name = build.each(record.args)
    if not isinstance(enum, EnumType) or name not in enum.__members__:
        raise UnknownClassError(record.stands_for)
    return enum.__members__[name]


_STORAGES: dict[str, torch.dtype | None] = {
    "torch.storage.UntypedStorage": None,
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
}
_NAMES = {*_STORAGES, "torch.Tensor", "torch.nn.parameter.Parameter", "numpy.ndarray"}
_MAKERS: dict[str, Callable[[Any, Record], Any]] = {
    "builtins.getattr": _member,
    "builtins.set": lambda build, record: set(build(record.args[0]) if record.args else ()),
    "builtins.bytes": _plain(bytes, ()),
    "builtins.bytearray": _plain(lambda *content: bytearray(*content[:1]), (), (bytes,)),
    "builtins.complex": _plain(complex, (float, float)),
    "_codecs.encode": _plain(_latin1, (str, str)),
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    "torch.Size": lambda build, record: torch.Size(counts(build(record.args[0]))),
    "torch.device": _plain(torch.device, (str,), (str, int)),
    "torch.serialization._get_layout": _plain({str(torch.strided): torch.strided}.__getitem__, (str,)),
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _on_cpu,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    **numpy_records.MAKERS,
}


def warn_of_refused(plain: Mapping[str, Any]) -> None:
    """Warn, once for each name, of values that a load would refuse: a run finds that out when it must go on."""
    for path, value in leaves(plain):
        if (name := ".".join(path)) not in _warned and not isinstance(value, torch.Tensor) and not _loads(value):
            _warned.add(name)
            _log.warning(
                "%s is a %s, which no load takes: it could run code. Save numbers, strings, tensors and "
                "arrays in its place, or allow its class by torch.serialization.add_safe_globals.", name, type(value).__name__,
            )  # fmt: skip


def _loads(value: Any) -> bool:
    if is_plain(value) or (type(value) is np.ndarray and value.dtype.kind in "biufc"):
        return True
    content = io.BytesIO()
    try:
        torch.save(value, content)
        load_safely(Memory.of(content.getvalue()))
    except Exception:
        return False
    return True


def is_plain(value: Any) -> bool:
    """True for None, a number, a text, bytes, and lists and tuples of these."""
    return type(value) in _PLAIN or (type(value) in (tuple, list) and all(map(is_plain, cast("list[Any]", value))))
