"""Batches on devices, and a state of those that training has received."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rescale_data as rd
from rescale_data import checkpoint
from tests.states import opened
from tests.xla.processes import on_devices

ROWS = [{"x": np.float32(np.arange(3) + row), "id": row} for row in range(64)]


def make(rows: Any = ROWS, **arguments: Any) -> rd.DataLoader:
    return rd.DataLoader(rows, **{"global_batch_size": 8, "micro_batch_size": 4, **arguments})


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def sharding(spec: tuple[Any, ...] = (0, None), **arguments: Any) -> Any:
    import torch_xla.distributed.spmd as xs

    return xs.ShardingSpec(xs.Mesh(list(range(4)), (4,)), spec, **arguments)


@on_devices(4)
def test_the_state_is_that_of_what_training_has_at_every_batch() -> None:
    from rescale_data.xla import Transfer

    reference = make()
    expected = [ids(reference) for _ in range(2)]
    for prefetch in (1, 2, 5):
        loader, plain = make(transfer=Transfer(input_sharding=sharding()), prefetch=prefetch), make()
        for epoch in range(2):
            got = []
            for batch, _ in zip(loader, plain, strict=True):
                got.append(batch["id"].cpu().tolist())
                assert batch["x"].device.type == "xla"
                _assert_same_state(loader.state_dict(), plain.state_dict())
                assert (loader.step, loader.epoch) == (plain.step, plain.epoch)
            assert got == expected[epoch]
        loader.close()


@on_devices(4)
def test_batches_that_cannot_be_placed_are_named() -> None:
    from rescale_data.xla import Transfer

    def first(input_sharding: Any, **arguments: Any) -> Any:
        return next(iter(make(**arguments, transfer=Transfer(input_sharding=input_sharding))))

    with pytest.raises(ValueError, match=r"'x' has 2 rows, which do not divide over the 4 devices .* multiple of 4"):
        first({"x": sharding(minibatch=True), "id": None}, micro_batch_size=2)
    with pytest.raises(ValueError, match=r"'id' has the shape \[4\], input_sharding is for 2 dims"):
        first(sharding(minibatch=True))
    with pytest.raises(ValueError, match=r"the columns \['id', 'x'\], input_sharding is for \['x'\]"):
        first({"x": sharding()})
    texts = make(
        [{"x": np.zeros(2), "text": "a"}] * 64, transfer=Transfer(input_sharding={"x": sharding(), "text": None})
    )
    with pytest.raises(ValueError, match=r"columns \['text'\] are no tensors"):
        next(iter(texts))
    batch = first({"x": sharding(minibatch=True), "id": sharding((0,))}, micro_batch_size=8)
    assert len(batch["x"]) == 8


@on_devices(4)
def test_rows_of_several_hosts_are_refused_where_torch_xla_would_take_them_for_all() -> None:
    from rescale_data.xla import Transfer

    def first(input_sharding: Any, **arguments: Any) -> Any:
        return next(
            iter(make(dp_rank=1, dp_world_size=2, **arguments, transfer=Transfer(input_sharding=input_sharding)))
        )

    whole = sharding(minibatch=True)
    for given in (None, sharding(), {"x": whole, "id": None}, {"x": whole, "id": sharding((0,))}):
        with pytest.raises(ValueError, match=r"on each of 2 hosts.*minibatch=True"):
            first(given)
    columns = {name: sharding((0,), minibatch=True) for name in ("id", "count")}
    with pytest.raises(ValueError, match=r"'count' has the shape \[\]"):
        first(columns, collate_fn=lambda rows: {"id": torch.arange(4), "count": torch.tensor(len(rows))})
    both = {"x": whole, "id": sharding((0,), minibatch=True)}
    assert first(both)["id"].tolist() == next(iter(make(dp_rank=1, dp_world_size=2)))["id"].tolist()


@on_devices(4)
def test_minibatch_keeps_the_order_of_rows_on_every_mesh_that_is_not_refused() -> None:
    import torch_xla.distributed.spmd as xs

    from rescale_data.xla import Transfer

    def rows(mesh: Any, dim: Any) -> Any:
        given = {"x": xs.ShardingSpec(mesh, (dim, None), minibatch=True), "id": None}
        batch = next(iter(make(transfer=Transfer(input_sharding=given))))
        assert torch.equal(batch["x"][:, 0].cpu(), batch["id"].cpu().float())

    named = xs.Mesh(list(range(4)), (2, 2), ("data", "model"))
    for mesh, dim in ((named, ("data", "model")), (xs.Mesh(list(range(4)), (4, 1), ("data", "model")), "data")):
        rows(mesh, dim)
    with pytest.raises(ValueError, match=r"over all devices\. Give \(\('data', 'model'\), None\)"):
        rows(named, "data")
    with pytest.raises(
        ValueError, match=r"over the devices \[3, 1, 0, 2\].*to its devices \[0, 1, 2, 3\] in this order"
    ):
        rows(xs.Mesh([3, 1, 0, 2], (4,)), 0)
    with pytest.raises(ValueError, match=r"over the devices \[0, 2, 1, 3\]"):
        rows(named, ("model", "data"))


@on_devices(8)
def test_the_devices_of_hosts_come_one_host_after_another_whatever_their_numbers() -> None:
    """v5e-16: host 0 has the devices 0 1 4 5. A host's k-th device gets the k-th part of the host's rows."""
    import random

    import torch_xla
    import torch_xla.distributed.spmd as xs

    from rescale_data.xla.input_sharding import check_input_sharding

    def accepted(order: list[int], hosts: list[list[int]]) -> bool:
        spec = xs.ShardingSpec(xs.Mesh(order, (8,)), (0, None), minibatch=True)
        verdicts = []
        for host, devices in enumerate(hosts):
            torch_xla.real_devices = lambda devices=devices: [f"TPU:{device}" for device in devices]
            try:
                check_input_sharding({"x": torch.zeros(8, 3)}, spec, len(hosts), host)
                verdicts.append(True)
            except ValueError as error:
                verdicts.append("in the order of the dp ranks" not in str(error))
        return all(verdicts)

    torch_xla.runtime.addressable_runtime_device_count = lambda: 4
    v5e = [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert accepted([0, 1, 4, 5, 2, 3, 6, 7], v5e)
    assert not accepted(list(range(8)), v5e)
    draw = random.Random(0)
    for _ in range(200):
        ids = draw.sample(range(8), 8)
        hosts = [sorted(ids[:4]), sorted(ids[4:])]
        order = draw.choice([hosts[0] + hosts[1], hosts[1] + hosts[0], draw.sample(range(8), 8)])
        places = {device: (host, k) for host, devices in enumerate(hosts) for k, device in enumerate(devices)}
        rows = [places[device] for device in order]
        assert accepted(order, hosts) == (rows == sorted(rows)), (order, hosts)


@on_devices(4)
def test_every_batch_is_checked_and_the_error_comes_when_training_comes_to_it() -> None:
    from rescale_data.xla import Transfer

    third = ids(make())[2]

    def collate(rows: list[Any]) -> Any:
        x = torch.stack([torch.from_numpy(row["x"]) for row in rows])
        return {"x": x[..., None] if [row["id"] for row in rows] == third else x}

    for prefetch in (1, 2, 5):
        loader = make(collate_fn=collate, transfer=Transfer(input_sharding=sharding(minibatch=True)), prefetch=prefetch)
        batches = iter(loader)
        assert [next(batches)["x"].shape for _ in range(2)] == [(4, 3)] * 2
        for _ in range(2):
            with pytest.raises(ValueError, match=r"'x' has the shape \[4, 3, 1\], input_sharding is for 2 dims"):
                next(batches)
        assert opened(loader.state_dict())["samples"] == 8
        loader.close()


@on_devices(4)
def test_what_xla_would_leave_behind_or_change_is_named() -> None:
    from types import MappingProxyType

    from rescale_data.xla import Transfer

    def first(batch: Any, input_sharding: Any = None) -> Any:
        return next(iter(make(collate_fn=lambda rows: batch, transfer=Transfer(input_sharding=input_sharding))))

    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        with pytest.raises(ValueError, match=r"'tokens\.0' is torch\.uint.*\.to\(torch\.int64\)"):
            first({"tokens": [torch.tensor([40_000]).to(dtype)]})
    with pytest.raises(ValueError, match="'x' is a ndarray, which torch_xla leaves on the host"):
        first({"x": np.zeros(4)})
    with pytest.raises(ValueError, match="The batch is a Parameter"):
        first(torch.nn.Parameter(torch.zeros(4)))
    assert first(None) is None
    with pytest.raises(ValueError, match=r"'0' has the shape \[4\], input_sharding is for 2 dims"):
        first((torch.zeros(4),), sharding(minibatch=True))
    with pytest.raises(ValueError, match=r"'in\.x' has 2 rows"):
        first({"in": {"x": torch.zeros(2, 3)}}, sharding(minibatch=True))
    assert first({"x": torch.zeros(4, 2)}, MappingProxyType({"x": sharding()}))["x"].device.type == "xla"
    assert first([torch.zeros(4, 2), "text", 3])[1:] == ["text", 3]


@on_devices(4)
def test_a_loader_read_by_torch_xlas_threads_warns_that_its_state_is_ahead() -> None:
    import torch_xla
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rescale_data").addHandler(handler)
    loader = make()
    batches: Iterator[Any] = iter(MpDeviceLoader(loader, torch_xla.device()))
    torch.testing.assert_close(next(batches)["x"].shape, torch.Size([4, 3]))
    assert opened(loader.state_dict())["samples"] > 4, "if this fails, torch_xla no longer reads ahead"
    assert any("transfer= to devices" in record for record in records)
    for _ in batches:
        pass  # its threads crash an interpreter that ends before them


@on_devices(4)
def test_what_a_training_loop_asks_of_a_loader_is_answered_for_training(tmp_path: Path) -> None:
    from rescale_data.xla import Transfer

    rows = [{"id": row} for row in range(30)]  # the last global batch of an epoch is padded
    loader, plain = make(rows, tail="pad", transfer=Transfer(), prefetch=3), make(rows, tail="pad")

    def answers(of: Any) -> list[Any]:
        return [len(of), of.step, of.epoch, of.last_batch_samples, _without_time(of.progress())]

    loader.start()
    for _ in range(2):
        for batch, same in zip(loader, plain, strict=True):
            assert batch["id"].tolist() == same["id"].tolist()
            _assert_same_state(loader.local_state_dict(), plain.state_dict())
            assert answers(loader) == answers(plain)
            if plain.step % 2:
                assert loader.peek()["id"].tolist() == plain.peek()["id"].tolist()
                assert answers(loader) == answers(plain)
    loader.skip(8)
    plain.skip(8)
    assert ids(loader) == ids(plain)
    assert next(iter(loader))["id"].tolist() == next(iter(plain))["id"].tolist()
    loader.skip(4)
    plain.skip(4)
    assert answers(loader)[:3] == answers(plain)[:3]
    checkpoint.save(tmp_path / "c", {"loader": loader})
    rd.checkpoint.check_checkpoint(tmp_path / "c", loader)
    fresh = make(rows, tail="pad", transfer=Transfer())
    rd.checkpoint.load_changed(tmp_path / "c", fresh)
    assert ids(fresh) == ids(plain)
    with pytest.raises(TypeError, match="repeat=True has no end"):
        len(make(repeat=True, transfer=Transfer()))
    assert loader.progress()["wait_seconds"] > 0


@on_devices(4)
def test_an_error_of_a_transfer_is_raised_by_next_alone_and_the_thread_ends(tmp_path: Path) -> None:
    from rescale_data.xla import Transfer

    with make() as plain:
        third = ids(plain)[2]

    def broken(rows: list[Any]) -> Any:
        numbers = [row["id"] for row in rows]
        return {"id": torch.tensor(numbers), "x": torch.zeros(2).to_sparse() if numbers == third else 0}

    for end in ("load_state_dict", "reset", "close"):
        loader = make(collate_fn=broken, transfer=Transfer(), prefetch=4)
        state = loader.state_dict()
        next(iter(loader))
        getattr(loader, end)(*[state] * (end == "load_state_dict"))
        loader.close()
        assert threading.active_count() == 1
    loader = make(collate_fn=broken, transfer=Transfer(), prefetch=4)
    with pytest.raises(RuntimeError, match="to\\(options\\)"):
        list(loader)
    assert opened(loader.state_dict())["samples"] == 8
    next_fails = iter(loader)
    with pytest.raises(RuntimeError, match="to\\(options\\)"):
        next(next_fails)
    with pytest.raises(KeyError, match="of the user"), loader:
        raise KeyError("of the user")
    assert threading.active_count() == 1


def _without_time(progress: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in progress.items() if not name.endswith(("_seconds", "_ready"))}


def _assert_same_state(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    assert torch.equal(got["table"], expected["table"])
    assert got["header"] == expected["header"]
