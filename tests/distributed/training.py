"""A small FSDP2 model with its optimizer and loader, saved and loaded as a training script does it."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed.segments import Data, Taken
from tests.pipelines import plain

DATA = Data("packed", 500, 96)
O = 24  # noqa: E741


class Training:
    """One rank of a run.

    Args:
        mesh: `None` without a process group: the model is then a plain one.
    """

    def __init__(self, b: int, mesh: DeviceMesh | None) -> None:
        torch.manual_seed(b)  # other weights on other topologies: the load has to set them
        self.model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
        if mesh is not None:
            fully_shard(self.model[0], mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.loader = DATA.loader(O, b, mesh=mesh)

    def steps(self, count: int) -> list[Taken]:
        found: list[Taken] = []
        batches = iter(self.loader)
        for _ in range(count):
            for _ in range(self.loader.gradient_accumulation_steps):
                samples = next(batches)["samples"]
                tokens = torch.stack([sample["tokens"] for sample in samples]) / 1000
                self.model(tokens).square().mean().backward()
                found.append(Taken(0, [plain(sample) for sample in samples], len(samples)))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return found

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "loader": self.loader}

    def save(self, path: Path) -> None:
        dcp.save(self.state(), checkpoint_id=path)

    def load(self, path: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def numbers(self) -> dict[str, Tensor]:
        """Parameters and moments, whole (collective)."""
        moments = {
            f"{i}.{name}": value
            for i, state in enumerate(self.optimizer.state.values())
            for name, value in state.items()
        }
        found = {**dict(self.model.named_parameters()), **moments}
        return {key: _whole(value.detach()) for key, value in found.items()}


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()
