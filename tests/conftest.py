"""Settings of all tests: one thread, reproducible properties, and processes that start in milliseconds.

Tests run in two processes (pytest-xdist), a file in one of them, so that what its tests share is made once; ``-n 0`` runs
them in one, for a debugger.
"""

import multiprocessing
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; child processes inherit it

from hypothesis import settings

from rescale_data.engine.processes import PRELOAD

settings.register_profile("reproducible", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)  # pytest --hypothesis-profile=explore
settings.load_profile("reproducible")

# Workers and ranks are forked from a server that has imported what they need, and no data: seconds a process saved.
PRELOAD += [
    "hypothesis",
    "pytest",
    "rescale_data.checkpoint.manager",
    "s3fs",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",  # stands for what the first DTensor of a process imports
]
multiprocessing.set_forkserver_preload(PRELOAD)
