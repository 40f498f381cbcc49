"""Fine-tuning on conversations: JSON lines, a chat template, a loss mask, whole conversations packed; on 4, 2 and then 3 ranks.

    python examples/sft.py

The template makes of each conversation its tokens, and which of them are learned: those of the assistant. The ranks are
processes with gloo that save and load with DCP, as in training. Then every sample is unpacked: each conversation has come once
in the epoch, with exactly its mask, but for those that are longer than a sample, which are dropped and counted. It exits
with 0 only if all of that holds.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mixture_parts.tokenizer import NUM_BYTES, NUM_MERGES, Tokenize, train

import rescale_data as rd

SEQ_LEN, GLOBAL_BATCH, SHARDS = 256, 12, 24
SEGMENTS = [(4, 2), (2, 3), (3, None)]  # ranks, steps; None to the end of the epoch
FIRST_SPECIAL = 1 + NUM_BYTES + NUM_MERGES
ROLES = {"user": FIRST_SPECIAL, "assistant": FIRST_SPECIAL + 1}
END_OF_TURN = FIRST_SPECIAL + 2
WORDS = ("a", "the", "red", "old", "house", "river", "garden", "bird", "why", "where", "is", "sings", "flows", "opens")


def write_conversations(path: Path, num: int) -> list[dict[str, Any]]:
    """Of one to four turns; every 20th has no answer, every 50th is very long."""
    chance = random.Random(0)

    def message(role: str, num_words: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(chance.choices(WORDS, k=num_words))}

    found = []
    for i in range(num):
        longest = 400 if i % 50 == 49 else 24
        turns = range(chance.randint(1, 4))
        messages = [message(role, chance.randint(1, longest)) for _ in turns for role in ("user", "assistant")]
        found.append({"id": i, "messages": messages[:1] if i % 20 == 19 else messages})
    path.write_text("\n".join(map(json.dumps, found)))
    return found


class ChatTemplate:
    """``{"messages": [{"role": ..., "content": ...}, ...]}`` -> tokens, and that those of the assistant are learned."""

    def __init__(self, tokenize: Tokenize) -> None:
        self._tokenize = tokenize

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        messages = row["messages"]
        tokens: list[int] = []
        learned: list[bool] = []
        for message, ids in zip(messages, self._tokenize([each["content"] for each in messages]), strict=True):
            tokens += [ROLES[message["role"]], *ids, END_OF_TURN]
            learned += [False, *[message["role"] == "assistant"] * (len(ids) + 1)]
        return {"id": row["id"], "tokens": np.array(tokens), "loss_mask": np.array(learned)}


def template_of(conversations: list[dict[str, Any]]) -> ChatTemplate:
    """With a tokenizer that is trained here and now."""
    return ChatTemplate(train([message["content"] for row in conversations[:40] for message in row["messages"]]))


# copy from here
def pipeline(source: rd.Source, template: ChatTemplate, shard: rd.Shard) -> rd.BaseNode[Any]:
    """One logical shard: no ranks in here."""
    rows = rd.Map(rd.Reader(source, shard), template)
    return rd.WholeDocumentPacker(
        rows, column="tokens", seq_len=SEQ_LEN, window=8, labels=True, long="drop",
        columns={"loss_mask": torch.bool}, payload=["id"],
    )  # fmt: skip


# to here


def unpacked(sample: dict[str, Any]) -> list[tuple[int, list[int], list[int]]]:
    """The id, the tokens and the labels of each conversation of a sample."""
    places = [sample["doc_ids"] == number for number in range(len(sample["id"]))]
    return [
        (chat, sample["tokens"][there].tolist(), sample["labels"][there].tolist())
        for chat, there in zip(sample["id"], places, strict=True)
    ]


def run_rank(folder: Path, segment: int, rank: int) -> None:
    """One rank of a segment: go on from the checkpoint of the one before, take some steps, write down what came, save."""
    world_size, steps = SEGMENTS[segment]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting{segment}", rank=rank, world_size=world_size)
    conversations = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    # copy from here
    loader = rd.DataLoader(
        functools.partial(pipeline, rd.JsonlSource(folder / "chats.jsonl"), template_of(conversations)),
        global_batch_size=GLOBAL_BATCH, micro_batch_size=GLOBAL_BATCH // world_size, num_logical_shards=SHARDS, tail="pad",
    )  # fmt: skip
    # to here
    if segment:
        dcp.load({"loader": loader}, checkpoint_id=folder / f"checkpoint{segment - 1}")
    came = []
    for batch in loader:
        real = [{key: values[i] for key, values in batch.items()} for i in range(loader.last_batch_samples)]
        came += [chat for sample in real for chat in unpacked(sample)]
        if steps is not None and loader.step == steps + sum(before or 0 for _, before in SEGMENTS[:segment]):
            break
    dcp.save({"loader": loader}, checkpoint_id=folder / f"checkpoint{segment}")
    counts = {key: value for key, value in loader.progress().items() if key.endswith("_documents")}
    (folder / f"came{segment}.{rank}").write_text(json.dumps([came, counts]))
    dist.destroy_process_group()


def run_leg(folder: Path, segment: int) -> tuple[list[Any], Counter[str]]:
    """What came on all ranks, and what they have counted since the run began."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.checkpoint", "rescale_data"])
    ranks = [context.Process(target=run_rank, args=(folder, segment, rank)) for rank in range(SEGMENTS[segment][0])]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"a rank of segment {segment} has failed")
    found = [json.loads((folder / f"came{segment}.{rank}").read_text()) for rank in range(len(ranks))]
    return [chat for came, _ in found for chat in came], sum((Counter(counts) for _, counts in found), Counter())


def is_as_written(chat: tuple[int, list[int], list[int]], written: dict[str, Any]) -> bool:
    """Whether a conversation that was unpacked has the tokens of its template, and labels where they are learned."""
    _, tokens, labels = chat
    following = zip(written["tokens"][1:].tolist(), written["loss_mask"][1:].tolist(), strict=True)
    return tokens == written["tokens"].tolist() and labels == [*[t if m else -100 for t, m in following], -100]


def main(num_conversations: int = 400) -> int:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        conversations = write_conversations(folder / "chats.jsonl", num_conversations)
        written = [template_of(conversations)(row) for row in conversations]
        came: list[Any] = []
        counts: Counter[str] = Counter()
        for segment, (world_size, _) in enumerate(SEGMENTS):
            chats, counts = run_leg(folder, segment)
            came += chats
            tokens = [label for _, _, labels in chats for label in labels]
            share = sum(label != -100 for label in tokens) / max(1, len(tokens))
            print(f"{world_size} ranks: {len(chats)} conversations, {len(tokens)} tokens, {share:.0%} of them learned")
    short = {row["id"] for row in written if len(row["tokens"]) <= SEQ_LEN}
    expected = {
        "dropped_documents": num_conversations - len(short),
        "untrained_documents": sum(not written[number]["loss_mask"].any() for number in short),
    }
    once = Counter(chat[0] for chat in came) == Counter(short)
    same = all(is_as_written(chat, written[chat[0]]) for chat in came)
    counted = {key: int(value) for key, value in counts.items()} == expected
    print(f"each of {len(short)} conversations once: {once}; each with its mask: {same}")
    print(f"counted over all segments: {dict(sorted(counts.items()))}, as it should be: {counted}")
    print(
        f"{'all of it holds' if once and same and counted else 'SOMETHING DIFFERS'} ({time.perf_counter() - started:.0f} s)"
    )
    return 0 if once and same and counted else 1


if __name__ == "__main__":
    sys.exit(main())
