"""Thin modules that put `rescale_data.DataLoader` into a trainer, each imported when it is used: `lightning`,
`huggingface` and `torchtitan`; and `causal_lm`, the batches that transformers' models expect."""
