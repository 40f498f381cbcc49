"""A small run whose every part is in one state: a model, AdamW and a loader, with or without XLA."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import rescale_data as rd

N = 48
WIDTH = 10
ROWS = [{"x": np.float32(np.arange(WIDTH) + row)} for row in range(96)]

NUM_MARKED = 3
LAYOUTS: dict[str, tuple[tuple[int, ...], list[tuple[Any, ...]]] | None] = {
    # name: shape of the mesh, and how the two weights and the first bias lie on it; the last bias has no mark at all
    "unsharded": None,
    "replicated": ((4,), [(None, None), (None, None), (None,)]),
    "(4,)": ((4,), [(0, None), (None, 0), (0,)]),
    "(2,2)": ((2, 2), [(0, 1), (0, None), (0,)]),  # the second weight and the bias twice on this host
    "(4,1)": ((4, 1), [(0, 1), (1, 0), (None,)]),
    "(1,4)": ((1, 4), [(0, 1), (1, 0), (1,)]),
    "both": ((2, 2), [((0, 1), None), (None, (1, 0)), ((0, 1),)]),
}


def model(seed: int) -> nn.Sequential:
    """10 -> 6 -> 7: no size of these divides over 4 devices."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, 7))


def loader(**topology: Any) -> rd.DataLoader:
    return rd.DataLoader(ROWS, global_batch_size=12, num_logical_shards=N, repeat=True, seed=5, **topology)


@dataclass
class Run:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any
    to_device: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    sync: Callable[[], None] = lambda: None
    batches: Iterator[Any] | None = None

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}

    def train(self, steps: int) -> list[float]:
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        if self.batches is None:
            self.batches = iter(self.loader)
        loss = self.model(self.to_device(next(self.batches)["x"]) / 50).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.sync()
        return loss.item()


def xla_run(layout: str, seed: int = 0, shape: tuple[int, ...] | None = None, **topology: Any) -> Run:
    """A run on all XLA devices of this process.

    Args:
        layout: A name of LAYOUTS.
        shape: Of the mesh, where it is not that of LAYOUTS, for another number of devices.
    """
    import torch_xla
    import torch_xla.distributed.spmd as xs

    net = model(seed).to("xla")
    marks = LAYOUTS[layout]
    if marks is not None:
        shape = shape or marks[0]
        mesh = xs.Mesh(list(range(int(np.prod(shape)))), shape)
        for parameter, spec in zip((net[0].weight, net[2].weight, net[0].bias), marks[1], strict=True):
            xs.mark_sharding(parameter, mesh, spec)
    return Run(net, adamw(net), loader(**topology), lambda x: x.to("xla"), torch_xla.sync)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)


def logged() -> list[str]:
    """Return a list of what the package logs from here on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rescale_data").addHandler(handler)
    return messages


def tensors(run: Run) -> dict[str, torch.Tensor]:
    """Every parameter and every tensor of the optimizer's state, whole and on the CPU, copies."""
    found = dict(run.model.named_parameters())
    for name, parameter in run.model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in run.optimizer.state.get(parameter, {}).items()}
    return {name: value.detach().cpu().clone() for name, value in found.items()}


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
