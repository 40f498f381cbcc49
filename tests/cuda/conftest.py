"""What needs a GPU; skipped where there is none. CI has none: run it by hand, `pytest -n 0 tests/cuda`."""

from pathlib import Path

import pytest
import torch

from tests.corpus import documents, write


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus in Arrow files."""
    path = tmp_path_factory.mktemp("corpus")
    write("arrow", path, documents([5, 40, 17, 3, 28, 60] * 40))
    return path
