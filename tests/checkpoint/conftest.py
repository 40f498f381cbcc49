"""Ranks are forked from a server that has imported what they need: four of them then start in less than a second."""

import multiprocessing
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; child processes inherit it

# Pipelining stands for what the first DTensor of a process imports, which takes seconds.
multiprocessing.set_forkserver_preload(
    [
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "rescale_data.checkpoint.manager",
        "s3fs",
    ]
)
