"""Neighbours of positions of a corpus: the tokens after earlier occurrences of the same last tokens or words.

The corpus is one sequence, in which position i sees the positions before i only. For the documents to be scored, which come
last, that is what a compressor sees.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from hpnlp.data.reading.files import Progress, ignore_progress
from hpnlp.errors import RangeError
from hpnlp.ops.search.contexts import ContextHashes, ContextIndex
from hpnlp.spec import build, parse_one
from hpnlp.types import InputError, Tokenizer, check_options, option

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96)
WORKERS = 2  # contexts that are sorted at the same time, each with about 30 bytes per token


@dataclasses.dataclass(frozen=True)
class Suffix:
    """Kinds of contexts that are looked up."""

    shortest: int = option(2, "Number of tokens of the shortest context.", least=1)
    longest: int = option(
        48, "Number of tokens of the longest context; those between are the ones of LENGTHS.", most=LENGTHS[-1]
    )
    words: int = option(
        3,
        "Contexts of the beginning of the present word with 1 to `words` words before it; 0 for none.",
        least=0,
        most=8,
    )
    k: int = option(32, "Number of most recent occurrences of each context that are returned.", least=1, most=1024)

    def __post_init__(self) -> None:
        check_options(self)
        if self.shortest > self.longest:
            limits = f"shortest={self.shortest}, longest={self.longest}: expected shortest <= longest"
            raise RangeError(type(self).__name__, limits)
        if not self.contexts:
            raise InputError(
                f"suffix: shortest={self.shortest}, longest={self.longest}, words=0: no context has such a length, which are "
                f"{', '.join(map(str, LENGTHS))} tokens"
            )

    @property
    def lengths(self) -> list[int]:
        """Numbers of tokens of the contexts."""
        return [n for n in LENGTHS if self.shortest <= n <= self.longest]

    @property
    def contexts(self) -> int:
        """Number of contexts of a position."""
        return len(self.lengths) + self.words


@dataclasses.dataclass(frozen=True)
class SuffixNeighbours:
    """Neighbours of Q positions.

    Attributes:
      tokens: Integers `[Q, n, k]`: for each of n contexts, the tokens after its most recent occurrences; negative for none.
      count: int32 `[Q, n]`: number of all earlier occurrences.
    """

    tokens: np.ndarray
    count: np.ndarray


def find(spec: str) -> Suffix:
    """The contexts of a spec.

    Args:
      spec: As in "suffix(longest=48, words=3, k=32)".

    Returns:
      The contexts.

    Raises:
      InputError: The spec is not valid.
    """
    return build(parse_one(spec, "store"), {"suffix": Suffix}, "store")


def word_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """Finds the tokens that consist of letters, digits and underscores, and of bytes of characters beyond ASCII.

    Returns:
      bool `[V]`.
    """
    texts = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    return np.array([bool(t) and all(b >= 128 or chr(b).isalnum() or b == ord("_") for b in t) for t in texts])


def neighbours(
    suffix: Suffix,
    corpus: np.ndarray,
    is_word: np.ndarray,
    queries: Sequence[tuple[np.ndarray, np.ndarray]],
    progress: Progress = ignore_progress,
) -> list[SuffixNeighbours]:
    """Finds the neighbours of positions.

    Args:
      suffix: The contexts.
      corpus: Integers `[N]`, all tokens in their order.
      is_word: bool `[V]`, see `word_tokens`.
      queries: Pairs of positions `[Q]` and limits `[Q]`: neighbours of a position come from before its limit, which is at most
        the position.
      progress: Called as `progress(step, done, total)`.

    Returns:
      The neighbours of each pair.

    Raises:
      InputError: A limit is behind its position.

    Cost: a sort of N numbers for each context, two of them at a time with about 30 bytes per token.
    """
    for positions, limits in queries:
        if np.any(limits > positions):
            raise InputError("a position would see itself or a later one: expected limits of at most the positions")
    contexts = _contexts(suffix, corpus, is_word)
    dtype = np.int16 if len(is_word) <= np.iinfo(np.int16).max else np.int32
    results = [
        SuffixNeighbours(
            np.empty((len(positions), len(contexts), suffix.k), dtype),
            np.empty((len(positions), len(contexts)), np.int32),
        )
        for positions, _ in queries
    ]

    def search(column: int) -> None:
        context = contexts[column]()
        index = ContextIndex.build(context[:-1], corpus)
        for (positions, limits), result in zip(queries, results, strict=True):
            recent = index.recent(context[positions], limits, suffix.k)
            result.tokens[:, column], result.count[:, column] = recent.tokens, recent.count

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        for done, _ in enumerate(pool.map(search, range(len(contexts))), 1):
            progress("indexing", done, len(contexts))
    return results


def _contexts(suffix: Suffix, tokens: np.ndarray, is_word: np.ndarray) -> list[Callable[[], np.ndarray]]:
    """Functions that hash the contexts of all positions 0 to N of N tokens, uint64 `[N + 1]`."""
    hashes = ContextHashes(tokens)
    contexts: list[Callable[[], np.ndarray]] = [lambda n=n: hashes.last_tokens(n) for n in suffix.lengths]
    return contexts + [lambda n=n: hashes.last_words(is_word, n) for n in range(1, suffix.words + 1)]


@dataclasses.dataclass(frozen=True)
class SuffixIndex:
    """The contexts of a text, which the contexts of other texts are looked up in.

    Attributes:
      suffix: The contexts.
      is_word: bool `[V]`, see `word_tokens`.
      indexes: The positions of the text by each context.
    """

    suffix: Suffix
    is_word: np.ndarray
    indexes: tuple[ContextIndex, ...]

    @classmethod
    def build(
        cls, suffix: Suffix, corpus: np.ndarray, is_word: np.ndarray, progress: Progress = ignore_progress
    ) -> SuffixIndex:
        """Sorts the positions of a text by each of their contexts.

        Args:
          suffix: The contexts.
          corpus: Integers `[N]`, the tokens of the text.
          is_word: bool `[V]`.
          progress: Called as `progress(step, done, total)`.

        Returns:
          The index.

        Cost: as `neighbours`, and 10 bytes (12 with more than 65,536 ids) per token and context are kept.
        """
        tokens = corpus.astype(np.uint16 if len(is_word) <= 1 << 16 else np.int32)
        contexts = _contexts(suffix, corpus, is_word)
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            indexes = []
            for index in pool.map(lambda context: ContextIndex.build(context()[:-1], tokens), contexts):
                indexes.append(index)
                progress("indexing", len(indexes), len(contexts))
        return cls(suffix, is_word, tuple(indexes))

    def neighbours(self, history: np.ndarray) -> SuffixNeighbours:
        """The neighbours of the position after a text.

        Args:
          history: Integers `[n]`, the tokens of the text, of which a few hundred suffice.

        Returns:
          The neighbours, of Q = 1 position.
        """
        hits = []
        for context, index in zip(_contexts(self.suffix, history, self.is_word), self.indexes, strict=True):
            hits.append(index.recent(context()[-1:], np.array([len(index.keys)]), self.suffix.k))
        return SuffixNeighbours(np.stack([r.tokens for r in hits], axis=1), np.stack([r.count for r in hits], axis=1))
