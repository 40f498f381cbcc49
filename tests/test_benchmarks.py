"""Benchmarks run to their ends, in their smallest form, so that they are there when somebody asks how fast it is."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, *arguments: str | Path) -> str:
    found = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_bench_state() -> None:
    told = run("bench_state.py", "--quick")
    for question in (
        "200 sources: state_dict()",
        "what carries state",
        "after a resume at 99 %",
        "ours / one a message",
    ):
        assert question in told


def test_bench_peers_writes_a_new_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    told = run("bench_peers.py", "--quick", "--only", "rows of 64 kB", "--page", page)
    assert told.strip() in page.read_text()
    assert "| ours |" in told
    assert "left out" not in told
