"""How fast is rescale_data beside other loaders, each as its users would configure it, on one corpus and in one run?

    python benchmarks/bench_peers.py [--out RESULT.json] [--page RESULTS.md] [--only packed,resume,...] [--quick]

Packed int64 batches [8, 4096] in the trainer's process and with two workers, a mixture of 16, JSON lines tokenized on the fly,
rows of 64 kB, and resuming. Each contender has a process of its own and goes on where its last round ended; rounds are taken in
turns, so that a noisy machine is noisy for all. What runs in one process is told in CPU time, threads included; workers in wall
time. A peer that cannot be imported is left out, and why is said.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import bench_read as read
import numpy as np
import peers
import torch
from bench_read import EOS, MICRO_BATCH, ROW_GROUP, SEQ_LEN, TOKENS, Corpus

import rescale_data as rd

SOURCES, DOCUMENTS = 16, 2 * ROW_GROUP  # files of the corpus, each a source of the mixture; documents of a file
ROW_BYTES, NUM_ROWS = 2**16, 4096
PACKAGES = (
    "litdata",
    "mosaicml-streaming",
    "grain",
    "lancedb",
    "datasets",
    "tokenizers",
    "megatron-core",
    "torchdata",
    "pyarrow",
)

MARK = "<!-- what bench_peers.py has found -->"
Make = Callable[[Corpus], Iterator[Any]]


def write(corpus: Corpus) -> None:
    for kind in ("arrow", "parquet", "megatron", "flat"):
        (corpus.folder / kind).mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(SOURCES):
        lengths = rng.integers(200, 1400, DOCUMENTS)
        tokens = rng.integers(3, 50_000, lengths.sum()).astype(np.uint16)
        corpus._write(f"{number:03d}", tokens, np.concatenate([[0], np.cumsum(lengths)]))
    words = rng.integers(0, 5000, (4 * DOCUMENTS, 120))
    lines = (json.dumps({"text": " ".join(f"w{word}" for word in row)}) for row in words.tolist())
    (corpus.folder / "text.jsonl").write_text("\n".join(lines) + "\n")


# Ours


def packed(sources: list[Any], shard: rd.Shard) -> rd.BaseNode[Any]:
    rows = [rd.Reader(source, shard) for source in sources]
    nodes = {f"part{number}": node for number, node in enumerate(rows)}
    mixed = rows[0] if len(rows) == 1 else rd.WeightedSampler(nodes, dict.fromkeys(nodes, 1.0))
    return rd.TokenPacker(mixed, column="tokens", seq_len=SEQ_LEN, eos_id=EOS)


def loader_of(sources: list[Any], num_workers: int = 0, *, repeat: bool = True) -> rd.DataLoader:
    return rd.DataLoader(
        partial(packed, sources),
        global_batch_size=MICRO_BATCH,
        num_logical_shards=16,
        repeat=repeat,
        num_workers=num_workers,
    )


def arrow(corpus: Corpus, num_workers: int = 0) -> Iterator[Any]:
    return iter(loader_of([rd.ArrowSource(corpus.folder / "arrow")], num_workers))


def parquet(corpus: Corpus, num_workers: int = 0) -> Iterator[Any]:
    """Decoded in every epoch: the cache is smaller than the corpus."""
    return iter(loader_of([rd.ParquetSource(corpus.folder / "parquet", cache_bytes=2**26)], num_workers))


def large_cache(corpus: Corpus) -> Iterator[Any]:
    return iter(loader_of([rd.ParquetSource(corpus.folder / "parquet")]))


def megatron(corpus: Corpus) -> Iterator[Any]:
    return iter(loader_of([rd.MegatronSource(corpus.folder / "megatron")]))


def mixture(corpus: Corpus) -> Iterator[Any]:
    return iter(loader_of([rd.ArrowSource(path) for path in corpus.paths("arrow")]))


def of_peer(name: str, **kwargs: Any) -> Make:
    return partial(_peer, name, kwargs)


def _peer(name: str, kwargs: dict[str, Any], corpus: Corpus) -> Iterator[Any]:
    loader = getattr(peers, name)(corpus, **kwargs)
    return peers.endless(lambda: loader)


# JSON lines: by a tokenizer that looks up words, so that reading and packing are seen beside it, and by one that is used

Encode = Callable[[list[str]], Any]


def lists_of_words(corpus: Corpus) -> Encode:
    del corpus
    return lambda texts: [[int(word[1:]) + 3 for word in text.split()] for text in texts]


def words(corpus: Corpus) -> Encode:
    look_up = lists_of_words(corpus)
    return lambda texts: [np.array(tokens) for tokens in look_up(texts)]


def bpe(corpus: Corpus) -> Encode:
    """Of Hugging Face, many texts at a time."""
    tokenizer = _trained(corpus)
    return lambda texts: [each.ids for each in tokenizer.encode_batch(texts)]


def bpe_one_by_one(corpus: Corpus) -> Encode:
    tokenizer = _trained(corpus)
    return lambda texts: [tokenizer.encode(text).ids for text in texts]


def _trained(corpus: Corpus) -> Any:
    """8,192 pieces of the project's own documents, so that words of the corpus are several each."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    path = corpus.folder / "bpe.json"
    if not path.exists():
        tokenizer, level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
        tokenizer.pre_tokenizer = level(add_prefix_space=False)
        trainer = trainers.BpeTrainer(vocab_size=8192, show_progress=False, initial_alphabet=level.alphabet())
        tokenizer.train([str(page) for page in Path(__file__).parents[1].glob("**/*.md")], trainer)
        tokenizer.save(str(path))
    return Tokenizer.from_file(str(path))


def encoding_alone(encoder: Callable[[Corpus], Encode], corpus: Corpus) -> Iterator[Any]:
    """The texts in memory, encoded; as many tokens as a batch has count as a batch."""
    texts = [json.loads(line)["text"] for line in (corpus.folder / "text.jsonl").read_text().splitlines()]
    count, encode = 0, encoder(corpus)
    while True:
        for first in range(0, len(texts), 64):
            count += sum(len(tokens) + 1 for tokens in encode(texts[first : first + 64]))
            while count >= TOKENS:
                count -= TOKENS
                yield None


def json_pipeline(source: Any, encode: Encode, shard: rd.Shard) -> rd.BaseNode[Any]:
    tokens = rd.Tokenize(rd.Reader(source, shard), encode, "text")
    return rd.TokenPacker(tokens, column="tokens", seq_len=SEQ_LEN, eos_id=EOS)


def json_lines(encoder: Callable[[Corpus], Encode], corpus: Corpus) -> Iterator[Any]:
    source = rd.JsonlSource(corpus.folder / "text.jsonl", index_dir=corpus.folder / "index")
    pipeline = partial(json_pipeline, source, encoder(corpus))
    return iter(rd.DataLoader(pipeline, global_batch_size=MICRO_BATCH, num_logical_shards=8, repeat=True))


def hf_json(encoder: Callable[[Corpus], Encode], corpus: Corpus) -> Iterator[Any]:
    return peers.hf_json(corpus.folder / "text.jsonl", encoder(corpus))


# Rows of 64 kB


class LargeRows:
    def __init__(self) -> None:
        self._rows = np.random.default_rng(0).integers(0, 255, (NUM_ROWS // 16, ROW_BYTES), dtype=np.uint8)

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._rows[index % len(self._rows)])


def large_rows(corpus: Corpus) -> Iterator[Any]:
    del corpus
    return iter(rd.DataLoader(LargeRows(), global_batch_size=MICRO_BATCH, num_logical_shards=8, repeat=True))


def torch_rows(kind: str, corpus: Corpus) -> Iterator[Any]:
    del corpus
    base = torch.utils.data.DataLoader if kind == "torch" else peers.StatefulDataLoader
    loader = base(LargeRows(), batch_size=MICRO_BATCH, shuffle=True, drop_last=True)
    return peers.endless(lambda: loader)


SECTIONS: dict[str, dict[str, Make]] = {
    "packed": {
        "memory map, in order (the limit)": read.memory_map,
        "memory map, shuffled rows (a limit)": read.shuffled_memory_map,
        "ours, Arrow": arrow,
        "ours, Megatron": megatron,
        "ours, Parquet, decoded once": large_cache,
        "ours, Parquet, decoded each epoch": parquet,
        "StatefulDataLoader, NumPy packer over Parquet": of_peer("packer_loader"),
        "Grain, ConcatThenSplit": of_peer("grain_loader"),
        "Megatron-core GPTDataset": of_peer("megatron_loader"),
        "StatefulDataLoader, rows packed before": of_peer("rows_loader"),
        "LitData, packed before": of_peer("lit_loader"),
        "Mosaic Streaming, packed before": of_peer("mosaic_loader"),
        "ours, Mosaic's shards, packed before": of_peer("our_mds_loader"),
        "LanceDB, packed before": of_peer("lance_loader"),
        "ours, LanceDB's table, packed before": of_peer("our_lance_loader"),
        "HF datasets, packed before": of_peer("hf_loader"),
    },
    "two workers": {
        "ours, Arrow": partial(arrow, num_workers=2),
        "ours, Parquet": partial(parquet, num_workers=2),
        "StatefulDataLoader, NumPy packer over Parquet": of_peer("packer_loader", num_workers=2),
        "StatefulDataLoader, rows packed before": of_peer("rows_loader", num_workers=2),
        "LitData, packed before": of_peer("lit_loader", num_workers=2),
        "Mosaic Streaming, packed before": of_peer("mosaic_loader", num_workers=2),
    },
    "mixture of 16": {
        "ours, Arrow": mixture,
        "Grain": peers.grain_mixture,
        "Megatron-core BlendedDataset": of_peer("megatron_loader"),
        "LitData, packed before": peers.lit_mixture,
        "HF datasets, interleaved streams": peers.hf_mixture,
    },
    "JSON lines": {
        "encoding alone (the limit)": partial(encoding_alone, words),
        "ours": partial(json_lines, words),
        "HF datasets, streaming": partial(hf_json, lists_of_words),
    },
    "JSON lines with BPE": {
        "encoding alone (the limit)": partial(encoding_alone, bpe),
        "encoding alone, a text at a time": partial(encoding_alone, bpe_one_by_one),
        "ours": partial(json_lines, bpe),
        "ours, a text at a time": partial(json_lines, bpe_one_by_one),
        "HF datasets, streaming": partial(hf_json, bpe),
    },
    "rows of 64 kB": {
        "torch DataLoader": partial(torch_rows, "torch"),
        "StatefulDataLoader": partial(torch_rows, "stateful"),
        "ours": large_rows,
    },
}


# Resuming: seconds until the first batch after a load, of a state taken at a share of the epoch


def resume_ours(corpus: Corpus, share: float) -> dict[str, float]:
    made = partial(loader_of, [rd.ArrowSource(corpus.folder / "arrow")], repeat=False)
    loader, num_tokens = made(), sum(map(len, corpus.flat()))
    loader.skip(int(num_tokens // TOKENS * share) * MICRO_BATCH)
    next(iter(loader))
    return _resumed(loader, made)


def resume_peer(name: str, corpus: Corpus, share: float) -> dict[str, float]:
    made = partial(getattr(peers, name), corpus)
    loader = made()
    length = sum(1 for _ in loader)
    batches = iter(loader)  # alive until the state has been taken
    for _ in islice(batches, max(1, int(length * share))):
        pass
    return _resumed(loader, made)


def _resumed(loader: Any, made: Callable[[], Any]) -> dict[str, float]:
    started = time.perf_counter()
    state = loader.state_dict()
    taken = time.perf_counter() - started
    again = made()
    started = time.perf_counter()
    again.load_state_dict(state)
    next(iter(again))
    return {
        "first batch s": time.perf_counter() - started,
        "state_dict s": taken,
        "state bytes": float(len(pickle.dumps(state))),
    }


RESUMES: dict[str, Callable[[Corpus, float], dict[str, float]]] = {
    "ours, Arrow": resume_ours,
    "StatefulDataLoader, NumPy packer over Parquet": partial(resume_peer, "packer_loader"),
    "StatefulDataLoader, rows packed before": partial(resume_peer, "rows_loader"),
    "LitData, packed before": partial(resume_peer, "lit_loader"),
    "Mosaic Streaming, packed before": partial(resume_peer, "mosaic_loader"),
}


# Measuring


class Contender:
    """A process of its own; what it answers is a value, or the text of an error."""

    def __init__(self, work: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, work, *args))
        self._process.start()

    def ask(self, question: Any, limit: float = 120) -> Any:
        try:
            self._pipe.send(question)
            return self._pipe.recv() if self._pipe.poll(limit) else f"nothing came in {limit:.0f} s"
        except (EOFError, OSError):
            return "its process ended"

    def close(self) -> None:
        self.ask(None, 3)
        self._process.kill()
        self._process.join()


def _serve(pipe: Any, work: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    answer: Callable[[Any], Any] | None = None
    while (question := pipe.recv()) is not None:
        try:
            answer = answer or work(*args)
            pipe.send(answer(question))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            pipe.send(
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} ({where.name})"[:300]
            )
    pipe.send(None)


def batches_for(make: Make, corpus: Corpus) -> Callable[[float], tuple[float, float]]:
    """Microseconds of CPU and of wall time a batch, over so many seconds of CPU time: on a busy machine, too, so many batches
    that what is done once for many is shared. Workers take time of their own: then of wall time."""
    batches = make(corpus)
    next(batches)

    def answer(seconds: float) -> tuple[float, float]:
        count, cpu, wall = 0, time.process_time(), time.perf_counter()
        passed = time.perf_counter if multiprocessing.active_children() else time.process_time
        started = passed()
        while passed() - started < seconds or count < 3:
            next(batches)
            count += 1
        times = (time.process_time() - cpu) / count * 1e6, (time.perf_counter() - wall) / count * 1e6
        return round(times[0], 1), round(times[1], 1)

    return answer


def resumed_for(
    resume: Callable[[Corpus, float], dict[str, float]], corpus: Corpus
) -> Callable[[float], dict[str, float]]:
    return partial(resume, corpus)


def measure(name: str, corpus: Corpus, seconds: float, rounds: int) -> dict[str, Any]:
    contenders: dict[str, Contender] = {}
    found: dict[str, Any] = {title: [] for title in SECTIONS[name]}
    for number in range(-1, rounds):  # the first does not count
        for title, make in SECTIONS[name].items():
            if isinstance(found[title], str):
                continue
            if title not in contenders:
                contenders[title] = Contender(batches_for, make, corpus)
            value = contenders[title].ask(seconds)
            print(f"{name}, {title}: {value}", file=sys.stderr, flush=True)
            if isinstance(value, str):
                found[title] = value
            elif number >= 0:
                found[title].append(value)
    for contender in contenders.values():
        contender.close()
    return found


def measure_resumes(corpus: Corpus) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for title, resume in RESUMES.items():
        contender = Contender(resumed_for, resume, corpus)
        contender.ask(0.5)  # the first does not count
        values = {f"{share:.0%}": contender.ask(share) for share in (0.01, 0.99)}
        contender.close()
        print(f"resume, {title}: {values}", file=sys.stderr, flush=True)
        errors = [value for value in values.values() if isinstance(value, str)]
        found[title] = errors[0] if errors else values
    return found


# Telling


def report(result: dict[str, Any]) -> str:
    lines = [result["machine"], result["versions"]]
    for name, rows in result["sections"].items():
        at = 1 if name == "two workers" else 0
        unit = "rows" if name == "rows of 64 kB" else "M tokens"
        amount = MICRO_BATCH if unit == "rows" else TOKENS / 1e6
        lines += [
            "",
            f"## {name}",
            "",
            *([f"From a run of its own: {result['apart'][name]}", ""] if name in result.get("apart", {}) else []),
            f"| | {unit} a second of {'wall' if at else 'CPU'} time | us a batch |",
            "|---|---|---|",
        ]
        for title, rounds in _sorted(rows, at):
            times = [each[at] for each in rounds]
            middle = statistics.median(times)
            speeds = (
                f"{amount / middle * 1e6:,.0f} ({amount / max(times) * 1e6:,.0f} to {amount / min(times) * 1e6:,.0f})"
            )
            lines.append(f"| {title} | {speeds} | {middle:,.0f} |")
        lines += _left_out(rows)
    if result.get("resume"):
        heads = "| | first batch at 1 %, ms | at 99 %, ms | state, bytes | `state_dict()`, ms |"
        lines += ["", "## resume", "", heads, "|---|---|---|---|---|"]
        for title, found in result["resume"].items():
            if not isinstance(found, str):
                early, late = found["1%"], found["99%"]
                first = f"{early['first batch s'] * 1e3:,.0f} | {late['first batch s'] * 1e3:,.0f}"
                lines.append(f"| {title} | {first} | {late['state bytes']:,.0f} | {late['state_dict s'] * 1e3:,.2f} |")
        lines += _left_out(result["resume"])
    return "\n".join(lines)


def merged(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """A result with the sections of a later run in place of its own, which says so."""
    apart = {**whole.get("apart", {}), **dict.fromkeys(part["sections"], part["machine"])}
    sections, resume = {**whole["sections"], **part["sections"]}, part["resume"] or whole["resume"]
    return {**whole, "sections": sections, "resume": resume, "apart": apart}


def _sorted(rows: dict[str, Any], at: int) -> list[tuple[str, Any]]:
    there = [(title, rounds) for title, rounds in rows.items() if not isinstance(rounds, str)]
    return sorted(there, key=lambda row: statistics.median(each[at] for each in row[1]))


def _left_out(rows: dict[str, Any]) -> list[str]:
    return [f"\n{title} was left out: {why}" for title, why in rows.items() if isinstance(why, str)]


def versions() -> str:
    found: list[str] = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} is not installed")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="where to write the numbers as JSON")
    parser.add_argument(
        "--page", type=Path, help="a Markdown page, in which the tables replace those between its marks"
    )
    parser.add_argument("--only", default=",".join([*SECTIONS, "resume"]), help="sections, separated by commas")
    parser.add_argument("--quick", action="store_true", help="short rounds, to see that it runs")
    args = parser.parse_args()
    seconds, rounds = (0.3, 1) if args.quick else (0.6, 5)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(Path(folder) / "corpus")
        write(corpus)
        chosen = args.only.split(",")
        sections = {name: measure(name, corpus, seconds, rounds) for name in SECTIONS if name in chosen}
        resume = measure_resumes(corpus) if "resume" in chosen else {}
    result = {"machine": read.machine(), "versions": versions(), "sections": sections, "resume": resume}
    if args.out and args.out.exists() and len(sections) < len(SECTIONS):
        result = merged(json.loads(args.out.read_text()), result)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.page:
        page = args.page.read_text() if args.page.exists() else f"# Results\n\n{MARK}{MARK}\n"
        before, _, after = re.split(MARK, page)
        args.page.write_text(f"{before}{MARK}\n{report(result)}\n\n{MARK}{after}")
    print(report(result))


if __name__ == "__main__":
    main()
