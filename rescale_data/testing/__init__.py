"""For your own tests: many ranks in one process, the promise that a pipeline rescales, and the contract of a source.

Example:
    >>> import rescale_data as rd
    >>> from rescale_data import testing
    >>> testing.assert_source(rd.DatasetSource(["one", "two"]))
"""

from rescale_data.testing.simulated import assert_rescalable, full_state_dict
from rescale_data.testing.source_contract import assert_source

__all__ = ["assert_rescalable", "assert_source", "full_state_dict"]
