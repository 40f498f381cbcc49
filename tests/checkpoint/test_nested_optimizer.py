"""Cases of torch's test_state_dict and of fairscale: nested wrapping, shared weights, experts, what is unused or frozen."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from rescale_data import checkpoint
from tests.checkpoint.models import mesh
from tests.checkpoint.processes import run

CPU = torch.device("cpu")


class Block(nn.Module):
    """A layer, and experts of which the last is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = [expert(x) for expert in list(self.experts)[:2]]
        return x + self.out(torch.tanh(torch.stack(chosen).mean(0))) * self.gain


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x))


def wrapped(how: str) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    if how == "none":
        return model
    for number, block in enumerate(model.blocks):
        if how == "fsdp2":
            for expert in block.experts:
                fully_shard(expert, mesh=mesh())
            model.blocks[number] = fully_shard(block, mesh=mesh())
        else:
            settings: dict[str, Any] = {"device_id": CPU, "use_orig_params": how == "fsdp1"}
            block.experts = nn.ModuleList(FullyShardedDataParallel(expert, **settings) for expert in block.experts)
            model.blocks[number] = FullyShardedDataParallel(block, **settings)
    if how == "fsdp2":
        return fully_shard(model, mesh=mesh())
    model.frozen = FullyShardedDataParallel(model.frozen, device_id=CPU, use_orig_params=how == "fsdp1")
    return FullyShardedDataParallel(model, device_id=CPU, use_orig_params=how == "fsdp1")


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, steps: int) -> list[float]:
    found = []
    for step in range(start, start + steps):
        torch.manual_seed(step)
        tokens = torch.randint(0, 11, (16,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found  # gradients stay


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))


def save(how: str, folder: str) -> None:
    model = wrapped(how)
    optimizer = adam(model)
    trained(model, optimizer, 0, 4)
    checkpoint.save(f"{folder}/c", {"model": model})
    states = {form: checkpoint.full_optimizer_state(model, optimizer, keyed_by=form) for form in ("name", "index")}
    states["stream"] = [(name, value) for name, value in checkpoint.stream_optimizer_state(model, optimizer)]
    if dist.get_rank() == 0:
        torch.save(states, f"{folder}/states.pt")


def resume(how: str, folder: str) -> list[list[float]]:
    """Into an optimizer that is new, one that has stepped, and one that has gradients and no state."""
    states = torch.load(f"{folder}/states.pt", weights_only=True)
    first = not dist.is_initialized() or dist.get_rank() == 0
    found = []
    for form in ("name", "index", "stream"):
        model = wrapped(how)
        optimizer = adam(model)
        if form != "name":
            trained(model, optimizer, 100, 1)
        if form == "index":
            optimizer = adam(model)
        checkpoint.load(f"{folder}/c", {"model": model})
        gradients = [parameter.grad for parameter in model.parameters()]
        if form == "stream":
            checkpoint.load_optimizer_stream(model, optimizer, states[form] if first else None)
        else:
            checkpoint.load_full_optimizer_state(model, optimizer, states[form] if first else None)
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True)), (
            "gradients stay as they were"
        )
        found.append(trained(model, optimizer, 4, 6))
    return found


OLD_TORCH = pytest.mark.skipif(
    torch.__version__.startswith("2.9."),
    reason="set_optimizer_state_dict(strict=False) of torch 2.9 cannot leave out parameters without a state in FSDP1",
)


@pytest.mark.parametrize(
    ("before", "ranks", "after"),
    [
        ("fsdp1-flat", 4, "fsdp2"),
        pytest.param("fsdp2", 4, "fsdp1-flat", marks=OLD_TORCH),
        pytest.param("fsdp1", 2, "fsdp1", marks=OLD_TORCH),
    ],
)
def test_nested_models_go_on_in_any_wrapping(tmp_path: Path, before: str, ranks: int, after: str) -> None:
    plain = wrapped("none")
    optimizer = adam(plain)
    expected = trained(plain, optimizer, 0, 4)
    own = optimizer.state_dict()
    expected = trained(plain, optimizer, 4, 6)
    run(ranks, save, before, str(tmp_path))
    for losses in (*run(2, resume, after, str(tmp_path)), resume("none", str(tmp_path))):
        for got in losses:
            assert got == pytest.approx(expected, rel=1e-4)
    index = torch.load(tmp_path / "states.pt", weights_only=True)["index"]
    assert [group["params"] for group in index["param_groups"]] == [group["params"] for group in own["param_groups"]]
    assert index["state"].keys() == own["state"].keys(), "no state for what is frozen, or an expert never chosen"


def nest(seed: int) -> nn.Module:
    """Parameters before and after children, on three floors."""
    torch.manual_seed(seed)

    class Branch(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False)
            if depth:
                self.inner = Branch(depth - 1)
            self.gain = nn.Parameter(torch.rand(3))
            self.second = nn.Linear(3, 3, bias=False) if not depth else Branch(depth - 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x) * self.gain
            return self.second(self.inner(x) if hasattr(self, "inner") else x)

    return Branch(2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for scale in (1.0, 0.5):
        optimizer.zero_grad()
        model(torch.full((2, 3), scale)).square().sum().backward()
        optimizer.step()


def numbers_of_any_wrapping() -> int:
    """How many wrappings, drawn at random, gave the numbers of the plain model and took them back."""
    done = 0
    for seed in range(20):
        plain, model = nest(seed), nest(seed)
        draw = random.Random(seed)
        for name, module in reversed(list(model.named_modules())[1:]):
            if draw.random() < 0.4:
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, FullyShardedDataParallel(module, device_id=CPU))
        model = FullyShardedDataParallel(model, device_id=CPU)
        expected, optimizer = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (plain, model))
        step(plain, expected)
        step(model, optimizer)
        full = checkpoint.full_optimizer_state(model, optimizer, keyed_by="index")
        own = expected.state_dict()
        assert str(full["param_groups"]) == str(own["param_groups"])
        for number, entries in own["state"].items():
            for key, value in entries.items():
                torch.testing.assert_close(full["state"][number][key], value)
        fresh = torch.optim.Adam(model.parameters(), lr=0.5)
        checkpoint.load_full_optimizer_state(model, fresh, own)
        assert same(checkpoint.full_optimizer_state(model, fresh), checkpoint.full_optimizer_state(plain, expected))
        done += 1
    return done


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["state"].keys() == b["state"].keys() and all(
        torch.equal(torch.as_tensor(a["state"][name][key]), torch.as_tensor(value))
        for name, entries in b["state"].items()
        for key, value in entries.items()
    )


def test_flat_parameters_are_numbered_as_without_wrapping() -> None:
    assert run(1, numbers_of_any_wrapping) == [20]
