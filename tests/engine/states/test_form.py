"""Samples that change their form between segments: a longer context, labels, another dtype; each at another topology.

That no token is lost or comes twice, also of whole documents and at an epoch's end: law 3.
"""

import logging
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.testing import full_state_dict
from tests.nodes.runs import BATCH, ranks_of, samples_by_shard
from tests.states import opened

N = 12
LENGTHS = np.random.default_rng(3).integers(1, 60, 400)
DOCUMENTS = rd.DatasetSource([{"tokens": 100 * i + np.arange(1, n + 1)} for i, n in enumerate(LENGTHS)], name="docs")
WORLDS = (4, 2, 3, 1, 6)
Tokens = dict[int, list[int]]


def loaders(packer: Any, world_size: int = 1, state: Any = None, **form: Any) -> list[rd.DataLoader]:
    form = {"column": "tokens", "eos_id": 0, **form}

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        return rd.Map(packer(rd.Reader(DOCUMENTS, shard), **form), dict)

    return ranks_of(pipeline, world_size, state, num_logical_shards=N)


Segments = list[tuple[dict[str, Any], int, int]]


def play(packer: Any, segments: Segments) -> tuple[dict[int, list[Any]], list[rd.DataLoader], float]:
    """Samples by shard, the loaders of the last segment, and the tokens that were in all samples."""
    state, found, tokens = None, defaultdict(list), 0
    ranks: list[rd.DataLoader] = []
    for form, world_size, num_steps in segments:
        ranks = loaders(packer, world_size, state, **form)
        for shard, samples in samples_by_shard(ranks, num_steps).items():
            found[shard] += samples
        tokens += num_steps * BATCH * form["seq_len"]
        state = full_state_dict(ranks)
    return found, ranks, tokens


def counted(ranks: list[rd.DataLoader]) -> float:
    return sum(loader.progress()["tokens/docs"] for loader in ranks)


def segments(forms: st.SearchStrategy[dict[str, Any]], max_size: int = 4) -> st.SearchStrategy[Segments]:
    return st.lists(st.tuples(forms, st.sampled_from(WORLDS), st.integers(0, 4)), min_size=2, max_size=max_size)


FORMS = st.fixed_dictionaries(
    {"seq_len": st.sampled_from([64, 256, 16])},
    optional={
        "labels": st.booleans(),
        "doc_ids": st.booleans(),
        "dtype": st.sampled_from([torch.int64, torch.int32]),
        "last": st.sampled_from(["drop", "pad"]),
    },
)
THROUGH = [({"seq_len": 64}, 4, 2), ({"seq_len": 256, "labels": True}, 2, 1), ({"seq_len": 64}, 3, 3)]
some = settings(max_examples=max(4, settings().max_examples // 6))


@given(segments(FORMS))
@example(THROUGH)
@some
def test_the_tokens_of_each_shard_end_to_end_are_those_of_an_uninterrupted_read(chain: Segments) -> None:
    found, ranks, tokens = play(rd.TokenPacker, chain)
    for shard, samples in found.items():
        given_tokens = torch.cat([sample["tokens"].long() for sample in samples]).tolist()
        rows = rd.Reader(DOCUMENTS, rd.Shard(shard, N, repeat=True))
        node = rd.TokenPacker(rows, column="tokens", eos_id=0, seq_len=8)
        assert given_tokens == torch.cat([next(node)["tokens"] for _ in range(len(given_tokens) // 8)]).tolist()
        for sample in samples:
            if "labels" in sample:
                assert sample["labels"][:-1].tolist() == sample["tokens"][1:].tolist()
    assert counted(ranks) == tokens


def test_one_warning_names_old_new_and_the_sample(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rescale_data"):
        _, ranks, _ = play(rd.TokenPacker, THROUGH[:2])
    said = [record.getMessage() for record in caplog.records if "another form" in record.getMessage()]
    assert len(said) == 1  # of two ranks the first speaks
    assert "source: labels was False up to sample 24, and is True from there; source: seq_len was 64 up" in said[0]
    state = full_state_dict(ranks)
    [again] = loaders(rd.TokenPacker, state=state, seq_len=256, labels=True)
    assert opened(again.state_dict())["pipeline"] == opened(state)["pipeline"]  # what was before is kept
    assert opened(state)["pipeline"]["source"]["earlier"] == [[24, {"seq_len": 64, "shards": 12, "tokens": 24 * 64}]]
    again.reset()
    assert "earlier" not in str(opened(again.state_dict())["pipeline"])


def within(rows: Any, *, seq_len: int, **form: Any) -> rd.BaseNode[Any]:
    """A packer below another one, which draws its samples again."""
    return rd.WholeDocumentPacker(rd.TokenPacker(rows, seq_len=seq_len, **form), column="tokens", seq_len=64, window=4)


@pytest.mark.parametrize(
    ("packer", "other", "words"),
    [
        (rd.TokenPacker, {"eos_id": 1}, "eos_id"),
        (rd.TokenPacker, {"bos_id": 2}, "bos_id"),
        (rd.TokenPacker, {"column": "others"}, "column"),
        (within, {"seq_len": 8}, "source: seq_len: saved 16, now 8"),
    ],
)
def test_what_would_be_other_tokens_is_an_error(packer: Any, other: dict[str, Any], words: str) -> None:
    [saved] = loaders(packer, seq_len=16)
    with pytest.raises(rd.DataStateError, match=words):
        loaders(packer, state=saved.state_dict(), **{"seq_len": 16, **other})


def test_a_third_change_within_a_window_is_an_error() -> None:
    chain = [({"window": 64, "seq_len": 64 * n}, 1, 1) for n in (1, 2, 3, 4)]
    with pytest.raises(rd.DataStateError, match="third change"):
        play(rd.WholeDocumentPacker, chain)
