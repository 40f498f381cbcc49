"""The first 1,000 global batches of ten runs are those of ``order.json``: another order is a change of kind ORDER."""

import json
from pathlib import Path

import pytest

from tests.golden.pipelines import RUNS, digests, run

FILE = Path(__file__).parent / "order.json"
NUM_BATCHES, EVERY = 1000, 100


@pytest.mark.parametrize("name", RUNS)
def test_the_order_of_rows_stays(name: str, tmp_path: Path) -> None:
    golden = json.loads(FILE.read_text())
    assert golden.keys() == RUNS.keys()
    assert digests(run(name, tmp_path, NUM_BATCHES), EVERY) == golden[name], (
        "each digest is of 100 global batches; a change on purpose: python -m tests.golden, and a line in CHANGELOG.md"
    )
