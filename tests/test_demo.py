"""The demo in its quick form, what it says when something is wrong, and that it leaves no process behind."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

import rescale_data as rd
from tests.formats import write_jsonl, write_table
from tests.rank_functions import fail_on_rank_1

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import rescaling_demo as demo  # noqa: E402
from demo import ranks  # noqa: E402
from demo.corpus import build_corpus, read_rows  # noqa: E402
from demo.ranks import RankFailedError, run_ranks  # noqa: E402
from demo.record import read  # noqa: E402
from demo.report import report  # noqa: E402


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Callable[[], bool], Path]:
    """The demo, run with 2 ranks and then with 1: its check of what they wrote down, and the folder of the last segment."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "START_METHOD", "forkserver")  # seconds a rank saved; ctrl-C is tested with the demo's own
        return _run(folder)


def _run(folder: Path) -> tuple[Callable[[], bool], Path]:
    corpus = build_corpus(None, folder / "corpus", 96)
    segments = demo.plan_segments([2, 1], 2, corpus, folder)
    reference = demo.plan_reference(segments, folder)
    for number, segment in enumerate([*segments, reference]):
        demo.run(segment, f"segment {number}")
    pipeline = functools.partial(demo.pipeline, rd.ParquetSource(corpus.folder), corpus.eos_id)
    check = functools.partial(report, segments, reference, pipeline, demo.SEED)
    return check, segments[1].folder


def test_every_batch_is_that_of_an_uninterrupted_run(finished, capsys):
    check, _ = finished
    assert check()
    said = capsys.readouterr().out
    assert "4 of 4 global batches" in said
    assert "96 samples, each the next one of its logical shard: 0 repeated, 0 lost" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (list.reverse, ["FAIL  3 of 4 global batches", "ok    96 samples"]),
        (lambda samples: samples.__setitem__(0, samples[1]), ["1 repeated, 1 lost"]),
    ],
)
def test_the_report_notices_a_sample_in_another_place_and_one_that_comes_twice(change, words, finished, capsys):
    """In what the first rank wrote down of a segment's first step."""
    check, folder = finished
    file, found = folder / "rank000.json", read(folder)[0]
    before = file.read_text()
    change(found["steps"][0]["samples"])
    file.write_text(json.dumps(found))
    assert not check()
    file.write_text(before)
    said = capsys.readouterr().out
    assert all(each in said for each in words)


def test_segments_whose_world_size_does_not_divide_the_global_batch_change_it(tmp_path):
    segments = demo.plan_segments([4, 3, 5, 5], 8, demo.Corpus("", 256, ""), tmp_path)
    assert [segment.global_batch_size for segment in segments] == [24, 24, 25, 25]
    assert {segment.num_logical_shards for segment in segments} == {96}
    assert all(segment.global_batch_size % (segment.world_size * segment.micro_batch_size) == 0 for segment in segments)
    assert demo.plan_reference(segments, tmp_path).stop == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-sizes", "0"], "'0' is not a whole number from 1 on"),
        (["--world-sizes", "4,"], "'' is not a whole number"),
        (["--world-sizes", "64"], "at most 16"),
        (["--steps", "many"], "'many' is not a whole number"),
        (["--data", "/nonexistent"], "there is no '/nonexistent'"),
        (["--data", ""], "there is no ''"),
    ],
)
def test_arguments_that_cannot_be_meant(arguments, message, capsys):
    with pytest.raises(SystemExit):
        demo.parse(arguments)
    assert message in capsys.readouterr().err


def test_a_mixed_folder_gives_what_it_can_and_says_what_it_left_out(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    with pytest.raises(ValueError, match="holds 0 different documents, and the demo needs at least 96"):
        build_corpus(data, tmp_path / "corpus", 96)
    write_table(data / "a.parquet", {"text": [f"row {i} of parquet" for i in range(5)]})
    write_table(data / "a.arrow", {"tokens": [[10 * i, 1, 2] for i in range(4)]})
    write_jsonl(data / "b.jsonl", [*({"id": i, "text": f"line {i}"} for i in range(5)), {"tokens": [1, 2, 3]}])
    (data / "c.md").write_text("some text")
    (data / "d.parquet").write_bytes(b"cut short")
    (data / "e.png").write_bytes(b"\0\1")
    corpus = build_corpus(data, tmp_path / "corpus", 12)
    assert len(read_rows(corpus)) == 16
    assert corpus.description.endswith("Left out, without text or tokens: 1 .parquet, 1 .png.")


@pytest.mark.parametrize(
    ("how", "message"),
    [("raise", r"rank 1 failed:[\s\S]*ValueError: no such luck"), ("die", "rank 1 died with exit code -9")],
)
def test_a_rank_that_fails_ends_all_and_is_named(how, message):
    with pytest.raises(RankFailedError, match=message):
        run_ranks(2, fail_on_rank_1, how)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
@pytest.mark.parametrize(("whole_group", "num_ranks"), [(True, 1), (False, 1)])
def test_ctrl_c_leaves_no_process(whole_group, num_ranks):
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "rescaling_demo.py"), "--world-sizes", str(num_ranks)],
        env={**os.environ, "DEMO_TEST": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=_heed_ctrl_c,
    )
    try:
        _until(
            lambda: len(_processes(mark)) >= 2 + 3 * num_ranks
        )  # itself, a tracker, ranks with a server and a worker
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 130
        assert said.endswith("interrupted; all processes are stopped\n")
        assert "Traceback" not in said
        _until(lambda: not _processes(mark))
    finally:
        process.kill()


def _heed_ctrl_c() -> None:
    """A shell starts what runs in its background with the signal ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _processes(mark: str) -> list[int]:
    """Those with ``mark`` in their environment."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
