"""`set_worker_info`: what ``torch.utils.data.get_worker_info()`` returns in a worker process.

Torch has no public way to set it, and datasets ask it: so one private name of torch is used here, and nowhere else.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.data import get_worker_info


def set_worker_info(number: int, num_workers: int, seed: int, pipeline: Any) -> None:
    """Make ``get_worker_info()`` in this process tell of a worker."""
    module: Any = sys.modules[get_worker_info.__module__]
    module._worker_info = module.WorkerInfo(id=number, num_workers=num_workers, seed=seed, dataset=pipeline)
