"""Batches for transformers' causal models: their loss is that of the packer's own labels."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import rescale_data as rd
from rescale_data.integrations.causal_lm import causal_lm_batch
from tests.trainers.test_refusals import hugging_face_trainer

DOCUMENTS = [{"tokens": torch.arange(3, 3 + i % 9 + 2)} for i in range(60)]


def pipeline(packer: Any, options: dict[str, Any], shard: rd.Shard) -> rd.BaseNode[Any]:
    reader = rd.Reader(DOCUMENTS, shard, shuffle=False)
    return packer(reader, column="tokens", seq_len=16, eos_id=2, labels=True, **options)


PACKERS = [(rd.TokenPacker, {}), (rd.TokenPacker, {"doc_ids": True}), (rd.WholeDocumentPacker, {})]
SIZES = {"global_batch_size": 4, "num_logical_shards": 4}


@pytest.mark.parametrize(("packer", "options"), PACKERS)
def test_the_loss_of_a_model_that_shifts(packer: Any, options: dict[str, Any]) -> None:
    made = functools.partial(pipeline, packer, options)
    ours, theirs = (next(iter(rd.DataLoader(made, **SIZES, **more))) for more in ({}, {"collate_fn": causal_lm_batch}))
    logits = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ours["labels"][:, :-1].flatten())
    assert F.cross_entropy(logits[:, :-1].flatten(0, 1), theirs["labels"][:, 1:].flatten()) == expected
    learned = theirs["labels"] != -100
    assert theirs["labels"][learned].equal(theirs["input_ids"][learned])
    assert theirs["input_ids"].equal(ours["tokens"])
    assert set(theirs) == {"input_ids", "labels", *["position_ids"] * ("doc_ids" in ours)}


def test_positions_begin_anew_in_each_document_and_labels_are_needed() -> None:
    sample = {"tokens": torch.arange(5), "labels": torch.arange(5), "doc_ids": torch.tensor([0, 0, 1, 1, 1])}
    for default_device in ("cpu", "meta"):  # of the trainer: the batch stays on the CPU
        with torch.device(default_device):
            batch = causal_lm_batch([sample])
        assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    with pytest.raises(ValueError, match=r"a packer with labels=True, but these have \['tokens'\]"):
        causal_lm_batch([{"tokens": torch.arange(5)}])


def test_hugging_face_refuses_labels_that_are_shifted(tmp_path: Path) -> None:
    made = functools.partial(pipeline, rd.TokenPacker, {})
    with pytest.raises(ValueError, match=r"would learn the token after the next\. .*collate_fn=causal_lm_batch"):
        hugging_face_trainer(tmp_path, rd.DataLoader(made, repeat=True, **SIZES), max_steps=2)
    hugging_face_trainer(tmp_path, rd.DataLoader(made, collate_fn=causal_lm_batch, repeat=True, **SIZES), max_steps=2)
