"""Thin modules, each imported when it is used, for the trainers `lightning`, `huggingface` and `torchtitan`.

`causal_lm` makes the batches that transformers' models expect.
"""
