"""Make the golden files anew.

    python -m tests.golden          # order and checkpoints
    python -m tests.golden order    # the order alone

A change of them is a change of kind ORDER or CHECKPOINT, which needs a line in CHANGELOG.md.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.golden import checkpoints
from tests.golden.pipelines import RUNS, digests, run
from tests.golden.test_order import EVERY, FILE, NUM_BATCHES


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        order = {}
        for each in RUNS:
            (folder / each).mkdir()
            order[each] = digests(run(each, folder / each, NUM_BATCHES), EVERY)
        FILE.write_text(json.dumps(order, indent=1) + "\n")
        if "order" not in sys.argv:
            checkpoints.make(folder / "data")


if __name__ == "__main__":
    main()
