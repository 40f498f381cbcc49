"""`assert_source`: whole sources pass, each broken promise fails."""

import inspect
import itertools
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rescale_data as rd
from rescale_data.sources import source as protocol
from rescale_data.sources.source import Source
from rescale_data.sources.synthetic import SyntheticSource
from rescale_data.testing import assert_source


class Rows(Source):
    """Integers; what a test breaks is one of its attributes or methods."""

    def __init__(self, **broken: Any) -> None:
        self.name, self.num_rows = "rows", 10
        self.fragments = np.array([0, 4, 10])
        for name, value in broken.items():
            setattr(self, name, value)

    def manifest(self) -> dict[str, Any]:
        return {"rows": 10}

    def row(self, index: int) -> dict[str, Any]:
        return {"x": np.array([index])}

    def locate(self, index: int) -> str:
        return f"row {index}"


NUMBERS = [np.array([i]) for i in range(10)]
DRAWN = itertools.count()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (object(), "lacks .*'num_rows'"),
        (Rows(num_rows=0), "num_rows is 0"),
        (Rows(num_rows=np.int64(10)), "an int above 0"),
        (Rows(name=""), "a short text"),
        (Rows(fragments=[0, 10]), "int64"),
        (Rows(fragments=np.array([0, 4, 9])), "from 0 to num_rows"),
        (Rows(fragments=np.array([0, 8, 4, 10])), "go up"),
        (Rows(lock=(i for i in range(3))), "pickles"),
        (Rows(row=lambda _: {"x": next(DRAWN)}), r"row\(\d\) is .* now and was"),
        (Rows(row=lambda index: {"x": NUMBERS[index]}), r"row\(\d\) is"),
        (Rows(locate="somewhere".format), "same of two rows"),
        (Rows(manifest=lambda: {"rows": np.int64(10)}), "JSON"),
    ],
)
def test_a_broken_promise(source: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_source(source)


def test_a_source_without_tokens() -> None:
    assert_source(Rows())
    with pytest.raises(AssertionError, match="no tokens"):
        assert_source(Rows(), columns=["x"])


def test_the_example_of_the_protocol(tmp_path: Path) -> None:
    text = protocol.__doc__ or ""
    code = textwrap.dedent(text[text.index("    class LogLines") : text.index("Then ``")]).replace("\\\\", "\\")
    assert len(code.strip().splitlines()) <= 26
    scope: dict[str, Any] = {"Path": Path, "np": np, "rd": rd, "__name__": __name__}
    exec(code, scope)
    globals()["LogLines"] = scope["LogLines"]  # pickles by name
    (tmp_path / "log.txt").write_text("one\ntwö\n\nfour")
    source = scope["LogLines"](str(tmp_path / "log.txt"))
    assert [source.row(i)["line"] for i in range(4)] == ["one", "twö", "", "four"]
    assert_source(source)


@pytest.mark.parametrize(
    "source", [rd.ParquetSource, rd.ArrowSource, rd.JsonlSource, rd.MegatronSource, rd.WebDatasetSource]
)
def test_options_of_sources_of_files_are_given_by_name(source: type[Source]) -> None:
    parameters = inspect.signature(source).parameters.values()
    assert [about.name for about in parameters if about.kind is not inspect.Parameter.KEYWORD_ONLY] == ["paths"]


class TestSynthetic:
    def test_keeps_the_contract(self) -> None:
        assert_source(SyntheticSource(3000, length=(0, 20)), columns=["tokens"])
        assert_source(SyntheticSource(5, length=7, seed=3), columns=["tokens"])

    def test_rows_do_not_change(self) -> None:
        source = SyntheticSource(2000, length=(2, 4), vocab_size=100)
        assert isinstance(source, Source)
        rows = [source.row(i)["tokens"].tolist() for i in (0, 1, 1999)]
        assert rows == [[80, 3], [63, 71, 91, 73], [50, 77, 92]]
        assert source.row(0)["tokens"].dtype == np.int32
        assert (
            SyntheticSource(2000, seed=1).row(0)["tokens"].tolist() != SyntheticSource(2000).row(0)["tokens"].tolist()
        )
        assert source.locate(7) == "synthetic row 7"
