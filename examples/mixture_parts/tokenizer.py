"""Byte pair encoding, trained here and now: Hugging Face `tokenizers` where it is installed, else a small one in Python."""

import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

EOS = 0
NUM_BYTES, NUM_MERGES = 256, 200
Tokenize = Callable[[list[str]], list[list[int]]]


def train(texts: Sequence[str]) -> Tokenize:
    """A function from texts to token ids, as `rd.Tokenize` takes it."""
    if importlib.util.find_spec("tokenizers"):
        return _hugging_face(texts)
    return BytePairs(_merges(Counter(word for text in texts for word in _words(text))))


def _hugging_face(texts: Sequence[str]) -> Tokenize:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special, size = ["<eos>"], 1 + NUM_BYTES + NUM_MERGES
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    )
    return lambda batch: [encoding.ids for encoding in tokenizer.encode_batch(batch)]


class BytePairs:
    """Token 0 ends a document, 1 to 256 are bytes, then come the merges in their order."""

    def __init__(self, merges: list[tuple[int, int]]) -> None:
        self._rank = {pair: 1 + NUM_BYTES + i for i, pair in enumerate(merges)}
        self._word = functools.lru_cache(2**16)(self._encode)

    def __call__(self, texts: list[str]) -> list[list[int]]:
        return [[token for word in _words(text) for token in self._word(word)] for text in texts]

    def _encode(self, word: str) -> tuple[int, ...]:
        tokens = _bytes(word)
        while pairs := [pair for pair in pairwise(tokens) if pair in self._rank]:
            best = min(pairs, key=self._rank.__getitem__)
            tokens = _merged(tokens, best, self._rank[best])
        return tokens


def _words(text: str) -> list[str]:
    return re.findall(r" ?\w+|\s+|[^\w\s]+", text)


def _bytes(word: str) -> tuple[int, ...]:
    return tuple(1 + byte for byte in word.encode())


def _merges(words: Counter[str]) -> list[tuple[int, int]]:
    """The pairs of tokens that are most frequent, one after the other."""
    split = {word: _bytes(word) for word, count in words.items() if count > 1}
    merges: list[tuple[int, int]] = []
    for token in range(1 + NUM_BYTES, 1 + NUM_BYTES + NUM_MERGES):
        pairs: Counter[tuple[int, int]] = Counter()
        for word, tokens in split.items():
            for pair in pairwise(tokens):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        split = {word: _merged(tokens, best, token) for word, tokens in split.items()}
    return merges


def _merged(tokens: tuple[int, ...], pair: tuple[int, int], into: int) -> tuple[int, ...]:
    if pair[0] not in tokens:
        return tokens
    found: list[int] = []
    for token in tokens:
        if found and token == pair[1] and found[-1] == pair[0]:
            found[-1] = into
        else:
            found.append(token)
    return tuple(found)
