"""The command ``rows``: looks up rows by their ids, and writes the list that `Reader(exclude=)` takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rescale_data.cli.auditing import import_object
from rescale_data.nodes.reading.blocklist import find_rows


def write_rows(source_name: str, ids_path: str, column: str, out_path: str) -> dict[str, Any]:
    """Write the rows of a source that have an id from a file; return the numbers of ids and rows.

    Raises:
        ValueError: There is no such source or file, or the source has no such column.
        FileNotFoundError: There is no file of ids.
    """
    id_lines = Path(ids_path).read_text().split("\n")
    id_set = {line.strip() for line in id_lines if line.strip()}
    integer_ids = {int(line) for line in id_set if line.removeprefix("-").isdecimal()}
    rows = find_rows(import_object(source_name), id_set | integer_ids, column)
    Path(out_path).write_text(json.dumps(rows))
    num_rows = len(rows) if isinstance(rows, list) else sum(map(len, rows.values()))
    return {"ids": len(id_set), "rows": num_rows, "out": out_path}
