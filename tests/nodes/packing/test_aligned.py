"""Columns beside the tokens: cut and packed with them, by both packers. Resumed and rescaled: `tests.nodes.zoo`."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rescale_data as rd
from tests.nodes.resume import endless, plain, take

N, EOS, BOS, PAD = 6, 9_999_999, 9_999_998, 9_999_997
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
some = settings(max_examples=max(12, settings().max_examples // 5))


def packers(packer: Any, shard: int, **form: Any) -> tuple[rd.Node[Any], rd.Node[Any]]:
    """One with all columns, and one without."""
    more, plain_form = {"columns": COLUMNS, "labels": True}, {k: v for k, v in form.items() if k != "cost"}
    made = ({**form, **more}, plain_form)
    rows = [rd.Reader(SOURCE, rd.Shard(shard, N, repeat=True)) for _ in made]
    with_columns, without = (
        packer(reader, column="tokens", eos_id=EOS, **each) for reader, each in zip(rows, made, strict=True)
    )
    return with_columns, without


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


def test_columns_stay_beside_their_tokens_where_the_document_within_is_blocked() -> None:
    def loader(blocked: set[int]) -> rd.DataLoader:
        def pipeline(shard: rd.Shard) -> rd.TokenPacker:
            rows = rd.Reader(SOURCE, shard, exclude=blocked)
            return rd.TokenPacker(rows, column="tokens", seq_len=16, eos_id=EOS, bos_id=BOS, columns=COLUMNS)

        return rd.DataLoader(pipeline, global_batch_size=N, num_logical_shards=N, repeat=True)

    run = loader(set())
    for batch in itertools.islice(run, 12):
        resumed = loader({last // 100 for last in batch["tokens"][:, -1].tolist() if last < BOS})
        resumed.load_state_dict(run.state_dict())
        values = plain(next(iter(resumed)))
        for i, tokens in enumerate(values["tokens"]):
            check_values(tokens, {**{key: value[i] for key, value in values.items()}, "real": [True] * 16})


@given(st.integers(0, N - 1), st.sampled_from([16, 33, 64]), st.sampled_from([None, BOS]))
@some
def test_documents_that_are_cut(shard: int, seq_len: int, bos: int | None) -> None:
    node, without = packers(rd.TokenPacker, shard, seq_len=seq_len, bos_id=bos, doc_ids=True)
    stream = [token for sample in take(without, 13) for token in sample["tokens"]]
    for begin, sample in zip(range(0, 12 * seq_len, seq_len), take(node, 12), strict=True):
        tokens, following = stream[begin : begin + seq_len], stream[begin + 1 : begin + seq_len + 1]
        assert sample["tokens"] == tokens
        wanted = [learned(b, a) for a, b in zip(tokens, following, strict=True)]
        assert sample["loss_mask"] == wanted
        assert sample["labels"] == [b if w else -100 for b, w in zip(following, wanted, strict=True)]
        check_values(tokens, {**sample, "real": [True] * seq_len})
    state = node.get_state()
    assert [state["untrained"], state["cut"]] == expected_counts(shard, 12, seq_len, 1 + (bos is not None))


def expected_counts(shard: int, num_samples: int, seq_len: int, num_around: int) -> list[int]:
    """Documents that ended untrained, and that were cut, in so many samples: by where each begins and ends in its stream."""
    untrained = cut = begin = 0
    rows = endless(rd.Reader(SOURCE, rd.Shard(shard, N, repeat=True)))
    while begin < num_samples * seq_len:
        row = next(rows)
        stop, border = begin + len(row["tokens"]) + num_around, (begin // seq_len + 1) * seq_len
        untrained += stop <= num_samples * seq_len and not row["loss_mask"].any()
        cut += border < stop
        begin = stop
    return [untrained, cut]


@given(
    st.integers(0, N - 1),
    st.sampled_from(["split", "truncate", "drop"]),
    st.sampled_from([1, 4]),
    st.sampled_from([None, BOS]),
)
@some
def test_whole_documents(shard: int, long: Any, multiple: int, bos: int | None) -> None:
    form = {"seq_len": 32, "window": 8, "long": long, "bos_id": bos, "pad_id": PAD}
    node, without = packers(rd.WholeDocumentPacker, shard, pad_documents_to=multiple, cost=True, **form)
    for sample, expected in zip(take(node, 12), take(without, 12), strict=True):
        assert all(sample[key] == expected[key] for key in ("tokens", "positions", "doc_ids", "cu_seqlens"))
        tokens, ids, ends = sample["tokens"], sample["doc_ids"], sample["cu_seqlens"]
        assert all(end % multiple == 0 for end in ends)
        assert sample["cost"] == [int((np.diff(ends[: max(ids) + 2]) ** 2).sum())]
        real = [i >= 0 and token != PAD for token, i in zip(tokens, ids, strict=True)]
        check_values(tokens, {**sample, "real": real})
        for at, mask in enumerate(sample["loss_mask"]):
            inside = at + 1 < 32 and ids[at] >= 0 and ids[at + 1] == ids[at] and real[at + 1]
            assert mask == (inside and learned(tokens[at + 1], tokens[at]))
            assert sample["labels"][at] == (tokens[at + 1] if mask else -100)


@pytest.mark.parametrize("long", ["split", "truncate", "drop"])
def test_whole_documents_of_which_no_label_is_learned_are_counted(long: Any) -> None:
    """What is packed of them: neither the first token of a piece nor what was left out is a label."""
    rows = rd.Reader(SOURCE, rd.Shard())
    node = rd.WholeDocumentPacker(rows, column="tokens", seq_len=16, columns=COLUMNS, long=long)
    list(node)
    untrained = 0
    for mask in (row["loss_mask"] for row in ROWS):
        kept = {"split": len(mask), "truncate": 16, "drop": len(mask) if len(mask) <= 16 else 0}[long]
        labels = [is_learned for i, is_learned in enumerate(mask[:kept]) if i % 16]
        untrained += len(mask) > 0 and kept > 0 and not any(labels)
    assert node.get_state()["untrained"] == untrained > 10


@pytest.mark.parametrize("last", ["drop", "pad"])
def test_all_documents_of_an_epoch_are_counted_whatever_becomes_of_its_end(last: Any) -> None:
    rows = rd.Reader(SOURCE, rd.Shard())
    node = rd.TokenPacker(rows, column="tokens", seq_len=64, eos_id=None, last=last, columns=COLUMNS)
    list(node)
    untrained = sum(len(row["tokens"]) > 0 and not row["loss_mask"].any() for row in ROWS)
    assert node.get_state()["untrained"] == untrained > 20
