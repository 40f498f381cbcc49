"""Save and load: what comes back, in every wrapping, and what is said when it does not fit."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ConstantLR, MultiStepLR, SequentialLR

from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager, LoadReport
from tests.checkpoint.models import Training, mesh
from tests.checkpoint.steps import loader_at
from tests.distributed.ranks import fails, run_ranks
from tests.states import opened

WRAPPINGS = {"none": (1, 0), "ddp": (2, 3), "fsdp1": (3, 2), "fsdp1-flat": (2, 3), "fsdp2": (4, 3), "tp": (2, 4)}
"""Ranks that save, and ranks that load; 0: without a process group."""
Saved = dict[str, tuple[str, dict[str, Any]]]


def save_as(how, path):
    training = Training(how)
    training.step(3)
    checkpoint.save(path, training.state)
    if how == "none":
        torch.save({**training.stock_state, "loader": training.loader.state_dict()}, f"{path}.pt")
    return training.numbers()


def load_as(how, paths):
    found = []
    for path in paths:
        training = Training(how, seed=1)
        assert checkpoint.load(path, training.state) == LoadReport()
        found.append(training.numbers())
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Each wrapping's checkpoint, and a file of torch.save, with the numbers that were saved."""
    folder = tmp_path_factory.mktemp("saved")
    paths = {how: f"{folder}/{how}" for how in WRAPPINGS}
    found = {how: (paths[how], run_ranks(ranks, save_as, how, paths[how])[0]) for how, (ranks, _) in WRAPPINGS.items()}
    return {**found, "file": (f"{folder}/none.pt", found["none"][1])}


@pytest.mark.parametrize("how", WRAPPINGS)
def test_every_wrapping_loads_what_every_other_saved(saved, how):
    paths, ranks = [path for path, _ in saved.values()], WRAPPINGS[how][1]
    for found in run_ranks(ranks, load_as, how, paths) if ranks else [load_as(how, paths)]:
        assert found == [numbers for _, numbers in saved.values()]


def test_stock_dcp_reads_the_folder_and_a_folder_of_stock_dcp_loads(saved, tmp_path):
    path, expected = saved["fsdp2"]
    other = Training(seed=5)
    other.step()
    dcp.load(state := other.stock_state, checkpoint_id=path)
    assert state["loader"].step == 3
    assert state["model"]["up.weight"].tolist() == expected["up.weight"]
    assert state["optimizer"]["state"]["down.bias"]["exp_avg"].tolist() == expected["down.bias.exp_avg"]
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    (found,) = load_as("none", [str(tmp_path / "stock")])
    assert {key: found[key] for key in expected if "." in key} == {key: expected[key] for key in expected if "." in key}


def test_a_save_never_steps_an_optimizer_without_state(tmp_path):
    training, other = Training(), Training(seed=3)
    checkpoint.save(tmp_path / "c", training.state)
    assert not training.optimizer.state
    other.step(2)
    checkpoint.load(tmp_path / "c", other.state)
    assert not other.optimizer.state
    assert other.optimizer.param_groups[0]["lr"] == training.optimizer.param_groups[0]["lr"]


def test_any_names_and_several_models_and_optimizers(tmp_path):
    def build(steps, rate):
        nets = {name: nn.Linear(2, 2) for name in ("net.g", "keys", "train", "net")}
        weights, biases = [net.weight for net in nets.values()], [net.bias for net in nets.values()]
        optimizers = {"opt": SGD(weights, lr=rate, momentum=0.9), "biases": torch.optim.Adam(biases, lr=rate)}
        for _ in range(steps):
            torch.stack([net(torch.ones(2)).sum() for net in nets.values()]).sum().backward()
            for optimizer in optimizers.values():
                optimizer.step()
        return {"nested": {"net": nets.pop("net")}, **nets, **optimizers}

    given, other = build(2, 0.5), build(0, 0.25)
    checkpoint.save(tmp_path / "c", given)
    assert checkpoint.load(tmp_path / "c", other) == LoadReport()
    for name in ("opt", "biases"):
        assert str(other[name].state_dict()) == str(given[name].state_dict())
    assert torch.equal(other["net.g"].weight, given["net.g"].weight)
    del other["net.g"], other["opt"], other["biases"]
    assert checkpoint.load(tmp_path / "c", other).not_asked == ("biases", "net.g", "opt")


class Keeper:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        self.state = state_dict


def test_keys_that_are_no_strings_come_back_and_are_saved_again(tmp_path):
    """DCP makes strings of them. Schedulers keep milestones by number."""

    def build(x):
        kept = Keeper({1: x, None: {(2, 3): torch.full((2,), x)}, "list": [{4: x}, {6: torch.full((1,), x)}]})
        optimizer = SGD(nn.Linear(1, 1).parameters(), lr=float(x))
        steps, parts = MultiStepLR(optimizer, [2, 4, 6]), [ConstantLR(optimizer), MultiStepLR(optimizer, [1, 3])]
        schedulers = {"steps": steps, "sequence": SequentialLR(optimizer, parts, [2])}
        values = {"list": [{1: torch.full((2,), x)}, OrderedDict({2: x})], "n": {3: {1: x}}}
        return {"keeper": kept, **schedulers, **values}

    def shown(state):
        return str([value.state_dict() if hasattr(value, "state_dict") else value for value in state.values()])

    checkpoint.save(tmp_path / "0", given := build(7))
    for generation in range(2):
        checkpoint.load(tmp_path / str(generation), state := build(8))
        assert shown(state) == shown(given)
        checkpoint.save(tmp_path / str(generation + 1), state)


def test_everything_that_does_not_fit_is_in_one_error_and_left_out_by_a_load_that_is_not_strict(tmp_path):
    given, other = nn.Linear(3, 4), nn.Linear(3, 4)
    other.register_parameter("extra", nn.Parameter(torch.full((2,), 9.0)))
    saved = {"model": given, "net": nn.Linear(3, 4), "loader": loader_at(0, 8), "half": torch.zeros(2), "number": 3}
    checkpoint.save(tmp_path / "c", {**saved, "a": 1, "b": 2})
    unfit = {"half": torch.zeros(2, dtype=torch.float16), "number": torch.zeros(()), "gone": 1}
    state = {"model": other, "net": nn.Sequential(nn.Linear(3, 5)), "loader": loader_at(0, 12), **unfit, "a": 0}
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        checkpoint.load(tmp_path / "c", state)
    for words in (
        *("missing in the checkpoint: net.0.weight", "missing in the checkpoint: gone", "not asked for: net.weight"),
        *("half, a float32 tensor of shape [2] in the checkpoint, a float16", "[8, 6]", "[12, 6]"),
        *("number, a plain value in the checkpoint", "'net' (2 values)", "num_logical_shards is fixed for a whole run"),
    ):
        assert words in str(caught.value)
    assert state["a"] == 0
    report = checkpoint.load(tmp_path / "c", state, strict=False)
    assert report.missing == ("gone", "model.extra", "net.0.bias", "net.0.weight")
    assert {"half", "loader.table", "number"} <= {*report.mismatched}
    assert report.not_asked == ("b",)
    assert torch.equal(other.weight, given.weight)
    assert torch.equal(other.extra, torch.full((2,), 9.0))
    assert state["loader"].step == 0, "a Stateful is loaded whole or not at all"
    assert (state["a"], state["gone"]) == (1, 1)


def test_a_name_that_begins_with_another_name_is_its_own(tmp_path):
    """DCP joins keys by dots, and a key may have one: "a.0" is a name, and the place of an item of "a"."""
    saved = {"a.0": 1, "a": [{"b": 2}]}
    checkpoint.save(tmp_path / "c", {"keeper": Keeper(saved), "keeper.more": {"c": 4, "d": 5}, "keeper.gone": 3})
    keeper, other, more = Keeper({"a.0": 0, "a": [{"b": 0}]}), Keeper({"new": 0}), {"c": 0}
    state = {"keeper": keeper, "keeper.other": other, "keeper.more": more}
    report = checkpoint.load(tmp_path / "c", state, strict=False)
    names = {"missing": ("keeper.other.new",), "unexpected": ("keeper.more.d",), "not_asked": ("keeper.gone",)}
    assert report == LoadReport(**names)
    assert (keeper.state, more, other.state) == (saved, {"c": 4}, {"new": 0})


def test_a_stateful_without_state_is_left_alone_where_its_name_is_a_value(tmp_path):
    """Of a checkpoint that says nothing of the places of its names."""
    stock_planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"keeper": torch.ones(2)}, checkpoint_id=tmp_path / "c", planner=stock_planner)
    state = {}
    keeper = Keeper(state)
    report = checkpoint.load(tmp_path / "c", {"keeper": keeper}, strict=False)
    assert report == LoadReport(unexpected=("keeper",))
    assert keeper.state is state


def test_a_load_replaces_plain_values_and_changes_none(tmp_path):
    checkpoint.save(tmp_path / "c", {"a": ({"x": np.float32(2), "y": {1}},)})
    held = ({"x": np.float32(3), "y": {2}},)
    state = {"a": held}
    checkpoint.load(tmp_path / "c", state)
    assert (state["a"], held) == (({"x": 2, "y": {1}},), ({"x": 3, "y": {2}},))


def test_read_data_state(saved, tmp_path):
    expected = loader_at(3)
    for how in WRAPPINGS:
        state = checkpoint.read_data_state(saved[how][0])
        assert state.keys() == expected.state_dict().keys()
        assert torch.equal(state["table"], expected.state_dict()["table"])
        header, wanted = opened(state), opened(expected.state_dict())
        assert (header["step"], header["samples"], header["pipeline"]) == (3, 12, wanted["pipeline"])
    checkpoint.save(tmp_path / "two", {"train": loader_at(), "eval": {"loader": loader_at(0, 4)}})
    with pytest.raises(ValueError, match=r"\['eval.loader', 'train'\]"):
        checkpoint.read_data_state(tmp_path / "two")
    with pytest.raises(ValueError, match=r"\['eval.loader', 'train'\], and none is named 'loader'"):
        checkpoint.read_data_state(tmp_path / "two", name="loader")
    assert len(checkpoint.read_data_state(tmp_path / "two", name="eval.loader")["table"]) == 4
    checkpoint.save(tmp_path / "none", {"a": 1})
    with pytest.raises(ValueError, match="holds 0 data states"):
        checkpoint.read_data_state(tmp_path / "none")


def on_meta():
    with torch.device("meta"):
        return nn.Linear(2, 3)


class Numbered(SGD):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.state["steps"] = 1


def numbered():
    model = nn.Linear(2, 3)
    return {"model": model, "opt": Numbered(model.parameters())}


NOT_SAVED = {
    "a list": (lambda: [1], TypeError, "maps names to values"),
    "a number as a name": (lambda: {1: 2}, TypeError, "keys are strings"),
    "a tuple as a key": (lambda: {"a": {"b": {(3,): 1}}}, TypeError, "'a.b' has the keys"),
    "two keys of one name": (lambda: {"a": {"b": {3: 1, "3": 2}}}, TypeError, "'a.b' has the keys"),
    "two paths of one name": (
        lambda: {"a": {"b.c": 1}, "a.b": {"c": 2}},
        ValueError,
        r"\['a.b.c'\] are each.*without dots",
    ),
    "a loader below a number": (lambda: {"a": {"b": {3: loader_at()}}}, TypeError, "a name of its own"),
    "a loader in a list": (lambda: {"loaders": [loader_at()]}, TypeError, "a name of its own"),
    "an optimizer alone": (lambda: {"opt": SGD(nn.Linear(1, 1).parameters())}, ValueError, "Put its model into the"),
    "a number of an optimizer": (numbered, TypeError, r"'opt' has \['steps'\].*param_groups\[0\]\['steps'\]"),
}
UNFIT = {
    "meta": (on_meta, r"x.weight is on the meta device.*\n.*x.bias is on the meta device.*to_empty"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "x is quantized: put int_repr",
    ),
    "sparse": (lambda: torch.eye(2).to_sparse(), "x is sparse_coo"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "x is jagged"),
    "in a list": (lambda: [torch.ones(1), torch.eye(2).to_sparse()], r"x.1 is sparse_coo"),
}
NOT_SAVED |= {name: (lambda build=build: {"x": build()}, ValueError, words) for name, (build, words) in UNFIT.items()}


@pytest.mark.parametrize("what", NOT_SAVED)
def test_what_has_no_place_in_a_checkpoint(tmp_path, what):
    build, error, words = NOT_SAVED[what]
    with pytest.raises(error, match=words):
        checkpoint.save(tmp_path / "c", build())
    assert not (tmp_path / "c").exists()
    with CheckpointManager(tmp_path / "run") as manager, pytest.raises(error, match=words):
        manager.save(1, build())
    checkpoint.save(tmp_path / "c", {"x": nn.Linear(2, 3)})
    for strict in (True, False) if what in UNFIT else ():
        with pytest.raises(error, match=words):
            checkpoint.load(tmp_path / "c", build(), strict=strict)


def save_partial(path):
    """Sharded tensors of which one rank's part would be saved, and a module on the meta device."""
    x = DTensor.from_local(torch.ones(3), mesh(), [Partial()])
    sharded = x.redistribute(placements=[Shard(0)])
    part = r"(?s)(?=.*one rank's part)(?=.*a list or a dict)"
    partial_values = r"x(\.0)? is a DTensor"
    for value, words in ((x, partial_values), ([x], partial_values), ((x,), part), ((sharded,), part)):
        fails(words, checkpoint.save, path, {"x": value})
        with CheckpointManager(f"{path}-run") as manager:
            fails(words, manager.save, 1, {"x": value})
    checkpoint.save(path, {"x": sharded})
    checkpoint.load(path, state := {"x": torch.zeros(3)})
    assert state["x"].tolist() == [2.0, 2.0, 2.0]
    model = on_meta()
    state = {"x": model, "optimizer": AdamW(model.parameters())}
    fails("x.weight is on the meta device", checkpoint.load, f"{path}-model", state, kind=ValueError)


def test_tensors_of_ranks_that_cannot_be_saved_or_loaded(tmp_path):
    model = nn.Linear(2, 3)
    optimizer = AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "c-model", {"x": model, "optimizer": optimizer})
    run_ranks(2, save_partial, str(tmp_path / "c"))
    model = on_meta().to_empty(device="cpu")
    checkpoint.load(tmp_path / "c-model", {"x": model, "optimizer": AdamW(model.parameters())})


@pytest.mark.parametrize("spelt", ["{0}/c", "{0}//c/", "file://{0}/c", "local://{0}/c"])
def test_a_local_folder_however_it_is_spelt(tmp_path, spelt):
    path, target = spelt.format(tmp_path), {"n": 0}
    checkpoint.save(path, {"n": 1})
    checkpoint.load(tmp_path / "c", target)
    assert target == {"n": 1}
    with pytest.raises(ValueError, match="already holds a checkpoint"):
        checkpoint.save(path, {"n": 2})
