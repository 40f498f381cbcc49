"""The loader's ranks are the hosts. Several hosts are simulated: one process each, on this machine, with its own devices."""

from pathlib import Path

import pytest
import torch

from rescale_data import checkpoint
from tests.xla import training
from tests.xla.processes import needs_torch_xla, on_devices, run, run_ranks
from tests.xla.training import loader, logged


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

    messages = logged()

    def said() -> list[str]:
        return [message for message in messages if "rows for" not in message]  # that shards have few is said as well

    assert host_mesh() is None
    assert loader(mesh=host_mesh())._stream.ranks.world_size == 1
    loader(transfer=Transfer())
    assert not said()
    xr.process_count = lambda: 2
    with pytest.raises(ValueError, match=r"init_process_group\('gloo'"):
        host_mesh()
    loader(micro_batch_size=6, dp_rank=1, dp_world_size=2, transfer=Transfer())
    assert not said()
    loader(transfer=Transfer())
    assert ["on 2 hosts" in message for message in said()] == [True]


@needs_torch_xla
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_hosts_read_different_rows_and_save_one_checkpoint(tmp_path: Path, num_hosts: int) -> None:
    """Hosts whose ranks in the group are the other way round; the devices of each hold the whole model here.

    One process without a group loads it on another number of devices.
    """
    run_ranks(_host, num_hosts, tmp_path, devices=2, folder=tmp_path)
    rows = [torch.load(tmp_path / f"host-{host}") for host in range(num_hosts)]
    batches = iter(loader())
    for step in range(2):
        expected = next(batches)["x"]
        assert torch.equal(torch.cat([of_host[step] for of_host in rows]), expected), "rows in the order of hosts"
    run(_load_on_one_host, devices=4, folder=tmp_path)


def _host(rank: int, world_size: int, folder: Path) -> None:
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    host = world_size - 1 - rank
    xr.process_index, xr.process_count = (lambda: host), (lambda: world_size)
    from rescale_data.xla import Transfer, host_mesh

    transfer = Transfer(input_sharding=xs.ShardingSpec(xs.Mesh([0, 1], (2,)), (0, None), minibatch=True))
    where = {"shape": (2,), "micro_batch_size": 12 // world_size, "mesh": host_mesh()}
    segment = training.xla_run("(4,)", transfer=transfer, **where)
    batches = iter(segment.loader)
    torch.save([next(batches)["x"].cpu() for _ in range(2)], folder / f"host-{host}")
    segment.model(torch.ones(4, training.WIDTH).to("xla")).sum().backward()
    segment.optimizer.step()
    checkpoint.save(folder / "c", segment.state)
    fresh = training.xla_run("(4,)", seed=1, **where)
    checkpoint.load(folder / "c", fresh.state)
    training.assert_equal(training.tensors(fresh), training.tensors(segment))
    assert fresh.loader.step == 2
    if rank == 0:
        torch.save(training.tensors(segment), folder / "tensors")


def _load_on_one_host(folder: Path) -> None:
    target, expected = training.xla_run("(2,2)", seed=1), loader()
    checkpoint.load(folder / "c", target.state)
    training.assert_equal(training.tensors(target), torch.load(folder / "tensors"))
    expected.skip(24)
    assert torch.equal(next(iter(target.loader))["x"], next(iter(expected))["x"])
