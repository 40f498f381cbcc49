"""Settings of all tests: one thread, reproducible properties, and processes that start in milliseconds."""

import multiprocessing
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; child processes inherit it

from hypothesis import settings

settings.register_profile("reproducible", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)  # pytest --hypothesis-profile=explore
settings.load_profile("reproducible")

# Workers and ranks are forked from a server that has imported what they need, and no data: seconds a process saved.
multiprocessing.set_forkserver_preload(["torch.distributed.checkpoint", "torch.distributed.fsdp", "rescale_data"])
