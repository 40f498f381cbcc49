"""Batches as transformers' causal language models expect them: ``rd.DataLoader(..., collate_fn=causal_lm_batch)``.

The module does not import transformers, so that worker processes start without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rescale_data.engine.collate import Samples, collate


def causal_lm_batch(samples: Samples) -> dict[str, Any]:
    """Collate packed samples into a batch with the names and the labels that transformers expects.

    Packers make labels that are shifted: ``labels[t]`` is the token after ``tokens[t]``. Models of transformers shift labels
    themselves, so these are shifted back. Their loss has the same terms, but for the last token of each sample.

    Args:
        samples: The samples of a `TokenPacker` or `WholeDocumentPacker`, made with ``labels=True``.

    Returns:
        ``{"input_ids", "labels"}``, each ``int[b, seq_len]``: a label is its token, or -100 where it is not learned. Where
        samples have ``doc_ids`` also ``"position_ids"``, which begin at 0 in each document. Nothing else is passed on.

    Raises:
        ValueError: The samples have no ``"tokens"`` or ``"labels"``.

    Example:
        >>> causal_lm_batch([{"tokens": torch.tensor([5, 6, 7]), "labels": torch.tensor([6, 7, -100])}])
        {'input_ids': tensor([[5, 6, 7]]), 'labels': tensor([[-100,    6,    7]])}
    """
    batch = collate(
        [{name: sample[name] for name in ("tokens", "labels", "doc_ids") if name in sample} for sample in samples]
    )
    if not {"tokens", "labels"} <= set(batch):
        raise ValueError(
            f"causal_lm_batch takes samples of a packer with labels=True, but these have {sorted(samples[0])}. The shifted "
            f"labels say which tokens are learned; they are shifted back here."
        )
    ignored_labels = torch.full_like(batch["labels"][:, :1], -100)
    labels = torch.cat([ignored_labels, batch["labels"][:, :-1]], dim=1)
    model_inputs = {"input_ids": batch["tokens"], "labels": labels}
    if "doc_ids" in batch:
        model_inputs["position_ids"] = positions(batch["doc_ids"])
    return model_inputs


def positions(doc_ids: Tensor) -> Tensor:
    """Return the position of each token in its document, from 0: ``int64[b, seq_len]``.

    A document begins where ``doc_ids`` change.
    """
    token_index = torch.arange(doc_ids.shape[1], device=doc_ids.device).expand_as(doc_ids)
    is_document_start = doc_ids.diff(dim=1, prepend=doc_ids[:, :1]) != 0
    return token_index - (token_index * is_document_start).cummax(dim=1).values
