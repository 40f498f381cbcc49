"""The code in docs/pipelines.md runs, and says what the page says."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "pipelines.md"


def test_code_of_pipelines(capsys: Any) -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    shown = capsys.readouterr().out
    assert shown.count("sample ") == 8
    lines = re.findall(r"\n  (.*)", shown)
    assert lines
    assert all(re.fullmatch(r"(web: web|code: code)\[\d+\]", line) for line in lines)
    first = names["batches"][7]["tokens"][0].tolist()
    told = [int(re.search(r"\d+", line)[0]) for line in rd_lines(shown)]
    assert sorted(told) == sorted(first[end - 1] for end in _ends(names["batches"][7]))


def rd_lines(shown: str) -> list[str]:
    """The documents of the first sample."""
    return re.findall(r"\n  (.*)", shown.partition("sample 1:")[0])


def _ends(batch: dict[str, Any]) -> list[int]:
    """The last token of each document, before its EOS, in the first sample."""
    ids = batch["doc_ids"][0].tolist()
    return [len(ids) - ids[::-1].index(doc) - 1 for doc in range(max(ids) + 1)]
