"""Law 6, for stores of checkpoints: one request fails, and the result is right, or an error; never "there is none".

Once the store answers again, the same call in the same process is right, although the error is still held.

Each request of each operation fails once, and from there on, with each kind of error that a store has.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

import rescale_data as rd
from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager, RunReader
from tests.laws.pairs import cases, name_of
from tests.states import opened

ERRORS: dict[str, Callable[[str], OSError]] = {
    "403": lambda path: PermissionError(13, "Forbidden", path),
    "404": lambda path: FileNotFoundError(2, "NoSuchKey", path),
    "500": lambda path: OSError(5, "InternalError", path),
    "503": lambda path: OSError(16, "SlowDown", path),
    "reset": lambda path: ConnectionResetError(104, "reset", path),
    "stall": lambda path: TimeoutError(110, "timed out", path),
}


class Faulty(MemoryFileSystem):
    """A bucket in memory whose requests fail as the test says."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 as in its base
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    isfile = AbstractFileSystem.isfile  # as of s3fs: False for any error
    requests = 0
    fails: Callable[[int], bool] = staticmethod(lambda number: False)
    error: Callable[[str], OSError] = staticmethod(ERRORS["403"])

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        path = path.removeprefix("faulty://").strip("/")
        return f"/{path}" if path else ""

    @classmethod
    def ask(cls, path: str, *, is_there: bool) -> None:
        """Make a request; a 404 is one of what is there, of anything else it is a right answer."""
        cls.requests += 1
        if "/.leases" not in path and cls.fails(cls.requests - 1):
            error = cls.error(path)
            if is_there or not isinstance(error, FileNotFoundError):
                raise error

    def _is_there(self, path: str) -> bool:
        path = self._strip_protocol(path)
        return any(key == path or key.startswith(f"{path}/") for key in self.store)


def asking(name: str) -> Callable[..., Any]:
    """Return a method that makes a request first; an empty listing and a 404 are the same answer."""
    method, reads = getattr(MemoryFileSystem, name), name in ("info", "cat_file")

    def request(self: Faulty, path: str, *given: Any, **how: Any) -> Any:
        self.ask(path, is_there=(reads or how.get("mode") == "rb") and self._is_there(path))
        return method(self, path, *given, **how)

    return request


for each in ("ls", "info", "cat_file", "_open", "pipe_file", "rm_file"):
    setattr(Faulty, each, asking(each))
fsspec.register_implementation("faulty", Faulty, clobber=True)
SOURCE = rd.DatasetSource([{"x": i} for i in range(64)], name="web")
RUN = "faulty://bucket/run"


def pipeline(shard: rd.Shard) -> rd.Reader:
    return rd.Reader(SOURCE, shard)


def target() -> dict[str, Any]:
    return {"w": torch.zeros(2), "n": 0}


def loaded(work: Callable[[dict[str, Any]], object]) -> Any:
    state = target()
    found = work(state)
    assert (state["w"] == state["n"]).all()
    return found, state["n"]


def save(_: Path) -> Any:
    with CheckpointManager(RUN, async_mode="disabled") as manager:
        manager.save(8, {"w": torch.full((2,), 8.0), "n": 8})
    return "told"


def delete(_: Path) -> Any:
    with CheckpointManager(RUN, async_mode="disabled") as manager:
        manager.delete(4)
        return manager.steps()


def save_alone(_: Path) -> Any:
    checkpoint.save(f"{RUN}/step-2", {"n": 2}, overwrite=True)
    return "told"


def convert(folder: Path) -> Any:
    checkpoint.to_torch_save(f"{RUN}/step-4", folder / "out.pt")
    return torch.load(folder / "out.pt", weights_only=True)["n"]


OPERATIONS: dict[str, Callable[[Path], Any]] = {
    "load_latest": lambda _: loaded(RunReader(RUN).load_latest)[1],
    "load": lambda _: loaded(lambda state: checkpoint.load(f"{RUN}/step-4", state))[1],
    "steps": lambda _: RunReader(RUN).steps(),
    "best_step": lambda _: RunReader(RUN).best_step("loss", "max"),
    "read_data_state": lambda _: opened(checkpoint.read_data_state(f"{RUN}/step-2"))["samples"],
    "verify": lambda _: checkpoint.verify(f"{RUN}/step-4"),
    "convert": convert,
    "audit": lambda _: rd.audit.Audit(RUN, pipeline).steps,
    "save": save,
    "save_alone": save_alone,
    "delete": delete,
}


@pytest.fixture(autouse=True)
def run() -> Iterator[None]:
    """A run of three steps, of which one is a lone save and has the state of a loader."""
    loader = rd.DataLoader(pipeline, global_batch_size=4)
    next(batches := iter(loader)), next(batches)
    checkpoint.save(f"{RUN}/step-2", {"loader": loader})
    with CheckpointManager(RUN, async_mode="disabled", keep_latest=None) as manager:
        for step in (4, 6):
            manager.save(step, {"w": torch.full((2,), float(step)), "n": step}, metrics={"loss": step})
    yield
    Faulty.fails = staticmethod(lambda number: False)
    Faulty.store.clear()
    Faulty.pseudo_dirs[:] = [""]


CASES = cases({"operation": list(OPERATIONS), "error": list(ERRORS), "lasting": [False, True]})
LEFT_OPEN = [{"operation": name, "error": "500", "lasting": True} for name in ("save", "save_alone", "delete")]
CASES += [case for case in LEFT_OPEN if case not in CASES]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_one_failing_request(case: dict[str, Any], tmp_path: Path) -> None:
    work, before, objects = OPERATIONS[case["operation"]], 0, dict(Faulty.store)
    Faulty.error = staticmethod(ERRORS[case["error"]])
    Faulty.requests = 0
    right = work(tmp_path)
    number = Faulty.requests
    assert number > 2
    for at in range(number):
        Faulty.store.clear()
        Faulty.store.update(objects)
        Faulty.requests = before
        Faulty.fails = staticmethod(lambda n, at=at: n == at or (case["lasting"] and n > at))
        failed, found, held = False, None, list[BaseException]()
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # a step that is passed over
            try:
                found = work(tmp_path)
            except (OSError, RuntimeWarning) as error:
                failed = True
                held.append(error)
        Faulty.fails = staticmethod(lambda number: False)
        named = case["operation"] == "verify" and "cannot be read: " in str(found)  # the file, in its answer
        assert failed or named or found == right, f"request {at} of {number}"
        newest = loaded(RunReader(RUN).load_latest)[1]
        assert not held or work(tmp_path) == right, f"again, after request {at} of {number}"
        assert newest == 8 or (newest == 6 and (failed or case["operation"] != "save")), "what was told is there"
