"""Every public name's docstring ends with an example, which imports what it needs and shows what comes out."""

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rescale_data
from rescale_data import audit, checkpoint, nodes, testing

NOT_OURS = {"BaseNode": "torchdata's class, with its own docstring"}
NAMES = [
    pytest.param(module, name, id=f"{module.__name__}.{name}")
    for module in (rescale_data, nodes, checkpoint, audit, testing)
    for name in module.__all__
    if name not in NOT_OURS
]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_example(module: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(getattr(module, name)) or ""
    assert re.search(r"\n\nExample:\n( +\S.*\n?)+\Z", text), "its docstring does not end with an Example section"
    test = doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, name, None, None)
    assert test.examples, "the example has no >>> line"
    told: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    assert not told, "".join(told)
    assert list(tmp_path.iterdir()) == [], "the example leaves files behind"


@pytest.mark.parametrize("name", NOT_OURS)
def test_those_left_out_are_not_ours(name: str) -> None:
    assert not getattr(rescale_data, name).__module__.startswith("rescale_data")


PACKAGE = Path(rescale_data.__path__[0])
in_each_file = pytest.mark.parametrize(
    "file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE))
)
HIDDEN = re.compile(
    r"(What|Whatever|Whether|Where|Which|Who|How|When|Those|Th(at|ese|is|ey)|Its?|Of|(In|By) which|From what|As far|So that)\b"
)
"""First words that hide what a sentence is about."""
LONGEST = 25
"""Words of a docstring's first sentence."""
NOT_USED = re.compile(
    r"\b(th(ose|at) of|those that|of (now|then)|who(m)?ever|is said|what is|told|tells?|hears?|heard|dealt|legs?)\b",
    re.IGNORECASE,
)
"""Words that have no noun, or another one in the glossary of docs/concepts.md."""


@in_each_file
def test_a_first_sentence_is_short_and_plain_and_names_its_subject(file: Path) -> None:
    """It says what is returned or done: "Return the rows of ...", "True if ...", "Positions of one logical shard"."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    texts = [ast.get_docstring(node) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)]
    first = [re.split(r"(?<=[.!?:])\s", re.sub(r"\s+", " ", text.split("\n\n")[0]))[0] for text in texts if text]
    wrong = [s for s in first if HIDDEN.match(s) or NOT_USED.search(s) or len(s.split()) > LONGEST]
    assert wrong == []


ARGUMENTS = re.compile(r"^Args:\n((?: .*\n|\n)+)", re.MULTILINE)


def described(owner: Any) -> list[tuple[str, Any]]:
    """Return ``owner`` and all functions and classes within it, with their names, if it is of the package."""
    found = [(owner.__qualname__, owner)] if inspect.isclass(owner) else []
    for name, value in vars(owner).items():
        value = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", None) or value))
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if value.__module__ == (owner.__name__ if inspect.ismodule(owner) else owner.__module__):
            found += described(value) if inspect.isclass(value) else [(f"{owner.__name__}.{name}", value)]
    return found


@in_each_file
def test_args_are_parameters(file: Path) -> None:
    """Each name in a section `Args:`, also in a list "a, b: ...", is a parameter of the function or class."""
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    try:
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    except ImportError as error:
        pytest.skip(str(error))
    wrong: list[str] = []
    for name, value in described(module):
        section = ARGUMENTS.search(inspect.cleandoc(value.__doc__ or "") + "\n")
        if section is None:
            continue
        listed = re.findall(r"^ {4}(\S[^:\n]*):", section[1], re.MULTILINE)
        parameters = {*inspect.signature(value).parameters}
        if inspect.isclass(value):  # `DataLoader` has a `__new__`, a named tuple no `__init__`
            parameters |= {*inspect.signature(value.__init__).parameters}
        names = [word.strip().lstrip("*") for words in listed for word in words.split(",")]
        wrong += [f"{name}: {word}" for word in names if word not in parameters]
    assert wrong == []


PAGES = [*sorted((PACKAGE.parent / "docs").glob("*.md")), *sorted(PACKAGE.parent.rglob("README.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PACKAGE.parent)))
def test_a_page_uses_plain_words(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`|^    .*?$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert (
        re.findall(
            r"[^.]{0,60}\b(?:th(?:ose|at) of|of (?:now|then)|is said|legs?|dealt)\b[^.]{0,60}", prose, re.IGNORECASE
        )
        == []
    )
