"""Ten runs whose order of rows is pinned: every format, every kind of node, each in a folder of its own.

Checkpoints compare sizes of files, which are not the same from every release of pyarrow: `tests.golden.checkpoints` uses the
formats that are written here.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import rescale_data as rd
from tests.formats import write_jsonl, write_megatron, write_table, write_tar

SIZES = {"global_batch_size": 8, "num_logical_shards": 16, "seed": 3}
Pipeline = Callable[[rd.Shard], rd.BaseNode[Any]]


def documents(num: int, first: int = 0) -> list[list[int]]:
    """Documents of 1 to 30 tokens below 1,000."""
    return [[(first + 7 * i + 3 * t) % 997 + 3 for t in range((first + i) ** 2 % 30 + 1)] for i in range(num)]


def table(docs: list[list[int]]) -> dict[str, pa.Array]:
    return {"tokens": pa.array(docs, pa.list_(pa.int32()))}


def parquet(folder: Path) -> rd.ParquetSource:
    for number in range(3):
        write_table(folder / "corpus" / f"{number}.parquet", table(documents(300, 300 * number)), 25)
    return rd.ParquetSource(folder / "corpus", columns=["tokens"])


def arrow(folder: Path) -> rd.ArrowSource:
    return rd.ArrowSource(write_table(folder / "corpus.arrow", table(documents(700)), 30))


def jsonl(folder: Path) -> rd.JsonlSource:
    rows = [{"id": i, "text": "".join(chr(97 + t % 26) for t in doc)} for i, doc in enumerate(documents(600))]
    return rd.JsonlSource(write_jsonl(folder / "corpus.jsonl", rows))


def tar(folder: Path) -> rd.WebDatasetSource:
    samples = [{"bin": bytes(t % 256 for t in doc)} for doc in documents(500)]
    return rd.WebDatasetSource(write_tar(folder / "corpus.tar", samples))


def megatron(folder: Path) -> rd.MegatronSource:
    return rd.MegatronSource(write_megatron(folder / "corpus", documents(800)))


def dataset(num: int, name: str) -> rd.DatasetSource:
    return rd.DatasetSource([{"tokens": np.array(doc)} for doc in documents(num, num)], name=name)


def tokenize(texts: list[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


def halved(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": row["tokens"] // 2}


def is_even(row: dict[str, Any]) -> bool:
    return int(row["tokens"][0]) % 2 == 0


def decoded(row: dict[str, Any]) -> dict[str, Any]:
    return {"key": int(row["__key__"]), "size": len(row["bin"])}


def moved(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """The raw stream alone: NumPy keeps no other across its releases."""
    return {**row, "draw": int(rng.bit_generator.random_raw()) % 1000}


def rows(folder: Path) -> rd.DataLoader:
    source = parquet(folder)
    return rd.DataLoader(source, shuffle=64, collate_fn=list, **SIZES)


def streams(folder: Path) -> rd.DataLoader:
    source = arrow(folder)

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        reader = rd.Reader(source, shard, shuffle=100)
        return rd.TokenPacker(reader, column="tokens", seq_len=32, eos_id=2, labels=True, doc_ids=True)

    return rd.DataLoader(pipeline, **SIZES)


def texts(folder: Path) -> rd.DataLoader:
    source = jsonl(folder)

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        return rd.TokenPacker(
            rd.Tokenize(rd.Reader(source, shard, shuffle=True), tokenize, "text"), column="tokens", seq_len=24, eos_id=0
        )

    return rd.DataLoader(pipeline, repeat=True, **SIZES)


def draws(folder: Path) -> rd.DataLoader:
    source = tar(folder)
    return rd.DataLoader(lambda shard: rd.RandomMap(rd.Map(rd.Reader(source, shard), decoded), moved), **SIZES)


def whole_documents(folder: Path) -> rd.DataLoader:
    source = megatron(folder)

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        reader = rd.Reader(source, shard, shuffle=True)
        return rd.WholeDocumentPacker(reader, column="tokens", seq_len=48, eos_id=2, window=16)

    return rd.DataLoader(pipeline, repeat=True, **SIZES)


def by_samples(_: Path) -> rd.DataLoader:
    sources = {name: dataset(num, name) for name, num in (("web", 400), ("code", 250), ("books", 90))}

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        readers = {name: rd.Reader(source, shard) for name, source in sources.items()}
        return rd.WeightedSampler(readers, {"web": 0.6, "code": 0.3, "books": 0.1}, stop="all")

    return rd.DataLoader(pipeline, collate_fn=list, **SIZES)


def by_tokens(_: Path) -> rd.DataLoader:
    sources = {name: dataset(num, name) for name, num in (("web", 400), ("code", 250), ("books", 90))}

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        readers = {name: rd.Reader(source, shard) for name, source in sources.items()}
        weights = {"web": 0.8, "code": 0.2, "books": 0.0}, {"web": 0.3, "code": 0.3, "books": 0.4}
        schedule = rd.Schedule([(0, weights[0]), (150_000, weights[1])], interpolate="linear")
        mixture = rd.WeightedSampler(readers, schedule, unit="tokens", column="tokens", max_epochs={"books": 8})
        return rd.TokenPacker(mixture, column="tokens", seq_len=32, eos_id=2)

    return rd.DataLoader(pipeline, repeat=True, **SIZES)


def shuffled(_: Path) -> rd.DataLoader:
    source = dataset(700, "web")

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        kept = rd.Filter(rd.Map(rd.Reader(source, shard), halved), is_even)
        return rd.Shuffle(rd.TokenPacker(kept, column="tokens", seq_len=16, eos_id=2, last="pad"), window=8)

    return rd.DataLoader(pipeline, tail="pad", **SIZES)


def growing(folder: Path) -> rd.DataLoader:
    return rd.DataLoader(parquet(folder), shuffle=64, collate_fn=list, repeat=True, **SIZES)


def excluding(folder: Path) -> rd.DataLoader:
    source = megatron(folder)
    blocked = range(5, 800, 9)

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        reader = rd.Reader(source, shard, shuffle=True, exclude={"corpus.bin": [*blocked]})
        return rd.TokenPacker(reader, column="tokens", seq_len=32, eos_id=2)

    return rd.DataLoader(pipeline, repeat=True, **SIZES)


RUNS: Mapping[str, Callable[[Path], rd.DataLoader]] = {
    run.__name__: run
    for run in (rows, streams, texts, draws, whole_documents, by_samples, by_tokens, shuffled, growing, excluding)
}


def batches(loader: rd.DataLoader, num: int) -> Iterator[Any]:
    """The next ``num`` batches, over the ends of epochs."""
    iterator = iter(loader)
    for _ in range(num):
        batch = next(iterator, None)
        while batch is None:
            iterator = iter(loader)
            batch = next(iterator, None)
        yield batch


def run(name: str, folder: Path, num: int) -> Iterator[Any]:
    """The first batches of a run; files join `growing` in the middle."""
    with RUNS[name](folder) as loader:
        if name != "growing":
            yield from batches(loader, num)
            return
        yield from batches(loader, num // 2)
        state = loader.state_dict()
    write_table(folder / "corpus" / "3.parquet", table(documents(200, 900)), 25)
    with growing(folder) as loader:
        loader.load_state_dict(state)
        yield from batches(loader, num - num // 2)


def digest(values: Any) -> str:
    """Eight bytes of a batch, its dtypes and shapes, in the same form on every machine."""
    found = hashlib.blake2b(digest_size=8)
    _feed(found.update, values)
    return found.hexdigest()


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, torch.Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value):
            update(key.encode())
            _feed(update, value[key])
    elif isinstance(value, list | tuple):
        update(f"{len(value)}".encode())
        for each in value:
            _feed(update, each)
    else:
        update(repr(value).encode())


def digests(all_batches: Iterator[Any], every: int) -> list[str]:
    """A digest of each ``every`` batches, in order, so that a difference is found to so many steps."""
    parts, found = [], []
    for batch in all_batches:
        parts.append(digest(batch))
        if len(parts) == every:
            found.append(digest(parts))
            parts = []
    return [*found, *([digest(parts)] if parts else [])]
