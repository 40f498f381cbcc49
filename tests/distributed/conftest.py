"""Ranks are forked from a server that has imported what they need: four of them then start in less than a second."""

import multiprocessing

# Pipelining stands for what the first DTensor of a process imports, which takes seconds.
multiprocessing.set_forkserver_preload(
    ["torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining", "fsspec", "rescale_data"]
)
