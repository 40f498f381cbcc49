"""Save and load: what comes back, in every wrapping, and what is said when it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Partial, Shard

from rescale_data import checkpoint
from tests.checkpoint.models import Plain, mesh, whole, wrap
from tests.checkpoint.processes import run
from tests.checkpoint.stand_in import StandInLoader
from tests.states import opened


def trained(how: str = "none", steps: int = 3, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap(Plain(), how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (seed + 1))
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every number of a model and its optimizer, by name, whole."""
    state = get_optimizer_state_dict(model, optimizer)
    found = {name: whole(value).clone() for name, value in get_model_state_dict(model).items()}
    for name, entries in state["state"].items():
        found.update({f"{name}.{key}": torch.as_tensor(whole(value)).clone() for key, value in entries.items()})
    return found | {f"group.{key}": torch.tensor(state["param_groups"][0][key]) for key in ("lr", "weight_decay")}


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def save_as(how: str, path: str) -> dict[str, Any]:
    model, optimizer = trained(how)
    loader = StandInLoader(mesh=mesh())
    loader.advance(3)
    checkpoint.save(path, {"model": model, "optimizer": optimizer, "loader": loader, "note": "hello"})
    return numbers(model, optimizer)


def load_all_as(how: str, paths: list[str]) -> list[Any]:
    return [load_as(how, path) for path in paths]


def load_as(how: str, path: str) -> tuple[dict[str, Any], int, Any]:
    model, optimizer = trained(how, steps=0, seed=1)
    loader = StandInLoader(mesh=mesh())
    state = {"model": model, "optimizer": optimizer, "loader": loader, "note": None}
    assert checkpoint.load(path, state) == checkpoint.LoadReport()
    return numbers(model, optimizer), loader.step, state["note"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Any]]]:
    """The same training, saved from every wrapping."""
    folder = tmp_path_factory.mktemp("saved")
    wrappings = {"none": 1, "ddp": 2, "fsdp1": 3, "fsdp1-flat": 2, "fsdp2": 4, "tp": 2}
    return {
        how: (str(folder / how), run(ranks, save_as, how, str(folder / how))[0]) for how, ranks in wrappings.items()
    }


@pytest.mark.parametrize(("how", "ranks"), [("ddp", 3), ("fsdp1", 2), ("fsdp1-flat", 3), ("fsdp2", 3), ("tp", 4)])
def test_every_wrapping_loads_what_every_other_saved(
    saved: dict[str, tuple[str, dict[str, Any]]], how: str, ranks: int
) -> None:
    for of_rank in run(ranks, load_all_as, how, [path for path, _ in saved.values()]):
        for (got, step, note), (_, expected) in zip(of_rank, saved.values(), strict=True):
            assert (step, note) == (3, "hello")
            assert_same(expected, got)


def test_no_process_group_loads_what_every_wrapping_saved(saved: dict[str, tuple[str, dict[str, Any]]]) -> None:
    for path, expected in saved.values():
        got, step, note = load_as("none", path)
        assert (step, note) == (3, "hello")
        assert_same(expected, got)


def test_stock_dcp_reads_the_folder(saved: dict[str, tuple[str, dict[str, Any]]]) -> None:
    path, expected = saved["fsdp2"]
    model, optimizer = trained(steps=1, seed=5)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "loader": StandInLoader(),
    }
    dcp.load(state, checkpoint_id=path)
    assert state["loader"].step == 3
    assert torch.equal(state["model"]["up.weight"], expected["up.weight"])
    assert torch.equal(state["optimizer"]["state"]["down.bias"]["exp_avg"], expected["down.bias.exp_avg"])


def test_a_folder_of_stock_dcp_loads(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "note": "x",
        "loader": StandInLoader(),
    }
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    got, step, note = load_as("none", str(tmp_path / "stock"))
    assert (step, note) == (0, "x")
    assert_same(numbers(model, optimizer), got)


def test_a_save_never_steps_an_optimizer_without_state(tmp_path: Path) -> None:
    model, optimizer = trained(steps=0)
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert not optimizer.state
    other_model, other = trained(steps=2, seed=3)
    checkpoint.load(tmp_path / "c", {"model": other_model, "optimizer": other})
    assert not other.state
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_two_optimizers_and_two_models(tmp_path: Path) -> None:
    def build(scale: float) -> dict[str, Any]:
        first, second = nn.Linear(2, 2), nn.Linear(3, 1)
        both = torch.optim.SGD([first.weight, second.weight], lr=scale, momentum=0.9)
        biases = torch.optim.Adam([first.bias], lr=scale)
        (first.weight.sum() * scale + first.bias.sum() + second.weight.sum()).backward()
        both.step()
        biases.step()
        return {"nets": {"first": first, "second": second}, "both": both, "biases": biases}

    given, other = build(0.5), build(0.25)
    checkpoint.save(tmp_path / "c", given)
    checkpoint.load(tmp_path / "c", other)
    for name in ("both", "biases"):
        left, right = given[name].state_dict(), other[name].state_dict()
        assert left["param_groups"] == right["param_groups"]
        assert str(left["state"]) == str(right["state"])


def test_any_name_will_do(tmp_path: Path) -> None:
    def build(steps: int) -> dict[str, Any]:
        modules: dict[str, Any] = {name: nn.Linear(2, 2) for name in ("net.g", "keys", "train", "net")}
        optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], momentum=0.9)
        for _ in range(steps):
            torch.stack([module(torch.ones(2)).sum() for module in modules.values()]).sum().backward()
            optimizer.step()
        return {**modules, "opt": optimizer}

    given, other = build(2), build(0)
    checkpoint.save(tmp_path / "c", given)
    assert checkpoint.load(tmp_path / "c", other) == checkpoint.LoadReport()
    assert str(other["opt"].state_dict()) == str(given["opt"].state_dict())
    assert torch.equal(other["net.g"].weight, given["net.g"].weight)
    del other["net.g"], other["opt"]
    assert checkpoint.load(tmp_path / "c", other).not_asked == ("net.g", "opt")


def test_everything_that_does_not_fit_is_in_one_error(tmp_path: Path) -> None:
    checkpoint.save(
        tmp_path / "c", {"model": nn.Linear(3, 4), "loader": StandInLoader(8), "half": torch.zeros(2), "number": 3}
    )
    state = {
        "model": nn.Sequential(nn.Linear(3, 5)),
        "loader": StandInLoader(12),
        "half": torch.zeros(2, dtype=torch.float16),
        "number": torch.zeros(()),
        "gone": 1,
    }
    with pytest.raises(ValueError) as caught:
        checkpoint.load(tmp_path / "c", state)
    text = str(caught.value)
    for part in (
        "missing in the checkpoint: model.0.weight",
        "not asked for: model.weight",
        "missing in the checkpoint: gone",
    ):
        assert part in text
    for part in (
        "half, a float32 tensor of shape [2] in the checkpoint, a float16",
        "number, a plain value in the checkpoint",
        "[8, 5]",
        "[12, 5]",
    ):
        assert part in text
    assert "'model' (2 values)" in text
    assert state["loader"].loaded is None
    assert state["gone"] == 1


def test_not_strict_loads_what_fits_and_says_what_did_not(tmp_path: Path) -> None:
    given = nn.Linear(3, 4)
    checkpoint.save(tmp_path / "c", {"model": given, "loader": StandInLoader(8), "a": 1, "b": 2})
    other = nn.Linear(3, 4)
    other.register_parameter("extra", nn.Parameter(torch.full((2,), 9.0)))
    state = {"model": other, "loader": StandInLoader(12), "a": 0, "missing": torch.ones(1)}
    report = checkpoint.load(tmp_path / "c", state, strict=False)
    assert report.missing == ("missing", "model.extra")
    assert "loader.table" in report.mismatched
    assert report.not_asked == ("b",)
    assert torch.equal(other.weight, given.weight)
    assert torch.equal(other.extra, torch.full((2,), 9.0))
    assert state["loader"].loaded is None, "a Stateful is loaded whole or not at all"
    assert state["a"] == 1


def save_rank_local(path: str) -> None:
    checkpoint.save(path, {"rng": {str(dist.get_rank()): torch.full((3,), float(dist.get_rank()))}})


def load_rank_local(path: str) -> str:
    state = {"rng": {str(dist.get_rank()): torch.zeros(3)}}
    try:
        checkpoint.load(path, state)
    except ValueError as error:
        return str(error)
    return str(state["rng"][str(dist.get_rank())].tolist())


def test_a_value_that_one_rank_misses_is_an_error_on_all(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    run(2, save_rank_local, path)
    assert run(2, load_rank_local, path) == ["[0.0, 0.0, 0.0]", "[1.0, 1.0, 1.0]"]
    texts = run(3, load_rank_local, path)
    assert len(set(texts)) == 1
    assert "missing in the checkpoint: rng.2, a float32 tensor of shape [3] in the state (on rank 2)" in texts[0]


def test_read_data_state(saved: dict[str, tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    expected = StandInLoader()
    expected.advance(3)
    for path, _ in saved.values():
        state = checkpoint.read_data_state(path)
        assert state.keys() == expected.state_dict().keys()
        assert torch.equal(state["table"], expected.table())
        header, wanted = opened(state), opened(expected.state_dict())
        assert (header["step"], header["samples"], header["pipeline"]) == (3, 12, wanted["pipeline"])
    checkpoint.save(tmp_path / "two", {"train": StandInLoader(), "eval": {"loader": StandInLoader(4)}})
    with pytest.raises(ValueError, match=r"\['eval.loader', 'train'\]"):
        checkpoint.read_data_state(tmp_path / "two")
    assert len(checkpoint.read_data_state(tmp_path / "two", name="eval.loader")["table"]) == 4
    checkpoint.save(tmp_path / "none", {"a": 1})
    with pytest.raises(ValueError, match="no data state"):
        checkpoint.read_data_state(tmp_path / "none")


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ([1], TypeError, "maps names to values"),
        ({1: 2}, TypeError, "keys are strings"),
        ({"a": {"b": {(3,): 1}}}, TypeError, "'a.b' has the keys"),
        ({"a": {"b": {3: 1, "3": 2}}}, TypeError, "'a.b' has the keys"),
        ({"a": {"b": {3: StandInLoader()}}}, TypeError, "a name of its own"),
        ({"loaders": [StandInLoader()]}, TypeError, "a name of its own"),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, ValueError, "Put its model into the state"),
    ],
)
def test_what_has_no_place_in_a_state(tmp_path: Path, state: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        checkpoint.save(tmp_path / "c", state)
    assert not (tmp_path / "c").exists()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 3)


class Counting(torch.optim.SGD):
    """An optimizer that keeps a number in its state, under the name of no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.state["steps"] = 1


def test_an_optimizer_that_keeps_what_is_no_parameters(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    state = {"model": model, "opt": Counting(model.parameters())}
    words = r"The state of the optimizer 'opt' has \['steps'\].*param_groups\[0\]\['steps'\]"
    with pytest.raises(TypeError, match=words):
        checkpoint.save(tmp_path / "c", state)
    with checkpoint.CheckpointManager(tmp_path / "run") as manager, pytest.raises(TypeError, match=words):
        manager.save(1, state)


def quantized(scale: float = 0.1) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), scale, 0, torch.quint8)


UNFIT: dict[str, tuple[Any, str]] = {
    "meta": (on_meta, r"x.weight is on the meta device.*\n.*x.bias is on the meta device.*to_empty"),
    "quantized": (quantized, r"x is quantized: put int_repr"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "x is sparse_coo"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "x is jagged"),
    "in a list": (lambda: [torch.ones(1), torch.eye(2).to_sparse()], r"x.1 is sparse_coo"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_tensors_that_have_no_place_in_a_checkpoint(tmp_path: Path, what: str) -> None:
    build, words = UNFIT[what]
    checkpoint.save(tmp_path / "c", {"x": nn.Linear(2, 3), "y": 1})
    for call in (
        lambda: checkpoint.save(tmp_path / "d", {"x": build(), "y": 1}),
        lambda: checkpoint.load(tmp_path / "c", {"x": build(), "y": 1}),
        lambda: checkpoint.load(tmp_path / "c", {"x": build(), "y": 1}, strict=False),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert not (tmp_path / "d").exists()
    with checkpoint.CheckpointManager(tmp_path / "run") as manager, pytest.raises(ValueError, match=words):
        manager.save(1, {"x": build()})


def save_partial(path: str) -> list[str]:
    x = DTensor.from_local(torch.ones(3), mesh(), [Partial()])
    sharded = x.redistribute(placements=[Shard(0)])
    texts: list[str] = []
    for value, error in ((x, ValueError), ([x], ValueError), ((x,), TypeError), ((sharded,), TypeError)):
        with pytest.raises(error) as caught:
            checkpoint.save(path, {"x": value})
        texts.append(str(caught.value))
        with checkpoint.CheckpointManager(f"{path}-run") as manager, pytest.raises(error):
            manager.save(1, {"x": value})
    checkpoint.save(path, {"x": sharded})
    checkpoint.load(path, state := {"x": torch.zeros(3)})
    return [*texts, str(state["x"].tolist())]


def test_a_sharded_tensor_of_which_one_ranks_part_would_be_saved(tmp_path: Path) -> None:
    for texts in run(2, save_partial, str(tmp_path / "c")):
        assert all("x is a DTensor of partial values" in text or "x.0 is a DTensor" in text for text in texts[:2])
        assert all("one rank's part" in text and "a list or a dict" in text for text in texts[2:4])
        assert texts[4] == "[2.0, 2.0, 2.0]"


def load_on_meta(path: str) -> str:
    model = on_meta()
    with pytest.raises(ValueError) as caught:
        checkpoint.load(path, {"x": model, "optimizer": torch.optim.AdamW(model.parameters())})
    return str(caught.value)


def test_a_module_on_the_meta_device_is_an_error_in_a_group_too(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "c", {"x": model, "optimizer": optimizer})
    for text in [*run(2, load_on_meta, str(tmp_path / "c")), load_on_meta(str(tmp_path / "c"))]:
        assert "x.weight is on the meta device" in text
    model = on_meta().to_empty(device="cpu")
    checkpoint.load(tmp_path / "c", {"x": model, "optimizer": torch.optim.AdamW(model.parameters())})


def test_other_groups_are_an_error(tmp_path: Path) -> None:
    model = Plain()
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    parameters = list(model.parameters())
    two = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)
    with pytest.raises(ValueError, match="2 parameter groups in the state and 1 in the checkpoint"):
        checkpoint.load(tmp_path / "c", {"model": model, "optimizer": two})
    fewer = torch.optim.SGD(parameters[1:], lr=0.1)
    with pytest.raises(ValueError, match="Group the parameters as in the run that saved"):
        checkpoint.load(tmp_path / "c", {"model": model, "optimizer": fewer})


@pytest.mark.parametrize("spelt", ["{0}/c", "{0}//c/", "file://{0}/c", "local://{0}/c"])
def test_a_local_folder_however_it_is_spelt(tmp_path: Path, spelt: str) -> None:
    path, target = spelt.format(tmp_path), {"n": 0}
    checkpoint.save(path, {"n": 1})
    checkpoint.load(tmp_path / "c", target)
    assert target == {"n": 1}
    with pytest.raises(ValueError, match="already holds a checkpoint"):
        checkpoint.save(path, {"n": 2})
