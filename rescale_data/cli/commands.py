"""The commands of ``rescale-data``. Each prints text, or with ``--json`` one JSON document.

What they do is imported when they do it: torch takes seconds, and ``--help`` needs none of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from rescale_data.checkpoint.retention import Retention
    from rescale_data.checkpoint.storage.run_folder import RunFolder

T = TypeVar("T")
HELP = """Look after checkpoints of rescale_data, local or by URL (s3://bucket/run).

Exit codes: 0 fine, 1 damaged, 2 a wrong argument or nothing there."""
app = typer.Typer(help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

CheckpointPath = Annotated[str, typer.Argument(help="A checkpoint: a DCP folder, or its URL.")]
RunFolderPath = Annotated[str, typer.Argument(help="A run's folder, with a checkpoint a step, or its URL.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document; nan and infinity are null.")]


@app.command()
def ls(folder: RunFolderPath, as_json: JsonFlag = False) -> None:
    """List the checkpoints in a run's FOLDER, with size, time and metrics."""
    from rescale_data.cli import inspect, render

    checkpoints = _run_or_exit(lambda: inspect.list_checkpoints(folder))
    _print(as_json, checkpoints, lambda console: render.show_list(console, checkpoints))


@app.command()
def index(
    paths: Annotated[
        list[str], typer.Argument(help="What the source is given: a glob in quotes, a folder, files, URLs.")
    ],
    index_dir: Annotated[
        str, typer.Option(help="Where ranks find it, a folder that they share: index_dir= of the source.")
    ],
    format_name: Annotated[str | None, typer.Option("--format", help="parquet, arrow, jsonl, tar or megatron.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that read files.")] = 4,
    as_json: JsonFlag = False,
) -> None:
    """Index the files at PATHS, so that a job that is given index_dir= starts without opening each file."""
    from rich.console import Console

    from rescale_data.cli import index as indexing

    console = Console(stderr=True)
    report = _run_or_exit(lambda: indexing.index(paths, index_dir, format_name, processes, console))
    _print_text(as_json, report, "{files} {format} files with {rows} rows are indexed in {index_dir}".format(**report))


@app.command()
def rows(
    source: Annotated[str, typer.Argument(help="MODULE:NAME of a source or a map-style dataset.")],
    ids: Annotated[str, typer.Argument(help="A text file with one id a line.")],
    out: Annotated[str, typer.Argument(help="The JSON file to write, for rd.Reader(exclude=).")],
    column: Annotated[str, typer.Option(help="Of the source, the one that holds ids.")] = "id",
    as_json: JsonFlag = False,
) -> None:
    """Find the rows of SOURCE that have one of the IDS and write the list OUT, to leave them out of a run."""
    from rescale_data.cli.rows import write_rows

    report = _run_or_exit(lambda: write_rows(source, ids, column, out))
    _print_text(as_json, report, "{rows} rows have one of the {ids} ids: {out}".format(**report))


@app.command()
def show(
    path: Annotated[str, typer.Argument(help="A checkpoint, or with --html also a run's folder; a path or URL.")],
    html: Annotated[str | None, typer.Option(help="Write it to this file, as an HTML page.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what the checkpoint at PATH holds: model, optimizer, and how far the data is, shard by shard."""
    from rescale_data.cli import inspect, render

    if html is not None:
        written_path = _run_or_exit(lambda: render.write_page(html, *inspect.summarize_run(path)))
        return _print_text(as_json, {"html": written_path}, written_path)
    summary = _run_or_exit(lambda: inspect.summarize(path))
    return _print(as_json, summary, lambda console: render.show_checkpoints(console, [summary["checkpoint"]], summary))


@app.command()
def plan(
    global_batch_size: Annotated[int, typer.Argument(help="Samples of an optimizer step over all ranks.")],
    current: Annotated[int | None, typer.Option("--from", help="Data-parallel ranks that the run has now.")] = None,
    to: Annotated[list[int] | None, typer.Option(help="Data-parallel ranks that it may get; may be repeated.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs that are alive: which number of ranks uses most?")] = None,
    model_parallel: Annotated[int, typer.Option(min=1, help="GPUs a data-parallel rank: TP * PP * CP.")] = 1,
    num_logical_shards: Annotated[int | None, typer.Option(help="Of the run, where it was given.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the numbers of ranks, micro batches and workers that keep the global batches of a run."""
    from rescale_data.cli import planning, render

    sizes = [*([] if current is None else [current]), *(to or [])]
    result = _run_or_exit(
        lambda: planning.fit_ranks(global_batch_size, sizes, gpus, model_parallel, num_logical_shards)
    )
    _print(as_json, result, lambda console: render.show_plan(console, result))


@app.command()
def audit(
    folder: RunFolderPath,
    pipeline: Annotated[
        list[str],
        typer.Option(help="MODULE:FUNCTION of the run's pipeline; again for each that it has had, where one changed."),
    ],
    find: Annotated[
        str | None, typer.Option(help="SOURCE:ROW, SOURCE:FILE or 'SOURCE: FILE, row 17': when was that served?")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="A step or FIRST:STOP: which documents did these hold?")] = None,
    repeat: Annotated[bool, typer.Option(help="As the loader had it.")] = False,
    tail: Annotated[Literal["drop", "pad"], typer.Option(help="As the loader had it.")] = "drop",
    num_workers: Annotated[int, typer.Option(min=0, help="As the loader had it, if it was not aligned.")] = 0,
    name: Annotated[str | None, typer.Option(help="Of the loader in the checkpoints, if they hold several.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Print at most this many samples.")] = 50,
    as_json: JsonFlag = False,
) -> None:
    """Find the steps in which the run in FOLDER served a document, or list the documents of some steps."""
    from rescale_data.cli import auditing, render

    as_loaded = {"repeat": repeat, "tail": tail, "num_workers": num_workers, "name": name}
    result = _run_or_exit(lambda: auditing.audit(folder, pipeline, find, steps, **as_loaded))
    _print(as_json, result, lambda console: render.show_audit(console, result, limit))


@app.command()
def verify(path: CheckpointPath, as_json: JsonFlag = False) -> None:
    """Compare the files of the checkpoint at PATH with the sizes and checksums that were recorded. Exit code 1 if damaged."""
    from rescale_data.cli import inspect

    report = _run_or_exit(lambda: inspect.verify_checkpoint(path))
    no_problem_text = (
        "whole"
        if report["checked"] == "checksums"
        else "sizes only: the checkpoint has no checksums, as another tool wrote it"
    )
    _print_text(as_json, report, "\n".join(report["problems"]) or no_problem_text)
    raise typer.Exit(1 if report["problems"] else 0)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A DCP folder or URL, a file of torch.save, or safetensors.")],
    target: Annotated[
        str, typer.Argument(help="What to write; it must not exist, except an empty folder for safetensors.")
    ],
    to: Annotated[
        Literal["torch", "safetensors", "dcp"] | None,
        typer.Option(help="Default: by TARGET's ending, .pt or safetensors, else dcp."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Only this entry (to files), or put all under this name (to dcp): model.")
    ] = None,
    max_shard_size: Annotated[int, typer.Option(min=1, help="Bytes of one safetensors file.")] = 5 * 10**9,
    as_json: JsonFlag = False,
) -> None:
    """Convert between DCP folders, torch.save files and safetensors, in bounded memory."""
    from rescale_data.cli import conversion
    from rescale_data.layout.plan import format_size

    report = _run_or_exit(lambda: conversion.convert(source, target, to=to, name=name, max_shard_size=max_shard_size))
    text = f"{report['target']}: {report['format']}, {len(report['files'])} files, {format_size(report['bytes'])}"
    _print_text(as_json, report, text)


@app.command()
def prune(
    folder: RunFolderPath,
    keep_latest: Annotated[int, typer.Option(help="Keep this many of the newest.")],
    keep_every: Annotated[int | None, typer.Option(help="Keep every step that is a multiple of this.")] = None,
    keep_best: Annotated[
        str | None, typer.Option(help="Keep the best by a metric: METRIC:min:COUNT or METRIC:max:COUNT.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, say what would be deleted.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait a minute to learn if readers on other hosts live.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete the checkpoints in a run's FOLDER that no rule keeps, except checkpoints that are, or may be, being read.

    A run that still saves is left to its own manager.
    """
    from rescale_data.checkpoint.retention import Retention, delete_steps
    from rescale_data.checkpoint.storage.open import open_store
    from rescale_data.checkpoint.storage.run_folder import RunFolder

    retention_rules = _run_or_exit(
        lambda: Retention(keep_latest=keep_latest, keep_every=keep_every, keep_best=_parse_best_metric(keep_best))
    )
    run_folder = _run_or_exit(lambda: RunFolder.open_existing(*open_store(folder)))
    steps_to_delete = _run_or_exit(lambda: _steps_to_delete(run_folder, retention_rules))
    outcomes = dict.fromkeys(map(str, steps_to_delete), "would be deleted")
    if yes and steps_to_delete:
        outcomes = _run_or_exit(lambda: delete_steps(run_folder, steps_to_delete, wait_for_holders=wait))
    listed_outcomes = [f"step-{step}: {outcome}" for step, outcome in outcomes.items()] or ["nothing to delete"]
    _print_text(as_json, outcomes, "\n".join(listed_outcomes))


def _steps_to_delete(run_folder: RunFolder, rules: Retention) -> list[int]:
    metrics = run_folder.metrics()
    missing_text = rules.missing_metric_message(metrics)
    if missing_text:
        raise ValueError(f"Nothing is deleted: in {run_folder.path} {missing_text}.")
    return rules.select_steps_to_delete(metrics)


def _parse_best_metric(text: str | None) -> tuple[str, str, int] | None:
    if text is None:
        return None
    metric, mode, count_text = [*text.rsplit(":", 2), "", ""][:3]
    if not count_text.isdigit():
        raise ValueError(f"--keep-best {text}: give METRIC:min:COUNT or METRIC:max:COUNT, such as val_loss:min:2.")
    return metric, mode, int(count_text)


def _run_or_exit(work: Callable[[], T]) -> T:
    """Return `work()`; print a user's error and exit with code 2, or with code 1 for a damaged checkpoint.

    Clients of object stores have exceptions of their own, for credentials that are missing and the like.
    """
    try:
        return work()
    except Exception as error:
        is_user_error = isinstance(error, ValueError | TypeError | OSError)
        if not is_user_error and type(error).__module__ == "builtins":
            raise
        from rescale_data.errors import DamagedCheckpointError

        typer.echo(str(error) if is_user_error else f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, DamagedCheckpointError) else 2) from error


def _print_text(as_json: bool, value: Any, text: str) -> None:
    """Print a text as it is: paths may have brackets, and are longer than a line."""
    _print(as_json, value, lambda console: console.print(text, markup=False, soft_wrap=True))


def _print(as_json: bool, value: Any, show_on_console: Callable[[Console], None]) -> None:
    if as_json:
        without_nan = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
        typer.echo(json.dumps(without_nan, indent=1))
    else:
        from rich.console import Console

        show_on_console(Console())
