"""Every later version loads checkpoints of format version 1, and goes on with the same batches."""

import json
from pathlib import Path

import pytest

from tests.golden.checkpoints import FOLDER, PLAIN, after


@pytest.mark.parametrize("name", [*PLAIN, "sharded"])
def test_a_checkpoint_of_version_1_goes_on(name: str, tmp_path: Path) -> None:
    golden = json.loads((FOLDER / "after.json").read_text())[name]
    assert after(name, tmp_path) == golden


def test_they_are_small_and_of_no_machine() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 150_000
    for path in files:
        assert not any(word in path.read_bytes() for word in (b"/tmp", b"/home", b"/root")), path
