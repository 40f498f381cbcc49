"""Conversion: nothing is lost on the way, and memory is bounded."""

import json
import multiprocessing
import os
import pprint
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from unittest.mock import Mock

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rescale_data import checkpoint
from rescale_data.checkpoint import LoadReport
from rescale_data.checkpoint.convert.safetensors import INDEX_FILE, NON_TENSORS_FILE
from rescale_data.checkpoint.convert.stored import StoredCheckpoint
from tests.checkpoint.steps import loader_at
from tests.states import opened

DTYPES = torch.bfloat16, torch.bool, torch.uint16, torch.float8_e4m3fn
HALF = torch.ones(4, dtype=torch.bfloat16)[::2]


def build(steps):
    torch.manual_seed(steps)
    model, loader = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)), loader_at(steps)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(3, 6)).sum().backward()
        optimizer.step()
    tensors = {str(dtype): (torch.arange(6).reshape(2, 3) * steps).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(3.5 * steps), "empty": torch.zeros(0, 4)}
    odd = {
        "list": [steps * torch.ones(2), {"deep": torch.zeros(1)}],
        "rng": (steps * torch.arange(3), [HALF, "cpu"], 1),
    }
    return {"model": model, "optimizer": optimizer, "loader": loader, "tensors": tensors, "odd": odd, "none": None}


def assert_loaded(path, expected):
    state = build(0)
    assert checkpoint.load(path, state) == LoadReport()
    assert state["loader"].step == expected["loader"].step
    assert torch.equal(state["model"][1].weight, expected["model"][1].weight)
    for name in ("optimizer", "tensors", "odd"):
        left, right = (each[name].state_dict() if name == "optimizer" else each[name] for each in (state, expected))
        assert str(left) == str(right)


def test_there_and_back(folder, tmp_path, caplog):
    expected, protocol = build(3), "memory" if "://" in folder else "file"
    fsspec.filesystem(protocol).makedirs(folder)
    checkpoint.save(tmp_path / "c", expected)
    checkpoint.to_torch_save(tmp_path / "c", f"{folder}/file.pt", budget=1)
    names = checkpoint.to_safetensors(tmp_path / "c", f"{folder}/st", max_shard_size=200, budget=100)
    assert "in no safetensors: odd.rng." in caplog.text
    local = tmp_path / "local"
    fsspec.filesystem(protocol).get(f"{folder}/", str(local), recursive=True)
    assert {*names, INDEX_FILE} == {path.name for path in (local / "st").iterdir()}
    assert names[:2] == [NON_TENSORS_FILE, f"model-00001-of-{len(names) - 1:05}.safetensors"]
    assert len(names) > 4
    assert {*json.loads((local / "st" / INDEX_FILE).read_text())["weight_map"].values()} == {*names[1:]}
    content = torch.load(local / "file.pt", mmap=True, weights_only=True)
    assert content.keys() == expected.keys()
    assert zipfile.ZipFile(local / "file.pt").testzip() is None
    for name in ("tensors", "odd"):
        assert pprint.pformat(content[name]) == pprint.pformat(expected[name])
    assert opened(content["loader"])["num_logical_shards"] == 12
    checkpoint.from_torch_save(local / "file.pt", tmp_path / "of file")
    checkpoint.from_safetensors(local / "st", tmp_path / "of st")
    for path in (tmp_path / "of file", tmp_path / "of st", local / "file.pt"):
        assert_loaded(path, expected)
    assert opened(checkpoint.read_data_state(tmp_path / "of file"))["step"] == 3
    with pytest.raises(ValueError, match=r"already\. Give another folder"):
        checkpoint.to_safetensors(tmp_path / "c", f"{folder}/st")
    for convert, name in ((checkpoint.from_safetensors, "st"), (checkpoint.from_torch_save, "file.pt")):
        if "://" in folder:
            with pytest.raises(ValueError, match="Copy it to a local disk first"):
                convert(f"{folder}/{name}", tmp_path / "x")


def test_a_file_of_a_model_alone_is_given_its_name(tmp_path):
    torch.save(build(2)["model"].state_dict(), tmp_path / "bare.pt")
    checkpoint.from_torch_save(tmp_path / "bare.pt", tmp_path / "c", name="model")
    checkpoint.load(tmp_path / "c", {"model": build(0)["model"]})
    with pytest.raises(ValueError, match=r"missing in the checkpoint: model\.0\.weight"):
        checkpoint.load(tmp_path / "bare.pt", {"model": build(0)["model"]})


def test_a_negated_view_in_a_file_loads(tmp_path):
    """torch makes one of the imaginary part of a conjugate, and writes the bytes as they are, and that they are negated."""
    imaginary = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    torch.save({"a": imaginary, "b": (imaginary,)}, tmp_path / "f.pt")
    checkpoint.load(tmp_path / "f.pt", state := {"a": torch.zeros(2), "b": ()})
    assert str(state) == "{'a': tensor([-2.,  4.]), 'b': (tensor([-2.,  4.]),)}"


def test_a_pipe_or_a_device_is_not_replaced_by_a_file(tmp_path):
    checkpoint.save(tmp_path / "c", {"a": 1})
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a folder or a device; give the path of a file"):
        checkpoint.to_torch_save(tmp_path / "c", tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("is_empty", [False, True])
def test_keys_and_empty_mappings_survive_the_way_there_and_back(tmp_path, is_empty):
    """DCP's names know neither: the optimizer of an ordinary file would come back for other parameters."""
    given = build(2)
    lists = {"list": [{}, {1: {}, "1.5": 2}, {None: torch.ones(1), 2.5: 3}], "deep": {-1: {True: [1, {7: 8}]}}}
    content = {"e": {}} if is_empty else {"opt": given["optimizer"].state_dict(), "e": {}, **lists}
    torch.save(content, tmp_path / "f.pt")
    checkpoint.from_torch_save(tmp_path / "f.pt", tmp_path / "c")
    checkpoint.to_safetensors(tmp_path / "c", tmp_path / "st")
    checkpoint.from_safetensors(tmp_path / "st", tmp_path / "again")
    for source in ("c", "again"):
        checkpoint.to_torch_save(tmp_path / source, tmp_path / "back.pt")
        back = torch.load(tmp_path / "back.pt", weights_only=True)
        assert pprint.pformat(back) == pprint.pformat(content)
    if not is_empty:
        checkpoint.to_torch_save(tmp_path / "c", tmp_path / "opt.pt", name="opt")
        other = build(0)["optimizer"]
        other.load_state_dict(torch.load(tmp_path / "opt.pt", weights_only=True))
        assert str(other.state_dict()) == str(given["optimizer"].state_dict())


def converted(folder):
    checkpoint.save(folder / "c", {"model": {f"w{n}": torch.full((10,), float(n)) for n in range(10)}, "step": 5})
    return checkpoint.to_safetensors(folder / "c", folder / "st", max_shard_size=80)


@given(lost=st.sets(st.integers(0, 4), min_size=1, max_size=4), index=st.booleans(), rest=st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_part_of_a_conversion_is_never_taken_for_the_whole(lost, index, rest):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = converted(folder)
        for gone in [names[number] for number in lost] + [INDEX_FILE] * (not index) + [NON_TENSORS_FILE] * (not rest):
            (folder / "st" / gone).unlink()
        with pytest.raises(FileNotFoundError, match="only a part of a conversion"):
            checkpoint.from_safetensors(folder / "st", folder / "back")
        assert not (folder / "back").exists()


def test_the_index_says_which_files_belong_together(tmp_path):
    names, folder = converted(tmp_path), tmp_path / "st"
    shutil.copy(folder / names[0], folder / "consolidated.safetensors")
    checkpoint.from_safetensors(folder, tmp_path / "back")
    state = {"model": {f"w{n}": torch.zeros(10) for n in range(10)}, "step": 0}
    assert checkpoint.load(tmp_path / "back", state) == LoadReport()
    assert [int(value[0]) for value in state["model"].values()] == list(range(10))
    content = json.loads((folder / INDEX_FILE).read_text())
    content["weight_map"]["model.other"] = names[0]
    for index, text, words in (
        (INDEX_FILE, json.dumps(content), r"names \['model\.other'\], which its files do not hold"),
        (INDEX_FILE, "{}", "no index of safetensors, or is damaged"),
        ("other.safetensors.index.json", "{}", "holds 2 indices"),
    ):
        (folder / index).write_text(text)
        with pytest.raises(ValueError, match=words):
            checkpoint.from_safetensors(folder, tmp_path / "again")


def stop_at_the_second(stop):
    stream = StoredCheckpoint.stream

    def stopped(self, names, budget):
        for number, tensor in enumerate(stream(self, names, 1)):
            if number == 1:
                stop()
            yield tensor

    return stopped


def convert_and_die(how, path, out):
    StoredCheckpoint.stream = stop_at_the_second(lambda: os.kill(os.getpid(), signal.SIGKILL))
    getattr(checkpoint, how)(path, out)


@pytest.mark.parametrize("how", ["to_safetensors", "to_torch_save"])
@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("end", ["killed", "failed"])
def test_a_conversion_that_ends_early_leaves_nothing_that_looks_whole(tmp_path, how, is_there, end, monkeypatch):
    checkpoint.save(tmp_path / "c", {"a": torch.ones(10), "b": torch.ones(10)})
    out = tmp_path / "out"
    if is_there:
        out.mkdir() if how == "to_safetensors" else out.write_text("old")
    if end == "killed":
        process = multiprocessing.get_context("forkserver").Process(
            target=convert_and_die, args=(how, tmp_path / "c", out)
        )
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    else:
        monkeypatch.setattr(StoredCheckpoint, "stream", stop_at_the_second((tmp_path / "nowhere").stat))
        with pytest.raises(FileNotFoundError):
            getattr(checkpoint, how)(tmp_path / "c", out)
        monkeypatch.undo()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["c", *["out"] * is_there]
    assert out.exists() == is_there
    assert not list(out.glob("*"))
    getattr(checkpoint, how)(tmp_path / "c", out)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".tmp") == ["c", "out"]
    if how == "to_safetensors":
        assert {path.name for path in out.iterdir()} == {"model.safetensors", NON_TENSORS_FILE}


def test_the_library_reads_and_writes_the_same(tmp_path):
    library = pytest.importorskip("safetensors.torch", reason="needs the extra safetensors")
    expected = build(1)
    checkpoint.save(tmp_path / "c", expected)
    assert checkpoint.to_safetensors(tmp_path / "c", tmp_path / "st", name="model") == ["model.safetensors"]
    read = library.load_file(tmp_path / "st" / "model.safetensors")
    assert read.keys() == expected["model"].state_dict().keys()
    assert all(torch.equal(read[key], value) for key, value in expected["model"].state_dict().items())
    more = {**read, "more": torch.ones(3, dtype=torch.bfloat16)}
    library.save_file(more, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    checkpoint.from_safetensors(tmp_path / "theirs.safetensors", tmp_path / "back", name="model")
    model = build(0)["model"]
    model.register_buffer("more", torch.zeros(3, dtype=torch.bfloat16))
    checkpoint.load(tmp_path / "back", {"model": model})
    assert torch.equal(model[0].weight, expected["model"][0].weight)
    assert model.more.sum() == 3


BOUNDED = """
import sys, threading, torch
from rescale_data import checkpoint
torch.set_num_threads(1)
folder, extra = sys.argv[1], int(sys.argv[2])

def bytes_of(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

def watched(convert, source, target, **given):
    # A private mapping of a file counts as data for a limit: look at the anonymous pages in memory instead.
    before, peak, done = bytes_of("RssAnon"), 0, threading.Event()
    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, bytes_of("RssAnon"))
    thread = threading.Thread(target=watch)
    thread.start()
    convert(f"{folder}/{source}", f"{folder}/{target}", **given)
    done.set()
    thread.join()
    assert 0 < peak < before + extra, (convert, peak - before)

checkpoint.read_data_state(f"{folder}/c")
watched(checkpoint.to_torch_save, "c", "f.pt", budget=8 << 20)
watched(checkpoint.from_torch_save, "f.pt", "c2")
watched(checkpoint.to_safetensors, "c2", "st", budget=8 << 20)
watched(checkpoint.from_safetensors, "st", "c3")
"""


def test_memory_is_bounded_by_the_budget_and_not_by_the_checkpoint(tmp_path):
    state = {"loader": loader_at(), "t": {str(n): torch.full((1_000_000,), float(n)) for n in range(40)}}
    checkpoint.save(tmp_path / "c", state)
    command = [sys.executable, "-c", BOUNDED, str(tmp_path), str(64 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    got = {"t": {str(n): torch.zeros(1_000_000) for n in range(40)}}
    checkpoint.load(tmp_path / "c3", got)
    assert all((value == int(n)).all() for n, value in got["t"].items())


def load(path, _):
    return checkpoint.load(path, {"a": 1})


to_st, of_st = checkpoint.to_safetensors, checkpoint.from_safetensors
to_pt, of_pt = checkpoint.to_torch_save, checkpoint.from_torch_save
WRONG = [
    (to_st, "c", "out", {}, ValueError, r"a is torch.complex128.*to_torch_save"),
    (to_st, "f4", "out", {}, ValueError, r"a is torch.float4_e2m1fn_x2.*to_torch_save"),
    (to_st, "m", "out", {}, ValueError, "keeps the name __metadata__ for itself"),
    (to_st, "c", "out", {"max_shard_size": 0}, ValueError, "max_shard_size=0: give a number of bytes"),
    (to_st, "c", "model.safetensors", {}, ValueError, r"the name of a file\. Give a folder"),
    (to_st, "c", "junk.pt", {}, ValueError, "name of a file"),
    (to_st, "c", "full", {}, ValueError, r"holds model\.safetensors already\. Give another folder"),
    (to_pt, "c", "full", {}, OSError, "is a folder"),
    (to_pt, "c", "out", {"name": "b"}, ValueError, "nothing named 'b'"),  # it is a value, and has no content
    (to_pt, "c", "out", {"name": "model"}, ValueError, r"nothing named 'model'. It holds \['a', 'b'\]"),
    (to_pt, "none", "out", {}, FileNotFoundError, "nothing at this path"),
    (to_pt, "short.safetensors", "out", {}, FileNotFoundError, r"short\.s.*: it is a file.*rescale-data convert"),
    (of_st, "c", "out", {}, FileNotFoundError, r"No \*\.safetensors in .* It holds a DCP checkpoint already"),
    (of_st, "short.safetensors", "out", {}, ValueError, "no safetensors file, or is damaged"),
    (of_st, "junk.safetensors", "out", {}, ValueError, "no safetensors file, or is damaged"),
    (of_pt, "none.pt", "out", {}, FileNotFoundError, "none.pt"),
    (of_pt, "junk.pt", "out", {}, ValueError, r"junk\.pt cannot be read"),
    (load, "list.pt", "out", {}, ValueError, "holds a list"),
    (load, "code.pt", "out", {}, ValueError, "plain values only"),
    *[(load, f"cut-{cut}.pt", "out", {}, ValueError, "cannot be read") for cut in (10, 100, 1000)],
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    checkpoint.save(folder / "c", {"a": torch.zeros(2, dtype=torch.complex128), "b": 1})
    checkpoint.save(folder / "f4", {"a": torch.zeros(2, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)})
    checkpoint.save(folder / "m", {"__metadata__": torch.zeros(2)})
    (folder / "junk.pt").write_bytes(b"junk")
    torch.save([1], folder / "list.pt")
    torch.save({"a": Path("x")}, folder / "code.pt")
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (folder / "short.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    (folder / "junk.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{junk")
    (folder / "full").mkdir()
    (folder / "full" / "model.safetensors").touch()
    checkpoint.to_torch_save(folder / "c", folder / "whole.pt")
    for cut in (10, 100, 1000):
        (folder / f"cut-{cut}.pt").write_bytes((folder / "whole.pt").read_bytes()[:-cut])
    return folder


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case[0].__name__} {case[1]} {case[2]} {case[5][:20]}")
def test_wrong_input_is_an_error_before_anything_is_written(files, case, monkeypatch):
    convert, source, target, options, error, words = case
    monkeypatch.setattr(StoredCheckpoint, "stream", Mock(side_effect=AssertionError("tensors are read")))
    before = sorted(files.iterdir())
    with pytest.raises(error, match=words):
        convert(files / source, files / target, **options)
    assert sorted(files.iterdir()) == before
