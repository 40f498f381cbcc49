"""`TokenPacker`: the stream of tokens is the documents end to end, from whatever position it is resumed."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchdata.nodes import BaseNode, Mapper

import rescale_data as rd
from rescale_data.nodes.packing.packer import TokenPacker
from rescale_data.nodes.packing.token_stream import TokenStream
from rescale_data.nodes.reader import Reader
from rescale_data.nodes.reading import fragment_documents
from rescale_data.shard import Shard
from tests.corpus import LAYOUTS, documents, fragment_order, write
from tests.formats import write_megatron

EOS, BOS, ONE = 2, 1, Shard()

per_example = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
lengths = st.lists(st.integers(0, 9), min_size=1, max_size=24)


def packer_of(source: Any, shard: Shard = ONE, shuffle: bool | int = 4, via_mapper: bool = False, **kwargs: Any):
    rows = source if isinstance(source, BaseNode) else Reader(source, shard, shuffle=shuffle)
    return TokenPacker(
        Mapper(rows, dict) if via_mapper else rows, **{"column": "tokens", "seq_len": 5, "eos_id": EOS, **kwargs}
    )


def naive_stream(source: Any, shard: Shard, shuffle: bool | int, bos: int | None, eos: int | None, epochs: int):
    """(tokens, documents): what a packer's samples must be slices of."""
    reader, tokens, owners = Reader(source, shard, shuffle=shuffle), [], []
    for _ in range(epochs):
        for doc in reader:
            around = [[] if token is None else [token] for token in (bos, eos)]
            new = [*around[0], *doc["tokens"].tolist(), *around[1]]
            tokens += new
            owners += [len(set(owners))] * len(new)
        reader.reset(reader.get_state())
    return tokens, owners


def as_lists(samples: Any) -> list[dict[str, list[int]]]:
    return [{key: value.tolist() for key, value in sample.items()} for sample in samples]


def many_blocks(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Copy documents out of fragments, so few at a time that samples span several copies; 2**20: leave them where they are."""
    monkeypatch.setattr("rescale_data.nodes.reading.fragment_documents.block_bytes", lambda *_: num_bytes)
    if num_bytes < 2**20:
        monkeypatch.setattr(fragment_documents.FragmentDocuments, "_fit_in_cache", lambda *_: False)
        monkeypatch.setattr(fragment_documents, "room_for_block", lambda _: 8 * num_bytes)


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


class TestStream:
    @given(
        lengths=lengths,
        seq_len=st.integers(1, 12),
        eos=st.sampled_from([EOS, None, 70_000]),
        bos=st.sampled_from([BOS, None]),
        labels=st.booleans(),
        dtype=st.sampled_from([torch.int32, torch.int64]),
        block=st.sampled_from([1, 30, 2**20]),
        layout=st.sampled_from(LAYOUTS),
        via_mapper=st.booleans(),
        shard=st.sampled_from([Shard(repeat=True, seed=3), Shard(1, 2, repeat=True)]),
    )
    @per_example
    def test_endless_stream_is_the_documents_end_to_end(
        self, lengths, seq_len, eos, bos, labels, dtype, block, layout, via_mapper, shard, tmp_path_factory
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            many_blocks(patch, block)
            docs = documents([*lengths, 4, 4])
            source = write(layout, tmp_path_factory.mktemp("corpus"), docs)
            kwargs = {"seq_len": seq_len, "eos_id": eos, "bos_id": bos, "labels": labels, "dtype": dtype}
            node = packer_of(source, shard, via_mapper=via_mapper, doc_ids=True, **kwargs)
            tokens, owners = naive_stream(source, shard, 4, bos, eos, epochs=3)
            count = (len(tokens) - 1) // seq_len
            tensors = list(itertools.islice(node, count))
            assert {(value.dtype, value.shape) for s in tensors for value in s.values()} <= {(dtype, (seq_len,))}
            samples = as_lists(tensors)
            flat = [token for sample in samples for token in sample["tokens"]]
            assert flat == tokens[: count * seq_len]
            if labels:
                assert [t for s in samples for t in s["labels"]] == tokens[1 : count * seq_len + 1]
            for i, sample in enumerate(samples):
                mine = owners[i * seq_len : (i + 1) * seq_len]
                names = {owner: number for number, owner in enumerate(dict.fromkeys(mine))}
                assert sample["doc_ids"] == [names[owner] for owner in mine]

    @pytest.mark.parametrize("last", ["drop", "pad"])
    @pytest.mark.parametrize("block", [1, 40, 2**20])
    def test_the_end_of_an_epoch(self, layout: str, last: str, block: int, tmp_path: Path, monkeypatch) -> None:
        many_blocks(monkeypatch, block)
        source = write(layout, tmp_path, documents([3, 0, 7, 1, 5, 9, 2, 2]))
        node = packer_of(source, Shard(1, 2), last=last, labels=True, doc_ids=True, pad_id=0)
        reader = Reader(source, Shard(1, 2), shuffle=4)
        for epoch in range(3):
            tokens = [t for row in reader for t in (*row["tokens"].tolist(), EOS)]
            reader.reset(reader.get_state())
            samples = as_lists(node)
            padding = -len(tokens) % 5 if last == "pad" else 0
            assert len(samples) == (len(tokens) + padding) // 5
            drawn = len(samples) * 5
            assert [t for s in samples for t in s["tokens"]] == (tokens + [0] * padding)[:drawn]
            assert [t for s in samples for t in s["labels"]] == (tokens[1:] + [-100] * 5)[:drawn]
            if padding:
                assert samples[-1]["doc_ids"][-padding:] == [-1] * padding
            for _ in range(2):
                with pytest.raises(StopIteration):
                    next(node)
            assert node.get_state() == {"offset": 0, "source": {"epoch": epoch + 1, "row": 0, "skipped": 0}}
            node.reset(node.get_state())


class TestSamples:
    def test_a_document_that_now_ends_at_the_position(self) -> None:
        """It was the last one. The next epoch begins at the first token, not as far behind it as the position was."""

        def packer(last: list[int]) -> TokenPacker:
            rows = [{"tokens": [*range(4)]}, {"tokens": last}]
            return packer_of(rd.DatasetSource(rows, name="rows"), shuffle=False, seq_len=4, eos_id=None)

        before, after = packer([*range(4, 11)]), packer([*range(4, 8)])
        assert [next(before)["tokens"].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        after.reset(before.get_state())
        assert list(after) == []
        after.reset(after.get_state())
        assert [sample["tokens"].tolist() for sample in after] == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_are_their_callers_own(self, tmp_path: Path) -> None:
        source = write("arrow", tmp_path, documents([40]))
        expected = as_lists(packer_of(source, labels=True))
        found = []
        for sample in packer_of(source, labels=True):
            found += as_lists([sample])
            sample["tokens"].fill_(-1)
            sample["labels"].fill_(-1)
        assert found == expected

    @pytest.mark.parametrize("convert", [list, torch.tensor, np.array, lambda v: np.array(v, dtype=np.uint64)])
    def test_tokens_from_any_node(self, convert) -> None:
        rows = Reader([[3, 4], [], [5, 6, 7]], Shard(), shuffle=False)
        node = packer_of(Mapper(rows, lambda doc: {"ids": convert(doc)}), column="ids", seq_len=4)
        assert as_lists(node) == [{"tokens": [3, 4, 2, 2]}, {"tokens": [5, 6, 7, 2]}]


def test_what_all_shards_put_in_order_fits_the_cache() -> None:
    assert fragment_documents.block_bytes(2**30, 1) == 2**20
    assert fragment_documents.block_bytes(2**30, 1024) * 1024 == 2**28
    assert fragment_documents.block_bytes(1, 1024) == 2**16


def test_reading_ahead_changes_neither_a_batch_nor_when_an_error_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fragment that cannot be read stops the batch that needs it, and no sooner; then the run goes on."""
    write_megatron(tmp_path / "d", [[i % 251] * (1 + i * 7 % 5) for i in range(9000)])
    rows = rd.MegatronSource(tmp_path).fragments
    starts = fragment_order(rows, 0, 0).fragment_starts
    gone = int(np.searchsorted(rows, starts[1]))  # the first shard comes to it alone, later
    reads, fails = rd.MegatronSource.tokens, [True]

    def tokens(self: Any, column: str, fragment: int) -> Any:
        if fails[0] and fragment == gone:
            raise OSError("gone")
        return reads(self, column, fragment)

    monkeypatch.setattr(rd.MegatronSource, "tokens", tokens)

    def run() -> tuple[list[list[int]], list[int]]:
        source = rd.MegatronSource(tmp_path)

        def pipeline(shard: Shard) -> Any:
            return TokenPacker(Reader(source, shard, shuffle=64), column="tokens", seq_len=32, eos_id=0)

        fails[0], batches, failed = True, [], []
        loader = rd.DataLoader(pipeline, global_batch_size=4, num_logical_shards=4, repeat=True, num_workers=0)
        while len(batches) < 200:
            try:
                batches.append(next(iter(loader))["tokens"].flatten().tolist())
            except OSError:
                failed, fails[0] = [*failed, len(batches)], False
        return batches, failed

    ahead = run()
    monkeypatch.setattr(TokenStream, "read_ahead", lambda self: None)
    assert ahead == run()
    assert len(ahead[1]) == 1
    assert ahead[1][0] > 50
