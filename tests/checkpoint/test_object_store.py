"""Checkpoints on an S3 server: committed by the last object, whatever the network does; and the proxy that makes it fail."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

pytest.importorskip("s3fs", reason="needs the extra s3")
pytest.importorskip("moto", reason="needs the extra s3")

from s3fs import S3FileSystem

import rescale_data as rd
from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager
from tests.checkpoint.object_server import BUCKET, FAULTS, Fault, Server, serving
from tests.checkpoint.stand_in import StandInLoader
from tests.states import opened


@pytest.fixture(scope="module")
def servers() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def server(servers: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(S3FileSystem, "retries", 2)  # its five, with growing pauses, take ten seconds
    servers.requests.clear()
    yield servers
    servers.set_fault(lambda method, path: None)


@pytest.fixture
def folder() -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.mark.parametrize("fault", FAULTS)
def test_one_request_fails_and_no_other(fault: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    config = {"retries": {"total_max_attempts": 1}, "read_timeout": 3 if fault == "stall" else 60}
    bucket: Any = S3FileSystem(**{**server.options, "config_kwargs": config}, skip_instance_cache=True)
    error = {"403": PermissionError, "404": FileNotFoundError}.get(fault, Exception)
    for name in "ab":
        bucket.pipe(f"{BUCKET}/{name}", name.encode() * 100)
    with server.recording() as requests:
        assert bucket.cat_file(f"{BUCKET}/a", start=10, end=20) == b"a" * 10
    (request,) = requests
    assert (request.method, request.path, request.range) == ("GET", f"/{BUCKET}/a", "bytes=10-19")
    for after in (0, 1):
        with server.failing(request, fault, after=after):
            assert bucket.cat_file(f"{BUCKET}/b", start=10, end=20) == b"b" * 10
            assert bucket.cat_file(f"{BUCKET}/a", start=10, end=30) == b"a" * 20
            for _ in range(after):
                assert bucket.cat_file(f"{BUCKET}/a", start=10, end=20) == b"a" * 10
            for _ in range(2 - after):
                with pytest.raises(error):
                    bucket.cat_file(f"{BUCKET}/a", start=10, end=20)
        assert bucket.cat_file(f"{BUCKET}/a", start=10, end=20) == b"a" * 10


def state(step: int = 0, size: int = 1000) -> dict[str, Any]:
    loader = StandInLoader()
    loader.advance(step)
    return {"weights": torch.full((size,), float(step)), "loader": loader, "step": step}


def test_a_round_trip_and_stock_dcp(server: Server, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function is given the options of the store."""
    options: dict[str, Any] = {"storage_options": server.options}
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("os.sync flushes every disk of the machine"))
    checkpoint.save(f"{folder}/c", state(3), **options)
    checkpoint.load(f"{folder}/c", target := state(), **options)
    assert (target["step"], target["loader"].step, target["weights"].unique().tolist()) == (3, 3, [3.0])
    assert opened(checkpoint.read_data_state(f"{folder}/c", **options))["step"] == 3
    assert checkpoint.verify(f"{folder}/c", **options) == []
    loader = rd.DataLoader(range(8), global_batch_size=4)
    next(iter(loader))
    checkpoint.save(f"{folder}/of a loader", {"train": loader}, **options)
    fresh = rd.DataLoader(range(8), global_batch_size=4)
    checkpoint.check_checkpoint(f"{folder}/of a loader", fresh, name="train", **options)
    checkpoint.load_changed(f"{folder}/of a loader", fresh, name="train", **options)
    assert fresh.step == 1
    for name, value in (
        *(("ENDPOINT_URL", server.url), ("ACCESS_KEY_ID", "key")),
        *(("SECRET_ACCESS_KEY", "secret"), ("REGION", "us-east-1")),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    dcp.load(stock := state(), checkpoint_id=f"{folder}/c")
    assert (stock["step"], stock["loader"].step) == (3, 3)
    writes = [path for method, path in server.requests if method == "PUT" and "/c/" in path and "lease" not in path]
    order = [next(i for i, path in enumerate(writes) if part in path) for part in ("__0_0", "/rescale_data-")]
    assert order == sorted(order), "the manifest is put after the data"
    assert "c/.metadata" in writes[-1], "and stock DCP's copy after the look at the claims"


def first(times: int, fault: str, at: str, method: str = "PUT") -> Fault:
    """A fault that strikes the first so many requests."""
    count = itertools.count()
    return lambda m, path: fault if m in (method, "POST") and at in path and next(count) < times else None


@pytest.mark.parametrize("fault", ["503", "cut", "stall"])
def test_a_passing_fault_is_retried(server: Server, folder: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a multipart upload, which is cut in the middle."""
    size = 3_000_000
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
        for step, steps in ((1, [1]), (2, [1]), (3, [1, 3])):
            server.set_fault(first(10**9 if step == 2 else 0, fault, at))
            manager.save(step, state(step))
            if step == 2:
                with pytest.raises(Exception, match=r"Saving|failed|SlowDown|Connection"):
                    manager.wait()
            server.set_fault(lambda method, path: None)
            assert manager.load_latest(state()) == steps[-1]
            assert manager.steps() == steps


@pytest.mark.parametrize(("run", "neighbour"), [("x?", "xy"), ("[x]", "x")])
def test_a_name_is_no_pattern(server: Server, folder: str, run: str, neighbour: str) -> None:
    """fsspec moves and removes what a name matches: no save to such a run was whole."""
    options: dict[str, Any] = {"storage_options": server.options}
    checkpoint.save(f"{folder}/{neighbour}/step-0", state(0), **options)
    objects = S3FileSystem(**server.options, skip_instance_cache=True)
    before = objects.find(f"{folder}/{neighbour}")
    with CheckpointManager(f"{folder}/{run}", keep_latest=1, **options) as manager:
        for step in (0, 1):
            manager.save(step, state(step))
    assert manager.steps() == [1]
    assert checkpoint.verify(f"{folder}/{run}/step-1", **options) == []
    assert not objects.exists(f"{folder}/{run}/step-0")
    objects.invalidate_cache()
    assert objects.find(f"{folder}/{neighbour}") == before
