"""The code in docs/ runs, and says what the pages say."""

import ast
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import rescale_data as rd

DOCS = Path(__file__).parents[1] / "docs"


def run(page: Path) -> dict[str, Any]:
    """The names that the code of a page leaves."""
    module = sys.modules["page"] = ModuleType("page")  # so that what it defines pickles
    names = module.__dict__
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, f"<{page.name}>", "exec"), names)
    return names


CODE = [page.stem for page in sorted(DOCS.glob("*.md")) if "```python" in page.read_text()]


@pytest.mark.parametrize("page", [name for name in CODE if name not in ("published_models", "trainers")])
def test_code_of(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Each page stands for itself: its blocks run, in their order, in an empty folder, and check what they show.

    The two pages that are left out need packages of others: tests/trainers runs what they show.
    """
    monkeypatch.chdir(tmp_path)
    check = globals().get(f"check_{page}", lambda names, shown: None)
    names = run(DOCS / f"{page}.md")
    check(names, capsys.readouterr().out)


def lines_to_copy(example: Path) -> str:
    """Return the lines of an example that a user copies: the imports that they use, and what stands between its marks."""
    text = example.read_text()
    parts = re.findall(r"^ *# copy from here\n(.*?)^ *# to here\n", text, re.DOTALL | re.MULTILINE)
    parts = [re.sub(r".*# not copied\n|  # fmt: skip", "", part) for part in parts]
    copied = "\n".join(textwrap.dedent(part).strip("\n") + "\n" for part in parts)
    return "".join(_imports_for(copied, text)) + "\n" + re.sub(r"\n{3,}", "\n\n", copied)


def _imports_for(copied: str, text: str) -> list[str]:
    """Return the import lines of ``text``, each with those of its names that ``copied`` uses."""
    lines = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [each for each in node.names if re.search(rf"\b{each.asname or each.name}\b", copied)]
            lines += [ast.unparse(node) + "\n"] * bool(node.names)
    return [
        line
        for line in lines
        if not line.startswith(("from parts.rows", "from parts.llama", "from parts.watcher", "from mixture_parts"))
    ]


def test_the_page_on_trainers_shows_lines_of_the_examples() -> None:
    """Each block names its example, which tests/trainers runs; 10 to 40 lines, but for spaces between them."""
    page = (DOCS / "trainers.md").read_text()
    blocks = re.findall(r"\]\(\.\./(examples/[\w/]+\.py)\)[^`]*?\n\n```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == page.count("```python") >= 8
    for name, block in blocks:
        assert block == lines_to_copy(DOCS.parent / name), f"{name} and docs/trainers.md differ: copy its lines anew"
        assert 8 <= len([line for line in block.splitlines() if line]) <= 40, name


def check_own_source(names: dict[str, Any], shown: str) -> None:
    assert len(set(names["lines"])) == len(names["lines"]) == 96


def check_streams(names: dict[str, Any], shown: str) -> None:
    assert len(set(names["xs"])) == len(names["xs"]) == 400


def check_migrating(names: dict[str, Any], shown: str) -> None:
    assert len(names["loader"]) == 24


def check_world_sizes(names: dict[str, Any], shown: str) -> None:
    assert "ranks W" in shown


ROOT = DOCS.parent
PAGES = sorted(
    path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.parts[len(ROOT.parts) :])
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository(page: Path) -> None:
    """Files and headings are there. Links to elsewhere are looked at, not followed: no test needs a network."""
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    for target, _, heading in (link.partition("#") for link in links):
        if "://" in target:
            assert re.fullmatch(r"https://[a-z0-9.-]+\.[a-z]+(/[\w./~%-]*)?", target), target
        else:
            assert (page.parent / target).exists(), target
            assert not heading or heading in anchors(page if not target else page.parent / target), (
                f"{target}#{heading}"
            )


def anchors(page: Path) -> set[str]:
    """What headings are called in links, as GitHub and MyST name them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_code_of_the_page_on_checkpoints(tmp_path: Path) -> None:
    """It stands in rescale_data/checkpoint/README.md. Twice: the second time goes on from what the first has saved."""
    text = (ROOT / "rescale_data" / "checkpoint" / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "100_000" in block
    for steps in (501, 1001):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = rd.DataLoader(list(range(8)), global_batch_size=4, num_logical_shards=4, repeat=True)
        names: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "loader": loader,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
            "folder": tmp_path / "run",
            "val_loss": 1.0 / steps,
        }
        exec(block.replace("100_000", str(steps)).replace("...", "next(iter(loader))"), names)
    assert {path.name for path in (tmp_path / "run").glob("step-*")} >= {"step-500", "step-1000"}
    assert names["state"]["loader"].step == 1001


def test_every_public_name_is_in_the_reference() -> None:
    import rescale_data
    from rescale_data import audit, checkpoint, nodes, testing

    text = (DOCS / "api.md").read_text()
    assert rescale_data.__all__ == sorted(rescale_data.__all__)
    for module in (rescale_data, nodes, checkpoint, audit, testing):
        part = re.search(rf"currentmodule:: {module.__name__}\n(.*?)(?=\n## rescale_data|\Z)", text, re.DOTALL)
        assert part is not None
        documented = re.findall(r"auto\w+:: (\w+)", part[1])
        assert sorted(documented) == sorted(set(module.__all__))
