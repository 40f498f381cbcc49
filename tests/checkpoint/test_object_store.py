"""Checkpoints on an S3 server: committed by the last object, whatever the network does."""

import os
import uuid

import pytest
import torch.distributed.checkpoint as dcp

pytest.importorskip("s3fs", reason="needs the extra s3")
pytest.importorskip("moto", reason="needs the extra s3")

from s3fs import S3FileSystem

import rescale_data as rd
from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager
from tests.checkpoint.object_server import BUCKET, no_fault, serving
from tests.checkpoint.steps import state_at
from tests.states import opened


@pytest.fixture(scope="module")
def servers():
    with serving() as server:
        yield server


@pytest.fixture
def server(servers, monkeypatch):
    monkeypatch.setattr(S3FileSystem, "retries", 2)  # its five, with growing pauses, take ten seconds
    yield servers
    servers.fault = no_fault


@pytest.fixture
def folder():
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def test_a_round_trip_and_stock_dcp(server, folder, monkeypatch):
    """Each function is given the options of the store."""
    options = {"storage_options": server.options}
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("os.sync flushes every disk of the machine"))
    with server.recording() as requests:
        checkpoint.save(f"{folder}/c", state_at(3), **options)
    checkpoint.load(f"{folder}/c", target := state_at(), **options)
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
    keys = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}
    for name, value in {"ENDPOINT_URL": server.url, "REGION": "us-east-1", **keys}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    dcp.load(stock := state_at(), checkpoint_id=f"{folder}/c")
    assert (stock["step"], stock["loader"].step) == (3, 3)
    writes = [path for method, path, _ in requests if method == "PUT" and "lease" not in path]
    order = [next(i for i, path in enumerate(writes) if part in path) for part in ("__0_0", "/rescale_data-")]
    assert order == sorted(order), "the manifest is put after the data"
    assert "c/.metadata" in writes[-1], "and stock DCP's copy after the look at the claims"


def first(fault, at, method="PUT"):
    """A fault that strikes the first request."""
    left = [fault]
    return lambda made: left.pop() if left and made.method in (method, "POST") and at in made.path else None


@pytest.mark.parametrize("fault", ["503", "cut", "stall"])
def test_a_passing_fault_is_retried(server, folder, fault, monkeypatch):
    """Also of a multipart upload, which is cut in the middle."""
    size = 3_000_000
    monkeypatch.setattr(server, "patience", 2.0 if fault == "stall" else server.patience)
    server.fault = first(fault, ".distcp")
    checkpoint.save(f"{folder}/c", state_at(2, size), storage_options=server.options)
    target = state_at(0, size)
    server.fault = first(fault, ".distcp", method="GET")
    checkpoint.load(f"{folder}/c", target, storage_options=server.options)
    assert target["weights"].unique().tolist() == [2.0]


@pytest.mark.parametrize(("run", "neighbour"), [("x?", "xy"), ("[x]", "x")])
def test_a_name_is_no_pattern(server, folder, run, neighbour):
    """fsspec moves and removes what a name matches: no save to such a run was whole."""
    options = {"storage_options": server.options}
    checkpoint.save(f"{folder}/{neighbour}/step-0", state_at(0), **options)
    objects = S3FileSystem(**server.options, skip_instance_cache=True)
    before = objects.find(f"{folder}/{neighbour}")
    with CheckpointManager(f"{folder}/{run}", keep_latest=1, **options) as manager:
        for step in (0, 1):
            manager.save(step, state_at(step))
    assert manager.steps() == [1]
    assert checkpoint.verify(f"{folder}/{run}/step-1", **options) == []
    assert not objects.exists(f"{folder}/{run}/step-0")
    objects.invalidate_cache()
    assert objects.find(f"{folder}/{neighbour}") == before
