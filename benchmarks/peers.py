"""Packed batches [8, 4096] by other loaders, each as its own documentation configures it; see `bench_peers`.

What a loader wants on disk is written before its first batch, and not timed. Those that pack on the fly shuffle documents; the
others shuffle rows that were packed before.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from bench_read import EOS, MICRO_BATCH, SEQ_LEN, Corpus
from numpy_packer import NumpyPacker
from torchdata.stateful_dataloader import StatefulDataLoader

import rescale_data as rd


def endless(make: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield from make()


# What others read: documents at random, and rows that were packed before.


class Documents:
    """Documents of an Arrow file at random."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._open()

    def _open(self) -> None:
        tables = [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in self.paths]
        self._chunks = [chunk for table in tables for chunk in table["tokens"].chunks]
        self._starts = np.cumsum([0, *map(len, self._chunks)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
        return {"tokens": self._chunks[chunk][int(index - self._starts[chunk])].values.to_numpy()}

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class Rows:
    """Packed rows in a memory map, which is how many write it themselves."""

    def __init__(self, corpus: Corpus) -> None:
        self._path = corpus.folder / "rows.npy"
        if not self._path.exists():
            parts = [part[: len(part) // SEQ_LEN * SEQ_LEN].reshape(-1, SEQ_LEN) for part in corpus.flat()]
            np.save(self._path, np.concatenate(parts))
        self._rows: Any = None

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.array[index].astype(np.int64))

    @property
    def array(self) -> np.ndarray:
        if self._rows is None:
            self._rows = np.load(self._path, mmap_mode="r")
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}


# Loaders


def rows_loader(corpus: Corpus, num_workers: int = 0) -> Any:
    return StatefulDataLoader(
        Rows(corpus), batch_size=MICRO_BATCH, shuffle=True, drop_last=True, num_workers=num_workers
    )


def packer_loader(corpus: Corpus, num_workers: int = 0) -> Any:
    dataset = NumpyPacker(corpus.paths("parquet"), SEQ_LEN, EOS)
    return StatefulDataLoader(dataset, batch_size=MICRO_BATCH, drop_last=True, num_workers=num_workers)


def lit_loader(corpus: Corpus, num_workers: int = 0) -> Any:
    import litdata

    folder = _optimized(corpus.folder / "litdata", corpus.paths("flat"))
    dataset = _lit_dataset(folder)
    return litdata.StreamingDataLoader(dataset, batch_size=MICRO_BATCH, drop_last=True, num_workers=num_workers)


def _lit_dataset(folder: Path) -> Any:
    import litdata

    loader = litdata.TokensLoader(block_size=SEQ_LEN)
    return litdata.StreamingDataset(str(folder), item_loader=loader, shuffle=True, drop_last=True)


def _optimized(folder: Path, paths: list[Path]) -> Path:
    import litdata

    if not folder.exists():
        litdata.optimize(
            fn=_tokens_of,
            inputs=[str(path) for path in paths],
            output_dir=str(folder),
            chunk_size=SEQ_LEN * 2048,
            num_workers=1,
            item_loader=litdata.TokensLoader(),
            verbose=False,
        )
    return folder


def _tokens_of(path: str) -> Iterator[torch.Tensor]:
    yield torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int32))


def mosaic_loader(corpus: Corpus, num_workers: int = 0) -> Any:
    streaming = _streaming()
    dataset = streaming.StreamingDataset(local=str(_mds(corpus)), shuffle=True, batch_size=MICRO_BATCH)
    return streaming.StreamingDataLoader(
        dataset, batch_size=MICRO_BATCH, num_workers=num_workers, drop_last=True, collate_fn=_stacked
    )


def _mds(corpus: Corpus) -> Path:
    """Write the packed rows as MDS shards, once; return their folder."""
    folder = corpus.folder / "mds"
    if not folder.exists():
        with _streaming().MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{SEQ_LEN}"}) as writer:
            for row in Rows(corpus).array:
                writer.write({"tokens": row})
    return folder


def our_mds_loader(corpus: Corpus, num_workers: int = 0) -> Any:
    """The shards of `mosaic_loader`, by the source in examples/sources."""
    return _ours(_example("mds_source").MdsSource(_mds(corpus)), num_workers)


def our_lance_loader(corpus: Corpus) -> Any:
    """The table of `lance_loader`, by the source in examples/sources."""
    _lance_table(corpus)
    return _ours(_example("lance_source").LanceSource(str(corpus.folder / "lancedb" / "rows.lance")), 0)


def _ours(source: Any, num_workers: int) -> rd.DataLoader:
    return rd.DataLoader(source, global_batch_size=MICRO_BATCH, num_workers=num_workers, collate_fn=_stacked)


def _example(name: str) -> Any:
    folder = str(Path(__file__).parents[1] / "examples" / "sources")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def _streaming() -> Any:
    """Mosaic Streaming imports torchvision, of which PyPI has only the build for CUDA: beside a torch for the CPU that finds
    no operators of its own, and raises. Nothing here calls one, so that their names are enough."""
    try:
        return importlib.import_module("streaming")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        _declared.append(library)
        return importlib.import_module("streaming")


_declared: list[Any] = []  # a library takes its operators with it


def _stacked(samples: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))


def grain_loader(corpus: Corpus) -> Any:
    import grain

    return _grain_packed(grain.MapDataset.source(Documents(corpus.paths("arrow"))).shuffle(seed=0).repeat())


def _grain_packed(documents: Any) -> Any:
    import grain

    packed = grain.experimental.ConcatThenSplitIterDataset(
        documents.to_iter_dataset(), length_struct={"tokens": SEQ_LEN}
    )
    return packed.batch(MICRO_BATCH)


def hf_loader(corpus: Corpus) -> Any:
    import datasets

    folder = corpus.folder / "hf"
    if not folder.exists():
        rows = Rows(corpus).array
        column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1).astype(np.int32)), SEQ_LEN)
        datasets.Dataset(pa.table({"tokens": column})).save_to_disk(str(folder))
    dataset = datasets.load_from_disk(str(folder)).with_format("torch")
    return StatefulDataLoader(dataset, batch_size=MICRO_BATCH, shuffle=True, drop_last=True)


def lance_loader(corpus: Corpus) -> Any:
    from lancedb.permutation import Permutation, permutation_builder

    table = _lance_table(corpus)
    order = Permutation.from_tables(table, permutation_builder(table).shuffle(seed=0).execute())
    rows = order.with_transform(_tensor_of)
    return torch.utils.data.DataLoader(rows, batch_size=MICRO_BATCH, drop_last=True, collate_fn=_itself)


def _lance_table(corpus: Corpus) -> Any:
    import lancedb

    database = lancedb.connect(str(corpus.folder / "lancedb"))
    rows = Rows(corpus).array
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1).astype(np.int32)), SEQ_LEN)
    return database.create_table("rows", pa.table({"tokens": column}), mode="overwrite")


def _tensor_of(batch: Any) -> torch.Tensor:
    values = batch.column("tokens").flatten().to_numpy()
    return torch.from_numpy(values.astype(np.int64)).view(-1, SEQ_LEN)


def _itself(batch: torch.Tensor) -> torch.Tensor:
    return batch


def megatron_loader(corpus: Corpus) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    prefixes = sorted({str(path.with_suffix("")) for path in corpus.paths("megatron")})
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQ_LEN,
        blend=(prefixes, [1.0] * len(prefixes)),
        split="1,0,0",
        path_to_cache=str(corpus.folder / "megatron-cache"),
        tokenizer=SimpleNamespace(eod=EOS, pad=EOS, vocab_size=50_000, unique_identifiers={"class": "none"}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    train = BlendedMegatronDatasetBuilder(GPTDataset, [40_000, 0, 0], lambda: True, config).build()[0]
    return torch.utils.data.DataLoader(train, batch_size=MICRO_BATCH, drop_last=True)


# Mixtures of 16


def lit_mixture(corpus: Corpus) -> Iterator[Any]:
    import litdata

    parts = [_lit_dataset(_optimized(corpus.folder / f"lit-{p.stem}", [p])) for p in corpus.paths("flat")]
    mixed = litdata.CombinedStreamingDataset(parts, weights=[1 / len(parts)] * len(parts), iterate_over_all=False)
    return endless(lambda: litdata.StreamingDataLoader(mixed, batch_size=MICRO_BATCH, drop_last=True))


def grain_mixture(corpus: Corpus) -> Iterator[Any]:
    import grain

    parts = [grain.MapDataset.source(Documents([path])).shuffle(seed=0).repeat() for path in corpus.paths("arrow")]
    return iter(_grain_packed(grain.MapDataset.mix(parts, weights=[1 / len(parts)] * len(parts))))


def hf_mixture(corpus: Corpus) -> Iterator[Any]:
    """Streams of documents interleaved, and packed as the library's own examples do, 1,000 documents at a time."""
    import datasets

    parts = [
        datasets.load_dataset(
            "parquet", data_files=str(path), split="train", streaming=True, cache_dir=str(corpus.folder / "hf-cache")
        ).shuffle(seed=0, buffer_size=1024)
        for path in corpus.paths("parquet")
    ]
    mixed = datasets.interleave_datasets(parts, seed=0, stopping_strategy="all_exhausted")
    packed = mixed.map(_grouped, batched=True, batch_size=1000).with_format("torch")
    return endless(lambda: StatefulDataLoader(packed, batch_size=MICRO_BATCH, drop_last=True))


def _grouped(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    tokens = list(itertools.chain.from_iterable([*document, EOS] for document in rows["tokens"]))
    size = len(tokens) // SEQ_LEN * SEQ_LEN
    return {"tokens": [tokens[i : i + SEQ_LEN] for i in range(0, size, SEQ_LEN)]}


def hf_json(path: Path, encode: Callable[[list[str]], list[list[int]]]) -> Iterator[Any]:
    import datasets

    cache = str(path.parent / "hf-json-cache")
    lines = datasets.load_dataset("json", data_files=str(path), split="train", streaming=True, cache_dir=cache)
    tokens = lines.shuffle(seed=0, buffer_size=1024).map(
        partial(_encoded, encode), batched=True, batch_size=1000, remove_columns=["text"]
    )
    packed = tokens.map(_grouped, batched=True, batch_size=1000).with_format("torch")
    return endless(lambda: StatefulDataLoader(packed, batch_size=MICRO_BATCH, drop_last=True))


def _encoded(encode: Callable[[list[str]], list[list[int]]], rows: dict[str, list[str]]) -> dict[str, Any]:
    return {"tokens": encode(rows["text"])}
