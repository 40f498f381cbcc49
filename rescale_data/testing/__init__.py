"""For your own tests: many ranks in one process, the promise that a pipeline rescales, and the contract of a source."""

from rescale_data.testing.simulated import assert_rescalable, full_state_dict
from rescale_data.testing.source_contract import assert_source

__all__ = ["assert_rescalable", "assert_source", "full_state_dict"]
