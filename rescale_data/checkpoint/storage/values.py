"""Read the plain values of a checkpoint without running code; at a save, warn about values that cannot be loaded.

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
    checked,
    checked_sizes,
    dtype_of,
    user_safe_globals,
)
from rescale_data.checkpoint.tree import iterate_leaves

_PLAIN_TYPES = (str, bytes, int, float, complex, bool, type(None))
_LEAF_TYPES = (*_PLAIN_TYPES, bytearray)
_warned: set[str] = set()
_log = logging.getLogger("rescale_data")


class Memory(mmap.mmap):
    """The bytes of a file of ``torch.save``, in memory that its tensors share."""

    def seekable(self) -> bool:
        return True

    @classmethod
    def empty(cls, num_bytes: int) -> Memory:
        """Return ``num_bytes`` bytes of memory (at least one) that is private to this process."""
        return cls(-1, max(1, num_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    @classmethod
    def from_bytes(cls, content: bytes) -> Memory:
        """Return new memory that holds a copy of ``content``."""
        memory = cls.empty(len(content))
        memory[: len(content)] = content
        return memory

    @classmethod
    def from_file(cls, path: str) -> Memory:
        """Return the memory-mapped file at ``path``, whose pages are read when they are used."""
        with open(path, "rb") as stream:
            return cls(stream.fileno(), 0, access=mmap.ACCESS_COPY)


def load_safely(memory: Memory) -> Any:
    """Return the value in the bytes of a ``torch.save`` file without running code. Its tensors are not copied.

    Raises:
        ValueError: the file is damaged or in the format before torch 1.6, or a value in it could run code.
    """
    try:
        return _Archive(memory).load_value()
    except UnknownClassError as error:
        class_name = str(error)
        raise ValueError(
            f"it holds {class_name}, which could run code; if it is a class of yours, allow it by "
            f"torch.serialization.add_safe_globals([{class_name.rpartition('.')[2]}])"
        ) from error
    except Exception as error:  # what a changed byte makes of a pickle is not to be foreseen
        raise ValueError(f"it is damaged, or no file of torch.save: {type(error).__name__}: {error}") from error


class _Storage(NamedTuple):
    """The bytes that tensors share, and the dtype of their elements (None if each tensor gives its own)."""

    content: torch.UntypedStorage
    dtype: torch.dtype | None


class _Archive:
    """A file of ``torch.save``: a zip archive with a pickle and a record for each storage."""

    def __init__(self, memory: Memory) -> None:
        with zipfile.ZipFile(cast("IO[bytes]", memory)) as archive:
            self._zip_infos = {zip_info.filename: zip_info for zip_info in archive.infolist()}
            data_name = next(data_name for data_name in self._zip_infos if data_name.split("/")[1:] == ["data.pkl"])
            self._prefix = data_name.removesuffix("data.pkl")
            self._pickle = archive.read(self._member(data_name))
            if (order := f"{self._prefix}byteorder") in self._zip_infos and archive.read(self._member(order)) == b"big":
                raise ValueError("it was written on a machine with big-endian numbers")
        self._raw_tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._storages: dict[tuple[str, str], _Storage] = {}

    def load_value(self) -> Any:
        """Return the value stored in the archive."""
        allowed_types = user_safe_globals()

        def is_known_class(name: str) -> bool:
            return name in _CONSTRUCTORS or name in _CLASS_NAMES or name in allowed_types or dtype_of(name) is not None

        return _Builder(allowed_types)(RecordUnpickler(self._pickle, is_known_class, self._storage).load())

    def _member(self, name: str) -> zipfile.ZipInfo:
        zip_info = self._zip_infos[name]
        if zip_info.compress_type != zipfile.ZIP_STORED or zip_info.compress_size != zip_info.file_size:
            raise ValueError(f"its record {name} is compressed")
        return zip_info

    def _storage(self, pid: Any) -> _Storage:
        """Return the storage for a reference ``("storage", class, key, device, number of elements)``."""
        reference_kind, cls, key, _, num_elements = pid
        dtype = _DTYPE_BY_STORAGE[cls.pickled_name]
        if reference_kind != "storage" or type(num_elements) is not int or num_elements < 0:
            raise ValueError(f"{pid!r} is no storage")
        if (storage := self._storages.get((key, cls.pickled_name))) is not None:
            return storage
        zip_info = self._member(f"{self._prefix}data/{key}")
        nbytes = num_elements * (dtype or torch.uint8).itemsize
        if nbytes != zip_info.file_size:
            raise ValueError(f"{nbytes} bytes of a storage, and its record has {zip_info.file_size}")
        start = zip_info.header_offset + 30  # a local header without the name and the extra field, whose lengths end it
        length_bytes = self._raw_tensor[start - 4 : start].tolist()
        start += length_bytes[0] + 256 * length_bytes[1] + length_bytes[2] + 256 * length_bytes[3]
        if start + nbytes > len(self._raw_tensor):
            raise ValueError(f"its record {zip_info.filename} is cut")
        content: Any = self._raw_tensor.untyped_storage()[start : start + nbytes] if nbytes else torch.UntypedStorage(0)
        return self._storages.setdefault((key, cls.pickled_name), _Storage(content, dtype))


class _Builder:
    """Builds values from records, each record once, so that shared objects are shared again."""

    def __init__(self, allowed_classes: Mapping[str, Any]) -> None:
        self._allowed_classes = allowed_classes
        self._built_by_id: dict[int, tuple[Any, Any]] = {}  # with the record, so that no other gets its id

    def __call__(self, value: Any) -> Any:
        if type(value) in _LEAF_TYPES:
            return value
        if id(value) not in self._built_by_id:
            self.register(value, self._build(value))
        return self._built_by_id[id(value)][1]

    def register(self, record: Any, value: Any) -> Any:
        """Register the value built from a record; a container before its items, which may refer to it."""
        self._built_by_id[id(record)] = record, value
        return value

    def build_all(self, values: Iterable[Any]) -> list[Any]:
        """Return the values built from several pickle records."""
        return [self(value) for value in values]

    def _build(self, value: Any) -> Any:
        if isinstance(value, Record):
            constructor = _CONSTRUCTORS.get(value.pickled_name)
            return constructor(self, value) if constructor else self._build_user_object(value)
        if isinstance(value, type):
            return self._resolve_global(cast(type[Record], value).pickled_name)
        if type(value) in (tuple, set, frozenset):
            return type(value)(self.build_all(value))
        self.register(value, value)
        if type(value) is list:
            value[:] = self.build_all(value)
        elif type(value) is dict:
            built_items = [(self(key), self(inner)) for key, inner in value.items()]
            value.clear()
            value.update(built_items)
        else:
            raise ValueError(f"a {type(value).__name__} is no value")
        return value

    def _resolve_global(self, name: str) -> Any:
        if (dtype := dtype_of(name)) is not None:
            return dtype
        if name in self._allowed_classes:
            return self._allowed_classes[name]
        raise UnknownClassError(name)

    def _build_user_object(self, record: Record) -> Any:
        """Build an object of a class that the user has allowed, as ``pickle`` does."""
        cls, args = self._resolve_global(record.pickled_name), self.build_all(record.args)
        instance: Any = self.register(record, cls(*args) if record.constructor_called else cls.__new__(cls, *args))
        if record.state is None:
            return instance
        state = self(record.state)
        if hasattr(instance, "__setstate__"):
            instance.__setstate__(state)
            return instance
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        for name, inner in {**(attributes or {}), **(slots or {})}.items():
            object.__setattr__(instance, name, inner)
        return instance


def _build_dict(build: _Builder, record: Record) -> Any:
    mapping = build.register(
        record, {"OrderedDict": OrderedDict, "Counter": Counter}[type(record).__name__](*build.build_all(record.args))
    )
    mapping.update((build(key), build(value)) for key, value in record.items)
    if record.state is not None:
        vars(mapping).update(build(record.state))  # torch notes versions of modules there
    return mapping


def _checked_call(make_value: Callable[..., Any], *valid_types: tuple[type, ...]) -> Callable[[_Builder, Record], Any]:
    """Return a constructor that calls ``make_value`` with arguments whose types are one of the given lists of types."""

    def constructor(build: _Builder, record: Record) -> Any:
        args = build.build_all(record.args)
        if tuple(map(type, args)) not in valid_types:
            raise ValueError(f"{record.pickled_name} of {args!r}")
        return make_value(*args)

    return constructor


def _encode_latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError(f"bytes in {encoding!r}")
    return text.encode(encoding)


def _build_tensor(build: _Builder, record: Record) -> torch.Tensor:
    """Build a tensor from (storage, offset, size, stride, requires_grad, hooks[, dtype][, metadata])."""
    storage, start, size, stride, requires_grad, _, *extra_args = record.args
    if not isinstance(storage, _Storage):
        raise ValueError(f"a tensor of {storage!r}")
    stored_dtype = cast(torch.dtype, build(extra_args.pop(0))) if record.pickled_name.endswith("v3") else storage.dtype
    dtype = stored_dtype if isinstance(stored_dtype, torch.dtype) else torch.uint8
    metadata = build(extra_args[0]) if extra_args else None
    if metadata and set(metadata) - {"conj", "neg"}:
        raise ValueError(f"a tensor with {metadata!r}")
    (offset,), sizes, strides = checked_sizes((start,)), checked_sizes(build(size)), checked_sizes(build(stride))
    last_element = offset + sum((length - 1) * step for length, step in zip(sizes, strides, strict=True))
    if 0 not in sizes and (last_element + 1) * dtype.itemsize > len(storage.content):
        raise ValueError(f"a tensor of shape {list(sizes)} in {len(storage.content)} bytes")
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage.content, offset, sizes, strides)  # type: ignore[call-overload]
    if metadata and metadata.get("conj"):
        tensor = tensor.conj()
    if metadata and metadata.get("neg"):
        tensor = -tensor  # of its bytes, a copy
    return tensor.requires_grad_() if requires_grad is True else tensor


def _build_parameter(build: _Builder, record: Record) -> torch.nn.Parameter:
    tensor_record, requires_grad, _ = record.args
    return torch.nn.Parameter(checked(build(tensor_record), torch.Tensor), requires_grad=requires_grad is True)


def _build_tensor_with_attributes(build: _Builder, record: Record) -> torch.Tensor:
    """Build a tensor with attributes from (function, class, arguments, attributes)."""
    function, cls, args, state = record.args
    if cls.pickled_name not in _CLASS_NAMES:
        raise UnknownClassError(cls.pickled_name)
    tensor = checked(_CONSTRUCTORS[function.pickled_name](build, function(*args)), torch.Tensor)
    vars(tensor).update(build(state))
    return tensor


def _build_cpu_tensor(build: _Builder, record: Record) -> torch.Tensor:
    return checked(build(record.args[0]), torch.Tensor)


def _build_enum_member(build: _Builder, record: Record) -> Any:
    """Return the member of an enum that the user has allowed, from (class, name), as Python 3.11.0 to 3.11.3 write it."""
    enum_class, member_name = build.build_all(record.args)
    if not isinstance(enum_class, EnumType) or member_name not in enum_class.__members__:
        raise UnknownClassError(record.pickled_name)
    return enum_class.__members__[member_name]


_DTYPE_BY_STORAGE: dict[str, torch.dtype | None] = {
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
_CLASS_NAMES = {*_DTYPE_BY_STORAGE, "torch.Tensor", "torch.nn.parameter.Parameter", "numpy.ndarray"}
_CONSTRUCTORS: dict[str, Callable[[Any, Record], Any]] = {
    "builtins.getattr": _build_enum_member,
    "builtins.set": lambda build, record: set(build(record.args[0]) if record.args else ()),
    "builtins.frozenset": lambda build, record: frozenset(build(record.args[0]) if record.args else ()),
    "builtins.bytes": _checked_call(bytes, ()),
    "builtins.bytearray": _checked_call(lambda *content: bytearray(*content[:1]), (), (bytes,)),
    "builtins.complex": _checked_call(complex, (float, float)),
    "_codecs.encode": _checked_call(_encode_latin1, (str, str)),
    "collections.OrderedDict": _build_dict,
    "collections.Counter": _build_dict,
    "torch.Size": lambda build, record: torch.Size(checked_sizes(build(record.args[0]))),
    "torch.device": _checked_call(torch.device, (str,), (str, int)),
    "torch.serialization._get_layout": _checked_call({str(torch.strided): torch.strided}.__getitem__, (str,)),
    "torch._utils._rebuild_tensor_v2": _build_tensor,
    "torch._utils._rebuild_tensor_v3": _build_tensor,
    "torch._utils._rebuild_parameter": _build_parameter,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _build_cpu_tensor,
    "torch._tensor._rebuild_from_type_v2": _build_tensor_with_attributes,
    **numpy_records.CONSTRUCTORS,
}


def warn_of_unloadable(state_dict: Mapping[str, Any]) -> None:
    """Warn, once for each name, of values that a load would refuse because they could run code."""
    for path, value in iterate_leaves(state_dict):
        if (name := ".".join(path)) not in _warned and not isinstance(value, torch.Tensor) and not _is_loadable(value):
            _warned.add(name)
            _log.warning(
                "%s is a %s, which no load takes: it could run code. Save numbers, strings, tensors and "
                "arrays in its place, or allow its class by torch.serialization.add_safe_globals.", name, type(value).__name__,
            )  # fmt: skip


def _is_loadable(value: Any) -> bool:
    if is_plain(value) or (type(value) is np.ndarray and value.dtype.kind in "biufc"):
        return True
    file_buffer = io.BytesIO()
    try:
        torch.save(value, file_buffer)
        load_safely(Memory.from_bytes(file_buffer.getvalue()))
    except Exception:
        return False
    return True


def is_plain(value: Any) -> bool:
    """True for None, numbers, strings, bytes, and lists and tuples of such values."""
    return type(value) in _PLAIN_TYPES or (
        type(value) in (tuple, list) and all(map(is_plain, cast("list[Any]", value)))
    )
