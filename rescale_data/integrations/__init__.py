"""Integrations with the trainers `lightning`, `huggingface` and `torchtitan`, imported only when they are used.

`causal_lm` makes the batches that transformers' models expect.
"""
