"""Earlier positions of a token sequence with equal contexts, by sorted hashes; computed on the host.

A context of position i is a function of tokens before i: the last n tokens, or the beginning of the present word with the words
before it. The occurrences of a context are looked up in the order of positions, so that those before i are known without a
comparison of texts. Text after i changes no result for i.

    hashes = ContextHashes(tokens).last_tokens(8)
    index = ContextIndex.build(hashes[:-1], tokens)
    found = index.recent(hashes[positions], positions, 32)
"""

from __future__ import annotations

import dataclasses

import numpy as np

from hpnlp.types import InputError

NO_TOKEN = -1  # stands for a neighbour that does not exist
_CHUNK = 1 << 14  # queries
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64


@dataclasses.dataclass(frozen=True)
class Recent:
    """Earlier occurrences of the contexts of positions.

    Attributes:
      tokens: int32 `[Q, k]`, the tokens after the most recent earlier occurrences, the most recent first; NO_TOKEN where there
        are fewer than k.
      count: int32 `[Q]`, the number of all earlier occurrences.
    """

    tokens: np.ndarray
    count: np.ndarray


@dataclasses.dataclass(frozen=True)
class ContextIndex:
    """Positions of a sequence, sorted by their contexts.

    Attributes:
      keys: uint64 `[N]`, ascending: the hash of a position's context in the upper bits, and the position in the lower ones.
      following: `[N]`, the token at the position of each key.
    """

    keys: np.ndarray
    following: np.ndarray

    @classmethod
    def build(cls, hashes: np.ndarray, tokens: np.ndarray) -> ContextIndex:
        """Sorts the positions of a sequence.

        Args:
          hashes: uint64 `[N]`, a context of each position.
          tokens: Integers `[N]`.

        Returns:
          The index.

        Raises:
          InputError: The numbers of hashes and tokens differ, or there is no token.

        Cost: a sort of N numbers; 8 bytes and a token for each position.
        """
        if hashes.shape != tokens.shape or tokens.ndim != 1 or not len(tokens):
            raise InputError(
                f"hashes {hashes.shape} and tokens {tokens.shape}: expected one of each for every position"
            )
        bits = _position_bits(len(tokens))
        keys = np.sort(((hashes >> bits) << bits) | np.arange(len(tokens), dtype=np.uint64))
        positions = (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
        return cls(keys, tokens[positions])

    def recent(self, hashes: np.ndarray, positions: np.ndarray, k: int) -> Recent:
        """Finds the most recent occurrences of contexts before positions.

        Args:
          hashes: uint64 `[Q]`, contexts.
          positions: Integers `[Q]`; only earlier positions of the sequence are found. N and more find all.
          k: Number of occurrences.

        Returns:
          The tokens after them.

        Cost: two binary searches for each context, and a copy of k neighbouring tokens.
        """
        if k < 1:
            raise InputError(f"k={k}: expected a number of occurrences, at least 1")
        bits = _position_bits(len(self.keys))
        clipped = np.minimum(positions, (1 << int(bits)) - 1).astype(np.uint64)
        first = (hashes >> bits) << bits
        order = np.argsort(first)  # neighbouring searches then read neighbouring keys
        begin, end = np.empty(len(first), np.int64), np.empty(len(first), np.int64)
        begin[order] = np.searchsorted(self.keys, first[order])
        end[order] = np.searchsorted(self.keys, first[order] | clipped[order])
        tokens = np.empty((len(first), k), np.int32)
        for start in range(0, len(first), _CHUNK):  # places take twice the memory of tokens
            chunk = slice(start, start + _CHUNK)
            places = end[chunk, None] - 1 - np.arange(k)
            is_earlier = places >= begin[chunk, None]
            following = self.following[np.maximum(places, 0)].astype(np.int32)
            tokens[chunk] = np.where(is_earlier, following, np.int32(NO_TOKEN))
        return Recent(tokens, (end - begin).astype(np.int32))


class ContextHashes:
    """Hashes of the contexts of all positions 0 to N of a sequence of N tokens, as uint64 `[N + 1]`."""

    def __init__(self, tokens: np.ndarray) -> None:
        """Prepares the hashes of all substrings.

        Args:
          tokens: Integers `[N]`, at least 0.

        Raises:
          InputError: A token is negative.
        """
        if len(tokens) and tokens.min() < 0:
            raise InputError(f"token {tokens.min()}: expected ids of at least 0")
        self._tokens = tokens
        # Sums over i < n of random(token i) base^i, and base^-n, both modulo 2^64.
        powers = np.cumprod(np.concatenate([np.ones(1, np.uint64), np.full(len(tokens), _BASE, np.uint64)]))
        inverse = np.full(len(tokens), pow(_BASE, -1, 1 << 64), np.uint64)
        self._inverses = np.cumprod(np.concatenate([np.ones(1, np.uint64), inverse]))
        values = _mixed(tokens.astype(np.uint64) + np.uint64(1)) * powers[:-1]
        self._sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values)])

    def last_tokens(self, length: int) -> np.ndarray:
        """Hashes the last tokens before each position.

        Args:
          length: Number of tokens; at the beginning of the sequence, those that there are.

        Returns:
          The hashes.

        Raises:
          InputError: The length is under 1.
        """
        if length < 1:
            raise InputError(f"length={length}: expected a number of tokens, at least 1")
        sums = self._sums.copy()
        sums[length:] -= self._sums[:-length]
        return _mixed(sums * self._inverses)

    def last_words(self, is_word: np.ndarray, words: int) -> np.ndarray:
        """Hashes the beginning of the present word before each position, and the words before it, without other tokens.

        Args:
          is_word: bool `[V]`, whether each id is a part of a word. A word is a run of such tokens.
          words: Number of words before the present one, which is empty after a token that is no part of a word.

        Returns:
          The hashes.

        Raises:
          InputError: `words` is under 0, or a token is not an id of `is_word`.
        """
        if words < 0:
            raise InputError(f"words={words}: expected at least 0")
        if len(self._tokens) and self._tokens.max() >= len(is_word):
            raise InputError(f"token {self._tokens.max()}: expected ids under {len(is_word)}, the length of is_word")
        inside = np.concatenate([[False], is_word[self._tokens]])  # whether the token before a position is in a word
        begins = np.flatnonzero(inside[1:] & ~inside[:-1])
        ends = np.flatnonzero(inside[:-1] & ~inside[1:])  # a word at the end of the sequence has none
        hashes = np.concatenate([np.zeros(words, np.uint64), self._between(begins[: len(ends)], ends)])
        started = np.concatenate([[0], np.cumsum(inside[1:] & ~inside[:-1])])
        begin = np.arange(len(inside))
        begin[inside] = begins[started[inside] - 1]
        result = self._between(begin, np.arange(len(inside)))
        finished = started - inside
        for i in range(words):
            result = _mixed(result * np.uint64(_BASE) + hashes[finished + (words - 1 - i)])
        return result

    def _between(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Hashes of the tokens from `begin` up to `end`."""
        return _mixed((self._sums[end] - self._sums[begin]) * self._inverses[end])


def _mixed(values: np.ndarray) -> np.ndarray:
    """A bijection of 64 bits in which each bit depends on all bits: the last steps of MurmurHash3."""
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(0xFF51AFD7ED558CCD)
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


def _position_bits(count: int) -> np.uint64:
    """Bits of a key that hold a position from 0 to `count`."""
    return np.uint64(max(24, count.bit_length()))
