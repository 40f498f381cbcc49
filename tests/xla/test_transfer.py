"""Batches on devices, and a state of those that training has received."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rescale_data as rd
from rescale_data import checkpoint
from tests.states import same_state
from tests.xla.processes import on_devices

ROWS = [{"x": np.float32(np.arange(3) + row), "id": row} for row in range(64)]


def make(rows: Any = ROWS, **arguments: Any) -> rd.DataLoader:
    return rd.DataLoader(rows, **{"global_batch_size": 8, "micro_batch_size": 4, **arguments})


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def sharding(spec: tuple[Any, ...] = (0, None), **arguments: Any) -> Any:
    import torch_xla.distributed.spmd as xs

    return xs.ShardingSpec(xs.Mesh(list(range(4)), (4,)), spec, **arguments)


def sent(data: Any = ROWS, input_sharding: Any = None, **arguments: Any) -> rd.DataLoader:
    """Open a loader whose batches come to the devices."""
    from rescale_data.xla import Transfer

    return make(data, transfer=Transfer(input_sharding=input_sharding), **arguments)


def first(input_sharding: Any, data: Any = ROWS, **arguments: Any) -> Any:
    return next(iter(sent(data, input_sharding, **arguments)))


@on_devices(4)
def test_batches_come_to_the_devices_and_the_state_is_that_of_training(tmp_path: Path) -> None:
    """What other calls give, however far the transfer is ahead: law 4."""
    loader = sent(ROWS[:30], {"x": sharding(), "id": None, "valid": None}, tail="pad", prefetch=5)
    plain = make(ROWS[:30], tail="pad")
    for batch, same in zip(loader, plain, strict=True):
        assert batch["id"].tolist() == same["id"].tolist()
        assert batch["x"].device.type == "xla"
        assert same_state(loader.state_dict(), plain.state_dict())
    loader.skip(8)
    plain.skip(8)
    checkpoint.save(tmp_path / "c", {"loader": loader})
    fresh = sent(ROWS[:30], tail="pad")
    checkpoint.load_changed(tmp_path / "c", fresh)
    assert ids(fresh) == ids(plain)


@on_devices(4)
def test_batches_that_cannot_be_placed_are_named() -> None:
    from types import MappingProxyType

    whole = sharding(minibatch=True)
    texts = [{"x": np.zeros(2), "text": "a"}] * 64
    for words, given, arguments in (
        (r"'x' has 2 rows, which do not divide over the 4 devices .* multiple of 4", {"x": whole, "id": None},
         {"micro_batch_size": 2}),
        (r"'id' has the shape \[4\], input_sharding is for 2 dims", whole, {}),
        (r"\{'x': 'Tensor', 'id': 'Tensor'\}, and input_sharding is for \['x'\]", {"x": sharding()}, {}),
        (r"'text': 'list'\}.* leave out in collate_fn what is no", {"x": sharding(), "text": None}, {"data": texts}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            first(given, **arguments)
    for words, batch, given in (
        (
            r"'tokens\.0' is a Tensor of torch\.uint16.*\.to\(torch\.int64\)",
            {"tokens": [torch.zeros(1, dtype=torch.uint16)]},
            None,
        ),
        (r"'tokens' is a Tensor of torch\.uint32", {"tokens": torch.zeros(1, dtype=torch.uint32)}, None),
        (r"'tokens' is a Tensor of torch\.uint64", {"tokens": torch.zeros(1, dtype=torch.uint64)}, None),
        ("'x' is a ndarray of float64, which torch_xla leaves on the host", {"x": np.zeros(4)}, None),
        ("The batch is a Parameter", torch.nn.Parameter(torch.zeros(4)), None),
        (r"'0' has the shape \[4\], input_sharding is for 2 dims", (torch.zeros(4),), whole),
        (r"'in\.x' has 2 rows", {"in": {"x": torch.zeros(2, 3)}}, whole),
    ):
        with pytest.raises(ValueError, match=words):
            first(given, collate_fn=lambda rows, batch=batch: batch)
    placed = first(MappingProxyType({"x": sharding()}), collate_fn=lambda rows: {"x": torch.zeros(4, 2)})
    assert placed["x"].device.type == "xla"
    assert first(None, collate_fn=lambda rows: [torch.zeros(4, 2), "text", 3])[1:] == ["text", 3]
    assert first(None, collate_fn=lambda rows: None) is None


@on_devices(4)
def test_rows_of_several_hosts_are_refused_where_torch_xla_would_take_them_for_all() -> None:
    whole, by_row = sharding(minibatch=True), sharding((0,), minibatch=True)
    two_hosts = {"dp_rank": 1, "dp_world_size": 2}
    for given in (None, sharding(), {"x": whole, "id": None}, {"x": whole, "id": sharding((0,))}):
        with pytest.raises(ValueError, match=r"on each of 2 hosts.*minibatch=True"):
            first(given, **two_hosts)
    counted = {"id": torch.arange(4), "count": torch.tensor(4)}
    with pytest.raises(ValueError, match=r"'count' has the shape \[\]"):
        first({"id": by_row, "count": by_row}, collate_fn=lambda rows: counted, **two_hosts)
    placed = first({"x": whole, "id": by_row}, **two_hosts)
    assert placed["id"].tolist() == next(iter(make(**two_hosts)))["id"].tolist()


@on_devices(4)
def test_minibatch_keeps_the_order_of_rows_on_every_mesh_that_is_not_refused() -> None:
    import torch_xla.distributed.spmd as xs

    def rows(mesh: Any, dim: Any) -> Any:
        batch = first({"x": xs.ShardingSpec(mesh, (dim, None), minibatch=True), "id": None})
        assert torch.equal(batch["x"][:, 0].cpu(), batch["id"].cpu().float())

    named = xs.Mesh(list(range(4)), (2, 2), ("data", "model"))
    rows(named, ("data", "model"))
    rows(xs.Mesh(list(range(4)), (4, 1), ("data", "model")), "data")
    for mesh, dim, words in (
        (named, "data", r"over all devices\. Give \(\('data', 'model'\), None\)"),
        (xs.Mesh([3, 1, 0, 2], (4,)), 0, r"the devices \[3, 1, 0, 2\].*its devices \[0, 1, 2, 3\] in this order"),
        (named, ("model", "data"), r"over the devices \[0, 2, 1, 3\]"),
    ):
        with pytest.raises(ValueError, match=words):
            rows(mesh, dim)


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
def test_every_batch_is_checked() -> None:
    """The error comes when training comes to it: law 2."""
    third = ids(make())[2]

    def collate(rows: list[Any]) -> Any:
        x = torch.stack([torch.from_numpy(row["x"]) for row in rows])
        return {"x": x[..., None] if [row["id"] for row in rows] == third else x}

    batches = iter(sent(ROWS, sharding(minibatch=True), collate_fn=collate))
    assert [next(batches)["x"].shape for _ in range(2)] == [(4, 3)] * 2
    with pytest.raises(ValueError, match=r"'x' has the shape \[4, 3, 1\], input_sharding is for 2 dims"):
        next(batches)
