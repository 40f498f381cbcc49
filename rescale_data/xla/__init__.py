"""Support for torch_xla (SPMD): ranks of the loader, batches on devices, checkpoints of sharded models.

Nothing else of the package imports this one; `rescale_data.checkpoint` does when a state holds XLA tensors.
"""

try:
    import torch_xla as _  # noqa: F401
except ImportError as error:  # also where it was built for another torch
    raise ImportError(
        f"rescale_data.xla needs torch_xla and the release of torch that it is built for ({error}). Run "
        f"`pip install 'rescale_data[xla]'` (torch_xla has releases up to 2.9 only, so this may install an older torch)."
    ) from error

from rescale_data.xla.hosts import host_mesh
from rescale_data.xla.transfer import Transfer

__all__ = ["Transfer", "host_mesh"]
