"""Datasets that Hugging Face's library saved to disk, read as Arrow files."""

from pathlib import Path

import pytest

from rescale_data.sources.arrow import ArrowSource
from rescale_data.testing import assert_source
from tests.nodes.resume import plain

datasets = pytest.importorskip("datasets")

ROWS = [{"text": f"row {i}", "label": i % 3, "tokens": list(range(i % 7))} for i in range(50)]


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
