"""One checkpoint of model, optimizer and loader, through plain `dcp.save`, `dcp.async_save` and `dcp.load`."""

import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.ranks import run_ranks
from tests.distributed.segments import ByRank, Taken, global_batches, take
from tests.distributed.training import DATA, O, Training

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Seen(NamedTuple):
    """What one rank has at a save or after a load, and what it takes from there on."""

    numbers: dict[str, Tensor]
    taken: list[Taken]


class HeldWriter(dcp.FileSystemWriter):
    """Writes nothing before the training loop has gone on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go = threading.Event()

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        assert self.go.wait(60)
        return super().write_data(*args, **kwargs)


def saved(folder: Path) -> Seen:
    """Three steps and a save; two more while another save is on its way."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    run = Training(3, mesh)
    run.steps(3)
    run.save(folder / "plain")
    numbers = run.numbers()
    writer = HeldWriter(folder / "async")
    future = dcp.async_save(run.state(), storage_writer=writer, process_group=dist.new_group(backend="gloo"))
    taken = run.steps(2)
    writer.go.set()
    future.result()
    return Seen(numbers, taken)


def loaded(paths: list[Path], b: int) -> list[Seen]:
    return [_loaded(path, b) for path in paths]


def _loaded(path: Path, b: int) -> Seen:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)) if dist.is_initialized() else None
    run = Training(b, mesh)
    run.load(path)
    numbers = run.numbers()
    return Seen(numbers, run.steps(2))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Seen]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(4, folder, saved, folder)


@pytest.fixture(scope="module")
def uninterrupted() -> list[Any]:
    """Global batches 3 and 4 of the run on one rank."""
    return global_batches([take(DATA.loader(O, O), 5)[3:]], O)


def check(found: list[Seen], before: list[Seen], uninterrupted: list[Any]) -> None:
    ranks: ByRank = [seen.taken for seen in found]
    assert global_batches(ranks, O) == uninterrupted
    for seen in found:
        assert seen.numbers.keys() == before[0].numbers.keys()
        for name, value in before[0].numbers.items():
            assert torch.equal(seen.numbers[name], value), name


@pytest.mark.parametrize(("w", "b"), [(2, 6), (6, 2)])
def test_saved_by_4_ranks_and_loaded_by_others(checkpoints: Any, uninterrupted: list[Any], w: int, b: int) -> None:
    folder, before = checkpoints
    ranks = run_ranks(w, folder, loaded, [folder / "plain", folder / "async"], b)
    for found in zip(*ranks, strict=True):
        check(list(found), before, uninterrupted)


def test_loaded_without_a_process_group(checkpoints: Any, uninterrupted: list[Any]) -> None:
    folder, before = checkpoints
    check(loaded([folder / "plain"], O), before, uninterrupted)


def test_the_loop_that_goes_on_during_a_save_takes_the_same_batches(checkpoints: Any, uninterrupted: list[Any]) -> None:
    assert global_batches([seen.taken for seen in checkpoints[1]], O) == uninterrupted


def test_the_state_is_small(checkpoints: Any) -> None:
    """R5: one tensor of at most 64 bytes a logical shard, one copy of each row, and one string beside it."""
    entries = dcp.FileSystemReader(checkpoints[0] / "plain").read_metadata().state_dict_metadata
    assert {name for name in entries if name.startswith("loader.")} == {"loader.table", "loader.header"}
    table = entries["loader.table"]
    assert table.size[0] == DATA.n
    assert table.size[1] * table.properties.dtype.itemsize <= 64
    assert [tuple(chunk.sizes) for chunk in table.chunks] == [tuple(table.size)]
