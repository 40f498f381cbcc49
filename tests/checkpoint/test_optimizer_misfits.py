"""Optimizers that are not the one that was saved: found before anything is loaded, and left out so that training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam

from rescale_data import checkpoint
from rescale_data.checkpoint.optimizer.named import named_state
from rescale_data.checkpoint.optimizer.room import allocate_state
from tests.checkpoint.models import wrap
from tests.checkpoint.processes import run

Build = Callable[[nn.Module], torch.optim.Optimizer]


def net(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(widths: tuple[int, ...], build: Build = lambda m: Adam(m.parameters()), steps: int = 0) -> dict[str, Any]:
    torch.manual_seed(len(widths))
    model = net(*widths)
    optimizer = build(model)
    for _ in range(steps):
        step(model, optimizer)
    return {"m": model, "opt": optimizer}


def by_name(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return named_state(state["m"], state["opt"])["state"]


def refused(path: Path, state: dict[str, Any]) -> str:
    """What a strict load says, which changes nothing."""
    before = str((state["m"].state_dict(), state["opt"].state_dict()))
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        checkpoint.load(path, state)
    assert str((state["m"].state_dict(), state["opt"].state_dict())) == before
    return str(caught.value)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "c", state_of((4, 4, 2), steps=2))
    return tmp_path / "c"


def test_another_head(saved: Path) -> None:
    text = refused(saved, state_of((4, 4, 5)))
    assert "different: opt.state.1.weight.exp_avg, has the shape [2, 4] and its parameter [5, 4]" in text
    assert "opt.state.1.bias.exp_avg_sq" in text
    assert "opt.state.1.bias.step" not in text
    state = state_of((4, 4, 5))
    report = checkpoint.load(saved, state, strict=False)
    assert {"m.1.weight", "opt.state.1.weight.exp_avg"} <= set(report.mismatched)
    assert not report.unexpected
    assert sorted(by_name(state)) == ["0.bias", "0.weight"]
    step(state["m"], state["opt"])


class Scaled(nn.Module):
    """A layer with one parameter that may be without dimensions."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("build", [Adam, NAdam, lambda p: Adam(p, fused=True), lambda p: SGD(p, momentum=0.9)])
def test_a_parameter_that_was_saved_without_dimensions(
    tmp_path: Path, build: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], steps: int
) -> None:
    """An average without dimensions is not one of a vector: fused kernels would read beyond it."""
    saved, state = ({"m": Scaled(*shape)} for shape in ((), (2,)))
    for content, count in ((saved, 2), (state, steps)):
        content["opt"] = build(content["m"].parameters())
        for _ in range(count):
            step(content["m"], content["opt"])
    before = str(by_name(state).get("scale"))
    checkpoint.save(tmp_path / "c", saved)
    report = checkpoint.load(tmp_path / "c", state, strict=False)
    assert any(name.startswith("opt.state.scale.") for name in report.mismatched)
    assert str(by_name(state).get("scale")) == before
    assert "layer.weight" in by_name(state)
    step(state["m"], state["opt"])


def test_an_entry_without_dimensions_is_not_one_of_another_optimizers_vector() -> None:
    model = net(4, 2)
    optimizer = Odd(model.parameters())
    live = {"average": torch.zeros(2, 4), "scalar": torch.zeros(()), "step": torch.zeros(1)}
    saved = {name: torch.zeros((), device="meta") for name in (*live, "new")}
    assert [*allocate_state(optimizer, model[0].weight, live, saved)[1]] == ["average"]


class Odd(torch.optim.Optimizer):
    """An optimizer that is not torch's."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})


def test_a_misfit_takes_no_memory() -> None:
    state = state_of((4, 2))
    huge = torch.empty(2**40, 2**10, device="meta")
    tensors, misfits = allocate_state(state["opt"], state["m"][0].weight, {}, {"exp_avg": huge})
    assert tensors == {"exp_avg": None}
    assert "exp_avg" in misfits


def another_head_sharded(path: str) -> tuple[Any, list[str]]:
    torch.manual_seed(1)
    model = wrap(net(4, 4, 5), "fsdp2")
    optimizer = Adam(model.parameters())
    with pytest.raises(ValueError, match=r"opt\.state\.1\.weight\.exp_avg"):
        checkpoint.load(path, {"m": model, "opt": optimizer})
    report = checkpoint.load(path, {"m": model, "opt": optimizer}, strict=False)
    step(model, optimizer)
    return report.mismatched, [
        name for name, value in by_name({"m": model, "opt": optimizer}).items() if value["step"] == 3
    ]


def test_another_head_of_a_sharded_model(saved: Path) -> None:
    (mismatched, went_on), _ = run(2, another_head_sharded, str(saved))
    assert {"m.1.weight", "opt.state.1.weight.exp_avg", "opt.state.1.bias.exp_avg_sq"} <= set(mismatched)
    assert {"0.weight", "0.bias"} <= set(went_on)


def test_what_is_left_out_keeps_its_state(saved: Path) -> None:
    state = state_of((4, 4, 5), steps=3)
    before = by_name(state)
    checkpoint.load(saved, state, strict=False)
    assert str(by_name(state)["1.weight"]) == str(before["1.weight"])
    assert by_name(state)["0.weight"]["step"] == 2
    step(state["m"], state["opt"])


def test_a_state_shaped_unlike_its_parameter_is_named(tmp_path: Path) -> None:
    given = state_of((4, 4, 2), steps=1)
    given["opt"].state[given["m"][0].weight]["exp_avg"] = torch.zeros(7)
    checkpoint.save(tmp_path / "c", given)
    with pytest.raises(ValueError, match=r"0\.weight\.exp_avg, has the shape \[7\] and its parameter \[4, 4\]"):
        checkpoint.load(tmp_path / "c", state_of((4, 4, 2)))


class Rows(torch.optim.Optimizer):
    """Its state is shaped unlike its parameters."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("rows", torch.zeros(parameter.shape[:1], dtype=torch.float64))
            state.setdefault("count", torch.zeros((), dtype=torch.int64))
            state.setdefault("master", parameter.float())
            state.setdefault("past", []).append(parameter.sum().double())
            state["count"] += 1


def test_an_optimizer_of_ones_own_comes_back_in_its_shapes_dtypes_and_lists(tmp_path: Path) -> None:
    def build(steps: int) -> dict[str, Any]:
        model = net(4, 2).to(torch.bfloat16)
        optimizer = Rows(model.parameters())
        for _ in range(steps):
            optimizer.step()
        return {"m": model, "opt": optimizer}

    given, fresh, stepped = build(3), build(0), build(1)
    checkpoint.save(tmp_path / "c", given)
    for other in (fresh, stepped):
        checkpoint.load(tmp_path / "c", other)
        assert str(by_name(other)) == str(by_name(given))
        other["opt"].step()
        assert [len(entries["past"]) for entries in by_name(other).values()] == [4, 4]


def test_lbfgs_goes_on(tmp_path: Path) -> None:
    def run(state: dict[str, Any], steps: int) -> list[float]:
        def loss() -> torch.Tensor:
            state["opt"].zero_grad()
            value = (state["m"](torch.ones(2, 4)) - 3).square().sum()
            value.backward()
            return value

        return [state["opt"].step(loss).item() for _ in range(steps)]

    def build() -> dict[str, Any]:
        return state_of((4, 3, 2), lambda m: torch.optim.LBFGS(m.parameters(), lr=0.01, max_iter=2))

    given, other = build(), build()
    run(given, 3)
    checkpoint.save(tmp_path / "c", given)
    checkpoint.load(tmp_path / "c", other)
    assert run(given, 3) == run(other, 3)


def test_another_optimizer(saved: Path, tmp_path: Path) -> None:
    def momentum(model: nn.Module) -> torch.optim.Optimizer:
        return SGD(model.parameters(), lr=0.1, momentum=0.9)

    text = refused(saved, state_of((4, 4, 2), momentum))
    assert "different: opt, of another optimizer in the checkpoint: its groups lack dampening, momentum of SGD" in text
    state = state_of((4, 4, 2), momentum)
    assert checkpoint.load(saved, state, strict=False).mismatched == ("opt",)
    assert "betas" not in state["opt"].param_groups[0]
    assert not state["opt"].state
    checkpoint.save(tmp_path / "sgd", state_of((4, 4, 2), momentum, steps=1))
    adam = state_of((4, 4, 2))
    assert checkpoint.load(tmp_path / "sgd", adam, strict=False).mismatched == ("opt",)
    step(adam["m"], adam["opt"])
    checkpoint.load(saved, state_of((4, 4, 2), lambda m: AdamW(m.parameters())))


def test_an_added_layer(saved: Path) -> None:
    text = refused(saved, state_of((4, 4, 2, 2)))
    assert "missing in the checkpoint: m.2.weight" in text
    assert "different: opt.param_groups, 1 parameter groups in the state and 1 in the checkpoint" in text
    state = state_of((4, 4, 2, 2), lambda m: Adam(m.parameters(), lr=0.5))
    report = checkpoint.load(saved, state, strict=False)
    assert report.mismatched == ("opt.param_groups",)
    assert not report.unexpected
    assert not state["opt"].state
    assert state["opt"].param_groups[0]["lr"] == 0.5
    step(state["m"], state["opt"])


def test_an_added_layer_in_a_group_of_its_own(saved: Path) -> None:
    def build(model: Any) -> torch.optim.Optimizer:
        return Adam([{"params": model[2].parameters()}, {"params": model[:2].parameters()}], lr=0.5)

    state = state_of((4, 4, 2, 2), build)
    assert checkpoint.load(saved, state, strict=False).mismatched == ("opt.param_groups",)
    assert [group["lr"] for group in state["opt"].param_groups] == [0.5, 1e-3]
    assert len(state["opt"].state) == 4
    step(state["m"], state["opt"])


def test_regrouped_parameters(saved: Path) -> None:
    def build(model: Any) -> torch.optim.Optimizer:
        return Adam([{"params": model[0].parameters()}, {"params": model[1].parameters()}])

    text = refused(saved, state_of((4, 4, 2), build))
    assert "2 parameter groups in the state and 1 in the checkpoint" in text
    assert "group 1 of the state, ['1.weight', '1.bias']" in text
    assert "Group the parameters as in the run that saved" in text


def test_a_learning_rate_that_is_a_tensor(tmp_path: Path) -> None:
    def build(rate: Any) -> dict[str, Any]:
        return state_of((4, 2), lambda m: Adam(m.parameters(), lr=rate), steps=1)

    checkpoint.save(tmp_path / "tensor", build(torch.tensor(0.5)))
    checkpoint.save(tmp_path / "number", build(0.25))
    for rate in (torch.tensor(0.1), 0.1):
        state = build(rate)
        for name, expected in (("tensor", 0.5), ("number", 0.25)):
            checkpoint.load(tmp_path / name, state)
            assert float(state["opt"].param_groups[0]["lr"]) == expected
            step(state["m"], state["opt"])


def with_empty_groups(*rates: float) -> dict[str, Any]:
    model = net(4, 2)
    return {"m": model, "opt": SGD([{"params": model.parameters()}, *({"params": [], "lr": r} for r in rates)], lr=1.0)}


def test_groups_without_parameters_go_in_order(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", with_empty_groups(0.3, 0.7))
    state = with_empty_groups(0.1, 0.2)
    checkpoint.load(tmp_path / "c", state)
    assert [group["lr"] for group in state["opt"].param_groups] == [1.0, 0.3, 0.7]


def test_a_checkpoint_without_the_optimizer(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"m": net(4, 4, 2)})
    state = state_of((4, 4, 2), steps=2)
    assert "missing in the checkpoint: opt.param_groups.0.params" in refused(tmp_path / "c", state)
    before = str(state["opt"].state_dict())
    checkpoint.load(tmp_path / "c", state, strict=False)
    assert str(state["opt"].state_dict()) == before


def test_a_state_by_number_names_the_way(tmp_path: Path) -> None:
    given = state_of((4, 4, 2), steps=2)
    torch.save({"m": given["m"].state_dict(), "opt": given["opt"].state_dict()}, tmp_path / "file.pt")
    text = refused(tmp_path / "file.pt", state_of((4, 4, 2)))
    assert "different: opt, by number and not by name" in text
    assert "load_state_dict" in text
    assert "opt.state.0" not in text
