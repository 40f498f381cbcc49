"""The command ``index``: makes the index of a source's files before a job starts."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from typing import Any

from rich.console import Console
from rich.progress import Progress

from rescale_data.sources.arrow import ArrowSource
from rescale_data.sources.file_source import FileSource
from rescale_data.sources.files.paths import find_matching_files
from rescale_data.sources.index import count_parts
from rescale_data.sources.jsonl import JsonlSource
from rescale_data.sources.megatron import MegatronSource
from rescale_data.sources.parquet import ParquetSource
from rescale_data.sources.webdataset import WebDatasetSource

FORMATS: dict[str, type[FileSource]] = {
    kind.FORMAT: kind for kind in (ParquetSource, ArrowSource, JsonlSource, WebDatasetSource, MegatronSource)
}
_POLL_SECONDS = 0.5


def index(paths: Sequence[str], index_dir: str, fmt: str | None, processes: int, console: Console) -> dict[str, Any]:
    """Make the index of a source, in several processes that divide its files among them.

    Args:
        paths: The paths that the source is given.
        index_dir: The folder of the index that the source is given.
        fmt: A key of `FORMATS`; by default the format of the files' names.
    """
    source_paths = paths[0] if len(paths) == 1 else list(paths)
    if fmt not in (None, *FORMATS):
        raise ValueError(f"--format {fmt}: give one of {', '.join(FORMATS)}.")
    kind = FORMATS[fmt] if fmt is not None else _find_source_class(source_paths)
    num_files = len(kind.find_files(source_paths).names)
    num_rows, source_args, num_parts_before = 0, (kind, source_paths, index_dir), count_parts(index_dir)
    spawn_context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn_context) as pool, Progress(console=console) as bar:
        task = bar.add_task(f"{num_files} files", total=num_files)
        running_tasks = {
            pool.submit(_count_rows, *source_args) for _ in range(min(processes, -(-num_files // kind.FILES_A_PART)))
        }
        while running_tasks:
            done_tasks, running_tasks = wait(running_tasks, _POLL_SECONDS, "FIRST_COMPLETED")
            row_counts = [future.result() for future in done_tasks]
            bar.update(task, completed=min(num_files, kind.FILES_A_PART * (count_parts(index_dir) - num_parts_before)))
            if row_counts:
                num_rows = row_counts[0]
        bar.update(task, completed=num_files)
    return {"format": kind.FORMAT, "files": num_files, "rows": num_rows, "index_dir": os.path.abspath(index_dir)}


def _count_rows(source_class: type[Any], paths: Any, index_dir: str) -> int:
    return source_class(paths, index_dir=index_dir).num_rows


def _find_source_class(paths: Any) -> type[FileSource]:
    suffixes = tuple(suffix for source_class in FORMATS.values() for suffix in source_class.SUFFIXES)
    first_name = find_matching_files(paths, suffixes).names[0]
    for source_class in FORMATS.values():
        if first_name.endswith(source_class.SUFFIXES):
            return source_class
    raise ValueError(f"{first_name} ends in none of {', '.join(suffixes)}: give --format, one of {', '.join(FORMATS)}.")
