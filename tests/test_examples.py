"""The examples of sources, small."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


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


def test_all_formats(capsys: pytest.CaptureFixture[str]) -> None:
    import all_formats

    assert all_formats.main() == 0
    assert capsys.readouterr().out.count("6144 rows, 6 fragments, the batches of Parquet: True") == 6


def test_fine_tuning_on_conversations(capsys: pytest.CaptureFixture[str]) -> None:
    import sft

    assert sft.main(num_conversations=250) == 0
    shown = capsys.readouterr().out
    assert "each with its mask: True" in shown
    assert "'untrained_documents': 12.0" in shown
