"""One checkpoint of model, optimizer and loader, through plain `dcp.save`, `dcp.async_save` and `dcp.load` (R7)."""

import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed.ranks import run_ranks
from tests.distributed.segments import Data, MicroBatch, global_batches, take
from tests.pipelines import plain

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DATA = Data("packed", 500, 96)
O = 24  # noqa: E741


class Training:
    """One rank of a run with an FSDP2 model, or, without a process group, with a plain one."""

    def __init__(self, b: int) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
        torch.manual_seed(b)  # other weights on other topologies: the load has to set them
        self.model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
        if mesh is not None:
            fully_shard(self.model[0], mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.loader = DATA.loader(O, b, mesh=mesh)

    def steps(self, count: int) -> list[MicroBatch]:
        found: list[MicroBatch] = []
        batches = iter(self.loader)
        for _ in range(count):
            for _ in range(self.loader.gradient_accumulation_steps):
                samples = next(batches)["samples"]
                tokens = torch.stack([sample["tokens"] for sample in samples]) / 1000
                self.model(tokens).square().mean().backward()
                found.append([plain(sample) for sample in samples])
            self.optimizer.step()
            self.optimizer.zero_grad()
        return found

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "loader": self.loader}

    def load(self, path: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def numbers(self) -> list[Tensor]:
        """Parameters and moments, whole (collective)."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [
            (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for value in (*self.model.parameters(), *moments)
        ]


class Seen(NamedTuple):
    """What one rank has at a save or after a load, and what it takes from there on."""

    numbers: list[Tensor]
    taken: list[MicroBatch]


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
    run = Training(3)
    run.steps(3)
    dcp.save(run.state(), checkpoint_id=folder / "plain")
    numbers = run.numbers()
    writer = HeldWriter(folder / "async")
    future = dcp.async_save(run.state(), storage_writer=writer, process_group=dist.new_group(backend="gloo"))
    taken = run.steps(2)
    writer.go.set()
    future.result()
    return Seen(numbers, taken)


def loaded(paths: list[Path], b: int) -> list[Seen]:
    found: list[Seen] = []
    for path in paths:
        run = Training(b)
        run.load(path)
        found.append(Seen(run.numbers(), run.steps(2)))
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
                assert all(map(torch.equal, seen.numbers, before[0].numbers))
    entries = dcp.FileSystemReader(paths[0]).read_metadata().state_dict_metadata
    assert {name for name in entries if name.startswith("loader.")} == {"loader.table", "loader.header"}
    table = entries["loader.table"]
    assert table.size[0] == DATA.n
    assert table.size[1] * table.properties.dtype.itemsize <= 64, "bytes a logical shard (R5)"
    assert [tuple(chunk.sizes) for chunk in table.chunks] == [tuple(table.size)], "one copy of each row"
