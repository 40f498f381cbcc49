"""What needs a GPU; skipped where there is none. CI has none: run it by hand, `pytest -n 0 tests/cuda`."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
