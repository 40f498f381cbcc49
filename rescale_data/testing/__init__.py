"""Helpers for your own tests: several ranks in one process, checks that a pipeline rescales and a source is valid.

Example:
    >>> import rescale_data as rd
    >>> from rescale_data import testing
    >>> testing.assert_source(rd.DatasetSource(["one", "two"]))
"""

from rescale_data.testing.simulated import assert_rescalable, full_state_dict
from rescale_data.testing.source_contract import assert_source

__all__ = ["assert_rescalable", "assert_source", "full_state_dict"]
