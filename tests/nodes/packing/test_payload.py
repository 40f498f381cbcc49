"""What documents carry along: each image once, with its document, within the limits, over any chain of topologies and forms."""

import itertools
from collections import Counter, defaultdict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.engine.collate import pin
from rescale_data.nodes.packing.columns import PerDocValues
from rescale_data.testing import assert_rescalable, full_state_dict
from tests.nodes.resume import N, endless, plain, ranks_of, samples_by_shard

WINDOW, PAD = 8, 9_999


def conversation(number: int, num_tokens: int, num_images: int | None) -> dict[str, Any]:
    """Tokens, images and a box for each image that name their row; `None` images where there are none."""
    images = None if num_images is None else [f"{number}/{i}".encode() for i in range(num_images)]
    boxes = np.full((num_images or 0, 4), number, dtype=np.float32)
    return {"tokens": np.full(num_tokens, number), "images": images, "boxes": boxes, "id": f"row {number}"}


RNG = np.random.default_rng(14)
ROWS = [conversation(i, int(RNG.integers(0, 40)), [None, 0, 1, 2, 4, 5][int(RNG.integers(6))]) for i in range(120)]
SOURCE = rd.DatasetSource(ROWS, name="chats")
PAYLOAD = {"payload": ["images", "boxes", "id"], "limits": {"images": 5}}


def packer(source: Any, shard: rd.Shard | None = None, **others: Any) -> rd.WholeDocumentPacker:
    form = {"column": "tokens", "seq_len": 48, "window": WINDOW, "pad_id": PAD, **PAYLOAD}
    return rd.WholeDocumentPacker(rd.Reader(source, shard or rd.Shard(), shuffle=4), **{**form, **others})


def num(value: Any) -> int:
    return 0 if value is None else len(value)


def first_pieces(sample: dict[str, Any], rows: list[dict[str, Any]], limits: dict[str, int]) -> list[int]:
    """The rows that begin in a sample: what they carry is there, and within the limits."""
    values = plain(sample)
    ids, tokens = values["doc_ids"], values["tokens"]
    numbers = [tokens[ids.index(doc)] for doc in range(max(ids) + 1)]
    begins = [doc for doc, name in enumerate(values["id"]) if name is not None]
    for doc, number in enumerate(numbers):
        expected = plain(rows[number]) if doc in begins else dict.fromkeys(PAYLOAD["payload"])
        assert {name: values[name][doc] for name in PAYLOAD["payload"]} == {k: expected[k] for k in PAYLOAD["payload"]}
    for name, most in limits.items():
        assert sum(map(num, values[name])) <= most
    assert {len(values[name]) for name in PAYLOAD["payload"]} == {len(numbers)}
    return [numbers[doc] for doc in begins]


@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.sampled_from([None, 0, 1, 2, 3, 6])), min_size=1, max_size=30),
    long=st.sampled_from(["split", "truncate", "drop"]),
    limits=st.fixed_dictionaries({}, optional={"images": st.integers(1, 7), "boxes": st.integers(5, 9)}),
    max_documents=st.integers(1, 4),
)
@settings(max_examples=80)
def test_each_document_has_what_it_carries_once(rows: Any, long: Any, limits: Any, max_documents: int) -> None:
    data = [conversation(i, *row) for i, row in enumerate(rows)]
    over = {i for i, row in enumerate(data) for name, most in limits.items() if num(row[name]) > most}
    node = packer(data, seq_len=16, long=long, limits=limits, max_documents=max_documents)
    if over and long != "drop":
        with pytest.raises(ValueError, match="more than a whole sample may") as caught:
            list(node)
        assert "given list: list[" in "".join(caught.value.__notes__)
        return
    came = [number for sample in node for number in first_pieces(sample, data, limits)]
    dropped = (
        {i for i, (length, _) in enumerate(rows) if length and (length > 16 or i in over)} if long == "drop" else set()
    )
    assert sorted(came) == [i for i, (length, _) in enumerate(rows) if length and i not in dropped]
    if long == "drop":
        assert node.get_state()["long"] == len(dropped)


FORMS = st.fixed_dictionaries(
    {"seq_len": st.sampled_from([40, 96]), "limits": st.sampled_from([{"images": n} for n in (5, 9)])}
)
SEGMENTS = st.lists(st.tuples(FORMS, st.sampled_from([4, 2, 3, 1]), st.integers(0, 3)), min_size=2, max_size=3)


@given(SEGMENTS)
@settings(max_examples=max(6, settings().max_examples // 8))
def test_each_comes_once_where_limits_and_length_change_within_windows(chain: Any) -> None:
    state, found = None, defaultdict(list)
    for form, world_size, steps in chain:
        ranks = ranks_of(partial(packer, SOURCE, **form), world_size, state)
        for shard, samples in samples_by_shard(ranks, steps).items():
            found[shard] += samples
        state = full_state_dict(ranks)
    for shard, samples in found.items():
        came = [row for sample in samples for row in first_pieces(sample, ROWS, {"images": 9})]
        reader = endless(rd.Reader(SOURCE, rd.Shard(shard, N, repeat=True), shuffle=4))
        read = [int(row["tokens"][0]) for row in itertools.islice(reader, len(came) + 60) if len(row["tokens"])]
        assert not Counter(came) - Counter(read[: len(came) + WINDOW])
        assert not Counter(read[: max(0, len(came) - WINDOW + 1)]) - Counter(came)


def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
    return packer(SOURCE, shard)


def through_nodes(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Map(rd.Shuffle(packer(SOURCE, shard), 4), dict)


@pytest.mark.parametrize(("pipeline", "workers"), [(pipeline, 1), (through_nodes, 0)])
def test_batches_hold_a_list_per_sample_with_workers_too(pipeline: Any, workers: int) -> None:
    """In place and collated, sent between processes or not, the batch is the same."""

    def make(rank: int, world_size: int, micro: int, num_workers: int) -> rd.DataLoader:
        return rd.DataLoader(
            pipeline, global_batch_size=6, num_logical_shards=6, dp_rank=rank, dp_world_size=world_size,
            micro_batch_size=micro, num_workers=num_workers, repeat=True,
        )  # fmt: skip

    assert_rescalable(make, [(2, 3, 0), (1, 3, workers)], steps=1)
    batch = next(iter(make(0, 1, 6, 0)))
    assert len(batch["images"]) == 6 == len(batch["tokens"])
    assert {type(value) for value in batch["images"]} == {PerDocValues}
    assert {type(images) for sample in batch["images"] for images in sample} <= {list, type(None)}


def test_the_last_batch_is_filled_up_with_what_its_samples_carry() -> None:
    loader = rd.DataLoader(pipeline, global_batch_size=8, num_logical_shards=4, tail="pad")
    came = []
    for batch in list(loader):  # batches that are kept stay as they are
        for i in range(int(batch["valid"].sum())):
            came += first_pieces({key: value[i] for key, value in batch.items()}, ROWS, {"images": 5})
    assert sorted(came) == [i for i, row in enumerate(ROWS) if len(row["tokens"])]


def test_tensors_within_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    assert pin({"images": [PerDocValues([[torch.tensor(1)], None, b"x"])]}) == {"images": [[[2], None, b"x"]]}


def test_another_payload_is_an_error_at_the_load() -> None:
    [saved] = ranks_of(pipeline)
    with pytest.raises(rd.DataStateError, match="payload"):
        ranks_of(partial(packer, SOURCE, payload=["images"]), state=saved.state_dict())
