"""The mixture example, small: every batch the same on 4, 3 and 8 ranks as on one, and a tokenizer that is one."""

import sys
from collections import Counter
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import mixture  # noqa: E402
from mixture_parts import corpora  # noqa: E402
from mixture_parts.tokenizer import BytePairs, _merges, _words  # noqa: E402


def test_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(corpora, "MAX_FILES", 20)
    monkeypatch.setattr(mixture, "STEPS", 3)
    assert mixture.main() == 0
    shown = capsys.readouterr().out
    assert shown.count("same\n") == 9
    assert "every global batch is the same" in shown
    assert "step 9, sample 0:" in shown


def test_byte_pairs_keep_every_byte() -> None:
    text = "the cat and the dog, the Äpfel:\n    the end"
    merges = _merges(Counter(_words(text * 3)))
    [tokens] = BytePairs(merges)([text])
    assert len(tokens) < len(text.encode())
    spelled = {1 + byte: bytes([byte]) for byte in range(256)}
    for number, (left, right) in enumerate(merges, 257):
        spelled[number] = spelled[left] + spelled[right]
    assert b"".join(spelled[token] for token in tokens) == text.encode()
