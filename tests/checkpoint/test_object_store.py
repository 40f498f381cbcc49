"""Checkpoints on an S3 server: committed by the last object, whatever the network does."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.models import mesh
from tests.checkpoint.processes import run
from tests.checkpoint.stand_in import StandInLoader

pytest.importorskip("s3fs", reason="needs the extra s3")
pytest.importorskip("moto", reason="needs the extra s3")

import rescale_data as rd
from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager, RunReader
from rescale_data.checkpoint.storage.claims import find
from rescale_data.checkpoint.storage.open import open_store
from tests.checkpoint.object_server import BUCKET, Fault, Server, serving
from tests.states import opened


@pytest.fixture(scope="module")
def servers() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def server(servers: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 2)  # its five, with growing pauses, take ten seconds
    servers.set_fault(lambda method, path: None)
    servers.requests.clear()
    yield servers
    servers.set_fault(lambda method, path: None)


@pytest.fixture
def folder() -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def state(step: int = 0, size: int = 1000) -> dict[str, Any]:
    loader = StandInLoader(mesh=mesh())
    loader.advance(step)
    return {"weights": torch.full((size,), float(step)), "loader": loader, "step": step}


def test_a_loader_is_compared_with_a_bucket_by_the_same_options(server: Server, folder: str) -> None:
    loader, fresh = (rd.DataLoader(range(8), global_batch_size=4) for _ in range(2))
    next(iter(loader))
    checkpoint.save(f"{folder}/c", {"train": loader}, storage_options=server.options)
    options: dict[str, Any] = {"name": "train", "storage_options": server.options}
    checkpoint.check_checkpoint(f"{folder}/c", fresh, **options)
    checkpoint.load_changed(f"{folder}/c", fresh, **options)
    assert fresh.step == 1


def test_a_round_trip_and_stock_dcp(server: Server, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(f"{folder}/c", state(3), storage_options=server.options)
    target = state()
    checkpoint.load(f"{folder}/c", target, storage_options=server.options)
    assert (target["step"], target["loader"].step, target["weights"].unique().tolist()) == (3, 3, [3.0])
    assert opened(checkpoint.read_data_state(f"{folder}/c", storage_options=server.options))["step"] == 3
    assert checkpoint.verify(f"{folder}/c", storage_options=server.options) == []
    for name, value in (
        ("ENDPOINT_URL", server.url),
        ("ACCESS_KEY_ID", "key"),
        ("SECRET_ACCESS_KEY", "secret"),
        ("REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    stock = state()
    dcp.load(stock, checkpoint_id=f"{folder}/c")
    assert (stock["step"], stock["loader"].step) == (3, 3)
    writes = [path for method, path in server.requests if method == "PUT"]
    order = [next(i for i, path in enumerate(writes) if part in path) for part in ("__0_0", "/rescale_data-")]
    assert order == sorted(order), "the manifest is put after the data"
    assert "c/.metadata" in [path for path in writes if "lease" not in path][-1], (
        "and stock DCP's copy after the look at the claims"
    )


def test_no_file_is_synced_machine_wide(server: Server, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("os.sync flushes every disk of the machine"))
    checkpoint.save(f"{folder}/c", state(1), storage_options=server.options)


def save_on_ranks(folder: str, options: dict[str, Any]) -> list[int]:
    with CheckpointManager(folder, keep_latest=2, storage_options=options) as manager:
        for step in range(1, 5):
            manager.save(step, state(step))
        target = state()
        assert manager.load_latest(target) == 4
        assert target["loader"].step == 4
    return manager.steps()


def test_ranks_save_and_retention_deletes(server: Server, folder: str) -> None:
    assert run(2, save_on_ranks, folder, server.options) == [[3, 4], [3, 4]]
    store, path = open_store(folder, server.options)
    assert [name for name in store.names(path) if name != ".leases"] == [".claims", "step-3", "step-4"]


def first(times: int, fault: str, at: str, method: str = "PUT") -> Fault:
    """A fault that strikes the first so many requests."""
    count = itertools.count()
    return lambda m, path: fault if m in (method, "POST") and at in path and next(count) < times else None


@pytest.mark.parametrize("fault", ["503", "cut", "stall"])
@pytest.mark.parametrize("size", [3_000_000])
def test_a_passing_fault_is_retried(
    server: Server, folder: str, fault: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``size`` makes it a multipart upload, which is cut in the middle."""
    monkeypatch.setattr(server, "patience", 2.0 if fault == "stall" else server.patience)
    server.set_fault(first(1, fault, ".distcp"))
    checkpoint.save(f"{folder}/c", state(2, size), storage_options=server.options)
    target = state(0, size)
    server.set_fault(first(1, fault, ".distcp", method="GET"))
    checkpoint.load(f"{folder}/c", target, storage_options=server.options)
    assert target["weights"].unique().tolist() == [2.0]


@pytest.mark.parametrize(("fault", "at"), [("503", ".distcp"), ("cut", "/rescale_data-")])
def test_a_lasting_fault_leaves_the_checkpoint_before(server: Server, folder: str, fault: str, at: str) -> None:
    options = server.options | {"config_kwargs": {"retries": {"max_attempts": 1}, "read_timeout": 60}}
    with CheckpointManager(folder, storage_options=options) as manager:
        manager.save(1, state(1))
        manager.wait()
        server.set_fault(first(10**9, fault, at))
        manager.save(2, state(2))
        with pytest.raises(Exception, match=r"Saving|failed|SlowDown|Connection"):
            manager.wait()
        server.set_fault(lambda method, path: None)
        assert manager.steps() == [1]
        assert manager.load_latest(state()) == 1
        manager.save(3, state(3))
        manager.wait()
        assert manager.steps() == [1, 3]


def test_a_replacement_of_another_tools_checkpoint(server: Server, folder: str) -> None:
    store, path = open_store(folder, server.options)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        store.put(f"{path}/c/{name}", b"of another tool")
    with pytest.raises(ValueError, match="overwrite=True"):
        checkpoint.save(f"{folder}/c", state(1), storage_options=server.options)
    checkpoint.save(f"{folder}/c", state(1), overwrite=True, storage_options=server.options)
    assert "__0_0.distcp" in store.names(f"{path}/c"), "what no claim of the folder made is nobody's to remove"
    assert checkpoint.verify(f"{folder}/c", storage_options=server.options) == []


def test_damage_is_found(server: Server, folder: str) -> None:
    checkpoint.save(f"{folder}/c", state(1), storage_options=server.options)
    store, path = open_store(folder, server.options)
    save = find(store, f"{path}/c")
    assert save is not None
    own = save.folder
    file = f"{path}/c/{own}/__0_0.distcp"
    content = bytearray(store.read(file))
    content[2000] ^= 4
    store.put(file, bytes(content))
    with pytest.raises(ValueError, match=r"__0_0\.distcp is not what was saved"):
        checkpoint.load(f"{folder}/c", state(), storage_options=server.options)
    store.rm_file(file)
    assert "is missing" in checkpoint.verify(f"{folder}/c", storage_options=server.options)[0]


def test_cached_listings_are_refused(folder: str) -> None:
    with pytest.raises(ValueError, match="use_listings_cache=True would hide"):
        RunReader(folder, storage_options={"use_listings_cache": True})


def test_an_unknown_scheme() -> None:
    with pytest.raises(ValueError, match="or give a local path"):
        checkpoint.save("nope://bucket/c", state())
