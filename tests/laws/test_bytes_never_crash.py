"""Law 8, bytes: a pickle from anyone, made of whatever names a reader knows, is a ValueError or a right answer, never a crash.

Crossed: each name that may occur, as what is called, as an argument, as a state, with arguments that it knows, and others;
opcodes and bytes of good pickles, changed, left out and doubled. Each runs in a process of its own, since a crash ends it.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import pickle
import pickletools
import resource
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from rescale_data import checkpoint
from rescale_data.checkpoint.storage import metadata, values

ROOM = 2 << 30
MOST = 1 << 16  # elements of an array that is looked at
EXAMPLES = 500
STRUCTURE = [("a", "i4"), ("b", ">f8"), ("c", "U4"), ("d", "f4", (2, 2)), ("e", [("f", "S3")])]
GOOD: dict[str, Any] = {
    "objects": np.array([["a", 1], [None, 2.5]], object),
    "objects by columns": np.asfortranarray(np.array([["a", 1], [[2], {"b": 2.5}]], object)),
    "arrays within an array": np.array([np.zeros(()), np.ones(2), None], object),
    "a structure": np.array([(1, 2.5, "ä", np.ones((2, 2)), (b"x",))], STRUCTURE),
    "padded": np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "days": np.array(["2026-01-01"], "M8[D]"),
    "times": np.array([5], "m8[25s]"),
    "big-endian": np.arange(3, dtype=">i4"),
    "by columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "without rows": np.zeros((0, 3)),
    "without dimension": np.array(3.5),
    "text": np.array(["äb", ""]),
    "bytes": [b"", b"\xff", bytearray(b"x"), np.array([b"a"])],
    "numbers": (np.float32(2), np.int64(1), np.bool_(True), np.str_("a"), np.datetime64("2026-01-01"), 1j, 1 << 90),
    "random numbers": [np.random.RandomState(0).get_state(), np.random.default_rng(0).bit_generator.state],
    "dtypes": [np.dtype("f4"), np.dtype(STRUCTURE), torch.float32, torch.strided, torch.device("cpu"), torch.Size([2])],
    "containers": (
        collections.OrderedDict(a=1),
        collections.Counter("aab"),
        {1, 2},
        frozenset("ab"),
        {3: (1,), "none": []},
    ),
}
TENSOR = torch.arange(6.0).reshape(2, 3)
TENSORS: list[Any] = [
    (TENSOR, TENSOR.t(), TENSOR[1:], TENSOR[:0]),
    [torch.tensor(3), torch.ones(2, dtype=torch.uint16), torch.ones(2, dtype=torch.complex64).conj()],
    torch.nn.Parameter(TENSOR.clone()),
    torch.nn.BatchNorm1d(2).state_dict(),
]
NAMES = [np.dtype, np.ndarray, np.zeros(1).__reduce__()[0], np.float32().__reduce__()[0]]
NAMES += [torch._utils._rebuild_tensor_v2, torch._utils._rebuild_parameter, torch._tensor._rebuild_from_type_v2]
NAMES += [torch.Tensor, torch.nn.Parameter, torch.Size, torch.device, torch.float32, torch.FloatStorage]
NAMES += [collections.OrderedDict, collections.Counter, set, frozenset, bytes, bytearray, complex]


class Derived:
    """An object of a pickle that is none of a class."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


class Stored:
    """A storage that a pickle refers to."""

    def __init__(self, pid: Any) -> None:
        self.pid = pid


class Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, Stored) else None


def file_of(pickled: bytes) -> values.Memory:
    """A file of torch.save with this pickle, and one storage of 24 bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", bytes(range(24)))
    return values.Memory.from_bytes(file.getvalue())


def pickled(value: Any) -> bytes:
    """The pickle in a file of torch.save."""
    file = io.BytesIO()
    torch.save(value, file)
    return zipfile.ZipFile(file).read("archive/data.pkl")


CODES = st.sampled_from(["O", "O8", "f8", "i4", "U2", "S8", "V8", "V16", "M8", "m8"])
CODES |= st.sampled_from(["b1", "c16", "f16", "U0", "S0", "V0", "O4", "f4,O", "(2,)O", "T"])
INTS = st.sampled_from([0, 1, 2, 3, 6, -1, 8, 63, 1 << 20, 1 << 31, 1 << 40, 1 << 62, 1 << 70])
SHAPES = st.lists(INTS, max_size=3).map(tuple)
DATA = st.one_of(st.sampled_from([b"", b"\x41" * 8, b"\x41" * 16, b"\x41" * 32]), st.binary(max_size=24))
KEYS = st.sampled_from(["0", "1", 0, "../0"])
CLASSES = st.sampled_from([torch.FloatStorage, torch.LongStorage, torch.storage.UntypedStorage, torch.Tensor])
ATOMS = st.one_of(st.none(), st.booleans(), INTS, DATA, CODES, SHAPES, st.floats(), st.sampled_from(NAMES))


@st.composite
def dtypes(draw: Any, inner: Any) -> Any:
    """A dtype of any code and state; or one with a field, in place, of 16 bytes."""
    if draw(st.booleans()):
        field = draw(st.one_of(inner, st.builds(Derived, st.just(np.dtype), st.tuples(CODES))))
        return Derived(np.dtype, ("V16", False, True), (3, "|", None, ("a",), {"a": (field, 0)}, 16, 1, draw(INTS)))
    fields = draw(st.dictionaries(st.sampled_from("ab"), st.tuples(inner, INTS), max_size=2))
    unit = ({}, draw(st.tuples(st.sampled_from([b"s", b"D", b"ns", b"x", "s"]), INTS, INTS, INTS)))
    state = (
        *(draw(st.sampled_from([3, 4])), draw(st.sampled_from("<>|="))),
        draw(st.one_of(st.none(), st.tuples(inner, SHAPES))),
        draw(st.sampled_from([None, tuple(fields), ("a", "b"), ("a", "a")])),
        *(draw(st.sampled_from([None, fields])), draw(INTS), draw(INTS), draw(INTS)),
        *([unit] if draw(st.booleans()) else []),
    )
    return Derived(np.dtype, (draw(CODES), False, True), *([state] if draw(st.booleans()) else []))


def extended(inner: Any) -> Any:
    """Objects that hold others: of the forms that the readers know, and of any."""
    kinds = dtypes(inner)
    data = st.one_of(DATA, st.lists(inner, max_size=3))
    array = st.tuples(st.one_of(SHAPES, st.sampled_from([(), (1,), (2,), (0, 3)])), kinds, st.booleans(), data).map(
        lambda state: Derived(NAMES[2], (np.ndarray, (0,), b"b"), (1, *state))
    )
    scalar = st.tuples(kinds, data).map(lambda args: Derived(NAMES[3], args))
    storage = st.tuples(CLASSES, KEYS, INTS).map(lambda of: Stored(("storage", *of[:2], "cpu", of[2])))
    good = st.just(Stored(("storage", torch.FloatStorage, "0", "cpu", 6)))
    args = st.tuples(st.one_of(good, good, storage, inner), INTS, SHAPES, SHAPES, st.booleans(), inner)
    tensor = args.map(lambda args: Derived(torch._utils._rebuild_tensor_v2, args))
    anything = st.tuples(st.sampled_from(NAMES), st.lists(inner, max_size=3).map(tuple), inner).map(
        lambda of: Derived(*of)
    )
    return st.one_of(
        *(array, scalar, tensor, kinds, anything, storage),
        *(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(st.one_of(INTS, CODES), inner, max_size=2),
        ),
    )


OBJECTS = st.recursive(ATOMS, extended, max_leaves=12)
POINTERS = b"\x41" * 16
LIES: list[tuple[Any, tuple[Any, ...] | None, Any]] = [
    ("O8", (3, "|", None, None, None, -1, -1, 0), POINTERS),
    ("f8", (3, "<", None, None, None, -1, -1, 63), POINTERS),
    ("U2", (3, "<", None, None, None, 8, 4, 63), POINTERS),
    ("U2", (3, "<", None, None, None, -8, 4, 0), POINTERS),
    ("S8", (3, "|", None, None, None, 1 << 20, 1, 0), POINTERS),
    ("S8", (3, "|", (np.dtype("S8"), (1 << 40,)), None, None, 8, 1, 0), POINTERS),
    ("V8", (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0), POINTERS),
    ("O", None, ["a"]),
    ("O", None, POINTERS),
    ([("a", "O")], None, [("x",), ("y",)]),
]
"""Dtypes with states that deny what they are, and the data of two elements."""


def of_lie(code: Any, state: tuple[Any, ...] | None, data: Any) -> bytes:
    kind = Derived(np.dtype, (code, False, True), *([state] if state else []))
    return of_objects(Derived(NAMES[2], (np.ndarray, (0,), b"b"), (1, (2,), kind, False, data)))


def of_objects(value: Any) -> bytes:
    file = io.BytesIO()
    with contextlib.suppress(Exception):  # what pickle itself does not write
        Pickler(file, protocol=2).dump(value)
    return file.getvalue()


@st.composite
def changed(draw: Any, contents: list[bytes]) -> bytes:
    """A good pickle with opcodes replaced, left out, doubled or taken from another one, and bytes changed."""
    parts = [_opcodes(content) for content in contents]
    found = list(draw(st.sampled_from(parts)))
    for _ in range(draw(st.integers(1, 3))):
        at, other = draw(st.integers(0, len(found) - 1)), draw(st.sampled_from(parts))
        start = draw(st.integers(0, len(other) - 1))
        found[at : at + draw(st.integers(0, 2))] = other[start : start + draw(st.integers(0, 3))]
        found = found or [b"."]
    content = bytearray(b"".join(found))
    for at in draw(st.lists(st.integers(0, max(0, len(content) - 1)), max_size=2)):
        content[at : at + 1] = bytes([draw(st.integers(0, 255))])
    return bytes(content)


def _opcodes(content: bytes) -> list[bytes]:
    starts = [position for _, _, position in pickletools.genops(content)]
    return [content[a:b] for a, b in zip(starts, [*starts[1:], len(content)], strict=True)]


def look_at(value: Any, depth: int = 0) -> None:
    """Read all that a value holds: memory that is not its own would be read here."""
    if isinstance(value, torch.Tensor):
        if max(value.shape, default=0) < MOST and value.numel() < MOST:
            value.detach().clone().resolve_conj().flatten().tolist()
    elif isinstance(value, np.ndarray):
        if max(value.shape, default=0) < MOST and value.size < MOST:
            copy.deepcopy(value)
            for item in value.reshape(-1).tolist() if value.dtype.hasobject else [repr(value.tolist())]:
                look_at(item, depth + 1)
    elif isinstance(value, np.dtype):
        np.zeros(2 if value.itemsize < MOST else 0, value).tolist()
    elif isinstance(value, dict):
        for pair in value.items():
            look_at(pair, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset) and depth < 50:
        for item in value:
            look_at(item, depth + 1)
    else:
        repr(value)


def read_a_value(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        look_at(values.load_safely(file_of(content)))


def read_metadata(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        read = metadata.read_metadata(content)
        repr((read.state_dict_metadata, read.storage_data, read.planner_data))


def all_metadata(folder: Path) -> list[bytes]:
    dcp.save({"w": TENSOR, "plain": 3, "nested": [{"a": TENSOR[0]}]}, checkpoint_id=folder)
    content = (folder / ".metadata").read_bytes()
    return [content, pickle.dumps(pickle.loads(content), protocol=2)]


def in_here(kind: str, folder: Path) -> None:
    """Run the examples of a kind, each written down before it is read."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    sources = {
        "objects": lambda: OBJECTS.map(of_objects),
        "opcodes": lambda: changed([pickled(value) for value in (*GOOD.values(), *TENSORS)]),
        "metadata": lambda: changed(all_metadata(folder)),
    }
    read = read_metadata if kind == "metadata" else read_a_value

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(sources[kind]())
    @example(b"\x80\x02K\x01r\xff\xff\xff\x7f.")  # what pickle keeps room for
    def reads(content: bytes) -> None:
        (folder / "last").write_bytes(content)
        read(content)

    for lie in LIES:
        (folder / "last").write_bytes(content := of_lie(*lie))
        read(content)
    reads()


@pytest.mark.parametrize("kind", ["objects", "opcodes", "metadata"])
def test_a_pickle_is_refused_or_read(tmp_path: Path, kind: str) -> None:
    work = f"from tests.laws.test_bytes_never_crash import *; in_here({kind!r}, Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", work], capture_output=True, text=True, check=False)
    last = (tmp_path / "last").read_bytes() if (tmp_path / "last").exists() else b""
    assert done.returncode == 0, f"exit {done.returncode} at {last!r}\n{done.stderr[-3000:]}"


def assert_same(found: Any, expected: Any) -> None:
    """Equal values of equal types, bit by bit."""
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape, found.flags.writeable) == (expected.dtype, expected.shape, True)
        assert found.flags.f_contiguous == expected.flags.f_contiguous
        if expected.dtype.hasobject:
            for ours, theirs in zip(found.ravel(), expected.ravel(), strict=True):
                assert_same(ours, theirs)
        else:
            assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert_same([*found.items()], [*expected.items()])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)
    elif isinstance(expected, np.generic):
        assert_same(np.array(found), np.array(expected))
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    else:
        assert found == expected


def test_what_people_have_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a class that is allowed for it, from a checkpoint and from a file of torch.save."""
    saved, allowed = {**GOOD, "tensors": tuple(TENSORS)}, set(torch.serialization.get_safe_globals())
    checkpoint.save(tmp_path / "c", {"values": tuple(saved.items())})
    torch.save({"values": tuple(saved.items())}, tmp_path / "file.pt")
    checkpoint.from_torch_save(tmp_path / "file.pt", tmp_path / "d")
    for folder in ("c", "d"):
        target: dict[str, Any] = {"values": None}
        checkpoint.load(tmp_path / folder, target)
        assert_same(target["values"], tuple(saved.items()))
    assert set(torch.serialization.get_safe_globals()) == allowed
    assert "no load takes" not in caplog.text


SIMPLE = nps.scalar_dtypes() | nps.byte_string_dtypes() | nps.unicode_string_dtypes()
ARRAYS = (SIMPLE | nps.nested_dtypes(SIMPLE, max_leaves=4)).flatmap(
    lambda dtype: nps.arrays(dtype, nps.array_shapes(min_dims=0, min_side=0, max_side=3))
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ARRAYS)
def test_any_array_comes_back(array: np.ndarray[Any, Any]) -> None:
    file = io.BytesIO()
    torch.save((array, array[()] if array.shape == () else None), file)
    assert_same(values.load_safely(values.Memory.from_bytes(file.getvalue()))[0], array)


class Trusted:
    """A class that a user has allowed."""

    def __init__(self, array: Any) -> None:
        self.array = array


def test_a_class_that_is_allowed_is_given_arrays() -> None:
    file = io.BytesIO()
    given = Trusted({"a": np.arange(3)})
    given.array["itself"] = given
    torch.save([given, given], file)
    with torch.serialization.safe_globals([Trusted]):
        first, second = values.load_safely(values.Memory.from_bytes(file.getvalue()))
    assert first is second is first.array["itself"]
    assert_same(first.array["a"], np.arange(3))
    with pytest.raises(ValueError, match="Trusted, which could run code"):
        values.load_safely(values.Memory.from_bytes(file.getvalue()))
