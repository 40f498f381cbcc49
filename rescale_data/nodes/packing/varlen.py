"""Cumulative sequence lengths of a batch, in the form that variable-length attention takes."""

from __future__ import annotations

import torch
from torch import Tensor

from rescale_data.errors import require_type


def flat_cu_seqlens(cu_seqlens: Tensor) -> tuple[Tensor, int]:
    """Return the cumulative sequence lengths of a batch whose samples are concatenated, and the longest length.

        q = q.flatten(0, 1)  # [b, seq_len, heads, dim] -> [b * seq_len, heads, dim]
        cu, longest = rd.flat_cu_seqlens(batch["cu_seqlens"])
        flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)

    Args:
        cu_seqlens: ``int32[b, M]`` of `WholeDocumentPacker`: from 0 to ``seq_len`` in each row; ``seq_len`` is then repeated.

    Returns:
        ``int32[num_sequences + 1]`` from 0 to ``b * seq_len``, strictly increasing; the padding of a sample is a sequence too.

    Example:
        >>> import torch
        >>> import rescale_data as rd
        >>> rd.flat_cu_seqlens(torch.tensor([[0, 3, 4, 4], [0, 4, 4, 4]], dtype=torch.int32))
        (tensor([0, 3, 4, 8], dtype=torch.int32), 4)
    """
    require_type(Tensor, 'the batch["cu_seqlens"] of rd.WholeDocumentPacker', cu_seqlens=cu_seqlens)
    seq_len = int(cu_seqlens[0, -1])
    sample_begins = torch.arange(len(cu_seqlens), dtype=cu_seqlens.dtype, device=cu_seqlens.device) * seq_len
    sequence_bounds = torch.unique_consecutive((cu_seqlens + sample_begins[:, None]).flatten())
    return sequence_bounds, int(sequence_bounds.diff().max())
