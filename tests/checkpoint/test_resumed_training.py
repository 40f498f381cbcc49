"""Training goes on after a load as if nothing had happened, whatever wrapped the model and the optimizer has held; and with a
loader, by plain `dcp.save`, `dcp.async_save` and `dcp.load` of one dict (R7).

The model has cases of torch's test_state_dict and of fairscale: nested wrapping, shared weights, experts, what is unused or
frozen, sizes that ranks do not divide, a buffer.
"""

import glob
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from rescale_data import checkpoint
from tests.checkpoint.models import CPU, FLAT, Training, mesh
from tests.distributed.ranks import run_ranks
from tests.distributed.segments import Data, MicroBatch, global_batches, take
from tests.pipelines import plain

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Counting(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state.update(count=0, scale=torch.tensor(1.0), sum=torch.zeros_like(parameter))
                state["count"] += 1
                state["scale"] *= 0.9
                state["sum"].add_(parameter.grad)
                parameter.sub_(state["sum"], alpha=group["lr"] * float(state["scale"]) / state["count"])


def two_groups(model):
    biases = {name: parameter for name, parameter in model.named_parameters() if name.endswith("bias")}
    others = [parameter for name, parameter in model.named_parameters() if name not in biases]
    return [{"params": others}, {"params": [*biases.values()], "weight_decay": 0.0, "lr": 0.005}]


OPTIMIZERS = {
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01)),
    "adamw": lambda m: torch.optim.AdamW(two_groups(m), lr=0.01, weight_decay=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "counting": lambda m: Counting(m.parameters()),
}


class Block(nn.Module):
    """A layer, and experts of which the last is never chosen."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        chosen = [expert(x) for expert in list(self.experts)[:2]]
        return x + self.out(torch.tanh(torch.stack(chosen).mean(0))) * self.gain


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(5, 3)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(self.norm(x)))


def build(how, name):
    torch.manual_seed(0)
    model = Model()
    for number, block in enumerate(model.blocks if how != "none" else ()):
        if how == "fsdp2":
            for expert in block.experts:
                fully_shard(expert, mesh=mesh())
            model.blocks[number] = fully_shard(block, mesh=mesh())
        else:
            block.experts = nn.ModuleList(FullyShardedDataParallel(expert, device_id=CPU) for expert in block.experts)
            model.blocks[number] = FullyShardedDataParallel(block, device_id=CPU)
    if how == "fsdp2":
        fully_shard(model, mesh=mesh())
    elif how == "fsdp1-flat":
        for part in ("frozen", "unused"):
            setattr(model, part, FullyShardedDataParallel(getattr(model, part), device_id=CPU))
        model = FullyShardedDataParallel(model, device_id=CPU)
        FLAT.append(model)
    return model, OPTIMIZERS[name](model)


def losses(model, optimizer, start, steps):
    """The same batch on all ranks, so that any number of ranks trains alike; the last gradients stay."""
    found = []
    for step in range(start, start + steps):
        torch.manual_seed(step)
        tokens = torch.randint(0, 11, (16,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def train_and_write(how, names, folder):
    """Each as a checkpoint, and gathered on rank 0 by DCP's functions (the README of checkpoint/) in a file of torch.save."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for name in names:
        model, optimizer = build(how, name)
        losses(model, optimizer, 0, 4)
        checkpoint.save(f"{folder}/{name}", {"model": model, "optimizer": optimizer})
        if how == "fsdp2":
            states = get_state_dict(model, optimizer, options=options)
            torch.save(dict(zip(("model", "optimizer"), states, strict=True)), f"{folder}/{name}.{dist.get_rank()}.pt")


def resume(how, names, folder):
    """Into an optimizer that has stepped; and one into one that is new, and one that has gradients and no state."""
    found = []
    files = [*names, *(Path(file).name for file in glob.glob(f"{folder}/*.0.pt"))]
    for file, steps, is_new in [*((file, 1, False) for file in files), ("adam", 0, False), ("adam", 1, True)]:
        model, optimizer = build(how, name := file.removesuffix(".0.pt"))
        losses(model, optimizer, 100, steps)
        optimizer = OPTIMIZERS[name](model) if is_new else optimizer
        gradients = [parameter.grad for parameter in model.parameters()]
        checkpoint.load(f"{folder}/{file}", {"model": model, "optimizer": optimizer})
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True)), "gradients stay"
        found.append((name, losses(model, optimizer, 4, 6)))
    return found


@pytest.mark.parametrize(("how", "ranks", "names"), [("fsdp2", 4, [*OPTIMIZERS]), ("fsdp1-flat", 2, ["adam"])])
def test_training_goes_on_in_another_wrapping(tmp_path, how, ranks, names):
    run_ranks(ranks, train_and_write, how, names, str(tmp_path))
    expected = {name: losses(*build("none", name), 0, 10)[4:] for name in names}
    for found in (*run_ranks(2, resume, "fsdp2", names, str(tmp_path)), resume("none", names, str(tmp_path))):
        for name, got in found:
            assert got == pytest.approx(expected[name], rel=1e-5), name


PACKED = Data("packed", 500, 96)
O = 24  # noqa: E741


def begun(b):
    """One rank of a run with FSDP2, or, without a process group, without; other weights on other topologies."""
    return Training("fsdp2" if dist.is_initialized() else "none", b, PACKED.loader(O, b, mesh=mesh()))


def steps(run, count):
    found, batches = [], iter(run.loader)
    for _ in range(count):
        for _ in range(run.loader.gradient_accumulation_steps):
            found.append([plain(sample) for sample in next(batches)["samples"]])
        run.learn()
    return found


class Seen(NamedTuple):
    numbers: dict[str, Any]
    taken: list[MicroBatch]


class HeldWriter(dcp.FileSystemWriter):
    def __init__(self, path):
        super().__init__(path)
        self.go = threading.Event()

    def write_data(self, *args, **kwargs):
        assert self.go.wait(60)
        return super().write_data(*args, **kwargs)


def saved(folder):
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


def loaded(paths, b):
    found = []
    for path in paths:
        run = begun(b)
        dcp.load(state := run.stock_state, checkpoint_id=path)
        set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found.append(Seen(run.numbers(), steps(run, 2)))
    return found


def test_saved_by_4_ranks_and_loaded_by_6_and_without_a_process_group(tmp_path):
    before = run_ranks(4, saved, tmp_path)
    uninterrupted = global_batches([take(PACKED.loader(O, O), 5)[3:]], O)
    assert global_batches([seen.taken for seen in before], O) == uninterrupted, "while a save is on its way"
    paths = [tmp_path / "plain", tmp_path / "async"]
    for ranks in (run_ranks(6, loaded, paths, 2), [loaded(paths, O)]):
        for found in zip(*ranks, strict=True):
            assert global_batches([seen.taken for seen in found], O) == uninterrupted
            for seen in found:
                assert seen.numbers == before[0].numbers
    entries = dcp.FileSystemReader(paths[0]).read_metadata().state_dict_metadata
    assert {name for name in entries if name.startswith("loader.")} == {"loader.table", "loader.header"}
    table = entries["loader.table"]
    assert table.size[0] == PACKED.n
    assert table.size[1] * table.properties.dtype.itemsize <= 64, "bytes a logical shard (R5)"
    assert [tuple(chunk.sizes) for chunk in table.chunks] == [tuple(table.size)], "one copy of each row"
