"""A checkpoint in an object store is replaced: what a failure or a kill at each request leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager
from rescale_data.checkpoint.storage import commit
from rescale_data.checkpoint.storage.manifest import read_manifest
from rescale_data.checkpoint.storage.open import open_store
from rescale_data.checkpoint.storage.store import ObjectStore

CHANGES = ("open_write", "rm_file", "remove_folder", "rename")


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    yield f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").store.clear()


def state(step: int) -> dict[str, Any]:
    return {"weights": torch.full((10,), float(step)), "number": step}


def loaded(url: str) -> int | None:
    """The step at ``url``, which is whole; None where there is no checkpoint."""
    target = state(0)
    try:
        checkpoint.load(url, target)
    except (FileNotFoundError, ValueError):
        return None
    assert (target["weights"] == target["number"]).all()
    return target["number"]


def loaded_by_stock_dcp(url: str) -> int:
    target = state(0)
    dcp.load(target, checkpoint_id=url)
    assert (target["weights"] == target["number"]).all()
    return target["number"]


def strike(monkeypatch: pytest.MonkeyPatch, at: int, *, lasting: bool) -> list[str]:
    """Let the request with this number fail, or with ``lasting``, as a kill does, all from there on; returns all requests."""
    requests: list[str] = []

    def struck(name: str) -> Any:
        method = getattr(ObjectStore, name)

        def change(store: ObjectStore, *arguments: Any) -> Any:
            requests.append(name)
            if len(requests) - 1 == at or (lasting and len(requests) > at):
                raise ConnectionError("the network is gone")
            return method(store, *arguments)

        return change

    for name in CHANGES:
        monkeypatch.setattr(ObjectStore, name, struck(name))
    return requests


def number_of_requests(url: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        requests = strike(patch, 10**9, lasting=False)
        checkpoint.save(url, state(2), overwrite=True)
    return len(requests)


@pytest.mark.parametrize("lasting", [False, True], ids=["a failure", "a kill"])
def test_at_each_request(url: str, lasting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(f"{url}/step-0", state(1))
    found, behind = [], 0
    for at in range(number_of_requests(f"{url}/step-0")):
        path = f"{url}/step-{at + 1}"
        checkpoint.save(path, state(1))
        with pytest.MonkeyPatch.context() as patch:
            strike(patch, at, lasting=lasting)
            try:
                checkpoint.save(path, state(2), overwrite=True)
                failed = False
            except ConnectionError:
                failed = True
        found.append(loaded(path))
        assert found[-1] == (1 if failed else 2)
        stock = loaded_by_stock_dcp(path)
        assert stock in (1, found[-1]), "old or new, and never a mix"
        behind += stock != found[-1]
    assert found == sorted(found)
    assert behind == 1, "a request after the commit stock DCP has its copy of the metadata"
    monkeypatch.setattr(commit, "ABANDONED", -1e9)
    with CheckpointManager(url, keep_latest=None) as manager:
        assert manager.steps() == list(range(len(found) + 1))
    assert [loaded_by_stock_dcp(f"{url}/step-{at + 1}") for at in range(len(found))] == found
    for at in range(len(found)):
        checkpoint.save(f"{url}/step-{at + 1}", state(3), overwrite=True)
        assert loaded(f"{url}/step-{at + 1}") == loaded_by_stock_dcp(f"{url}/step-{at + 1}") == 3


def test_a_first_save_that_fails_leaves_nothing(url: str) -> None:
    for at in range(number_of_requests(f"{url}/other")):
        with pytest.MonkeyPatch.context() as patch:
            strike(patch, at, lasting=False)
            with pytest.raises(ConnectionError):
                checkpoint.save(f"{url}/c", state(2))
        store, path = open_store(f"{url}/c")
        assert not store.exists(path)


@pytest.mark.parametrize("name", [".metadata", "rescale_data.json"])
def test_an_answer_that_is_lost(url: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The store did what it was asked for, and says that it did not."""
    checkpoint.save(f"{url}/c", state(1))
    write, lost = ObjectStore.write, []

    def lose(store: ObjectStore, path: str, content: bytes) -> None:
        write(store, path, content)
        if path.endswith(f"/c/{name}") and not lost:
            lost.append(path)
            raise ConnectionError("the answer is lost")

    monkeypatch.setattr(ObjectStore, "write", lose)
    checkpoint.save(f"{url}/c", state(2), overwrite=True)
    assert lost
    assert loaded(f"{url}/c") == loaded_by_stock_dcp(f"{url}/c") == 2


def test_at_no_request_a_reader_finds_less_than_a_checkpoint(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads between any two requests of a replacement."""
    checkpoint.save(f"{url}/c", state(1))
    found: list[int | None] = []
    for name in CHANGES:
        method = getattr(ObjectStore, name)

        def between(store: ObjectStore, *arguments: Any, method: Any = method) -> Any:
            found.append(loaded(f"{url}/c"))
            return method(store, *arguments)

        monkeypatch.setattr(ObjectStore, name, between)
    checkpoint.save(f"{url}/c", state(2), overwrite=True)
    assert (found[0], found[-1], sorted(found, key=lambda step: step or 0)) == (1, 2, found)


def test_what_cannot_be_pickled_leaves_the_checkpoint(url: str) -> None:
    checkpoint.save(f"{url}/c", state(1))
    with pytest.raises(Exception, match="pickle"):
        checkpoint.save(f"{url}/c", {"number": lambda: 1}, overwrite=True)
    assert loaded(f"{url}/c") == loaded_by_stock_dcp(f"{url}/c") == 1
    with CheckpointManager(url, async_mode="disabled") as manager:
        manager.save(5, state(5))
        with pytest.raises(Exception, match="pickle"):
            manager.save(5, {"number": lambda: 1})
        assert manager.steps() == [5]
    assert loaded(f"{url}/step-5") == 5


def test_nothing_of_the_old_checkpoint_stays(url: str) -> None:
    for step in (1, 2):
        checkpoint.save(f"{url}/c", state(step), overwrite=True)
    dcp.save(state(3), checkpoint_id=f"{url}/stock")
    checkpoint.save(f"{url}/stock", state(4), overwrite=True)
    store, path = open_store(url)
    for name in ("c", "stock"):
        metadata, own, manifest = store.names(f"{path}/{name}")
        assert (metadata, manifest) == (".metadata", "rescale_data.json")
        assert store.names(f"{path}/{name}/{own}") == [".metadata", "__0_0.distcp"]
        assert checkpoint.verify(f"{url}/{name}") == []


def test_a_checkpoint_of_before_is_read_and_replaced(url: str) -> None:
    """Then the manifest named the metadata that has a fixed name."""
    checkpoint.save(f"{url}/c", state(1))
    store, path = open_store(f"{url}/c")
    manifest = read_manifest(store, path)
    assert manifest is not None
    files = {".metadata" if name == manifest.metadata else name: record for name, record in manifest.files.items()}
    store.rm_file(f"{path}/{manifest.metadata}")
    store.write(f"{path}/rescale_data.json", dataclasses.replace(manifest, files=files).to_json())
    assert (loaded(f"{url}/c"), checkpoint.verify(f"{url}/c")) == (1, [])
    checkpoint.save(f"{url}/c", state(2), overwrite=True)
    assert loaded(f"{url}/c") == loaded_by_stock_dcp(f"{url}/c") == 2
