"""Whole optimizer states: saved at four ranks, continued at two, one and unsharded, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from rescale_data import checkpoint
from tests.checkpoint.models import Net, wrap
from tests.checkpoint.processes import run


class Counting(torch.optim.Optimizer):
    """An optimizer whose state has a Python number, a 0-d tensor and a tensor."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state.update(count=0, scale=torch.tensor(1.0), sum=torch.zeros_like(parameter))
                state["count"] += 1
                state["scale"] *= 0.9
                state["sum"].add_(parameter.grad)
                parameter.sub_(state["sum"], alpha=group["lr"] * float(state["scale"]) / state["count"])


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = [(name, parameter) for name, parameter in model.named_parameters()]
    biases = [parameter for name, parameter in named if name.endswith("bias")]
    return [
        {"params": [p for name, p in named if not name.endswith("bias")]},
        {"params": biases, "weight_decay": 0.0, "lr": 0.005},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(two_groups(m), lr=0.01, weight_decay=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "counting": lambda m: Counting(m.parameters()),
}


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, steps: int) -> list[float]:
    """The same batch on all ranks, so that any number of ranks trains alike."""
    found = []
    for step in range(start, start + steps):
        torch.manual_seed(step)
        tokens = torch.randint(0, 11, (16,))
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def build(how: str, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = wrap(Net(), how)
    return model, OPTIMIZERS[name](model)


def train_and_write(how: str, folder: str) -> None:
    """Each as a checkpoint, and gathered on rank 0 by DCP's functions (the README of checkpoint/) in a file of torch.save."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for name in OPTIMIZERS:
        model, optimizer = build(how, name)
        losses(model, optimizer, 0, 4)
        checkpoint.save(f"{folder}/{name}", {"model": model, "optimizer": optimizer})
        gathered = {
            "model": get_model_state_dict(model, options=whole),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=whole),
        }
        if dist.get_rank() == 0:
            torch.save(gathered, f"{folder}/{name}.pt")


def resume(how: str, folder: str) -> dict[str, list[float]]:
    found = {}
    for name in (f"{name}{ending}" for name in OPTIMIZERS for ending in ("", ".pt")):
        model, optimizer = build(how, name.removesuffix(".pt"))
        losses(model, optimizer, 100, 1)  # what was there before is overwritten
        checkpoint.load(f"{folder}/{name}", {"model": model, "optimizer": optimizer})
        found[name] = losses(model, optimizer, 4, 10)
    return found


def test_written_at_four_ranks_and_continued(tmp_path: Path) -> None:
    run(4, train_and_write, "fsdp2", str(tmp_path))
    expected = {name: losses(*build("none", name), 0, 14)[4:] for name in OPTIMIZERS}
    for found in (*run(2, resume, "fsdp2", str(tmp_path)), resume("none", str(tmp_path))):
        for name, got in found.items():
            assert got == pytest.approx(expected[name.removesuffix(".pt")], rel=1e-5), name
