"""One fault at every place, the half of sources: whatever one request does, rows are right, or an error names its file."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import rescale_data as rd
from rescale_data import checkpoint
from rescale_data.sources.decoded.cache import cache
from rescale_data.sources.files import remote
from tests.checkpoint.object_server import BUCKET, FAULTS, Request, Server, serving
from tests.laws.pairs import Case, cases, name_of
from tests.laws.tables import CORPORA, FILES, SOURCES

pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")

SCANNED = ("jsonl", "webdataset")
"""Formats of which each file has an index, in a folder that is given."""
PATIENCE, STALLED = 60.0, 0.25
"""Seconds that a request may take, and that one may take where one never answers."""


def source_of(server: Server, case: Case, index_dir: Path, timeout: float = PATIENCE) -> rd.Source:
    """Open the files of a case through the server, with no listing of before."""
    kind, (make, suffix) = case["kind"], FILES[case["kind"]]
    config = {"retries": {"total_max_attempts": 1}, "read_timeout": timeout, "connect_timeout": timeout}
    options = {**server.options, "config_kwargs": config, "use_listings_cache": False}
    cache().clear()
    given = {"folder": "", "file": f"/a{suffix}", "glob": f"/*{suffix}", "deep glob": f"/**/*{suffix}"}
    return make(
        f"s3://{BUCKET}/{kind}/data{given[case['given']]}",
        storage_options=options,
        remote=rd.Remote(timeout=timeout, retries=1, read_ahead=case["read_ahead"]),
        **({"index_dir": index_dir} if case["operation"] == "index" or kind in SCANNED else {}),
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A bucket with files of each kind in a folder, and in one below it."""
    folder = tmp_path_factory.mktemp("corpora")
    with serving() as made:
        bucket: Any = s3fs.S3FileSystem(**made.options)
        for kind in FILES:
            (folder / kind / "data" / "more").mkdir(parents=True)
            SOURCES[kind](folder / kind / "data", CORPORA["web"])
            SOURCES[kind](folder / kind / "data" / "more", CORPORA["books"])
            for file in (folder / kind / "data").rglob("[!.]*"):
                if file.is_file():
                    bucket.put_file(str(file), f"{BUCKET}/{file.relative_to(folder)}")
        yield made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr(remote, "_FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(remote, "_LISTING_TIMEOUT_FACTOR", 2)


def rows_of(source: Any) -> list[str]:
    return [f"{source.locate(i).rpartition('/')[2]}: {source.row(i)!r}" for i in range(source.num_rows)]


def loader_of(source: Any, on_error: Any = "raise") -> rd.DataLoader:
    pipeline = partial(rd.Reader, source, on_error=on_error)
    return rd.DataLoader(pipeline, global_batch_size=4, num_logical_shards=8, collate_fn=list)


def packed(source: Any, on_error: Any) -> list[str]:
    reader = rd.Reader(source, rd.Shard(), shuffle=8, on_error=on_error)
    node = rd.TokenPacker(reader, column="tokens", seq_len=11, eos_id=None)
    return [repr(sample) for sample in node]


def told_by_audit(source: Any, run: Path) -> str:
    served = rd.audit.Audit(str(run), lambda shard: rd.Reader(source, shard)).find(f"{source.name}:3").served
    return repr([(each.step, each.sample) for each in served])


def result(server: Server, case: Case, tmp_path: Path, timeout: float = PATIENCE, attempt: int = 0) -> Any:
    source = source_of(server, case, tmp_path / f"index-{attempt}", timeout)
    match case["operation"]:
        case "open":
            return source.num_rows, source.name
        case "pack":
            is_packable = case["kind"] in ("parquet", "arrow", "megatron")
            return packed(source, case["on_error"]) if is_packable else rows_of(source)
        case "load":
            return [repr(batch) for batch in loader_of(source, case["on_error"])]
        case "find":
            return rd.find_rows(source, [3]) if case["kind"] in ("parquet", "arrow") else rows_of(source)
        case "audit":
            return told_by_audit(source, tmp_path / "run")
        case _:
            return rows_of(source)


def save_a_run(server: Server, case: Case, tmp_path: Path) -> None:
    source = source_of(server, case, tmp_path / "index-run")
    loader = loader_of(source)
    for _ in zip(range(6), loader, strict=False):
        pass
    checkpoint.save(str(tmp_path / "run" / "step-6"), {"loader": loader})


def named(error: BaseException) -> str:
    """What an error says, with its notes and those of its causes."""
    said = [str(error), *getattr(error, "__notes__", [])]
    return " ".join(said) if error.__cause__ is None else " ".join([*said, named(error.__cause__)])


DIMENSIONS: dict[str, list[Any]] = {
    "kind": list(FILES),
    "given": ["folder", "file", "glob", "deep glob"],
    "operation": ["open", "index", "read", "pack", "load", "find", "audit"],
    "read_ahead": [True, False],
    "on_error": ["raise", "skip"],
    "fault": list(FAULTS),
}


@pytest.mark.parametrize("case", cases(DIMENSIONS), ids=name_of)
def test_rows_are_right_or_an_error_names_the_file(case: Case, server: Server, tmp_path: Path) -> None:
    if case["operation"] == "audit":
        save_a_run(server, case, tmp_path)
    with server.recording() as requests:
        expected = result(server, case, tmp_path)
    fault = case["fault"]
    for attempt, request in enumerate(dict.fromkeys(requests), 1):
        is_listing = "list-type" in request.path
        if fault == "404" and (is_listing or request.method == "HEAD"):
            continue  # then there is none
        with server.failing(request, fault) as failed:
            try:
                found = result(server, case, tmp_path, STALLED if fault == "stall" else PATIENCE, attempt)
            except Exception as error:
                found = expected
                blame(error, request, fault, case)
        has_effect = (fault, request.method) != ("short", "HEAD")  # whose answer has no body
        assert len(failed) > (has_effect and fault not in ("403", "404")), "what may pass is asked for again"
        assert found == expected, request
    assert result(server, case, tmp_path, attempt=0) == expected, "what faults have left harms nobody"


def blame(error: Exception, request: Request, fault: str, case: Case) -> None:
    """Assert that an error is of the kind of its fault, and names the file, or what was listed."""
    said = named(error)
    key = f"{BUCKET}/{case['kind']}/data"
    if "list-type" not in request.path and fault != "stall":  # a busy machine may take as long for another file
        key = unquote(request.path).strip("/").partition("?")[0]
    assert key in said, (request, said)
    assert "matches no file" not in said, said
    assert "without files" not in said, said
    expected = {"403": (PermissionError,), "404": (FileNotFoundError,)}.get(fault, (OSError,))
    assert isinstance(error, expected), (request, error)
    assert fault == "404" or not isinstance(error, FileNotFoundError), (request, error)
