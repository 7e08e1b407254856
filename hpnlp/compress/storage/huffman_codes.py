"""Canonical Huffman codes: code lengths under a limit, codes, and tables that decode them.

Codes are canonical: symbols in the order of (length, symbol) have increasing codes, so that the lengths alone describe the
code. The first bit of a code is the lowest bit of its number, as in a little-endian bit stream.

References: Larmore and Hirschberg 1990, "A Fast Algorithm for Optimal Length-Limited Huffman Codes" (package-merge).
"""

from __future__ import annotations

import functools

import numpy as np

from hpnlp.errors import InputError

MAX_LENGTH = 16  # bits; an alphabet has at most 2^16 symbols
SYMBOL_SHIFT, LENGTH_MASK = 5, 31  # of the entries of a decoding table
# Shorter limits give smaller tables, which are made and read faster: 12 bits fit in the L1 cache, 15 in the L2 cache.
LIMITS = (8, 10, 12, 15, 16)
_BITS_PER_TABLE_ENTRY = 0.1  # bits of the stream that a smaller table is worth; 0.4 KB for 15 bits


def code_lengths(counts: np.ndarray, limit: int = MAX_LENGTH) -> np.ndarray:
    """Code lengths with the least total number of bits among those of at most `limit` bits, by package-merge.

    Args:
      counts: [n] occurrences of each symbol.
      limit: Largest length in bits.

    Returns:
      uint8[n] lengths; 0 for symbols that do not occur. A single symbol has length 1.

    Raises:
      InputError: More symbols occur than codes of `limit` bits exist.

    Cost: `limit` sorts of at most 2n numbers.
    """
    used = np.flatnonzero(counts)
    lengths = np.zeros(len(counts), np.uint8)
    if len(used) > 1 << limit:
        raise InputError(f"{len(used)} symbols occur: codes of {limit} bits exist for {1 << limit}; use a larger limit")
    if len(used) <= 1:
        lengths[used] = 1
        return lengths
    order = used[np.argsort(counts[used], kind="stable")]
    leaves = counts[order].astype(np.int64)
    # Level by level from the longest codes: pairs of the previous level are merged with the leaves.
    is_leaf, merged = [], leaves
    for level in range(limit):
        if level:
            pairs = merged[: len(merged) // 2 * 2].reshape(-1, 2).sum(axis=1)
            candidates = np.concatenate([leaves, pairs])
            by_weight = np.argsort(candidates, kind="stable")
            merged = candidates[by_weight]
            is_leaf.append(by_weight < len(leaves))
        else:
            is_leaf.append(np.ones(len(leaves), bool))
    # The first 2n - 2 entries of the last level are taken; a pair that is taken takes two entries of the level before.
    taken = 2 * len(leaves) - 2
    for leaf in reversed(is_leaf):
        taken_leaves = int(np.count_nonzero(leaf[:taken]))
        lengths[order[:taken_leaves]] += 1
        taken = 2 * (taken - taken_leaves)
    return lengths


def choose_lengths(counts: np.ndarray) -> np.ndarray:
    """Code lengths under the limit of `LIMITS` with the fewest bits, where entries of the decoding table count as 0.1 bits.

    Args:
      counts: [n] occurrences of each symbol.

    Returns:
      uint8[n] lengths.
    """
    symbols = np.count_nonzero(counts)
    options = []
    for limit in (limit for limit in LIMITS if symbols <= 1 << limit):
        lengths = code_lengths(counts, limit)
        longest = int(lengths.max(initial=0))
        options.append((int(counts @ lengths.astype(np.int64)) + _BITS_PER_TABLE_ENTRY * (1 << longest), lengths))
        if longest < limit:  # larger limits give the same code
            break
    return min(options, key=lambda option: option[0])[1]


def check_lengths(lengths: np.ndarray) -> None:
    """Checks that lengths describe a complete code, so that every sequence of bits decodes.

    Args:
      lengths: uint8[n] code lengths.

    Raises:
      InputError: A length above 16, or an incomplete or overfull code.
    """
    used = lengths[lengths > 0].astype(np.int64)
    longest = int(used.max(initial=0))
    single = len(used) == 1 and longest == 1  # its codes are both 0 and 1
    if longest > MAX_LENGTH or not (single or int((1 << (MAX_LENGTH - used)).sum()) == 1 << MAX_LENGTH):
        raise InputError(
            f"{len(used)} code lengths of up to {longest} bits are no Huffman code: the data are damaged; encode them again"
        )


def canonical_codes(lengths: np.ndarray) -> np.ndarray:
    """Canonical codes of code lengths.

    Args:
      lengths: uint8[n] lengths that `check_lengths` accepts.

    Returns:
      uint32[n] codes, whose lowest bit is the first of the stream; 0 for symbols without a code.
    """
    order = _canonical_order(lengths)
    sizes = lengths[order].astype(np.int64)
    spans = 1 << (MAX_LENGTH - sizes)  # of the MAX_LENGTH-bit numbers that begin with the code
    codes = np.zeros(len(lengths), np.uint32)
    codes[order] = _reverse_bits(np.cumsum(spans) - spans)
    return codes


def decoding_table(lengths: np.ndarray) -> tuple[int, np.ndarray]:
    """Table that maps the next bits of a stream to a symbol and the length of its code.

    Args:
      lengths: uint8[n] lengths that `check_lengths` accepts.

    Returns:
      (bits of an index, int32[2^bits] entries). An entry is symbol << SYMBOL_SHIFT | length, so that one look-up of 4 bytes
      gives both.
    """
    order = _canonical_order(lengths)
    bits = int(lengths.max())
    sizes = lengths[order].astype(np.int64)
    entries = ((order << SYMBOL_SHIFT) | sizes).astype(np.int32)
    if len(order) == 1:
        return bits, np.repeat(entries, 2)
    return bits, np.repeat(entries, 1 << (bits - sizes))[_reversed_numbers(bits)]


def _canonical_order(lengths: np.ndarray) -> np.ndarray:
    used = np.flatnonzero(lengths)
    return used[np.argsort(lengths[used], kind="stable")]


@functools.cache
def _reversed_numbers(bits: int) -> np.ndarray:
    """int64[2^bits] each number with its bits in reverse order."""
    return _reverse_bits(np.arange(1 << bits) << (MAX_LENGTH - bits)).astype(np.int64)


def _reverse_bits(numbers: np.ndarray) -> np.ndarray:
    """Reverses the 16 bits of each number."""
    x = numbers.astype(np.uint32)
    for shift, mask in ((1, 0x5555), (2, 0x3333), (4, 0x0F0F), (8, 0x00FF)):
        m, s = np.uint32(mask), np.uint32(shift)
        x = ((x >> s) & m) | ((x & m) << s)
    return x
