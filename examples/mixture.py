"""A mixture of two corpora, tokenized on the fly, documents kept whole; rescaled from 4 ranks to 3 to 8 with other weights.

    python examples/mixture.py

Each segment goes on from the state of the one before, on other ranks and with other weights. Beside it runs a single rank that
changes the weights at the same samples: every global batch must be the same. The ranks are loaders in this one process
(``dp_rank=``, ``dp_world_size=``); in training give ``mesh=`` and put the loader into the dict of ``dcp.save`` and
``dcp.load``. It takes some twenty seconds.
"""

import functools
import hashlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mixture_parts.corpora import write_corpora
from mixture_parts.tokenizer import EOS, Tokenize, train

import rescale_data as rd
from rescale_data.testing import full_state_dict

GLOBAL_BATCH, SHARDS, SEQ_LEN, STEPS = 24, 24, 256, 12
SEGMENTS = [  # ranks, weights
    (4, {"code": 0.7, "prose": 0.3}),
    (3, {"code": 0.5, "prose": 0.5}),
    (8, {"code": 0.1, "prose": 0.9}),
]


def pipeline(
    sources: dict[str, rd.Source], tokenizer: Tokenize, weights: dict[str, float], provenance: bool, shard: rd.Shard
) -> rd.BaseNode[Any]:
    """One logical shard: no ranks and no workers in here."""

    def documents(name: str) -> rd.BaseNode[Any]:
        rows = rd.Reader(sources[name], shard, shuffle=64, provenance=provenance)
        rows = rd.Filter(rows, lambda row: len(row["text"]) > 80)
        rows = rd.Tokenize(rows, tokenizer, "text")
        return rd.CleanDocuments(rows, "tokens", min_length=16, max_length=SEQ_LEN - 1)

    mixture = rd.WeightedSampler({name: documents(name) for name in weights}, weights, unit="tokens", column="tokens")
    return rd.WholeDocumentPacker(mixture, column="tokens", seq_len=SEQ_LEN, eos_id=EOS, window=8, labels=True)


def make_loaders(world_size: int, pipeline: Any) -> list[rd.DataLoader]:
    return [
        rd.DataLoader(
            pipeline,
            global_batch_size=GLOBAL_BATCH,
            micro_batch_size=GLOBAL_BATCH // world_size,
            num_logical_shards=SHARDS,
            dp_rank=rank,
            dp_world_size=world_size,
            repeat=True,
        )
        for rank in range(world_size)
    ]


def run(loaders: list[rd.DataLoader], state: dict[str, Any] | None) -> tuple[list[str], dict[str, Any]]:
    """Go on from a state: a hash of each global batch, rows in rank order, and the state at the end."""
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(state)
    hashes = []
    for batches in zip(*loaders, strict=True):
        tokens = [batch["tokens"].numpy().tobytes() for batch in batches]
        hashes.append(hashlib.sha256(b"".join(tokens)).hexdigest()[:12])
        if len(hashes) == STEPS:
            break
    return hashes, full_state_dict(loaders)


def shares(loaders: list[rd.DataLoader]) -> str:
    """What has been drawn since the weights changed, and how much of the samples is padding."""
    progress = [loader.progress() for loader in loaders]
    drawn = {name: sum(p[f"drawn_tokens/{name}"] for p in progress) for name in ("code", "prose")}
    padding = sum(p["padding_share/code+prose"] for p in progress) / len(progress)
    text = ", ".join(f"{name} {tokens / max(1, sum(drawn.values())):.0%}" for name, tokens in drawn.items())
    return f"tokens drawn: {text}; padding {padding:.1%}"


def main() -> int:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        texts = write_corpora(Path(folder))
        sources: dict[str, rd.Source] = {name: rd.ParquetSource(f"{folder}/{name}") for name in texts}
        tokenizer = train([*texts["code"][:40], *texts["prose"]])
        state = reference_state = None
        same = True
        for segment, (world_size, weights) in enumerate(SEGMENTS):
            with_weights = functools.partial(pipeline, sources, tokenizer, weights, False)
            loaders = make_loaders(world_size, with_weights)
            hashes, state_after = run(loaders, state)
            expected, reference_state_after = run(make_loaders(1, with_weights), reference_state)
            same = same and hashes == expected
            print(f"{world_size} ranks, weights {weights}: {shares(loaders)}")
            for step, (got, want) in enumerate(zip(hashes, expected, strict=True), segment * STEPS):
                print(f"  step {step:2d}   {got}   one rank {want}   {'same' if got == want else 'DIFFERENT'}")
            last_state, state, reference_state = state, state_after, reference_state_after

        # Which documents were in a step? Another loader with provenance goes there from the last checkpoint before it.
        [asked] = make_loaders(1, functools.partial(pipeline, sources, tokenizer, SEGMENTS[-1][1], True))
        asked.load_state_dict(last_state or {})
        step = 2 * STEPS + 3
        asked.skip((step - asked.step) * GLOBAL_BATCH)
        print(
            "Each logical shard is within two documents of its weights, which shows in a segment of a few samples a shard."
        )
        print(f"step {step}, sample 0:", *next(iter(asked))["provenance"][0].splitlines(), sep="\n  ")
    print(f"{'every global batch is the same' if same else 'BATCHES DIFFER'} ({time.perf_counter() - started:.0f} s)")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
