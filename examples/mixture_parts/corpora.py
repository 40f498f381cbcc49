"""Two corpora of this machine's own text: the standard library's code, and what its docstrings say."""

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

MAX_FILES, MAX_CHARACTERS, MIN_PROSE = 90, 20_000, 120


def write_corpora(folder: Path) -> dict[str, list[str]]:
    """Parquet files with a column "text", a folder for each corpus; returns the texts."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:MAX_FILES]
    code = [text for file in files if (text := file.read_text(errors="replace")[:MAX_CHARACTERS]).strip()]
    prose = [text for file in files for text in _docstrings(file)]
    for name, texts in (("code", _functions(code)), ("prose", prose)):
        (folder / name).mkdir(parents=True)
        half = len(texts) // 2
        for number, part in enumerate((texts[:half], texts[half:])):
            pq.write_table(pa.table({"text": part}), folder / name / f"{number}.parquet", row_group_size=100)
    return {"code": code, "prose": prose}


def _functions(modules: list[str]) -> list[str]:
    """Code in pieces that begin with a definition at the top level."""
    pieces: list[str] = []
    for module in modules:
        head, *rest = module.split("\ndef ")
        pieces += [head, *("def " + piece for piece in rest)]
    return pieces


def _docstrings(file: Path) -> Iterator[str]:
    with warnings.catch_warnings(action="ignore"):
        tree = ast.parse(file.read_text(errors="replace"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text) >= MIN_PROSE:
                yield text
