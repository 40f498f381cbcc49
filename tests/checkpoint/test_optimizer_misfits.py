"""Optimizers that are not the one that was saved: found before anything is loaded, and left out so that training goes on."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam

from rescale_data import checkpoint
from rescale_data.checkpoint.optimizer.named import named_state
from rescale_data.checkpoint.optimizer.room import allocate_state
from tests.nodes.resume import plain

Build = Callable[[Any], torch.optim.Optimizer]


def net(*widths):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def step(state):
    def loss():
        state["opt"].zero_grad()
        given = torch.ones(2, 4, dtype=next(state["m"].parameters()).dtype)
        value = (state["m"](given) - 3).square().sum()
        value.backward()
        return value

    state["opt"].step(loss)


def adam(model):
    return Adam(model.parameters())


def momentum(model):
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def state_of(widths, build=adam, steps=0):
    torch.manual_seed(len(widths))
    model = net(*widths)
    state = {"m": model, "opt": build(model)}
    for _ in range(steps):
        step(state)
    return state


def by_name(state):
    return named_state(state["m"], state["opt"])["state"]


@pytest.fixture
def saved(tmp_path):
    checkpoint.save(tmp_path / "c", state_of((4, 4, 2), steps=2))
    return tmp_path / "c"


def in_groups(*groups):
    """Adam with a group for each of these lists of layers."""
    return lambda model: Adam(
        [{"params": [p for n in group for p in model[n].parameters()]} for group in groups], lr=0.5
    )


HEAD = ("opt.state.1.weight.exp_avg, has the shape [2, 4] and its parameter [5, 4]", "opt.state.1.bias.exp_avg_sq")
ADDED = ("missing in the checkpoint: m.2.weight", "1 parameter groups in the state and 1 in the checkpoint")
REGROUPED = (
    *("2 parameter groups in the state and 1 in the checkpoint", "group 1 of the state, ['1.weight', '1.bias']"),
    "Group the parameters as in the run that saved",
)
OTHER = ("different: opt, of another optimizer in the checkpoint: its groups lack dampening, momentum of SGD",)
NAMES = ["0.bias", "0.weight", "1.bias", "1.weight"]
MISFITS = {
    "another head": ((4, 4, 5), adam, HEAD, "opt.state.1.weight.exp_avg", NAMES[:2], [1e-3]),
    "another optimizer": ((4, 4, 2), momentum, OTHER, "opt", [], [0.1]),
    "an added layer": ((4, 4, 2, 2), in_groups([0, 1, 2]), ADDED, "opt.param_groups", [], [0.5]),
    "an added layer in a group": ((4, 4, 2, 2), in_groups([2], [0, 1]), (), "opt.param_groups", NAMES, [0.5, 1e-3]),
    "regrouped parameters": ((4, 4, 2), in_groups([0], [1]), REGROUPED, "opt.param_groups", [], [0.5, 0.5]),
}
"""What does not fit: widths and optimizer; the words of the error; what is reported; whose state is loaded; learning rates."""


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_told_or_left_out(saved, name, steps):
    """A strict load changes nothing; after another one what was left out is as before, and training goes on."""
    widths, build, all_words, mismatched, names, rates = MISFITS[name]
    state = state_of(widths, build, steps)
    before, states = str((state["m"].state_dict(), state["opt"].state_dict())), by_name(state)
    with pytest.raises(ValueError, match=r"nothing was loaded:(?s:.*)different: opt\.?") as caught:
        checkpoint.load(saved, state)
    assert all(words in str(caught.value) for words in all_words)
    assert "opt.state.1.bias.step" not in str(caught.value)
    assert str((state["m"].state_dict(), state["opt"].state_dict())) == before
    report = checkpoint.load(saved, state, strict=False)
    assert mismatched in report.mismatched
    assert not report.unexpected
    loaded = {name for name, entries in by_name(state).items() if entries.get("step") == 2}
    assert loaded == {*names}
    others = [{name: str(of[name]) for name in of if name not in loaded} for of in (states, by_name(state))]
    assert others[0] == others[1]
    assert [group["lr"] for group in state["opt"].param_groups] == rates
    step(state)


def test_another_optimizer_with_the_same_settings_fits(saved):
    assert checkpoint.load(saved, state_of((4, 4, 2), lambda m: AdamW(m.parameters()))) == checkpoint.LoadReport()


class Scaled(nn.Module):
    """A layer with one parameter that may be without dimensions."""

    def __init__(self, *shape):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return self.layer(x) * self.scale


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("build", [Adam, NAdam, lambda p: Adam(p, fused=True), lambda p: SGD(p, momentum=0.9)])
def test_a_parameter_that_was_saved_without_dimensions(tmp_path, build, steps):
    """An average without dimensions is not one of a vector: fused kernels would read beyond it."""
    saved, state = ({"m": Scaled(*shape)} for shape in ((), (2,)))
    for content, count in ((saved, 2), (state, steps)):
        content["opt"] = build(content["m"].parameters())
        for _ in range(count):
            step(content)
    before = str(by_name(state).get("scale"))
    checkpoint.save(tmp_path / "c", saved)
    report = checkpoint.load(tmp_path / "c", state, strict=False)
    assert any(name.startswith("opt.state.scale.") for name in report.mismatched)
    assert str(by_name(state).get("scale")) == before
    assert "layer.weight" in by_name(state)
    step(state)


class Rows(torch.optim.Optimizer):
    """An optimizer that is not torch's: its state is shaped unlike its parameters."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["by number"] = [{0: 0}]

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("rows", torch.zeros(parameter.shape[:1], dtype=torch.float64))
            state.setdefault("count", torch.zeros((), dtype=torch.int64))
            state.setdefault("master", parameter.float())
            state.setdefault("past", []).append(parameter.sum().double())
            state["by number"][0][0] += 1
            state["count"] += 1


def test_what_an_entry_is_loaded_into():
    """Without dimensions it is not another optimizer's vector; what does not fit takes no memory."""
    model = net(4, 2)
    live = {"average": torch.zeros(2, 4), "scalar": torch.zeros(()), "step": torch.zeros(1)}
    saved = {name: torch.zeros((), device="meta") for name in (*live, "new")}
    assert [*allocate_state(Rows(model.parameters()), model[0].weight, live, saved)[1]] == ["average"]
    huge = torch.empty(2**40, 2**10, device="meta")
    tensors, mismatches = allocate_state(adam(model), model[0].weight, {}, {"exp_avg": huge})
    assert tensors == {"exp_avg": None}
    assert "exp_avg" in mismatches


@pytest.mark.parametrize("build", [Rows, NAdam, torch.optim.ASGD, torch.optim.LBFGS])
def test_state_comes_back_in_its_shapes_dtypes_and_lists(tmp_path, build):
    """torch would load the product of all momenta in the parameters' dtype, which bfloat16 rounds."""
    of_narrow = lambda model: build(model.to(torch.bfloat16).parameters())  # noqa: E731
    given, fresh, stepped = (state_of((4, 2), of_narrow, steps) for steps in (3, 0, 1))
    checkpoint.save(tmp_path / "c", given)
    for other in (fresh, stepped):
        checkpoint.load(tmp_path / "c", other)
        for of in (str, plain):  # with dtypes, and with all digits
            assert of(by_name(other)) == of(by_name(given))
        step(other)


def test_a_learning_rate_that_is_a_tensor_and_groups_without_parameters(tmp_path):
    """These go in order."""

    def build(rate, *rates):
        empty = [{"params": [], "lr": other} for other in rates]
        return state_of((4, 2), lambda m: Adam([{"params": m.parameters()}, *empty], lr=rate), steps=1)

    checkpoint.save(tmp_path / "tensor", build(torch.tensor(0.5), 0.3, 0.7))
    checkpoint.save(tmp_path / "number", build(0.25, 0.3, 0.7))
    for rate in (torch.tensor(0.1), 0.1):
        state = build(rate, 0.1, 0.2)
        for name, expected in (("tensor", 0.5), ("number", 0.25)):
            checkpoint.load(tmp_path / name, state)
            assert [float(group["lr"]) for group in state["opt"].param_groups] == [expected, 0.3, 0.7]
            step(state)


def test_a_checkpoint_without_the_optimizer_and_one_by_number(tmp_path):
    given, state = state_of((4, 4, 2), steps=2), state_of((4, 4, 2), steps=1)
    torch.save({"m": given["m"].state_dict(), "opt": given["opt"].state_dict()}, tmp_path / "number.pt")
    checkpoint.save(tmp_path / "none", {"m": given["m"]})
    before = str(state["opt"].state_dict())
    by_number = r"different: opt, by number and not by name(?s:.*)load_state_dict"
    for name, words in (("none", "missing in the checkpoint: opt.param_groups.0.params"), ("number.pt", by_number)):
        with pytest.raises(ValueError, match=words) as caught:
            checkpoint.load(tmp_path / name, state)
        assert "opt.state.0" not in str(caught.value)
        checkpoint.load(tmp_path / name, state, strict=False)
        assert str(state["opt"].state_dict()) == before
