"""Checkpoints that do not fit or are not whole: what `dcp.load` says by itself, what we say, and that nothing is silent."""

import functools
import pickle
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

import rescale_data as rd
from rescale_data import checkpoint
from rescale_data.state import Field
from tests.distributed.ranks import run_ranks
from tests.distributed.segments import Data, take

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROWS, UNEVEN, FILTERED = Data("rows", 200, 24), Data("rows", 200, 25), Data("every", 200, 24)
O = 12  # noqa: E741


def _said(call: Any, kind: type[BaseException]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


# Ranks that do not save together


def on_2_ranks(folder: Path) -> dict[str, str]:
    """Saves that go wrong, and what is said of them on this rank."""
    rank = dist.get_rank()
    said: dict[str, str] = {}
    loader = ROWS.loader(O, 6)
    take(loader, 2)
    dcp.save({"loader": loader}, checkpoint_id=folder / "whole")
    if rank == 1:
        take(loader, 1)

    uneven = UNEVEN.loader(O, 6)
    take(uneven, 1 + rank)
    apart = uneven.state_dict()  # as dcp.load asks for one
    said["different steps, pickled"] = _said(lambda: pickle.dumps(apart), rd.DataStateError)
    said["different steps, saved"] = _said(
        lambda: dcp.save({"loader": uneven}, checkpoint_id=folder / "apart"), CheckpointException
    )
    said["different steps, loaded"] = _said(lambda: UNEVEN.loader(O, 6).load_state_dict(apart), rd.DataStateError)
    whole = functools.partial(rd.whole_state, {"root": uneven.local_state_dict()})
    said["different steps, made whole"] = _said(whole, rd.DataStateError)

    said["another N"] = _said(lambda: _load(Data("rows", 200, 48).loader(O, 6), folder / "whole"), CheckpointException)
    said["another field"] = _said(lambda: _load(FILTERED.loader(O, 6), folder / "whole"), CheckpointException)
    said["another seed"] = _said(lambda: _load(ROWS.loader(O, 6, seed=8), folder / "whole"), rd.DataStateError)
    return said


def _load(loader: rd.DataLoader, path: Path) -> None:
    dcp.load({"loader": loader}, checkpoint_id=path)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("refusals")
    return folder, run_ranks(2, folder, on_2_ranks, folder)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("different steps, made whole", ["The ranks save at different batches", "others between 12 and 24"]),
        ("different steps, pickled", ["The ranks save at different batches", "others between 12 and 24"]),
        ("different steps, saved", ["The ranks save at different batches"]),
        ("different steps, loaded", ["are not of sample"]),
        ("another N", ["Size mismatch between saved torch.Size([24, 6]) and current: torch.Size([48, 6])"]),
        ("another field", ["Size mismatch between saved torch.Size([24, 6]) and current: torch.Size([24, 8])"]),
        ("another seed", ["The state was saved with seed=7, the loader has seed=8. Another seed is another order"]),
    ],
)
def test_all_ranks_are_told(ranks: Any, name: str, parts: list[str]) -> None:
    for rank in ranks[1]:
        assert all(part in rank[name] for part in parts), rank[name]


# A checkpoint of another run: what `check_checkpoint` says


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


class Scaled(rd.Node[Any]):
    """The last node of a pipeline, without state and with a parameter."""

    def __init__(self, source: rd.BaseNode[Any], factor: int) -> None:
        super().__init__(source=source)
        self.factor = factor

    def next(self) -> Any:
        return self.factor * next(self.children["source"])

    def parameters(self) -> dict[str, Any]:
        return {"factor": self.factor}


class Counted(Scaled):
    """The same with a field."""

    FIELDS: ClassVar[tuple[Field, ...]] = (Field(("count",)),)


def loader_of(node: type[Scaled], factor: int) -> rd.DataLoader:
    return rd.DataLoader(lambda shard: node(rd.Reader(list(range(100)), shard), factor), global_batch_size=4)


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (
            Data("rows", 200, 48),
            {},
            "saved with num_logical_shards=24, the loader has num_logical_shards=48. It is fixed for a whole run",
        ),
        (FILTERED, {}, r"The fields differ from those of the checkpoint: .*source.kept is new.*or begin a new run"),
        (ROWS, {"seed": 8}, "saved with seed=7, the loader has seed=8. Another seed is another order"),
        (Data("rows", 201, 24), {}, "The sources differ from those of the checkpoint: .*200.*201.*restore the files"),
    ],
    ids=["N", "fields", "seed", "dataset"],
)
def test_check_checkpoint_explains(whole: Path, data: Data, arguments: dict[str, Any], message: str) -> None:
    loader = data.loader(O, **arguments)
    with pytest.raises(rd.DataStateError, match=message):
        rd.checkpoint.check_checkpoint(whole, loader)
    with pytest.raises((CheckpointException, rd.DataStateError)):
        _load(loader, whole)
    assert loader.step == 0


def test_another_parameter(tmp_path: Path) -> None:
    dcp.save({"loader": loader_of(Scaled, 2)}, checkpoint_id=tmp_path)
    rd.checkpoint.check_checkpoint(tmp_path, loader_of(Scaled, 2))
    message = r"The pipeline differ.*factor: saved 2, now 3.*use the saved ones, or begin a new run"
    with pytest.raises(rd.DataStateError, match=message):
        rd.checkpoint.check_checkpoint(tmp_path, loader_of(Scaled, 3))
    with pytest.raises(rd.DataStateError, match=message):
        _load(loader_of(Scaled, 3), tmp_path)


def test_a_field_too_many(tmp_path: Path) -> None:
    """DCP says that shapes differ, we say of what."""
    dcp.save({"loader": loader_of(Counted, 2)}, checkpoint_id=tmp_path)
    with pytest.raises(rd.DataStateError, match=r"The fields differ.*count was saved and is not there now"):
        rd.checkpoint.check_checkpoint(tmp_path, loader_of(Scaled, 2))
    with pytest.raises(rd.DataStateError, match=r"The fields differ.*count"):
        checkpoint.load(tmp_path, {"loader": loader_of(Scaled, 2)})
    with pytest.raises(CheckpointException, match=r"Size mismatch between saved .* for loader.table"):
        _load(loader_of(Scaled, 2), tmp_path)


def test_check_checkpoint_accepts_what_may_change(whole: Path) -> None:
    for o, b in ((O, 3), (2 * O, 8), (1, 1)):
        rd.checkpoint.check_checkpoint(whole, ROWS.loader(o, b, repeat=False, tail="pad"))
    rd.checkpoint.check_checkpoint(str(whole), ROWS.loader(O), name="loader")
    rd.checkpoint.check_checkpoint(whole.with_name("two"), FILTERED.loader(O), name="validation")


@pytest.mark.parametrize(
    ("saved", "name", "message"),
    [
        ("none", None, r"holds no data state of a rescale_data loader. Save the loader in the state"),
        ("two", None, r"holds the data states \['train', 'validation'\]. Name one of them"),
        ("two", "loader", r"holds the data states \['train', 'validation'\], and none is named 'loader'"),
    ],
)
def test_a_checkpoint_without_the_data_state(whole: Path, saved: str, name: str | None, message: str) -> None:
    with pytest.raises(rd.DataStateError, match=message):
        rd.checkpoint.check_checkpoint(whole.with_name(saved), ROWS.loader(O), name=name)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"No checkpoint at .*: there is nothing at this path"):
        rd.checkpoint.check_checkpoint(tmp_path / "nothing", ROWS.loader(O))
