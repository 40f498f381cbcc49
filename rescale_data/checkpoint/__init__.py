"""What a training loop needs around its one checkpoint."""

from rescale_data.checkpoint.check import check_checkpoint

__all__ = ["check_checkpoint"]
