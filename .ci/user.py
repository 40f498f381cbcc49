"""What a user's type checker sees; it runs against the built wheel."""

import torch

import rescale_data as rd

rows: list[dict[str, list[int]]] = [{"tokens": [i] * 5} for i in range(64)]
source = rd.DatasetSource(rows)


def pipeline(shard: rd.Shard) -> rd.BaseNode[dict[str, torch.Tensor]]:
    return rd.TokenPacker(rd.Reader(source, shard), column="tokens", seq_len=8, eos_id=0)


loader = rd.DataLoader(pipeline, global_batch_size=4, num_logical_shards=8, repeat=True)
step: int = loader.step
for _, batch in zip(range(2), loader, strict=False):
    print(batch["tokens"].shape)
state: dict[str, object] = dict(loader.state_dict())
print(rd.__file__, rd.plan(4).num_logical_shards, step, len(state))
