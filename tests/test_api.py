"""What can be imported, and what importing it does not do."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rescale_data as rd


def test_the_names_of_a_loader() -> None:
    """What a user calls, and no more: all else is underscored."""
    assert [name for name in dir(rd.DataLoader(range(8), global_batch_size=4)) if not name.startswith("_")] == [
        "batches_left", "close", "epoch", "gradient_accumulation_steps", "last_batch_samples", "load_state_dict",
        "local_state_dict", "options", "peek", "progress", "reopen", "report", "reset", "set_epoch", "skip", "start",
        "state_dict", "step",
    ]  # fmt: skip


def test_importing_starts_no_process_group_thread_or_log() -> None:
    code = (
        "import threading, logging, torch.distributed as dist, rescale_data\n"
        "assert threading.active_count() == 1 and not logging.getLogger().handlers and not dist.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


PACKAGE = Path(rd.__path__[0])
FLOORS = [
    ["errors"],
    ["state"],
    ["order", "shard"],
    ["rounds"],
    ["layout"],
    ["lease"],
    ["sources"],
    ["nodes"],
    ["engine"],
    ["loader"],
    ["integrations"],
    ["checkpoint"],
    ["audit", "xla"],
    ["testing", "cli"],
    ["__init__"],
]
LEVELS = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
"""A module imports from its own room or from those on lower floors: see rescale_data/README.md."""
DCP = "torch.distributed.checkpoint."
DCP_FUNCTIONS = ("state_dict.", "stateful.", "staging.", "storage.StorageReader", "api.CheckpointException")


def imports(path: Path) -> list[str]:
    """Modules and names that a file imports, dotted."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


in_each_module = pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)


@in_each_module
def test_imports_go_down_and_are_public(path: Path) -> None:
    """DCP is used below its functions in one module: what a new torch may change. Others have three types of it."""
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "rescale_data":
            assert parts[1] == own or LEVELS[parts[1]] < LEVELS[own], name
        elif parts[0] in ("torch", "torchdata"):
            assert not any(part.startswith("_") for part in parts), name
        assert parts[0] != "torchdata" or path.match("nodes/base.py"), name
        below = name.startswith(DCP) and not name.removeprefix(DCP).startswith(DCP_FUNCTIONS)
        assert not below or path == PACKAGE / "checkpoint" / "storage" / "dcp.py", name


BELOW_STORAGE = ["tree", "ranks"]


@pytest.mark.parametrize("room", [*BELOW_STORAGE, "storage"])
def test_the_storage_of_checkpoints_imports_nothing_above_it(room: str) -> None:
    allowed = {"storage", *BELOW_STORAGE} if room == "storage" else {room}
    paths = [*(PACKAGE / "checkpoint" / room).rglob("*.py"), *(PACKAGE / "checkpoint").glob(f"{room}.py")]
    names = [name.split(".") for path in paths for name in imports(path)]
    assert {parts[2] for parts in names if parts[:2] == ["rescale_data", "checkpoint"]} <= allowed


def test_the_rooms_are_described_as_they_are() -> None:
    """rescale_data/README.md: every room, from the top floor down, and only files that are there."""
    page = (PACKAGE / "README.md").read_text()
    named = re.findall(r"`([\w/]+(?:\.py|\.c|/))`", page)
    assert named
    assert [name for name in named if not any((root / name).exists() for root in (PACKAGE, PACKAGE.parent))] == []
    rows = re.findall(r"^\| (`.*?) \|", page.split("\n## To find")[0], re.MULTILINE)
    rooms = [Path(name).stem for row in rows for name in re.findall(r"`([\w.]+)/?`", row)]
    assert sorted(rooms) == sorted(LEVELS.keys() - {"__init__"})
    assert [LEVELS[room] for room in rooms] == sorted((LEVELS[room] for room in rooms), reverse=True)


@pytest.mark.parametrize("name", ["order.py", "rounds.py", "state.py", "layout"])
def test_the_bottom_is_pure(name: str) -> None:
    """Integers and tensors: no I/O, no processes, no collectives."""
    found = [each for path in PACKAGE.glob(f"{name}/*.py" if name == "layout" else name) for each in imports(path)]
    assert found
    outside = {module.split(".")[0] for module in found} - set(sys.stdlib_module_names)
    assert outside <= {"numpy", "torch", "rescale_data"}
    assert not any(module.startswith(("torch.distributed", "os", "io", "multiprocessing")) for module in found)
