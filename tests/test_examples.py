"""The examples, small: those of sources, and the mixture; and benchmarks, in their smallest form, to their ends."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))


def test_three_epochs_of_images(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL")
    import image_finetuning

    assert image_finetuning.main(num_rows=96) == 0
    shown = capsys.readouterr().out
    assert shown.count("96 images of 96, each once: True") == 3
    assert "4 ranks for 9 steps, 6 for 3: every batch is that of one rank: True" in shown


def test_a_hugging_face_stream(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("datasets")
    import hf_stream

    assert hf_stream.main() == 0
    assert "all of 480 rows, each once: True" in capsys.readouterr().out


def test_progress_in_tensorboard(tmp_path: Path) -> None:
    """The schedule of the example is what its event file tells."""
    pytest.importorskip("tensorboard")
    import progress_tensorboard
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    progress_tensorboard.main(str(tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    books = {event.step: event.value for event in events.Scalars("share/books")}
    assert list(books) == list(range(0, 200, 5))
    assert books[80] == 0 < books[120] < books[195]
    assert sum(events.Scalars(f"share/{name}")[-1].value for name in progress_tensorboard.ROWS) == pytest.approx(1)
    assert events.Scalars("data/filtered_rows")[-1].value > 0


def test_all_formats(capsys: pytest.CaptureFixture[str]) -> None:
    import all_formats

    assert all_formats.main() == 0
    assert capsys.readouterr().out.count("6144 rows, 6 fragments, the batches of Parquet: True") == 6


def test_fine_tuning_on_conversations(capsys: pytest.CaptureFixture[str]) -> None:
    import sft

    assert sft.main(num_conversations=250) == 0
    shown = capsys.readouterr().out
    assert "each with its mask: True" in shown
    assert "all of it holds" in shown


def test_a_mixture(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every batch is the same on 4, 3 and 8 ranks as on one."""
    import mixture
    from mixture_parts import corpora

    monkeypatch.setattr(corpora, "MAX_FILES", 20)
    monkeypatch.setattr(mixture, "STEPS", 3)
    assert mixture.main() == 0
    shown = capsys.readouterr().out
    assert shown.count("same\n") == 9
    assert "every global batch is the same" in shown
    assert "step 9, sample 0:" in shown


def run(script: str, *arguments: str | Path) -> str:
    found = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_bench_state() -> None:
    told = run("bench_state.py", "--quick")
    for question in (
        "200 sources: state_dict()",
        "what carries state",
        "after a resume at 99 %",
        "ours / one a message",
    ):
        assert question in told


def test_bench_peers_writes_a_new_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    told = run("bench_peers.py", "--quick", "--only", "rows of 64 kB", "--page", page)
    assert told.strip() in page.read_text()
    assert "| ours |" in told
    assert "left out" not in told
