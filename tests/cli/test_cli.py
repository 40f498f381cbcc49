"""The command line: what people see, what scripts read, and the exit codes."""

import datetime
import itertools
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from tests.checkpoint.steps import data, flip, loader_at

pytest.importorskip("typer", reason="needs the extra cli")

from typer.testing import CliRunner

import rescale_data as rd
from rescale_data.checkpoint import CheckpointManager, load, save
from rescale_data.cli.commands import app
from rescale_data.cli.render import format_size, progress_bar


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result.output


def said(*arguments, code=0):
    return " ".join(call(*arguments, code=code).split())


def read(*arguments, code=0):
    """What a command prints for scripts; nan and infinity are no JSON."""
    return json.loads(call(*arguments, "--json", code=code), parse_constant=pytest.fail)


def data_in(checkpoint):
    return read("show", checkpoint)["data"]["loader"]


def steps_in(folder):
    return [about["step"] for about in read("ls", folder)]


@pytest.fixture
def run_folder(tmp_path):
    torch.manual_seed(0)
    model, loader = nn.Linear(4, 3), loader_at(num_rows=36)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    with CheckpointManager(tmp_path / "run", keep_latest=None, async_mode="disabled") as manager:
        for step in range(0, 25, 5):
            manager.save(step, state, metrics={"val_loss": 3 - step / 10})
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            loader.skip(5 * 4)
    return tmp_path / "run"


def test_ls(run_folder, tmp_path):
    text = call("ls", run_folder)
    assert text.index("step-5 ") < text.index("step-10")
    assert "val_loss=1" in text
    listed = read("ls", run_folder)
    assert [about["step"] for about in listed] == [0, 5, 10, 15, 20]
    assert listed[1]["metrics"] == {"val_loss": 2.5}
    save(tmp_path / "odd" / "c", {"a": 1}, metrics={"loss": float("nan"), "gain": float("-inf"), "rate": 0.5})
    assert read("ls", tmp_path / "odd")[0]["metrics"] == {"loss": None, "gain": None, "rate": 0.5}


def test_show(run_folder):
    text = call("show", run_folder / "step-20")
    parts = ("model", "optimizer", "float32", "80 samples, 20 global batches", "12 logical shards")
    assert all(part in text for part in parts)
    assert f"data     1 to 2  122.2% (100.0% to 133.3%)  {'██▆' * 4}" in text
    summary = read("show", run_folder / "step-20")
    assert summary["entries"]["model"]["elements"] == 15
    assert summary["data"]["loader"]["shards"] == [7, 7, 6] * 4
    assert summary["data"]["loader"]["epochs"] == {"": [1, 2]}, "of a single source, which has no name in the state"


def test_verify(run_folder):
    step = run_folder / "step-5"
    assert "whole" in call("verify", step)
    flip(data(step) / "__0_0.distcp", 99)
    assert "not what was saved" in said("verify", step, code=1)
    assert len(read("verify", step, code=1)["problems"]) == 1
    (data(step) / "__0_0.distcp").unlink()
    call("verify", step, code=1), call("show", step, code=1)


def test_verify_of_a_checkpoint_without_checksums_says_so(tmp_path):
    """A flipped byte of a plain DCP checkpoint cannot be seen: it is not called whole."""
    dcp.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / "c", no_dist=True)
    file = next((tmp_path / "c").rglob("*.distcp"))
    flip(file, -99)
    assert "sizes only: the checkpoint has no checksums" in call("verify", tmp_path / "c")
    report = read("verify", tmp_path / "c")
    assert (report["checked"], report["problems"]) == ("sizes", [])
    file.write_bytes(file.read_bytes()[:900])
    assert "has 900 bytes" in read("verify", tmp_path / "c", code=1)["problems"][0]
    file.unlink()
    assert "is missing" in read("verify", tmp_path / "c", code=1)["problems"][0]


def test_convert(run_folder, tmp_path):
    step = run_folder / "step-10"
    for source, target, *given in (
        (step, "f.pt"),
        ("f.pt", "back"),
        (step, "st", "--to", "safetensors", "--name", "model"),
        ("st", "model", "--name", "model"),
    ):
        report = read("convert", tmp_path / source, path := tmp_path / target, *given)
        assert report["format"] == {"f.pt": "torch", "st": "safetensors"}.get(target, "dcp")
        files = [path / name for name in report["files"]] if path.is_dir() else [path]
        assert report["bytes"] == sum(file.stat().st_size for file in files) > 0
    assert "torch, 1 files" in call("convert", step, tmp_path / "g.pt")
    assert data_in(tmp_path / "back") == data_in(step)
    load(tmp_path / "model", {"model": nn.Linear(4, 3)})
    before = (tmp_path / "f.pt").read_bytes()
    assert "exists already" in call("convert", run_folder / "step-5", tmp_path / "f.pt", code=2)
    assert (tmp_path / "f.pt").read_bytes() == before
    assert "already holds a checkpoint" in call("convert", tmp_path / "f.pt", tmp_path / "back", code=2)
    assert "it is a file, and a checkpoint is a folder" in call("show", tmp_path / "f.pt", code=2)
    save(tmp_path / "c", {"a": datetime.date(2026, 1, 1)})
    for name in ("h.pt", "safetensors"):
        text = said("convert", tmp_path / "c", tmp_path / name, code=2)
        assert "a is refused: " in text
        assert "Save plain numbers, strings, tensors and arrays" in text


def test_prune(run_folder):
    rules = ("--keep-latest", 1, "--keep-every", 10, "--keep-best", "val_loss:max:1")
    assert read("prune", run_folder, *rules) == {"5": "would be deleted", "15": "would be deleted"}
    assert "step-5: deleted" in call("prune", run_folder, *rules, "--yes")
    assert steps_in(run_folder) == [0, 10, 20]
    assert "nothing" in call("prune", run_folder, *rules)
    assert "METRIC:min:COUNT" in call("prune", run_folder, "--keep-latest", 1, "--keep-best", "loss", code=2)
    call("prune", run_folder, "--keep-latest", 0, code=2)
    text = said("prune", run_folder, "--keep-latest", 1, "--keep-best", "val_los:min:1", "--yes", code=2)
    assert "the metric 'val_los' of keep_best" in text
    assert steps_in(run_folder) == [0, 10, 20]


def test_what_is_no_checkpoint_or_no_run_is_told_with_the_cure(run_folder, tmp_path):
    for command in (("ls",), ("prune", "--keep-latest", 1)):
        assert "No folder" in call(*command, run_folder / "none", code=2)
        assert "is a checkpoint itself; give the folder of the run" in said(*command, run_folder / "step-5", code=2)
    (run_folder / "logs").mkdir()
    (run_folder / "logs" / "a.txt").touch()
    assert "logs: it holds ['a.txt']. Give the folder of a run" in call("ls", run_folder / "logs", code=2)
    assert "it holds ['a.txt']" in call("ls", run_folder / "logs", "--json", code=2)
    for command in ("show", "verify"):
        text = call(command, run_folder, code=2).replace("\n", "")
        assert f"folder of a run: give one of its checkpoints, {run_folder / 'step-20'}." in text
    (run_folder / "empty").mkdir()
    for command, folder in itertools.product(("show", "verify"), ("none", "empty")):
        assert "No checkpoint" in call(command, run_folder / folder, code=2)
    assert "There is nothing at this path" in call("convert", tmp_path / "none", tmp_path / "out", code=2)


def test_index(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    folder = tmp_path / ("x" * 120) / "[bold]a[" / "b]"
    asked = ("index", tmp_path / "a.jsonl", "--index-dir", folder)
    assert "--format csv: give one of parquet, arrow, jsonl" in call(*asked, "--format", "csv", code=2)
    assert f"indexed in {folder}\n" in call(*asked), "a path is printed as it is"


class NoCredentials(Exception):
    """As clients of object stores have it: no error of the system."""


def test_an_error_of_an_object_stores_client_is_a_line(monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "ls", Mock(side_effect=NoCredentials("Unable to locate credentials")))
    assert call("ls", "memory://bucket/run", code=2) == "NoCredentials: Unable to locate credentials\n"


def test_help_says_what_each_command_does():
    text = call("--help")
    assert all(command in text for command in ("ls", "show", "verify", "convert", "prune"))
    assert "Exit codes" in text
    assert "--keep-best" in call("prune", "--help")
    call("nonsense", code=2)


def python(*lines):
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)


def test_help_imports_neither_torch_nor_what_reads_checkpoints():
    done = python(
        "import sys; from typer.testing import CliRunner; from rescale_data.cli.commands import app",
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0",
        "print([name for name in ('torch', 'numpy', 'pyarrow', 'fsspec', 'torchdata') if name in sys.modules])",
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]")


def test_without_the_extra():
    done = python("import sys; sys.modules['typer'] = None; from rescale_data.cli.main import main; main()")
    assert done.returncode == 2
    assert "pip install 'rescale_data[cli]'" in done.stderr


def test_a_name_that_the_terminal_cannot_show_is_escaped(tmp_path):
    save(tmp_path / "c", {"lö": 1})
    done = python(
        f"import sys; sys.argv = ['rescale-data', 'show', {str(tmp_path / 'c')!r}]; sys.stdout.reconfigure(encoding='ascii')",
        "from rescale_data.cli.main import main; main()",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert r"l\xf6" in done.stdout


def test_picture_and_size():
    assert progress_bar([0, 4, 8], 10) == " ▄█"
    assert progress_bar(list(range(100)), 10)[-1] == "█"
    assert len(progress_bar(list(range(100)), 10)) == 10
    assert [format_size(n) for n in (0, 999, 123456, 5e12)] == ["0 B", "999 B", "123 kB", "5 TB"]


def test_a_page_of_a_checkpoint_and_of_a_run(run_folder, tmp_path):
    """That of a run has its checkpoints with sizes and metrics, and what the newest one that can be read holds."""
    page, step = tmp_path / "page.html", run_folder / "step-20"
    assert "page.html" in call("show", step, "--html", page).replace("\n", "")
    text = page.read_text()
    assert "80 samples, 20 global batches, 12 logical shards" in text
    assert re.search("samples +6 to 7 +(██▇){4}", text)
    assert re.search("data +1 to 2 .*(██▆){4}", text), "logical shards are at other rows of the source"
    assert "<title>rescale-data show</title>" in text
    assert "http" not in text
    assert "No checkpoint" in call("show", tmp_path / "none", "--html", page, code=2)
    assert "No such file" in call("show", step, "--html", tmp_path / "none" / "page.html", code=2)
    call("prune", run_folder, "--keep-latest", 1, "--keep-every", 10, "--yes")
    call("show", run_folder, "--html", page)
    text = page.read_text()
    assert text.count("committed") == 3
    assert "80 samples, 20 global batches" in text
    (data(step) / "__0_0.distcp").unlink()
    call("show", run_folder, "--html", page)
    assert re.search("In <span[^>]*>step-10<", page.read_text())


@pytest.mark.parametrize("above", [lambda mixture: mixture, lambda mixture: rd.Map(mixture, abs)])
def test_a_page_of_a_mixture(tmp_path, above):
    sources = {name: rd.DatasetSource(list(range(90)), name=name) for name in ("root <web>", "code")}

    def pipeline(shard):
        rows = {name: rd.Reader(source, shard) for name, source in sources.items()}
        kept = {**rows, "code": rd.Filter(rows["code"], lambda row: row % 2)}
        return above(rd.WeightedSampler(kept, {"root <web>": 0.75, "code": 0.25}))

    loader = rd.DataLoader(pipeline, global_batch_size=8, num_logical_shards=8, repeat=True)
    for _ in zip(range(4), loader, strict=False):
        pass
    save(tmp_path / "saved", {"loader": loader})
    call("show", tmp_path / "saved", "--html", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert re.search("code +25.0%   25.0%", text)
    rows = {path.removeprefix("source."): drawn for path, drawn in data_in(tmp_path / "saved")["rows"].items()}
    drawn = sum(rows["root <web>"]) / 90
    assert re.search(f"root &lt;web&gt; +0 +{drawn:.1%} \\(", text)
    assert "code.filtered" in text


def test_plan():
    text = call("plan", 768, "--from", 64, "--to", 50)
    assert "64" in text
    assert "no; 48 and 64 would" in text
    found = read("plan", 768, "--gpus", 497, "--model-parallel", 8)
    assert found["largest"] == {"gpus": 497, "model_parallel": 8, "ranks": 48, "used": 384}
    for about in read("plan", 24)["ranks"]:
        for micro_batch_size in about["micro_batches"]:
            for workers in about["workers"]:
                assert rd.plan(24, micro_batch_size=micro_batch_size, num_workers=workers)
    assert "hold no data-parallel rank" in call("plan", 768, "--gpus", 4, "--model-parallel", 8, code=2)
    assert "at least 1" in call("plan", 768, "--to", 0, code=2)


def test_plan_tells_what_is_refused_from_what_has_another_order():
    asked = ("plan", 768, "--num-logical-shards", 100)
    found = read(*asked, "--from", 50, "--to", 64, "--to", 384)["ranks"]
    assert [(about["ranks"], about["allowed"], about["keeps_order"]) for about in found] == [
        (50, False, False),  # 50 does not divide 768
        (64, True, False),
        (384, False, False),  # more ranks than logical shards
    ]
    for about in found:
        sizes = {"global_batch_size": 768, "num_logical_shards": 100, "dp_rank": 0, "dp_world_size": about["ranks"]}
        with nullcontext() if about["allowed"] else pytest.raises(ValueError, match=r"divide|less than"):
            rd.DataLoader(list(range(768)), micro_batch_size=1, **sizes)
    text = call(*asked, "--from", 64)
    assert "allowed" in text
    assert "would" not in text
    assert "has to be a multiple" in call(*asked, "--gpus", 64, code=2)


SOURCE = rd.DatasetSource([{"x": i} for i in range(48)], name="numbers")


def numbers(shard):
    return rd.Reader(SOURCE, shard)


def test_audit(tmp_path):
    loader = rd.DataLoader(numbers, global_batch_size=4, repeat=True)
    seen = [batch["x"].tolist() for _, batch in zip(range(6), loader, strict=False)]
    save(tmp_path / "run" / "step-6", {"loader": loader})
    of_numbers, row = ("--pipeline", f"{__name__}:numbers", "--repeat"), f"numbers:{seen[4][1]}"
    asked = ("audit", tmp_path / "run", *of_numbers)
    text = call(*asked, "--find", row)
    assert f"numbers[{seen[4][1]}]" in text
    assert "1 rows, drawn 1 times; in 1 samples of steps 0 to 5" in text
    served = read(*asked, "--steps", "2:4")["served"]
    assert [one["documents"] for one in served] == [[f"numbers: numbers[{x}]"] for x in seen[2] + seen[3]]
    assert "3 not shown" in call(*asked, "--steps", "5", "--limit", "1")
    for wrong, says in (
        (["--steps", "5:9"], "newest checkpoint"),
        (["--steps", "x"], "FIRST:STOP"),
        ([], "one of --find SOURCE:ROW or --steps"),
        (["--find", "others:1"], "reads the sources ['numbers']"),
    ):
        assert says in said(*asked, *wrong, code=2)
    other = rd.DataLoader(SOURCE, global_batch_size=4)
    save(tmp_path / "two" / "step-6", {"loader": loader, "validation": {"loader": other}})
    of_two = ("audit", tmp_path / "two", *of_numbers, "--find", row)
    assert "Name one of them" in call(*of_two, code=2)
    assert call(*of_two, "--name", "loader") == text
    for name in ("nowhere:f", f"{__name__}:nothing", __name__):
        assert "MODULE:NAME" in call("audit", tmp_path / "run", "--pipeline", name, "--steps", "1", code=2)


def test_rows_are_looked_up_and_written_as_a_reader_takes_them(tmp_path):
    (tmp_path / "ids.txt").write_text("3\n17\n\n999\n")
    asked = ("rows", f"{__name__}:SOURCE", tmp_path / "ids.txt", tmp_path / "list.json")
    assert "2 rows have one of the 3 ids" in call(*asked, "--column", "x")
    exclude = json.loads((tmp_path / "list.json").read_text())
    assert exclude == [3, 17]
    left = {row["x"] for row in rd.Reader(SOURCE, rd.Shard(), exclude=exclude)}
    assert left == set(range(48)) - {3, 17}
    assert "No row of numbers can be looked up by its column 'id'" in said(*asked, code=2)
    assert "nowhere" in call("rows", f"{__name__}:SOURCE", tmp_path / "nowhere", tmp_path / "list.json", code=2)
