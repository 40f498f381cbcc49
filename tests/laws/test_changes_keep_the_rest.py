"""Law 3: a change between segments keeps what it does not name. Of sources that stay every token comes once an epoch; those
that a window brings again are in as many logical shards as a warning says, and none is lost.

Crossed: change, the source that it is about, node over rows, mixture, node over the mixture, top, topology after the change.
The state is saved at many points, so that windows and documents are open in all ways.
"""

import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rescale_data as rd
from rescale_data.testing import full_state_dict
from tests.corpus import listed as excluded
from tests.laws.pairs import Case, cases, name_of
from tests.laws.tables import ENDLESS, LENGTHS, MIXTURES, ROWS, SOURCES, TOPS, WEIGHTS, Row, packer, rows_of, whole

N = 2
Weights = Mapping[str, float]
TOPOLOGIES = {"same": (1, 2, 0, 2), "ranks": (2, 1, 0, 2), "global batch": (1, 4, 0, 4), "worker": (1, 2, 1, 2)}
"""W, b, K, O after the change; the first of them before. Simulated ranks cannot agree on an epoch's end."""
CHANGES: dict[str, Callable[[str], list[Any]]] = {
    "nothing": lambda _: [WEIGHTS, WEIGHTS],
    "weights": lambda name: [WEIGHTS, {**WEIGHTS, name: 7}],
    "rests": lambda name: [WEIGHTS, {**WEIGHTS, name: 0}],
    "goes on": lambda name: [{**WEIGHTS, name: 0}, WEIGHTS],
    "added": lambda name: [without(WEIGHTS, name), WEIGHTS],
    "added at 0": lambda name: [without(WEIGHTS, name), {**WEIGHTS, name: 0}],
    "left out": lambda name: [WEIGHTS, without(WEIGHTS, name)],
    "left out at 0": lambda name: [{**WEIGHTS, name: 0}, without(WEIGHTS, name)],
    "rests, left out": lambda name: [WEIGHTS, {**WEIGHTS, name: 0}, without(WEIGHTS, name)],
    "added, left out": lambda name: [without(WEIGHTS, name), {**WEIGHTS, name: 0}, without(WEIGHTS, name)],
    "schedule": lambda name: [schedule(name), {**WEIGHTS, name: 7}],
    "schedule, left out": lambda name: [schedule(name), without(WEIGHTS, name)],
    "max_epochs": lambda _: [WEIGHTS, WEIGHTS],
    "seq_len": lambda _: [WEIGHTS, WEIGHTS],
    "files": lambda _: [WEIGHTS, WEIGHTS],
    "blocklist": lambda _: [WEIGHTS, WEIGHTS],
    "files, weights": lambda name: [WEIGHTS, {**WEIGHTS, name: 7}],
    "files, blocklist": lambda _: [WEIGHTS, WEIGHTS],
}
"""The weights of each segment, by the source that is changed."""
OVER = {name: ROWS[name] for name in ("plain", "Map", "Filter", "CleanDocuments", "Shuffle")}


def schedule(name: str) -> rd.Schedule:
    """A source rests soon, and another one is drawn from more after that."""
    rests = {**WEIGHTS, name: 0}
    return rd.Schedule([(0, WEIGHTS), (30, rests), (90, {**rests, "web": 1}), (150, rests), (210, {**rests, "web": 1})])


def without(weights: Weights, name: str) -> Weights:
    return {other: weight for other, weight in weights.items() if other != name}


def rotated(row: Row, rng: np.random.Generator) -> Row:
    """Return the row with its tokens in a random order: read again with other random numbers, tokens come twice or never."""
    return {**row, "tokens": rng.permutation(row["tokens"])}


def numbers(texts: list[str]) -> list[list[int]]:
    return [[int(word) for word in text.split() if word.isdigit()] for text in texts]


RANDOM = {
    "RandomMap": lambda node: rd.RandomMap(node, rotated),
    "Tokenize": lambda node: rd.Tokenize(node, numbers, "text", batch_size=3),
}
"""In place of those of the tables, whose tokens do not say which document they are of."""
TOPS_WITHOUT_REST = {
    **TOPS,
    "TokenPacker": partial(packer, last="pad"),
    "TokenPacker-labels": lambda node: rd.TokenPacker(
        node, column="tokens", seq_len=11, eos_id=None, labels=True, last="pad"
    ),
    "TokenPacker-TokenPacker": lambda node: packer(packer(node, seq_len=4, last="pad"), last="pad"),
    "TokenPacker-WholeDocumentPacker": lambda node: whole(packer(node, seq_len=4, last="pad")),
    "WholeDocumentPacker-TokenPacker": lambda node: packer(whole(node), last="pad"),
}
DIMENSIONS: Mapping[str, Any] = {
    "change": [*CHANGES],
    "source": ["code", "books"],
    "rows": [*ROWS],
    "mixture": [name for name in MIXTURES if name != "samples-first"] + ["nested-tokens-all"],
    "over": [*OVER, *RANDOM],
    "top": [*TOPS_WITHOUT_REST],
    "then": [*TOPOLOGIES],
}
MIXED: dict[str, Callable[..., rd.Node[Any]]] = {
    **MIXTURES,
    "samples": partial(MIXTURES["samples"]),
    "nested-tokens-all": partial(MIXTURES["nested-tokens"], stop="all"),
}


def scheduled(below: Callable[[str], Any], weights: Weights, *, schedule: rd.Schedule, **kwargs: Any) -> rd.Node[Any]:
    return rd.WeightedSampler({name: below(name) for name in weights}, schedule, **kwargs)


FLAT = ("samples", "samples-all", "tokens", "tokens-all")


def allowed(case: Case) -> bool:
    change, alone = case["change"], case["mixture"] == "one source"
    if alone and change not in ("nothing", "seq_len", "files", "blocklist", "files, blocklist"):
        return False
    if change in ("schedule", "schedule, left out", "max_epochs") and case["mixture"] not in FLAT:
        return False
    if change == "seq_len" and case["top"] not in ("TokenPacker", "TokenPacker-pad", "WholeDocumentPacker"):
        return False
    if case["over"] == "Tokenize" and case["rows"] in ("Tokenize", "CleanDocuments"):
        return False
    return case["then"] != "ranks" or case["mixture"] in ENDLESS


def corpus(name: str, times: int) -> list[Row]:
    first = 1000 * [*LENGTHS].index(name)
    rows = rows_of(times * LENGTHS[name], first)
    return [{**row, "text": " ".join(map(str, row["tokens"]))} for row in rows]


class Segments:
    """The loaders of a case, segment after segment."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.endless = case["mixture"] in ENDLESS
        self.rows = {name: corpus(name, 25 if self.endless else 1) for name in LENGTHS}
        self.sources: dict[str, Any] = {n: rd.DatasetSource(rows, name=n) for n, rows in self.rows.items()}
        self.weights = CHANGES[case["change"]](case["source"])
        if "files" in case["change"]:
            SOURCES["parquet"](folder, self.rows["web"])
        self.use(0)

    def use(self, segment: int) -> None:
        """Be what the pipeline is in a segment."""
        self.segment = segment
        if "files" in self.case["change"]:
            if segment:
                (self.folder / "b").mkdir(exist_ok=True)
                SOURCES["parquet"](self.folder / "b", rows_of([5, 0, 3], 5000))
            elif (self.folder / "b").exists():
                (self.folder / "b" / "a.parquet").unlink()
            self.sources["web"] = rd.ParquetSource(self.folder)

    def below(self, shard: rd.Shard, name: str) -> rd.Node[Any]:
        exclude = None
        if "blocklist" in self.case["change"]:
            is_changed = name == ("web" if "files" in self.case["change"] else self.case["source"])
            exclude = excluded(self.sources[name], ([4, 9, 15] if self.segment else [2, 8]) if is_changed else [])
        node: Any = rd.Reader(self.sources[name], shard, shuffle=False, exclude=exclude)
        return {**ROWS, **RANDOM}[self.case["rows"]](node)

    def pipeline(self, shard: rd.Shard) -> rd.Node[Any]:
        weights, mixed_by = self.weights[self.segment], MIXED[self.case["mixture"]]
        if self.case["change"] == "max_epochs" and self.segment:
            mixed_by = partial(mixed_by, max_epochs={self.case["source"]: 1})
        if isinstance(weights, rd.Schedule):
            mixed_by = partial(scheduled, schedule=weights, **mixed_by.keywords)
            weights = WEIGHTS
        mixed = mixed_by(partial(self.below, shard), weights)
        over = {**OVER, **RANDOM}[self.case["over"]](mixed)
        form = {"seq_len": 7} if self.case["change"] == "seq_len" and self.segment else {}
        return TOPS_WITHOUT_REST[self.case["top"]](over, **form)

    def tokens(self, name: str) -> list[set[int]]:
        """The tokens of a corpus in the present segment, in each logical shard: higher ones later, but for windows."""
        nodes = [{**OVER, **RANDOM}[self.case["over"]](self.below(rd.Shard(i, N), name)) for i in range(N)]
        return [{int(token) for sample in node for token in sample["tokens"]} for node in nodes]

    def ranks(self, segment: int, state: Any = None) -> list[rd.DataLoader]:
        self.use(segment)
        w, b, k, o = TOPOLOGIES[self.case["then"] if segment else "same"]
        sizes: Any = {"global_batch_size": o, "micro_batch_size": b, "num_logical_shards": N, "dp_world_size": w}
        workers: Any = {"num_workers": k, "multiprocessing_context": "fork" if k else None}
        how: Any = {**sizes, **workers, "repeat": self.endless, "tail": "pad", "collate_fn": listed}
        ranks = [rd.DataLoader(self.pipeline, dp_rank=rank, **how) for rank in range(w)]
        for loader in ranks if state is not None else ():
            loader.load_state_dict(state)
        return ranks


def listed(samples: list[Any]) -> dict[str, Any]:
    return {"samples": [[int(token) for token in sample["tokens"]] for sample in samples]}


def steps(ranks: list[rd.DataLoader]) -> Iterator[list[int]]:
    """The tokens of each step of all ranks, to the end of the epoch."""
    iterators = [iter(loader) for loader in ranks]
    while True:
        found: list[int] = []
        for _ in range(ranks[0].gradient_accumulation_steps):
            batches = [next(batches, None) for batches in iterators]
            if batches[0] is None:
                return
            for batch in batches:
                valid = batch["valid"].tolist() if "valid" in batch else itertools.repeat(True)
                found += [t for tokens, real in zip(batch["samples"], valid) for t in tokens if real]  # noqa: B905
        yield [token for token in found if token >= 10]


def close(ranks: list[rd.DataLoader]) -> None:
    for loader in ranks:
        loader.close()


def saves(segments: Segments, most: int) -> list[tuple[list[int], Any]]:
    """What was delivered, and the state, at several points behind each of the segments but the last."""
    found: list[tuple[list[int], Any]] = [([], None)]
    for segment in range(len(segments.weights) - 1):
        before, found = found[-1] if segment == 0 else found[len(found) // 2], []
        ranks = segments.ranks(segment, before[1])
        delivered = list(before[0])
        for step in itertools.islice(steps(ranks), 30 if segments.endless else None):
            delivered += step
            found.append((list(delivered), full_state_dict(ranks)))
        close(ranks)
        every = max(1, len(found) // most)
        found = found[segment % every :: every]
    return found


CASES = [(case, 6) for case in cases(DIMENSIONS, allowed)]
SENSITIVE = [("schedule, left out", "Shuffle"), ("rests, left out", "WholeDocumentPacker"), ("added at 0", "Shuffle")]
SENSITIVE += [("blocklist", "TokenPacker")]
"""Changes of a mixture by tokens that few of the positions show, with the nodes that have windows: saved at each step."""
PLAIN = {"source": "code", "rows": "plain", "mixture": "tokens", "over": "plain", "then": "same"}
CASES += [({"change": change, **PLAIN, "top": top}, 60) for change, top in SENSITIVE]
CASES += [({"change": "files, blocklist", **PLAIN, "mixture": "one source", "top": "TokenPacker"}, 60)]


@pytest.mark.parametrize(("case", "most"), CASES, ids=[name_of(case) for case, _ in CASES])
def test_a_change_keeps_what_it_does_not_name(
    case: Case, most: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rescale_data")
    segments, last = Segments(case, tmp_path), len(CHANGES[case["change"]](case["source"])) - 1
    saved = saves(segments, most)
    segments.use(0)
    before = {name: segments.tokens(name) for name in LENGTHS}
    segments.use(last)
    after = {name: segments.tokens(name) for name in LENGTHS}
    named = {"web"} if case["mixture"] == "one source" else {*segments.weights[last]}
    for delivered, state in saved:
        caplog.clear()
        ranks = segments.ranks(last, state)
        begun_again = sum(int(n) for n in re.findall(r"(\d+) of \d+ logical shards were within a", caplog.text))
        rest = [t for step in itertools.islice(steps(ranks), 30 if segments.endless else None) for t in step]
        counts = Counter(delivered + rest)
        shards_with_repeats = set()
        for name in named:
            rests = case["change"] in ("schedule", "schedule, left out", "max_epochs") or (
                case["mixture"] != "one source" and not all(weights.get(name) for weights in segments.weights)
            )
            for shard, one in enumerate(before[name]):
                stays = one & set().union(*after[name])  # files that join divide rows otherwise
                if any(counts[token] > 1 for token in stays):
                    shards_with_repeats.add(shard)
                due = stays
                if segments.endless or rests:  # what is left of a window below the mixture waits for its source
                    window = 60 if case["rows"] == "Shuffle" else 0
                    due = {t for t in stays if t <= max(one.intersection(delivered), default=0) - window}
                assert due <= counts.keys(), f"{name}: never {sorted(due - counts.keys())}"
                assert "blocklist" not in case["change"] or not (one - stays).intersection(rest), "what is blocked came"
        assert len(shards_with_repeats) <= begun_again
        if "files" in case["change"] and not segments.endless:
            counts = Counter(t for step in steps(ranks) for t in step)
            assert counts == Counter(t for name in named for tokens in segments.tokens(name) for t in tokens)
        close(ranks)
