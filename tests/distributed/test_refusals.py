"""Checkpoints that do not fit: what `dcp.load` says by itself, and what we say. Of another run: `tests.test_errors`."""

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

import rescale_data as rd
from tests.distributed.segments import Data, take

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROWS, FILTERED = Data("rows", 200, 24), Data("every", 200, 24)
O = 12  # noqa: E741


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two loaders, saved in one process."""
    path = tmp_path_factory.mktemp("whole") / "checkpoint"
    loader, other = ROWS.loader(O), FILTERED.loader(O)
    take(loader, 2)
    dcp.save({"loader": loader}, checkpoint_id=path)
    dcp.save({"train": loader, "validation": other}, checkpoint_id=path.with_name("two"))
    dcp.save({"step": 3}, checkpoint_id=path.with_name("none"))
    return path


def test_check_checkpoint_accepts_what_may_change(whole: Path) -> None:
    for o, b in ((O, 3), (2 * O, 8), (1, 1)):
        rd.checkpoint.check_checkpoint(whole, ROWS.loader(o, b, repeat=False, tail="pad"))
    rd.checkpoint.check_checkpoint(str(whole), ROWS.loader(O), name="loader")
    rd.checkpoint.check_checkpoint(whole.with_name("two"), FILTERED.loader(O), name="validation")


@pytest.mark.parametrize(
    ("saved", "name", "message"),
    [
        ("nothing", None, "No checkpoint at .*: there is nothing at this path"),
        ("none", None, r"holds no data state of a rescale_data loader. Save the loader in the state"),
        ("two", None, r"holds the data states \['train', 'validation'\]. Name one of them"),
        ("two", "loader", r"holds the data states \['train', 'validation'\], and none is named 'loader'"),
    ],
)
def test_a_checkpoint_without_the_data_state(whole: Path, saved: str, name: str | None, message: str) -> None:
    with pytest.raises(FileNotFoundError if saved == "nothing" else rd.DataStateError, match=message):
        rd.checkpoint.check_checkpoint(whole.with_name(saved), ROWS.loader(O), name=name)
