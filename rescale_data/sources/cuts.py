"""Where fragments begin in files that do not say so themselves."""

from __future__ import annotations

import numpy as np

from rescale_data.state import Ints


def cut_rows(starts: Ints, max_rows: int, max_bytes: int) -> Ints:
    """First rows of the fragments, as many in each as fit its rows and bytes and at least one, and the number of rows.

    Args:
        starts: ``int64[R + 1]``, where rows begin and where the last one ends.
        max_rows: Of a fragment.
        max_bytes: Of a fragment.
    """
    cuts, num_rows = [0], len(starts) - 1
    while cuts[-1] < num_rows:
        at = cuts[-1]
        by_bytes = int(np.searchsorted(starts, starts[at] + max_bytes, side="right")) - 1
        cuts.append(max(at + 1, min(at + max_rows, by_bytes, num_rows)))
    return np.array(cuts, dtype=np.int64)
