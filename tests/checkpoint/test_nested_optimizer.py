"""Cases of torch's test_state_dict and of fairscale: nested wrapping, shared weights, experts, what is unused or frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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
    checkpoint.save(f"{folder}/c", {"model": model, "optimizer": optimizer})


def resume(how: str, folder: str) -> list[list[float]]:
    """Into an optimizer that is new, one that has stepped, and one that has gradients and no state."""
    found = []
    for steps, anew in ((0, False), (1, False), (1, True)):
        model = wrapped(how)
        optimizer = adam(model)
        trained(model, optimizer, 100, steps)
        optimizer = adam(model) if anew else optimizer
        gradients = [parameter.grad for parameter in model.parameters()]
        checkpoint.load(f"{folder}/c", {"model": model, "optimizer": optimizer})
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True)), "gradients stay"
        found.append(trained(model, optimizer, 4, 6))
    return found


@pytest.mark.parametrize(("before", "ranks"), [("fsdp1-flat", 2), ("fsdp2", 3)])
def test_nested_models_go_on_in_another_wrapping(tmp_path: Path, before: str, ranks: int) -> None:
    plain = wrapped("none")
    optimizer = adam(plain)
    trained(plain, optimizer, 0, 4)
    expected = trained(plain, optimizer, 4, 6)
    run(ranks, save, before, str(tmp_path))
    for losses in (*run(2, resume, "fsdp2", str(tmp_path)), resume("none", str(tmp_path))):
        for got in losses:
            assert got == pytest.approx(expected, rel=1e-4)
