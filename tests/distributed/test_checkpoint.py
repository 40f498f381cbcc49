"""One checkpoint of model, optimizer and loader, through plain `dcp.save`, `dcp.async_save` and `dcp.load` (R7)."""

import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import set_state_dict

from tests.checkpoint.models import Training, mesh
from tests.distributed.ranks import run_ranks
from tests.distributed.segments import Data, MicroBatch, global_batches, take
from tests.pipelines import plain

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DATA = Data("packed", 500, 96)
O = 24  # noqa: E741


def begun(b: int) -> Training:
    """One rank of a run with FSDP2, or, without a process group, without; other weights on other topologies."""
    return Training("fsdp2" if dist.is_initialized() else "none", b, DATA.loader(O, b, mesh=mesh()))


def steps(run: Training, count: int) -> list[MicroBatch]:
    found, batches = list[MicroBatch](), iter(run.loader)
    for _ in range(count):
        for _ in range(run.loader.gradient_accumulation_steps):
            found.append([plain(sample) for sample in next(batches)["samples"]])
        run.learn()
    return found


class Seen(NamedTuple):
    numbers: dict[str, Any]
    taken: list[MicroBatch]


class HeldWriter(dcp.FileSystemWriter):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go = threading.Event()

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        assert self.go.wait(60)
        return super().write_data(*args, **kwargs)


def saved(folder: Path) -> Seen:
    run = begun(3)
    steps(run, 3)
    dcp.save(run.stock_state, checkpoint_id=folder / "plain")
    numbers = run.numbers()
    writer = HeldWriter(folder / "async")
    future = dcp.async_save(run.stock_state, storage_writer=writer, process_group=dist.new_group(backend="gloo"))
    taken = steps(run, 2)
    writer.go.set()
    future.result()
    return Seen(numbers, taken)


def loaded(paths: list[Path], b: int) -> list[Seen]:
    found: list[Seen] = []
    for path in paths:
        run = begun(b)
        dcp.load(state := run.stock_state, checkpoint_id=path)
        set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found.append(Seen(run.numbers(), steps(run, 2)))
    return found


def test_saved_by_4_ranks_and_loaded_by_6_and_without_a_process_group(tmp_path: Path) -> None:
    before = run_ranks(4, tmp_path, saved, tmp_path)
    uninterrupted = global_batches([take(DATA.loader(O, O), 5)[3:]], O)
    assert global_batches([seen.taken for seen in before], O) == uninterrupted, "while a save is on its way"
    paths = [tmp_path / "plain", tmp_path / "async"]
    for ranks in (run_ranks(6, tmp_path, loaded, paths, 2), [loaded(paths, O)]):
        for found in zip(*ranks, strict=True):
            assert global_batches([seen.taken for seen in found], O) == uninterrupted
            for seen in found:
                assert seen.numbers == before[0].numbers
    entries = dcp.FileSystemReader(paths[0]).read_metadata().state_dict_metadata
    assert {name for name in entries if name.startswith("loader.")} == {"loader.table", "loader.header"}
    table = entries["loader.table"]
    assert table.size[0] == DATA.n
    assert table.size[1] * table.properties.dtype.itemsize <= 64, "bytes a logical shard (R5)"
    assert [tuple(chunk.sizes) for chunk in table.chunks] == [tuple(table.size)], "one copy of each row"
