"""Sets the value that ``torch.utils.data.get_worker_info()`` returns in a worker process.

Datasets call that function, and torch has no public way to set its value. So this module uses one private name of torch, and no
other module does.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.data import get_worker_info


def set_worker_info(worker_number: int, num_workers: int, seed: int, pipeline: Any) -> None:
    """Make ``torch.utils.data.get_worker_info()`` return the given worker number, count, seed and pipeline in this process."""
    module: Any = sys.modules[get_worker_info.__module__]
    module._worker_info = module.WorkerInfo(id=worker_number, num_workers=num_workers, seed=seed, dataset=pipeline)
