"""Columns beside the tokens: cut and packed with them, by both packers, over any chain of topologies."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.testing import full_state_dict
from tests.nodes.resume import endless

N, BATCH, EOS, BOS, PAD = 6, 12, 9_999_999, 9_999_998, 9_999_997
RNG = np.random.default_rng(4)
OTHERS = {
    "uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64, "float16": torch.float16, "float64": torch.float64,
}  # fmt: skip
LENGTHS = RNG.integers(0, 40, 120)
ROWS = [
    {
        "tokens": 100 * i + np.arange(n),
        "loss_mask": RNG.random(n) < (0.6 if i % 5 else 0.0),
        "reward": (100 * i + np.arange(n)).astype(np.float32) / 4,
        "segment": np.arange(n)[::-1].copy(),
        **{f"of_{dtype}": np.arange(n).astype(dtype) % 7 for dtype in OTHERS},
    }
    for i, n in enumerate(LENGTHS)
]
SOURCE = rd.DatasetSource(ROWS, name="conversations")
COLUMNS = {"loss_mask": torch.bool, "reward": torch.float32, "segment": torch.int16}
COLUMNS |= {f"of_{name}": dtype for name, dtype in OTHERS.items()}
LEARNED = {int(t) for row in ROWS for t in row["tokens"][row["loss_mask"]]}
some = settings(max_examples=max(4, settings().max_examples // 10))


def loaders(world_size: int, packer: Any, **others: Any) -> list[rd.DataLoader]:
    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        rows = rd.Reader(SOURCE, shard)
        return packer(rows, **{"column": "tokens", "eos_id": EOS, "columns": COLUMNS, "labels": True, **others})

    sizes = {"global_batch_size": BATCH, "micro_batch_size": BATCH // world_size, "num_logical_shards": N}
    arguments = {**sizes, "dp_world_size": world_size, "repeat": True}
    return [rd.DataLoader(pipeline, dp_rank=rank, **arguments) for rank in range(world_size)]


def samples_of(
    chain: list[tuple[int, int]], packer: Any, **others: Any
) -> tuple[dict[int, list[Any]], list[rd.DataLoader]]:
    state, found = None, defaultdict(list)
    ranks: list[rd.DataLoader] = []
    for world_size, steps in chain:
        ranks = loaders(world_size, packer, **others)
        for loader in ranks if state is not None else []:
            loader.load_state_dict(state)
        for _ in range(steps):
            for loader in ranks:
                taken = loader._stream.take()
                for i, shard in enumerate(taken.shards):
                    found[shard].append({key: value[i].tolist() for key, value in taken.batch.items()})
        state = full_state_dict(ranks)
    return found, ranks


def check_values(tokens: list[int], sample: Any) -> None:
    """Each token has its own values, and what stands around a document, or pads, has none."""
    for at, token in enumerate(tokens):
        row, place = divmod(token, 100)
        inside = token < PAD and sample["real"][at]
        assert sample["reward"][at] == (token / 4 if inside else 0)
        assert sample["segment"][at] == (LENGTHS[row] - 1 - place if inside else 0)
        assert {sample[f"of_{name}"][at] for name in OTHERS} == {place % 7 if inside else 0}


def learned(token: int, before: int) -> bool:
    return token in LEARNED or (token == EOS and before in LEARNED)


chains = st.lists(st.tuples(st.sampled_from([4, 2, 3, 1]), st.integers(0, 4)), min_size=2, max_size=3)


@given(chains, st.sampled_from([16, 33, 64]), st.sampled_from([None, BOS]))
@some
def test_documents_that_are_cut(chain: list[tuple[int, int]], seq_len: int, bos: int | None) -> None:
    found, ranks = samples_of(chain, rd.TokenPacker, seq_len=seq_len, bos_id=bos, doc_ids=True)
    assert counted(ranks, "untrained", "cut") == expected_counts(found, seq_len, 1 + (bos is not None))
    for shard, samples in found.items():
        plain = rd.TokenPacker(
            rd.Reader(SOURCE, rd.Shard(shard, N, repeat=True)),
            column="tokens",
            eos_id=EOS,
            bos_id=bos,
            seq_len=seq_len,
            labels=True,
        )
        for sample in samples:
            expected = next(plain)
            assert sample["tokens"] == expected["tokens"].tolist()
            tokens, following = expected["tokens"].tolist(), expected["labels"].tolist()
            wanted = [learned(b, a) for a, b in zip(tokens, following, strict=True)]
            assert sample["loss_mask"] == wanted
            assert sample["labels"] == [b if w else -100 for b, w in zip(following, wanted, strict=True)]
            check_values(tokens, {**sample, "real": [True] * seq_len})


@given(chains, st.sampled_from(["split", "truncate", "drop"]), st.sampled_from([1, 4]), st.sampled_from([None, BOS]))
@some
def test_whole_documents(chain: list[tuple[int, int]], long: Any, multiple: int, bos: int | None) -> None:
    form = {
        "seq_len": 32,
        "window": 8,
        "long": long,
        "pad_documents_to": multiple,
        "bos_id": bos,
        "cost": True,
        "pad_id": PAD,
    }
    found, ranks = samples_of(chain, rd.WholeDocumentPacker, **form)
    for shard, samples in found.items():
        if multiple == 1:
            plain = rd.WholeDocumentPacker(
                rd.Reader(SOURCE, rd.Shard(shard, N, repeat=True)), column="tokens", eos_id=EOS, bos_id=bos, seq_len=32,
                window=8, long=long, pad_id=PAD,
            )  # fmt: skip
        for sample in samples:
            tokens, ids, ends = sample["tokens"], sample["doc_ids"], sample["cu_seqlens"]
            if multiple == 1:
                expected = next(plain)
                assert all(
                    sample[key] == expected[key].tolist() for key in ("tokens", "positions", "doc_ids", "cu_seqlens")
                )
            num = max(ids) + 1
            assert all(end % multiple == 0 for end in ends)
            lengths = np.diff(ends[: num + 1])
            assert sample["cost"] == [int((lengths**2).sum())]
            real = [i >= 0 and token != PAD for token, i in zip(tokens, ids, strict=True)]
            check_values(tokens, {**sample, "real": real})
            for at, mask in enumerate(sample["loss_mask"]):
                inside = at + 1 < 32 and ids[at] >= 0 and ids[at + 1] == ids[at] and real[at + 1]
                assert mask == (inside and learned(tokens[at + 1], tokens[at]))
                assert sample["labels"][at] == (tokens[at + 1] if mask else -100)
    uninterrupted = np.zeros(2)
    for shard, samples in found.items():
        rows = rd.Reader(SOURCE, rd.Shard(shard, N, repeat=True))
        node = rd.WholeDocumentPacker(rows, column="tokens", eos_id=EOS, columns=COLUMNS, **{**form, "cost": False})
        for _ in samples:
            next(node)
        uninterrupted += [node.get_state()["untrained"], node.get_state()["long"]]
    name = {"split": "split", "truncate": "truncated", "drop": "dropped"}[long]
    assert counted(ranks, "untrained", name) == uninterrupted.tolist()


def counted(ranks: list[rd.DataLoader], *names: str) -> list[float]:
    """What the ranks say together."""
    return [sum(loader.progress()[f"{name}_documents"] for loader in ranks) for name in names]


def expected_counts(found: dict[int, list[Any]], seq_len: int, num_around: int) -> list[int]:
    """Documents that ended untrained, and that were cut, in so many samples: by where each begins and ends in its stream."""
    untrained = cut = 0
    for shard, samples in found.items():
        begin, total = 0, len(samples) * seq_len
        rows = endless(rd.Reader(SOURCE, rd.Shard(shard, N, repeat=True)))
        while begin < total:
            row = next(rows)
            stop, border = begin + len(row["tokens"]) + num_around, (begin // seq_len + 1) * seq_len
            untrained += stop <= total and not row["loss_mask"].any()
            cut += border < stop
            begin = stop
    return [untrained, cut]


@pytest.mark.parametrize("long", ["split", "truncate", "drop"])
def test_documents_of_which_no_label_is_learned_are_counted(long: Any) -> None:
    """What is packed of them: neither the first token of a piece nor what was left out is a label."""
    rows = rd.Reader(SOURCE, rd.Shard())
    node = rd.WholeDocumentPacker(rows, column="tokens", seq_len=16, columns=COLUMNS, long=long)
    list(node)
    untrained = 0
    for mask in (row["loss_mask"] for row in ROWS):
        kept = {"split": len(mask), "truncate": 16, "drop": len(mask) if len(mask) <= 16 else 0}[long]
        labels = [learned for i, learned in enumerate(mask[:kept]) if i % 16]
        untrained += len(mask) > 0 and kept > 0 and not any(labels)
    assert node.get_state()["untrained"] == untrained > 10


@pytest.mark.parametrize("last", ["drop", "pad"])
def test_all_documents_of_an_epoch_are_counted_whatever_becomes_of_its_end(last: Any) -> None:
    rows = rd.Reader(SOURCE, rd.Shard())
    node = rd.TokenPacker(rows, column="tokens", seq_len=64, eos_id=None, last=last, columns=COLUMNS)
    list(node)
    untrained = sum(len(row["tokens"]) > 0 and not row["loss_mask"].any() for row in ROWS)
    assert node.get_state()["untrained"] == untrained > 20


@pytest.mark.parametrize("packer", [rd.TokenPacker, rd.WholeDocumentPacker])
@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        (
            {"loss_mask": [True, False]},
            {"loss_mask": torch.bool},
            "'loss_mask' has shape \\[2\\], and 'tokens' 3 tokens",
        ),
        ({"reward": [1.0, 2.5, 3.0]}, {"reward": torch.int64}, "'reward' holds values of float64"),
        ({}, {"reward": torch.int64}, "has 'reward', but a sample has the keys"),
        ({}, {"tokens": torch.int64}, "yields itself"),
        ({}, {"loss_mask": torch.int64}, "is torch.bool"),
        ({}, {"x": torch.complex64}, "give one of"),
        ({}, ["loss_mask"], "give {name: dtype}"),
    ],
)
def test_what_does_not_fit_is_an_error_with_its_row(packer: Any, row: Any, columns: Any, message: str) -> None:
    source = rd.DatasetSource([{"tokens": [1, 2, 3], **row}], name="chats")
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        next(packer(rd.Reader(source, rd.Shard()), column="tokens", seq_len=2, eos_id=0, columns=columns))
    if row:
        assert "chats: chats[0]" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("packer", [rd.TokenPacker, rd.WholeDocumentPacker])
def test_columns_of_other_lengths_name_source_file_and_row(packer: Any, tmp_path: Path) -> None:
    lines = [{"tokens": [1, 2, 3], "loss_mask": [True] * n} for n in (3, 3, 2)]
    (tmp_path / "part.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = rd.Reader(rd.JsonlSource(tmp_path), rd.Shard(), shuffle=False)
    with pytest.raises(ValueError, match="'loss_mask' has shape \\[2\\], and 'tokens' 3 tokens") as caught:
        list(packer(rows, column="tokens", seq_len=3, eos_id=0, columns={"loss_mask": torch.bool}))
    [note] = [note for note in caught.value.__notes__ if "given" in note]
    assert note == f"in {packer.__name__}, given {tmp_path.name}: {tmp_path}/part.jsonl, line 3"
