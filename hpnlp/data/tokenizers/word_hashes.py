"""Hashes of words: 128 bits of the UTF-8 bytes of each word, which need numpy alone.

The hash is MurmurHash3_x86_128 (Appleby 2011) with the seed 0, of bytes from 0 to 255 on every machine. A program without hpnlp
reads this file as it is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import numpy as np

WORDS = 4  # uint32 of a hash
BLOCK = 16  # bytes that the hash reads at once
# Name -> pattern of a word. Blanks belong to words of single characters only.
SPLITS = {
    "whitespace": re.compile(r"\S+"),
    "letters": re.compile(r"\w+|[^\w\s]"),
    "identifiers": re.compile(r"[^\W_]+|[^\w\s]"),
    "characters": re.compile(r"(?s:.)"),
}
# Borders of words within a name such as readHTTPHeader, for the split at identifiers.
_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

_FACTORS = tuple(np.uint32(c) for c in (0x239B961B, 0xAB0E9789, 0x38B34AE5, 0xA1E38B93))
_ADDED = tuple(np.uint32(c) for c in (0x561CCD1B, 0x0BCAA747, 0x96CD1C35, 0x32AC3B17))
_BEFORE, _AFTER = (15, 16, 17, 18), (19, 17, 15, 13)  # rotations of the words of a block, and of the state


def split(text: str, by: str) -> list[str]:
    """The words of a text, in lower case; none for a text of blanks, unless words are characters. `by`: an entry of SPLITS."""
    if by == "identifiers":
        text = _CASE.sub(" ", text)
    return [word.lower() for word in SPLITS[by].findall(text)]


def encode(text: str, by: str) -> np.ndarray:
    """The hashes of the words of a text, uint32 [words, 4]. Each distinct word is hashed once."""
    words = split(text, by)
    numbers: dict[str, int] = {}
    places = np.fromiter((numbers.setdefault(word, len(numbers)) for word in words), np.int64, len(words))
    return hashes([word.encode("utf-8", "surrogateescape") for word in numbers])[places]


def hashes(words: Sequence[bytes]) -> np.ndarray:
    """The hashes of words, uint32 [n, 4].

    Cost: a loop over the blocks of the longest word, each of numpy operations on all words that have so many.
    """
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    result = np.zeros((len(words), WORDS), np.uint32)
    order = np.argsort(lengths, kind="stable")
    for _, group in itertools.groupby(order.tolist(), key=lambda number: int(lengths[number]) // BLOCK):
        numbers = list(group)
        result[numbers] = _equally_long([words[number] for number in numbers])
    return result


def _equally_long(words: Sequence[bytes]) -> np.ndarray:
    """Hashes of words with the same number of complete blocks."""
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    blocks = int(lengths[0]) // BLOCK
    padded = b"".join(word.ljust((blocks + 1) * BLOCK, b"\0") for word in words)
    chunks = np.frombuffer(padded, "<u4").reshape(len(words), blocks + 1, WORDS).astype(np.uint32)
    h = [np.zeros(len(words), np.uint32) for _ in range(WORDS)]
    for block in range(blocks):
        for i in range(WORDS):
            h[i] = _rotated(h[i] ^ _scrambled(chunks[:, block, i], i), _AFTER[i]) + h[(i + 1) % WORDS]
            h[i] = h[i] * np.uint32(5) + _ADDED[i]
    # A part of zeros changes nothing, so that incomplete blocks need no cases.
    h = [h[i] ^ _scrambled(chunks[:, blocks, i], i) ^ lengths.astype(np.uint32) for i in range(WORDS)]
    return np.stack(finished(h), axis=1)


def _scrambled(part: np.ndarray, i: int) -> np.ndarray:
    return _rotated(part * _FACTORS[i], _BEFORE[i]) * _FACTORS[(i + 1) % WORDS]


def _rotated(x: np.ndarray, bits: int) -> np.ndarray:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def finished(h: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The last step of the hash, by which every bit of the result depends on every bit of the four words of the state."""
    return _summed([_mixed(word) for word in _summed(h)])


def _summed(h: Sequence[np.ndarray]) -> list[np.ndarray]:
    first = h[0] + h[1] + h[2] + h[3]
    return [first, *(word + first for word in h[1:])]


def _mixed(word: np.ndarray) -> np.ndarray:
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))
