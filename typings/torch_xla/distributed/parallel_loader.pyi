from collections.abc import Iterable, Iterator
from typing import Any

import torch

class MpDeviceLoader:
    def __init__(self, loader: Iterable[Any], device: torch.device, **kwargs: Any) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
