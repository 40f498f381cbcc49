"""The loader's ranks are the hosts. Several hosts are simulated: one process each, on this machine, with its own devices."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import rescale_data as rd
from rescale_data import checkpoint
from tests.xla import training
from tests.xla.processes import needs_torch_xla, on_devices, run, run_ranks
from tests.xla.training import loader


@on_devices(2)
def test_ranks_are_ordered_as_the_hosts_are() -> None:
    from rescale_data.xla.hosts import ranks_in_order

    assert ranks_in_order([0, 1, 2], 3) == [0, 1, 2]
    assert ranks_in_order([2, 0, 1], 3) == [1, 2, 0]
    for given in ([0, 0, 1, 1], [0, 1]):
        with pytest.raises(ValueError, match="one rank a host"):
            ranks_in_order(given, 3)


@on_devices(2)
def test_a_single_host_needs_no_group_and_several_do() -> None:
    import torch_xla.runtime as xr

    from rescale_data.xla import Transfer, host_mesh

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: "rows for" not in record.getMessage())  # that shards have few is said as well
    logging.getLogger("rescale_data").addHandler(handler)
    assert host_mesh() is None
    assert loader(mesh=host_mesh())._stream.ranks.world_size == 1
    loader(transfer=Transfer())
    assert not warnings
    xr.process_count = lambda: 2
    with pytest.raises(ValueError, match=r"init_process_group\('gloo'"):
        host_mesh()
    loader(micro_batch_size=6, dp_rank=1, dp_world_size=2, transfer=Transfer())
    assert not warnings
    loader(transfer=Transfer())
    assert ["on 2 hosts" in warning for warning in warnings] == [True]


@needs_torch_xla
def test_a_gloo_group_of_one_saves_what_a_process_without_a_group_loads(tmp_path: Path) -> None:
    run_ranks(_save_with_group, 1, tmp_path, devices=4, path=tmp_path / "c")
    run(_load_alone, devices=2, path=tmp_path / "c")


def _save_with_group(rank: int, world_size: int, path: Path) -> None:
    from rescale_data.xla import host_mesh

    source = training.xla_run("(2,2)", mesh=host_mesh())
    source.train(2)
    checkpoint.save(path, source.state)


def _load_alone(path: Path) -> None:
    source, target = training.xla_run("unsharded"), training.xla_run("(4,)", seed=1, shape=(2,))
    source.train(2)
    checkpoint.load(path, target.state)
    for name, value in training.tensors(source).items():
        torch.testing.assert_close(training.tensors(target)[name], value, rtol=1e-5, atol=1e-6)
    assert target.loader.step == 2


@needs_torch_xla
def test_hosts_read_different_rows_and_save_one_checkpoint(tmp_path: Path) -> None:
    """Two hosts whose ranks in the group are the other way round; the devices of each hold the whole model here."""
    run_ranks(_host, 2, tmp_path, devices=2, folder=tmp_path)
    rows = [torch.load(tmp_path / f"host-{host}") for host in range(2)]
    batches = iter(loader())
    for step in range(2):
        assert torch.equal(torch.cat([rows[0][step], rows[1][step]]), next(batches)["x"]), "rows in the order of hosts"
    run(_load_on_one_host, devices=4, path=tmp_path / "c")


def _host(rank: int, world_size: int, folder: Path) -> None:
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.process_index, xr.process_count = (lambda: 1 - rank), (lambda: 2)
    from rescale_data.xla import Transfer, host_mesh

    mesh = xs.Mesh(list(range(2)), (2,))
    transfer = Transfer(input_sharding=xs.ShardingSpec(mesh, (0, None), minibatch=True))
    segment = training.xla_run("(4,)", shape=(2,), micro_batch_size=6, mesh=host_mesh(), transfer=transfer)
    batches = iter(segment.loader)
    torch.save([next(batches)["x"].cpu() for _ in range(2)], folder / f"host-{1 - rank}")
    checkpoint.save(folder / "c", segment.state)
    fresh = training.xla_run("(4,)", seed=1, shape=(2,), micro_batch_size=6, mesh=host_mesh())
    checkpoint.load(folder / "c", fresh.state)
    training.assert_equal(training.tensors(fresh), training.tensors(segment))
    assert fresh.loader.step == 2


def _load_on_one_host(path: Path) -> None:
    target, expected = training.xla_run("(2,2)", seed=1), loader()
    checkpoint.load(path, target.state)
    batches = iter(expected)
    for _ in range(2):
        next(batches)
    assert torch.equal(next(iter(target.loader))["x"], next(batches)["x"])
    assert isinstance(expected, rd.DataLoader)
