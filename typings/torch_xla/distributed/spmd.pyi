from enum import IntEnum
from typing import Any

import numpy as np
import torch

class ShardingType(IntEnum):
    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6

class XLAShardedTensor(torch.Tensor):
    global_tensor: torch.Tensor
    @property
    def sharding_type(self) -> ShardingType: ...

class Mesh:
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...] | None
    def get_logical_mesh(self) -> np.ndarray[Any, Any]: ...

class ShardingSpec:
    mesh: Mesh
    partition_spec: tuple[Any, ...]
    minibatch: bool | None

def wrap_if_sharded(x: Any) -> Any: ...
