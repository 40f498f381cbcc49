"""torch_xla (SPMD) beside the core: which ranks the loader has, batches on devices, checkpoints of sharded models.

Nothing else of the package imports this one; `rescale_data.checkpoint` does when a state holds XLA tensors.
"""

from rescale_data.xla.installed import require_torch_xla

require_torch_xla()

from rescale_data.xla.device_loader import DeviceLoader  # noqa: E402
from rescale_data.xla.hosts import host_mesh  # noqa: E402

__all__ = ["DeviceLoader", "host_mesh"]
