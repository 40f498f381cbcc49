"""The end of an epoch that only reading tells: every document is packed once, and no call reads more than some steps."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.engine.ends import STEPS_PER_ROUND
from tests.corpus import documents
from tests.datasets import Hooked

SEQ_LEN = 8


@settings(max_examples=4)
@given(
    longest=st.sampled_from([8, 40]),
    n=st.sampled_from([4, 6]),
    o=st.sampled_from([2, 4]),
    saved_at=st.integers(0, 700),
    seed=st.integers(0, 2**16),
)
def test_every_token_is_delivered_once_in_rounds_of_bounded_reading(
    longest: int, n: int, o: int, saved_at: int, seed: int
) -> None:
    lengths = np.sort(np.random.default_rng(seed).integers(1, longest + 1, 1500)).tolist()  # the last shards have most
    reads = list[int]()
    source = rd.DatasetSource(Hooked([{"tokens": doc} for doc in documents(lengths, first=0)], reads.append))

    def pipeline(shard: rd.Shard) -> Any:
        rows = rd.Reader(source, shard, shuffle=8)
        return rd.TokenPacker(rows, column="tokens", seq_len=SEQ_LEN, eos_id=None, last="pad", pad_id=-1)

    def loader() -> rd.DataLoader:
        return rd.DataLoader(pipeline, global_batch_size=o, num_logical_shards=n, tail="pad")

    found, first, most = [], loader(), 0
    for count, batch in enumerate(first):
        found.append(batch["tokens"][batch["valid"]])
        most = max(most, len(reads))
        reads.clear()
        if count == saved_at:
            state, first = first.state_dict(), loader()
            first.load_state_dict(state)
            break
    if first.epoch == 0:
        found += [batch["tokens"][batch["valid"]] for batch in first]
    tokens = np.sort(np.concatenate(found).flatten())
    assert tokens[tokens >= 0].tolist() == list(range(sum(lengths)))
    samples_a_call = 2 * (STEPS_PER_ROUND * o + n)  # looked at, and then served
    assert most <= samples_a_call * (SEQ_LEN + 1) + 8 * n
