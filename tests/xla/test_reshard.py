"""Saved on one mesh, loaded on any other: bit for bit, in place and in the sharding of the run that loads."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from rescale_data import checkpoint
from tests.states import opened
from tests.xla import training
from tests.xla.processes import needs_torch_xla, on_devices, run, run_ranks
from tests.xla.training import LAYOUTS, NUM_MARKED, adamw, assert_equal, loader, tensors


@on_devices(4)
def test_every_layout_loads_what_every_other_saved(tmp_path: Path) -> None:
    """The optimizer's state is sharded as if it had stepped; padding and copies of a piece never reach the checkpoint."""
    reference = training.xla_run("unsharded")
    reference.train(3)
    runs = {}
    for layout in LAYOUTS:
        runs[layout] = training.xla_run(layout)
        runs[layout].train(3)
        checkpoint.save(tmp_path / layout, runs[layout].state)
        _assert_pieces_are_whole(tmp_path / layout)
    next_losses = reference.train(3)
    for saved, source in runs.items():
        expected, samples = tensors(source), opened(source.loader.state_dict())["samples"]
        for layout in LAYOUTS:
            target = training.xla_run(layout, seed=1)
            before = _shardings(target.model)
            checkpoint.load(tmp_path / saved, target.state)
            assert_equal(tensors(target), expected)
            _assert_still_sharded(target.model, before, f"{saved} -> {layout}")
            if layout in ("(4,)", "(2,2)"):  # in which XLA cuts nothing else in its steps
                assert _optimizer_shardings(target) == _optimizer_shardings(runs[layout]), f"{saved} -> {layout}"
            assert opened(target.loader.state_dict())["samples"] == samples
            np.testing.assert_allclose(target.train(3), next_losses, rtol=1e-5)
            _assert_still_sharded(target.model, before, f"{saved} -> {layout}, trained")
    assert "devices=[2,2]0,1,2,3" in str(_optimizer_shardings(runs["(2,2)"]))


def _assert_pieces_are_whole(folder: Path) -> None:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    assert metadata.storage_data is not None
    for name, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            volumes = [chunk.sizes.numel() for chunk in entry.chunks]
            assert sum(volumes) == entry.size.numel(), name
            assert all(volumes), "no piece is padding alone"
            assert len(volumes) == len([index for index in metadata.storage_data if index.fqn == name])


@on_devices(4)
def test_a_whole_state_in_a_file_comes_back_sharded_too(tmp_path: Path) -> None:
    source = training.xla_run("(2,2)")
    source.train(2)
    expected = tensors(source)
    checkpoint.save(tmp_path / "c", source.state)
    checkpoint.to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    for steps in (0, 1):
        target = training.xla_run("(2,2)", seed=1)
        target.train(steps)
        checkpoint.load(tmp_path / "c.pt", {name: target.state[name] for name in ("model", "optimizer")})
        assert _optimizer_shardings(target) == _optimizer_shardings(source)
        assert_equal(tensors(target), expected)
        target.train(1)
        assert _optimizer_shardings(target) == _optimizer_shardings(source)


@on_devices(4)
def test_a_coarser_mesh_reads_what_overlaps_and_no_more(tmp_path: Path) -> None:
    import torch_xla.distributed.spmd as xs

    from rescale_data.checkpoint.devices import adapt_tensors

    def sharded(shape: tuple[int, ...], spec: tuple[Any, ...]) -> torch.Tensor:
        tensor = torch.arange(64.0).reshape(16, 4).to("xla")
        xs.mark_sharding(tensor, xs.Mesh(list(range(4)), shape), spec)
        return tensor

    def num_reads(tensor: torch.Tensor) -> int:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(
            adapt_tensors({"t": tensor}, "to_load"), dcp.FileSystemReader(tmp_path / "c").read_metadata()
        )
        return len(planner.create_local_plan().items)

    checkpoint.save(tmp_path / "c", {"t": sharded((4,), (0, None))})  # rows 0-3, 4-7, 8-11, 12-15
    assert num_reads(sharded((4,), (0, None))) == 4, "the same pieces"
    assert num_reads(sharded((2, 2), (0, 1))) == 8, "each of 4 pieces overlaps 2 of the saved ones"
    assert num_reads(sharded((2, 2), (0, None))) == 8, "coarser: each of 4 devices has a half, of 2 saved pieces"
    assert num_reads(sharded((4,), (None, 0))) == 16, "columns: each overlaps all"
    assert num_reads(torch.zeros(16, 4).to("xla")) == 4, "whole"
    assert num_reads(torch.zeros(16, 4)) == 4, "whole, on the CPU"


@needs_torch_xla
@pytest.mark.timeout(900)
def test_fsdp2_to_xla_and_back_by_name_with_the_data_on_another_number_of_devices_each_time(tmp_path: Path) -> None:
    """The chain of segments loses as one process that never stopped does, and ends where that one does."""
    losses: list[float] = []
    ends = [2, 3, 2, 1, 2, 1]
    for number, (devices, steps) in enumerate(zip(["2 ranks", 4, 3, "3 ranks", 1, 2], ends, strict=True)):
        given = {
            "load_from": tmp_path / f"{number - 1}" if number else None,
            "save_to": tmp_path / f"{number}",
            "steps": steps,
        }
        if isinstance(devices, str):
            losses += np.mean(run_ranks(_fsdp2, int(devices[0]), tmp_path, **given), axis=0).tolist()
        else:
            losses += run(_xla, devices=devices, **given)
    (expected,) = run_ranks(_uninterrupted, 1, tmp_path, checkpoint_path=tmp_path / "5", steps=sum(ends))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def _fsdp2(rank: int, world_size: int, load_from: Path | None, save_to: Path, steps: int) -> list[float]:
    """One rank of a segment without XLA, saved and loaded by stock DCP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    net = fully_shard(training.model(seed=0 if load_from is None else 1), mesh=mesh)
    segment = training.Run(net, adamw(net), loader(mesh=mesh, micro_batch_size=12 // world_size))
    if load_from is not None:
        checkpoint.load(load_from, segment.state)
    losses = segment.train(steps)
    model_state, optimizer_state = get_model_state_dict(net), get_optimizer_state_dict(net, segment.optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "loader": segment.loader}, checkpoint_id=save_to)
    return losses


def _xla(load_from: Path, save_to: Path, steps: int) -> list[float]:
    devices = int(os.environ["CPU_NUM_DEVICES"])
    segment = training.xla_run(*(("(2,2)", 1) if devices == 4 else ("(4,)", 1, (devices,))))
    checkpoint.load(load_from, segment.state)
    losses = segment.train(steps)
    checkpoint.save(save_to, segment.state)
    return losses


def _uninterrupted(rank: int, world_size: int, checkpoint_path: Path, steps: int) -> list[float]:
    net = training.model(seed=0)
    reference = training.Run(net, adamw(net), loader())
    losses = reference.train(steps)
    other = training.model(seed=1)
    chain = training.Run(other, adamw(other), loader())
    checkpoint.load(checkpoint_path, chain.state)
    for name, expected in tensors(reference).items():
        torch.testing.assert_close(tensors(chain)[name], expected, rtol=1e-4, atol=1e-5)
    got, expected = chain.loader.state_dict(), reference.loader.state_dict()
    assert opened(got)["samples"] == opened(expected)["samples"] == steps * 12
    for key, rows in opened(expected)["shards"].items():
        assert torch.equal(opened(got)["shards"][key], rows), key
    return losses


def _assert_still_sharded(net: torch.nn.Module, before: list[str], where: str) -> None:
    """XLA keeps the marks of what is cut; what is whole it may cut in any step."""
    after = _shardings(net)
    lost = [(mark, now) for now, mark in zip(after, before, strict=True) if mark and mark != now]
    assert not lost, (where, lost)


def _shardings(net: torch.nn.Module) -> list[str]:
    """Of the marked parameters."""
    return [_sharding(parameter) for parameter in net.parameters()][:NUM_MARKED]


def _optimizer_shardings(of: training.Run) -> list[str]:
    marked = list(of.model.parameters())[:NUM_MARKED]
    return [_sharding(value) for parameter in marked for value in of.optimizer.state[parameter].values()]


def _sharding(tensor: torch.Tensor) -> str:
    """Replicated and unmarked are the same to XLA."""
    import torch_xla.distributed.spmd as xs

    wrapped = xs.wrap_if_sharded(tensor)
    spec = str(wrapped.sharding_spec) if isinstance(wrapped, xs.XLAShardedTensor) else ""
    return "" if spec == "{replicated}" else spec
