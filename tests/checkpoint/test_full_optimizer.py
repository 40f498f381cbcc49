"""Whole optimizer states: saved at four ranks, continued at two, one and unsharded, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rescale_data import checkpoint
from tests.checkpoint.models import Net, mesh, wrap
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
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(two_groups(m), lr=0.01, weight_decay=0.1),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
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


def train_and_save(how: str, folder: str, names: list[str]) -> None:
    for name in names:
        model, optimizer = build(how, name)
        losses(model, optimizer, 0, 4)
        checkpoint.save(f"{folder}/{name}", {"model": model})
        states = {form: checkpoint.full_optimizer_state(model, optimizer, keyed_by=form) for form in ("name", "index")}
        states["stream"] = [
            (key, dict(value) if isinstance(value, dict) else value)
            for key, value in checkpoint.stream_optimizer_state(model, optimizer)
        ]
        assert all(not states[form] for form in ("name", "index")) or dist.get_rank() == 0, "other ranks hold nothing"
        if dist.get_rank() == 0:
            torch.save(states, f"{folder}/{name}.pt")


FORMS = ("name", "index", "stream")


def resume(how: str, folder: str, names: list[str], all_forms: bool = True) -> dict[str, dict[str, list[float]]]:
    """Losses by optimizer and form; without ``all_forms`` each optimizer in one of them, in turn."""
    found: dict[str, dict[str, list[float]]] = {}
    for number, name in enumerate(names):
        first = not dist.is_initialized() or dist.get_rank() == 0
        states = torch.load(f"{folder}/{name}.pt", weights_only=True) if first else {}
        found[name] = {}
        for form in FORMS if all_forms else [FORMS[number % 3]]:
            model, optimizer = build(how, name)
            losses(model, optimizer, 100, 1)  # what was there before is overwritten
            checkpoint.load(f"{folder}/{name}", {"model": model})
            if form == "stream":
                checkpoint.load_optimizer_stream(model, optimizer, states.get(form))
            else:
                checkpoint.load_full_optimizer_state(model, optimizer, states.get(form))
            found[name][form] = losses(model, optimizer, 4, 10)
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, list[float]]:
    return {name: losses(*build("none", name), 0, 14)[4:] for name in OPTIMIZERS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("optimizers"))
    run(4, train_and_save, "fsdp2", folder, list(OPTIMIZERS))
    return folder


@pytest.mark.parametrize(("how", "ranks"), [("fsdp2", 2), ("fsdp2", 1), ("ddp", 2)])
def test_saved_at_four_ranks_and_continued(folder: str, expected: dict[str, list[float]], how: str, ranks: int) -> None:
    for found in run(ranks, resume, how, folder, list(OPTIMIZERS), (how, ranks) == ("fsdp2", 2)):
        for name, forms in found.items():
            for form, got in forms.items():
                assert got == pytest.approx(expected[name], rel=1e-5), (name, form)


def test_continued_unsharded_and_as_torchs_own(folder: str, expected: dict[str, list[float]]) -> None:
    for name, forms in resume("none", folder, list(OPTIMIZERS)).items():
        for form, got in forms.items():
            assert got == pytest.approx(expected[name], rel=1e-5), (name, form)
    for name in OPTIMIZERS:
        model, optimizer = build("none", name)
        losses(model, optimizer, 0, 4)
        own = optimizer.state_dict()
        ours = torch.load(f"{folder}/{name}.pt", weights_only=True)["index"]
        assert own["state"].keys() == ours["state"].keys(), "unused and frozen parameters have no state"
        assert [group["params"] for group in own["param_groups"]] == [group["params"] for group in ours["param_groups"]]
        for index, entries in own["state"].items():
            for key, value in entries.items():
                torch.testing.assert_close(torch.as_tensor(ours["state"][index][key]), torch.as_tensor(value))
        optimizer.load_state_dict(ours)


@pytest.mark.parametrize(("how", "ranks"), [("fsdp1", 2), ("fsdp1-flat", 3)])
def test_hazard_fsdp1_on_the_cpu(tmp_path: Path, expected: dict[str, list[float]], how: str, ranks: int) -> None:
    """torch's ``full_state_dict`` with ``cpu_offload`` crashes there, or returns wrong values."""
    names = ["adam", "momentum", "sgd"]
    run(ranks, fsdp1_round_trip, how, str(tmp_path), names)
    for name, forms in resume_plain(str(tmp_path), names).items():
        assert forms == pytest.approx(plain_losses(name)[4:], rel=1e-4), name
    for found in run(2, resume_fsdp1, how, str(tmp_path), names):
        for name, got in found.items():
            assert got == pytest.approx(plain_losses(name)[4:], rel=1e-4), name


def plain_model(how: str, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Embedding(11, 7), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 11)), how)
    return model, OPTIMIZERS[name](model)


def plain_losses(name: str) -> list[float]:
    return losses(*plain_model("none", name), 0, 14)


def fsdp1_round_trip(how: str, folder: str, names: list[str]) -> None:
    for name in names:
        model, optimizer = plain_model(how, name)
        losses(model, optimizer, 0, 4)
        checkpoint.save(f"{folder}/{name}", {"model": model})
        state = checkpoint.full_optimizer_state(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(state, f"{folder}/{name}.pt")


def resume_plain(folder: str, names: list[str], how: str = "none") -> dict[str, list[float]]:
    found = {}
    for name in names:
        model, optimizer = plain_model(how, name)
        checkpoint.load(f"{folder}/{name}", {"model": model})
        state = torch.load(f"{folder}/{name}.pt", weights_only=True)
        first = not dist.is_initialized() or dist.get_rank() == 0
        checkpoint.load_full_optimizer_state(model, optimizer, state if first else None)
        found[name] = losses(model, optimizer, 4, 10)
    return found


def resume_fsdp1(how: str, folder: str, names: list[str]) -> dict[str, list[float]]:
    return resume_plain(folder, names, how)


def stray_state() -> list[str]:
    said = []
    model = nn.Linear(6, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh(), [Shard(0)]))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight] = {"row": torch.zeros(3)}
    try:
        checkpoint.full_optimizer_state(model, optimizer)
    except ValueError as error:
        said.append(str(error))
    optimizer.state.clear()
    bad = {"state": {"weight": {"row": torch.zeros(3)}}, "param_groups": [{"params": ["weight"], "lr": 0.1}]}
    try:
        checkpoint.load_full_optimizer_state(model, optimizer, bad if dist.get_rank() == 0 else None)
    except ValueError as error:
        said.append(str(error))
    unknown = {"state": {"other": {}}, "param_groups": [{"params": ["weight"]}]}
    try:
        checkpoint.load_full_optimizer_state(model, optimizer, unknown if dist.get_rank() == 0 else {})
    except ValueError as error:
        said.append(str(error))
    assert isinstance(model.weight, DTensor)
    return said


def test_what_cannot_be_mapped_is_named_on_all_ranks() -> None:
    """torch's ``set_state_dict`` with ``{}`` on the other ranks hangs; here they give anything."""
    for said in run(2, stray_state):
        assert "weight.row is a plain tensor of shape [3]" in said[0]
        assert "weight.row has the shape [3] and its parameter [4, 6]" in said[1]
        assert "parameters that the optimizer has not: ['other']" in said[2]


def test_bad_arguments() -> None:
    model, optimizer = build("none", "adam")
    with pytest.raises(ValueError, match="keyed_by='number'"):
        checkpoint.full_optimizer_state(model, optimizer, keyed_by="number")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state on rank 0 is NoneType"):
        checkpoint.load_full_optimizer_state(model, optimizer, None)
    with pytest.raises(ValueError, match="2 parameters by index"):
        checkpoint.load_full_optimizer_state(model, optimizer, {"state": {}, "param_groups": [{"params": [0, 1]}]})
    with pytest.raises(ValueError, match="has no parameter 'other'"):
        checkpoint.load_optimizer_stream(model, optimizer, [("other", {"step": torch.zeros(())})])


def checkpointed(how: str, path: str, save: bool) -> dict[str, list[float]]:
    found = {}
    for name in OPTIMIZERS:
        model, optimizer = build(how, name)
        if save:
            losses(model, optimizer, 0, 4)
            checkpoint.save(f"{path}/{name}", {"model": model, "optimizer": optimizer})
        else:
            losses(model, optimizer, 100, 1)
            checkpoint.load(f"{path}/{name}", {"model": model, "optimizer": optimizer})
            found[name] = losses(model, optimizer, 4, 10)
    return found


def test_the_same_through_one_checkpoint(tmp_path: Path, expected: dict[str, list[float]]) -> None:
    run(4, checkpointed, "fsdp2", str(tmp_path), True)
    for found in (*run(2, checkpointed, "fsdp2", str(tmp_path), False), checkpointed("none", str(tmp_path), False)):
        for name, got in found.items():
            assert got == pytest.approx(expected[name], rel=1e-5), name
