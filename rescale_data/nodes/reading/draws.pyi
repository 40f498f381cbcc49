"""What `draws.c` has; `rescale_data.nodes.mixture.lengths` says what it means."""

from typing import Any

def run(points: Any, chosen: Any, first: int, numbers: Any, lengths: list[Any], turn_at: int, /) -> tuple[int, int]: ...
