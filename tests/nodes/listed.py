"""Row numbers of any source as `Reader(exclude=)` takes them."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from rescale_data.sources.source import FiledSource


def listed(source: Any, rows: Iterable[int]) -> Any:
    if not isinstance(source, FiledSource):
        return list(rows)
    found = defaultdict(list)
    for file, row in map(source.file_row, rows):
        found[file].append(row)
    return dict(found)
