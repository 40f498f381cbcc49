"""Datasets that Hugging Face's library saved to disk, read as Arrow files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from rescale_data.cli.commands import app
from rescale_data.sources.arrow import ArrowSource
from rescale_data.testing import assert_source

datasets = pytest.importorskip("datasets")

ROWS = [{"text": f"row {i}", "label": i % 3, "tokens": list(range(i % 7))} for i in range(50)]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()}


@pytest.mark.parametrize("name", ["saved", "saved[1]*"])
def test_a_saved_dataset(name: str, tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(ROWS).filter(lambda row: row["label"] != 1)
    saved.save_to_disk(tmp_path / name, num_shards=3)
    (tmp_path / name / "cache-0123.arrow").write_bytes(b"what a map left behind")
    source = ArrowSource(tmp_path / name)
    assert ArrowSource(f"file://{tmp_path / name}").manifest() == source.manifest()
    assert [plain(source.row(i)) for i in range(source.num_rows)] == list(saved)
    assert_source(source, columns=["tokens"])
    assert source.manifest()["files"][0][0] == "data-00000-of-00003.arrow"


def test_the_command_counts_the_files_of_the_data_set_alone(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=3)
    (tmp_path / "saved" / "cache-0123.arrow").write_bytes(b"what a map left behind")
    command = ["index", str(tmp_path / "saved"), "--index-dir", str(tmp_path / "index"), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert '"files": 3' in result.stdout


def test_images_are_their_bytes(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (3, 2), (1, 2, 3))
    datasets.Dataset.from_dict(
        {"image": [image, image]}, features=datasets.Features({"image": datasets.Image()})
    ).save_to_disk(tmp_path / "saved")
    row = ArrowSource(tmp_path / "saved").row(1)
    assert row["image"]["bytes"].startswith(b"\x89PNG")


def test_a_folder_of_splits(tmp_path: Path) -> None:
    split = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"splits \['train', 'test'\]. Give one of them, .*saved/train'"):
        ArrowSource(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"splits .*saved/train'"):
        ArrowSource(f"file://{tmp_path / 'saved'}")
    assert ArrowSource(tmp_path / "saved" / "train").num_rows == 50
