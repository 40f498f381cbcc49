"""Conversion: nothing is lost on the way, and memory is bounded."""

from __future__ import annotations

import contextlib
import json
import os
import pprint
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from rescale_data import checkpoint
from rescale_data.checkpoint.convert.safetensors import INDEX_FILE, NON_TENSORS_FILE
from rescale_data.checkpoint.convert.stored import StoredCheckpoint
from tests.checkpoint.models import Plain, mesh, whole, wrap
from tests.checkpoint.processes import context, run
from tests.checkpoint.stand_in import StandInLoader
from tests.states import opened


def build(steps: int) -> dict[str, Any]:
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = StandInLoader()
    for _ in range(steps):
        model(torch.randn(3, 6)).sum().backward()
        optimizer.step()
    loader.advance(steps)
    dtypes = {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in (torch.bfloat16, torch.bool, torch.uint16, torch.float8_e4m3fn)
    }
    odd = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "list": [torch.ones(2), {"deep": torch.zeros(1)}],
        "tuple": (1, "a"),
    }
    return {"model": model, "optimizer": optimizer, "loader": loader, "dtypes": dtypes, "odd": odd, "none": None}


def blank() -> dict[str, Any]:
    state = build(0)
    for group in (
        state["dtypes"],
        {key: value for key, value in state["odd"].items() if isinstance(value, torch.Tensor)},
    ):
        for tensor in group.values():
            tensor.zero_()
    state["odd"]["list"][0].zero_()
    return state


def assert_loaded(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state["loader"].step == expected["loader"].step
    assert torch.equal(state["model"][1].weight, expected["model"][1].weight)
    assert str(state["optimizer"].state_dict()) == str(expected["optimizer"].state_dict())
    assert str(state["dtypes"]) == str(expected["dtypes"])
    assert str(state["odd"]) == str(expected["odd"])


def test_to_torch_save_and_back(tmp_path: Path) -> None:
    expected = build(3)
    checkpoint.save(tmp_path / "c", expected)
    checkpoint.to_torch_save(tmp_path / "c", tmp_path / "file.pt", budget=100)
    content = torch.load(tmp_path / "file.pt", mmap=True, weights_only=True)
    assert content.keys() == expected.keys()
    assert torch.equal(content["model"]["1.weight"], expected["model"][1].weight)
    assert opened(content["loader"])["num_logical_shards"] == 12
    assert content["odd"]["tuple"] == (1, "a")
    assert torch.equal(content["odd"]["list"][0], torch.ones(2))
    assert content["dtypes"]["torch.bfloat16"].dtype is torch.bfloat16
    assert zipfile.ZipFile(tmp_path / "file.pt").testzip() is None
    checkpoint.from_torch_save(tmp_path / "file.pt", tmp_path / "back")
    for path in ("back", "file.pt"):
        state = blank()
        checkpoint.load(tmp_path / path, state)
        assert_loaded(state, expected)
    assert opened(checkpoint.read_data_state(tmp_path / "back"))["step"] == 3


def test_tensors_in_a_tuple_are_read_without_running_code(tmp_path: Path) -> None:
    half = torch.ones(4, dtype=torch.bfloat16)[::2]
    expected = {"a": torch.zeros(3), "rng": (torch.arange(3), [half, torch.tensor(2.5)]), "z": torch.ones(2)}
    checkpoint.save(tmp_path / "c", expected)
    checkpoint.to_torch_save(tmp_path / "c", tmp_path / "f.pt", budget=1)
    content = torch.load(tmp_path / "f.pt", mmap=True, weights_only=True)
    assert content.keys() == expected.keys()
    assert all(str(content[key]) == str(value) for key, value in expected.items())


def test_what_torch_save_wrote_loads(tmp_path: Path) -> None:
    expected = build(2)
    torch.save({"model": expected["model"].state_dict(), "extra": 5}, tmp_path / "file.pt")
    state = {"model": blank()["model"], "extra": 0}
    checkpoint.load(tmp_path / "file.pt", state)
    assert torch.equal(state["model"][0].weight, expected["model"][0].weight)
    assert state["extra"] == 5
    torch.save(expected["model"].state_dict(), tmp_path / "bare.pt")
    checkpoint.from_torch_save(tmp_path / "bare.pt", tmp_path / "c", name="model")
    checkpoint.load(tmp_path / "c", {"model": blank()["model"]})
    with pytest.raises(ValueError, match=r"missing in the checkpoint: model\.0\.weight"):
        checkpoint.load(tmp_path / "bare.pt", {"model": blank()["model"]})


def test_keys_and_empty_mappings_survive_the_way_there_and_back(tmp_path: Path) -> None:
    """DCP's names know neither: the optimizer of an ordinary file would come back for other parameters."""
    given = build(2)
    content = {
        "opt": given["optimizer"].state_dict(),
        "e": {},
        "list": [{}, {1: {}, "1.5": 2}, {None: torch.ones(1), 2.5: 3}],
        "deep": {-1: {True: [1, {7: 8}]}},
    }
    torch.save(content, tmp_path / "f.pt")
    checkpoint.from_torch_save(tmp_path / "f.pt", tmp_path / "c")
    checkpoint.to_safetensors(tmp_path / "c", tmp_path / "st")
    checkpoint.from_safetensors(tmp_path / "st", tmp_path / "again")
    for source in ("c", "again"):
        checkpoint.to_torch_save(tmp_path / source, tmp_path / "back.pt")
        back = torch.load(tmp_path / "back.pt", weights_only=True)
        assert {key: pprint.pformat(value) for key, value in back.items()} == {
            key: pprint.pformat(value) for key, value in content.items()
        }
    checkpoint.to_torch_save(tmp_path / "c", tmp_path / "opt.pt", name="opt")
    other = build(0)
    other["optimizer"].load_state_dict(torch.load(tmp_path / "opt.pt", weights_only=True))
    assert str(other["optimizer"].state_dict()) == str(given["optimizer"].state_dict())


def test_a_checkpoint_of_nothing_but_empty_mappings(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"model": {}})
    checkpoint.to_torch_save(tmp_path / "c", tmp_path / "f.pt")
    checkpoint.to_safetensors(tmp_path / "c", tmp_path / "st")
    checkpoint.from_safetensors(tmp_path / "st", tmp_path / "back")
    checkpoint.to_torch_save(tmp_path / "back", tmp_path / "back.pt")
    assert torch.load(tmp_path / "f.pt") == torch.load(tmp_path / "back.pt") == {"model": {}}


def test_safetensors_and_back(tmp_path: Path) -> None:
    expected = build(3)
    checkpoint.save(tmp_path / "c", expected)
    names = checkpoint.to_safetensors(tmp_path / "c", tmp_path / "st", max_shard_size=200, budget=100)
    assert len(names) > 3
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    index = json.loads((tmp_path / "st" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(names)
    checkpoint.from_safetensors(tmp_path / "st", tmp_path / "back")
    state = blank()
    checkpoint.load(tmp_path / "back", state)
    assert_loaded(state, expected)


def converted(folder: Path, **sizes: Any) -> list[str]:
    """A checkpoint of ten tensors as safetensors."""
    checkpoint.save(folder / "c", {"model": {f"w{n}": torch.full((10,), float(n)) for n in range(10)}, "step": 5})
    return checkpoint.to_safetensors(folder / "c", folder / "st", **sizes)


@given(lost=st.sets(st.integers(0, 4), min_size=1, max_size=4), index=st.booleans(), rest=st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_part_of_a_conversion_is_never_taken_for_the_whole(lost: set[int], index: bool, rest: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = converted(folder, max_shard_size=80)
        for gone in [names[number] for number in lost] + [INDEX_FILE] * (not index) + [NON_TENSORS_FILE] * (not rest):
            (folder / "st" / gone).unlink()
        with pytest.raises(FileNotFoundError, match="only a part of a conversion"):
            checkpoint.from_safetensors(folder / "st", folder / "back")
        assert not (folder / "back").exists()


def test_the_index_says_which_files_belong_together(tmp_path: Path) -> None:
    names = converted(tmp_path, max_shard_size=80)
    shutil.copy(tmp_path / "st" / names[0], tmp_path / "st" / "consolidated.safetensors")
    checkpoint.from_safetensors(tmp_path / "st", tmp_path / "back")
    state = {"model": {f"w{n}": torch.zeros(10) for n in range(10)}, "step": 0}
    assert checkpoint.load(tmp_path / "back", state) == checkpoint.LoadReport()
    assert [int(value[0]) for value in state["model"].values()] == list(range(10))
    index = tmp_path / "st" / INDEX_FILE
    content = json.loads(index.read_text())
    content["weight_map"]["model.other"] = names[0]
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"names \['model\.other'\], which its files do not hold"):
        checkpoint.from_safetensors(tmp_path / "st", tmp_path / "again")
    index.write_text("{}")
    with pytest.raises(ValueError, match="no index of safetensors, or is damaged"):
        checkpoint.from_safetensors(tmp_path / "st", tmp_path / "again")
    shutil.copy(index, tmp_path / "st" / "other.safetensors.index.json")
    with pytest.raises(ValueError, match="holds 2 indices"):
        checkpoint.from_safetensors(tmp_path / "st", tmp_path / "again")


def convert_and_die(how: str, path: Path, out: Path) -> None:
    """Convert a checkpoint, and be killed before its second tensor."""
    stream = StoredCheckpoint.stream

    def killed(self: StoredCheckpoint, names: list[str], budget: int) -> Iterator[torch.Tensor]:
        for number, tensor in enumerate(stream(self, names, 1)):
            if number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield tensor

    StoredCheckpoint.stream = killed  # type: ignore[method-assign]
    getattr(checkpoint, how)(path, out)


@pytest.mark.parametrize("how", ["to_safetensors", "to_torch_save"])
@pytest.mark.parametrize("there", [False, True])
def test_a_killed_conversion_leaves_nothing_that_looks_whole(tmp_path: Path, how: str, there: bool) -> None:
    checkpoint.save(tmp_path / "c", {"a": torch.ones(10), "b": torch.ones(10)})
    out = tmp_path / "out"
    if there and how == "to_safetensors":
        out.mkdir()
    elif there:
        out.write_text("old")
    process = context.Process(target=convert_and_die, args=(how, tmp_path / "c", out))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert out.exists() == there
    assert not list(out.glob("*"))
    getattr(checkpoint, how)(tmp_path / "c", out)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".tmp") == ["c", "out"]
    if how == "to_safetensors":
        assert {path.name for path in out.iterdir()} == {"model.safetensors", NON_TENSORS_FILE}


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path / "c", {"a": torch.ones(10), "b": torch.ones(10)})

    def failing(self: StoredCheckpoint, names: list[str], budget: int) -> Iterator[torch.Tensor]:
        yield torch.ones(10)
        raise OSError("disk full")

    monkeypatch.setattr(StoredCheckpoint, "stream", failing)
    for convert in (checkpoint.to_safetensors, checkpoint.to_torch_save):
        with pytest.raises(OSError, match="disk full"):
            convert(tmp_path / "c", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(("how", "word"), [("to_torch_save", "is a folder"), ("to_safetensors", "name of a file")])
def test_a_target_of_the_other_kind_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, word: str
) -> None:
    checkpoint.save(tmp_path / "c", {"a": torch.zeros(10)})
    target = tmp_path / "target"
    target.mkdir() if how == "to_torch_save" else target.touch()

    def refuse(*_: object) -> Iterator[torch.Tensor]:
        raise AssertionError("tensors are read")

    monkeypatch.setattr(StoredCheckpoint, "stream", refuse)
    with pytest.raises((OSError, ValueError), match=word):
        getattr(checkpoint, how)(tmp_path / "c", target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "target"]


@pytest.mark.parametrize("how", ["to_safetensors", "to_torch_save"])
@pytest.mark.parametrize("gone", [False, True])
def test_a_checkpoint_that_is_replaced_while_it_is_converted_is_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, gone: bool
) -> None:
    checkpoint.save(tmp_path / "step-1", {f"w{n}": torch.ones(10) for n in range(3)})
    stream = StoredCheckpoint.stream

    def replaced(self: StoredCheckpoint, names: list[str], budget: int) -> Iterator[torch.Tensor]:
        for number, tensor in enumerate(stream(self, names, 1)):
            if number == 1 and gone:
                shutil.rmtree(tmp_path / "step-1")
            elif number == 1:
                checkpoint.save(tmp_path / "step-1", {f"w{n}": torch.zeros(10) for n in range(3)}, overwrite=True)
            yield tensor

    monkeypatch.setattr(StoredCheckpoint, "stream", replaced)
    with pytest.raises(FileNotFoundError) if gone else contextlib.nullcontext():
        getattr(checkpoint, how)(tmp_path / "step-1", tmp_path / "out")
    assert (tmp_path / "out").exists() != gone
    monkeypatch.undo()
    if not gone:
        (checkpoint.from_safetensors if how == "to_safetensors" else checkpoint.from_torch_save)(
            tmp_path / "out", tmp_path / "back"
        )
        found = {f"w{n}": torch.zeros(10) for n in range(3)}
        checkpoint.load(tmp_path / "back", found)
        assert all((tensor == 1).all() for tensor in found.values()), "what is read has a lease"


def test_files_in_an_object_store(tmp_path: Path) -> None:
    """In which a file of another tool is read as well; to read it back it is copied to a local disk first."""
    url = f"memory://{tmp_path.name}"
    store = fsspec.filesystem("memory")
    expected = build(2)
    checkpoint.save(tmp_path / "c", expected)
    names = checkpoint.to_safetensors(tmp_path / "c", f"{url}/st", max_shard_size=200)
    checkpoint.to_torch_save(tmp_path / "c", f"{url}/f.pt", budget=100)
    store.get(f"{url}/", str(tmp_path / "local"), recursive=True)
    assert {*names, INDEX_FILE, NON_TENSORS_FILE} == {path.name for path in (tmp_path / "local" / "st").iterdir()}
    checkpoint.from_safetensors(tmp_path / "local" / "st", tmp_path / "back")
    for path in ("back", "local/f.pt"):
        state = blank()
        checkpoint.load(tmp_path / path, state)
        assert_loaded(state, expected)
    with pytest.raises(ValueError, match=r"already\. Give another folder"):
        checkpoint.to_safetensors(tmp_path / "c", f"{url}/st")
    for convert, source in ((checkpoint.from_safetensors, f"{url}/st"), (checkpoint.from_torch_save, f"{url}/f.pt")):
        with pytest.raises(ValueError, match="Copy it to a local disk first"):
            convert(source, tmp_path / "x")


@pytest.mark.parametrize("sizes", [(400, 40), (40, 400)])
def test_safetensors_of_two_conversions_are_not_mixed(tmp_path: Path, sizes: tuple[int, int]) -> None:
    checkpoint.save(tmp_path / "c", {"a": torch.ones(10), "b": torch.ones(10)})
    names = checkpoint.to_safetensors(tmp_path / "c", tmp_path / "st", max_shard_size=sizes[0])
    with pytest.raises(ValueError, match=r"already\. Give another folder"):
        checkpoint.to_safetensors(tmp_path / "c", tmp_path / "st", max_shard_size=sizes[1])
    assert sorted(path.name for path in (tmp_path / "st").glob("*.safetensors")) == names
    with pytest.raises(ValueError, match=r"the name of a file\. Give a folder"):
        checkpoint.to_safetensors(tmp_path / "c", tmp_path / "model.safetensors")


def test_the_library_reads_and_writes_the_same(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="needs the extra safetensors")
    expected = build(1)
    checkpoint.save(tmp_path / "c", expected)
    assert checkpoint.to_safetensors(tmp_path / "c", tmp_path / "st", name="model") == ["model.safetensors"]
    read = library.load_file(tmp_path / "st" / "model.safetensors")
    assert read.keys() == expected["model"].state_dict().keys()
    assert all(torch.equal(read[key], value) for key, value in expected["model"].state_dict().items())
    library.save_file(
        {**read, "more": torch.ones(3, dtype=torch.bfloat16)},
        tmp_path / "theirs.safetensors",
        metadata={"format": "pt"},
    )
    checkpoint.from_safetensors(tmp_path / "theirs.safetensors", tmp_path / "back", name="model")
    model = blank()["model"].float()
    model.register_buffer("more", torch.zeros(3, dtype=torch.bfloat16))
    checkpoint.load(tmp_path / "back", {"model": model})
    assert torch.equal(model[0].weight, expected["model"][0].weight)
    assert model.more.sum() == 3


def load_file_sharded(file: str, how: str) -> dict[str, Any]:
    model = wrap(Plain(), how)
    loader = StandInLoader(mesh=mesh())
    state: dict[str, Any] = {"model": model, "loader": loader, "note": None}
    if dist.get_rank() == 1:
        state["extra"] = {"only here": torch.zeros(2)}
    report = checkpoint.load(file, state, strict=False)
    assert report.missing == ("extra.only here",), "a rank that asks for something else does not hang"
    assert state["note"] == "hello"
    assert loader.step == 4
    return {name: whole(value).clone() for name, value in get_model_state_dict(model).items()}


@pytest.mark.parametrize(("how", "ranks"), [("fsdp2", 3), ("tp", 2), ("fsdp1", 2)])
def test_a_file_loads_into_any_sharding(tmp_path: Path, how: str, ranks: int) -> None:
    """torch's BroadcastingTorchSaveReader takes tensors only, and hangs with DTensors and on a missing name."""
    model, loader = Plain(), StandInLoader()
    loader.advance(4)
    torch.save({"model": model.state_dict(), "loader": loader.state_dict(), "note": "hello"}, tmp_path / "file.pt")
    for got in run(ranks, load_file_sharded, str(tmp_path / "file.pt"), how):
        assert all(torch.equal(got[name], value) for name, value in model.state_dict().items())


BOUNDED = """
import resource, sys, threading, torch
from rescale_data import checkpoint
torch.set_num_threads(1)
folder, extra = sys.argv[1], int(sys.argv[2])

def bytes_of(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

def with_a_limit(convert, source, target):
    limit = bytes_of("VmData") + extra
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    convert(f"{folder}/{source}", f"{folder}/{target}", budget=8 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)

def watched(convert, source, target):
    # A private mapping of a file counts as data: look at the anonymous pages in memory instead.
    before, peak, done = bytes_of("RssAnon"), 0, threading.Event()
    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, bytes_of("RssAnon"))
    thread = threading.Thread(target=watch)
    thread.start()
    convert(f"{folder}/{source}", f"{folder}/{target}")
    done.set()
    thread.join()
    assert 0 < peak < before + extra, (convert, peak - before)

checkpoint.read_data_state(f"{folder}/c")
with_a_limit(checkpoint.to_torch_save, "c", "f.pt")
watched(checkpoint.from_torch_save, "f.pt", "c2")
with_a_limit(checkpoint.to_safetensors, "c2", "st")
watched(checkpoint.from_safetensors, "st", "c3")
"""


def test_memory_is_bounded_by_the_budget_and_not_by_the_checkpoint(tmp_path: Path) -> None:
    """64 MB beside the interpreter; the checkpoint has 160."""
    state = {"loader": StandInLoader(), "t": {str(n): torch.full((1_000_000,), float(n)) for n in range(40)}}
    checkpoint.save(tmp_path / "c", state)
    command = [sys.executable, "-c", BOUNDED, str(tmp_path), str(64 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    got = {"t": {str(n): torch.zeros(1_000_000) for n in range(40)}}
    checkpoint.load(tmp_path / "c3", got)
    assert all((value == int(n)).all() for n, value in got["t"].items())


def test_bad_input(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"a": torch.zeros(2, dtype=torch.complex128), "b": 1})
    with pytest.raises(ValueError, match=r"a is torch.complex128.*to_torch_save"):
        checkpoint.to_safetensors(tmp_path / "c", tmp_path / "st")
    checkpoint.save(tmp_path / "m", {"__metadata__": torch.zeros(2)})
    with pytest.raises(ValueError, match="keeps the name __metadata__ for itself"):
        checkpoint.to_safetensors(tmp_path / "m", tmp_path / "st")
    with pytest.raises(ValueError, match="max_shard_size=0: give a number of bytes"):
        checkpoint.to_safetensors(tmp_path / "c", tmp_path / "st", max_shard_size=0)
    with pytest.raises(ValueError, match="nothing named 'b'"):  # it is a value, and has no content
        checkpoint.to_torch_save(tmp_path / "c", tmp_path / "f.pt", name="b")
    with pytest.raises(ValueError, match=r"nothing named 'model'. It holds \['a', 'b'\]"):
        checkpoint.to_torch_save(tmp_path / "c", tmp_path / "f.pt", name="model")
    with pytest.raises(FileNotFoundError):
        checkpoint.to_torch_save(tmp_path / "none", tmp_path / "f.pt")
    with pytest.raises(FileNotFoundError, match=r"No \*\.safetensors in .* It holds a DCP checkpoint already"):
        checkpoint.from_safetensors(tmp_path / "c", tmp_path / "d")
    with pytest.raises(FileNotFoundError):
        checkpoint.from_torch_save(tmp_path / "none.pt", tmp_path / "d")
    (tmp_path / "junk.pt").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"junk\.pt cannot be read"):
        checkpoint.from_torch_save(tmp_path / "junk.pt", tmp_path / "d")
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds a list"):
        checkpoint.load(tmp_path / "list.pt", {"a": 1})
    torch.save({"a": Path("x")}, tmp_path / "code.pt")
    with pytest.raises(ValueError, match="plain values only"):
        checkpoint.load(tmp_path / "code.pt", {"a": 1})
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "short.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match="no safetensors file, or is damaged"):
        checkpoint.from_safetensors(tmp_path / "short.safetensors", tmp_path / "d")
    with pytest.raises(FileNotFoundError, match=r"short\.safetensors: it is a file.*rescale-data convert"):
        checkpoint.to_torch_save(tmp_path / "short.safetensors", tmp_path / "f.pt")
    (tmp_path / "junk.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{junk")
    with pytest.raises(ValueError, match="no safetensors file, or is damaged"):
        checkpoint.from_safetensors(tmp_path / "junk.safetensors", tmp_path / "d")
    checkpoint.to_torch_save(tmp_path / "c", tmp_path / "f.pt")
    content = (tmp_path / "f.pt").read_bytes()
    for cut in (10, 100, 1000):
        (tmp_path / "f.pt").write_bytes(content[:-cut])
        with pytest.raises(ValueError, match="cannot be read"):
            checkpoint.load(tmp_path / "f.pt", {"a": 1})
    assert not [name for name in tmp_path.iterdir() if name.name.startswith("f.pt.")]


def test_a_tensor_within_a_tuple_is_named_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint.save(tmp_path / "c", {"w": torch.ones(2), "rng": (torch.arange(3), "cpu"), "n": (1, 2)})
    assert checkpoint.to_safetensors(tmp_path / "c", tmp_path / "st") == ["non_tensors.pt", "model.safetensors"]
    assert "in no safetensors: rng." in caplog.text
    checkpoint.from_safetensors(tmp_path / "st", tmp_path / "back")
    target: dict[str, Any] = {"w": torch.zeros(2), "rng": None, "n": None}
    checkpoint.load(tmp_path / "back", target)
    assert (target["rng"][0].tolist(), target["rng"][1], target["n"]) == ([0, 1, 2], "cpu", (1, 2))
