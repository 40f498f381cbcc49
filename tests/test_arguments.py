"""What is no argument of a public function is an error of ours that says what to give, never one of Python from within."""

from __future__ import annotations

import inspect
import math
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import rescale_data as rd
from rescale_data import checkpoint, testing
from rescale_data.errors import checks_argument_types

WRONG = (None, 5, 1.5, math.inf, math.nan, True, "x", [None], {"x": None}, object())


def reader() -> rd.Reader:
    return rd.Reader([{"tokens": [1, 2, 3], "text": "abc"}] * 8, rd.Shard(), shuffle=False)


def loader(**given: Any) -> rd.DataLoader:
    return rd.DataLoader(**{"pipeline": range(64), "global_batch_size": 8, **given})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arguments")
    pq.write_table(pa.table({"tokens": [[1, 2], [3]]}), folder / "data.parquet")
    (folder / "data.jsonl").write_text('{"text": "a"}\n')
    checkpoint.save(folder / "step-1", {"loader": loader()})
    return folder


COLUMN: dict[str, Any] = {"column": "tokens", "seq_len": 4, "eos_id": 1}
CASES: dict[str, Callable[[Path], tuple[Callable[..., Any], dict[str, Any]]]] = {
    "Shard": lambda folder: (rd.Shard, {}),
    "SyntheticSource": lambda folder: (rd.SyntheticSource, {"num_rows": 8}),
    "DatasetSource": lambda folder: (rd.DatasetSource, {"dataset": [1, 2]}),
    "IterableSource": lambda folder: (rd.IterableSource, {"streams": [range(3)]}),
    "ParquetSource": lambda folder: (rd.ParquetSource, {"paths": folder / "data.parquet"}),
    "JsonlSource": lambda folder: (rd.JsonlSource, {"paths": folder / "data.jsonl"}),
    "Remote": lambda folder: (rd.Remote, {}),
    "Schedule": lambda folder: (rd.Schedule, {"keys": [(0, {"a": 1.0})]}),
    "Reader": lambda folder: (rd.Reader, {"source": [1, 2], "shard": rd.Shard()}),
    "StreamReader": lambda folder: (rd.StreamReader, {"source": rd.IterableSource([[1]]), "shard": rd.Shard()}),
    "CleanDocuments": lambda folder: (rd.CleanDocuments, {"source": reader(), "column": "tokens"}),
    "Filter": lambda folder: (rd.Filter, {"source": reader(), "predicate": bool}),
    "Map": lambda folder: (rd.Map, {"source": reader(), "fn": bool}),
    "RandomMap": lambda folder: (rd.RandomMap, {"source": reader(), "fn": max}),
    "Shuffle": lambda folder: (rd.Shuffle, {"source": reader(), "window": 4}),
    "Tokenize": lambda folder: (rd.Tokenize, {"source": reader(), "tokenizer": len, "column": "text"}),
    "TokenPacker": lambda folder: (rd.TokenPacker, {"source": reader(), **COLUMN}),
    "WholeDocumentPacker": lambda folder: (rd.WholeDocumentPacker, {"source": reader(), **COLUMN}),
    "WeightedSampler": lambda folder: (rd.WeightedSampler, {"nodes": {"a": reader()}, "weights": {"a": 1.0}}),
    "DataLoader": lambda folder: (loader, {"global_batch_size": 8}),
    "LogicalShards": lambda folder: (
        rd.LogicalShards,
        {"pipeline": lambda s: rd.Reader(range(64), s), "num_logical_shards": 8, "global_batch_size": 8},
    ),
    "reopen": lambda folder: (loader().reopen, {"global_batch_size": 8}),
    "skip": lambda folder: (loader().skip, {"num_samples": 8}),
    "set_epoch": lambda folder: (loader().set_epoch, {"epoch": 0}),
    "load_state_dict": lambda folder: (loader().load_state_dict, {"state_dict": loader().state_dict()}),
    "plan": lambda folder: (rd.plan, {"global_batch_size": 8}),
    "pad_collate": lambda folder: (rd.pad_collate, {"pad": {"a": 0}}),
    "flat_cu_seqlens": lambda folder: (rd.flat_cu_seqlens, {"cu_seqlens": torch.tensor([[0, 3, 4]])}),
    "check_checkpoint": lambda folder: (
        rd.checkpoint.check_checkpoint,
        {"path": folder / "step-1", "loader": loader()},
    ),
    "load_changed": lambda folder: (rd.checkpoint.load_changed, {"path": folder / "step-1", "loader": loader()}),
    "read_data_state": lambda folder: (checkpoint.read_data_state, {"path": folder / "step-1"}),
    "verify": lambda folder: (checkpoint.verify, {"path": folder / "step-1"}),
    "save": lambda folder: (checkpoint.save, {"path": folder / "saved", "state": {}, "overwrite": True}),
    "load": lambda folder: (checkpoint.load, {"path": folder / "step-1", "state": {}}),
    "RunReader": lambda folder: (checkpoint.RunReader, {"folder": folder}),
    "CheckpointManager": lambda folder: (
        lambda **given: checkpoint.CheckpointManager(**given).close(),
        {"folder": folder / "run", "keep_latest": 3, "keep_every": None, "keep_best": None, "async_mode": "thread"},
    ),
    "full_state_dict": lambda folder: (testing.full_state_dict, {"loaders": [loader()]}),
}
"""Of each function what it is given, besides which it has its defaults."""
SLOW = {"num_workers", "worker_init_fn"}


def said(function: Callable[..., Any], given: dict[str, Any]) -> str:
    """What was raised by another line than a ``raise`` of the package; empty where nothing was."""
    try:
        function(**given)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        is_ours = "rescale_data" in last.filename and (last.line or "").startswith("raise")
        known = isinstance(error, ValueError | TypeError | OSError)
        return "" if is_ours and known else f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
    return ""


@pytest.mark.parametrize("name", CASES)
def test_no_error_is_of_python_itself_and_what_is_no_whole_number_is_named_with_the_cure(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latter of each argument that is declared as an int, or an int or None."""
    monkeypatch.chdir(folder)
    function, given = CASES[name](folder)
    function(**given)
    public = rd.DataLoader if function is loader else function
    public = public.__init__ if inspect.isclass(public) else public
    parameters = inspect.signature(public).parameters
    named = {argument for argument, about in parameters.items() if about.kind is not inspect.Parameter.VAR_KEYWORD}
    for argument in {*named, *given} - SLOW - {"self"}:
        for wrong in WRONG:
            assert not said(function, {**given, argument: wrong}), (argument, wrong)
    for argument, kind in get_type_hints(public).items():
        if kind not in (int, int | None) or (name, argument) == ("reopen", "delivered"):
            continue  # without a state nothing is delivered, whatever it is
        for wrong in (8.0, "8", True):
            says = re.escape(f"{argument}={wrong!r} is a {type(wrong).__name__}; give an int")
            with pytest.raises(TypeError, match=says):
                function(**{**given, argument: wrong})


@checks_argument_types
def declared(
    a: int,
    b: float | None = None,
    *,
    c: bool = False,
    d: str | None = None,
    e: Mapping[str, int] | None = None,
    f: list[int] | Mapping[str, Callable[[int], int]] | None = None,
) -> tuple[Any, ...]:
    return a, b, c, d, e, f


def test_kinds_are_those_that_are_declared() -> None:
    right = declared(np.int32(3), np.float32(0.5), c=np.bool_(True), d="x", e={})  # type: ignore[arg-type]
    assert right == (3, 0.5, True, "x", {}, None)
    assert [type(one) for one in right[:3]] == [int, float, bool]
    assert declared(1, 2, f="anything") == (1, 2, False, None, None, "anything")  # type: ignore[arg-type]
    for wrong in (
        {"a": True},
        {"a": None},
        {"a": 1.0},
        {"b": "1"},
        {"b": True},
        {"c": None},
        {"c": 1},
        {"d": b""},
        {"e": []},
    ):
        ((name, value),) = wrong.items()
        with pytest.raises(TypeError, match=re.escape(f"{name}={value!r} is a {type(value).__name__}; give ")):
            declared(**{"a": 1, **wrong})
    with pytest.raises(TypeError, match=r"a=1\.5 is a float; give an int"):
        declared(1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes from 1 to 2 positional arguments"):
        declared(1, 2.0, 3)  # type: ignore[misc]
