"""Canonical Huffman codes: code lengths under a limit, codes, and tables that decode them.

Codes are canonical: symbols in the order of (length, symbol) have increasing codes, so that the lengths alone describe the
code. The first bit of a code is the lowest bit of its number, as in a little-endian bit stream.

References: Larmore and Hirschberg 1990, "A Fast Algorithm for Optimal Length-Limited Huffman Codes" (package-merge).
"""

from __future__ import annotations

import numpy as np

from hpnlp.errors import InputError

MAX_LENGTH = 16  # bits; an alphabet has at most 2^16 symbols
# Shorter limits give smaller tables, which decode faster: 12 bits fit in the L1 cache, 15 in the L2 cache.
LIMITS = (12, 15, 16)
_TOLERANCE = 1.0005  # relative size at which a shorter limit is preferred


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
    """Code lengths under the smallest of `LIMITS` that costs at most 0.05 % more bits than the largest.

    Args:
      counts: [n] occurrences of each symbol.

    Returns:
      uint8[n] lengths.
    """
    best = code_lengths(counts, LIMITS[-1])
    bits = int(counts @ best.astype(np.int64))
    for limit in LIMITS[:-1]:
        if int(best.max(initial=0)) <= limit:
            return best
        if np.count_nonzero(counts) <= 1 << limit:
            lengths = code_lengths(counts, limit)
            if int(counts @ lengths.astype(np.int64)) <= _TOLERANCE * bits:
                return lengths
    return best


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


def decoding_tables(lengths: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Tables that map the next bits of a stream to a symbol and the length of its code.

    Args:
      lengths: uint8[n] lengths that `check_lengths` accepts.

    Returns:
      (bits of an index, uint16[2^bits] symbols, int64[2^bits] lengths).
    """
    order = _canonical_order(lengths)
    bits = int(lengths.max())
    sizes = lengths[order].astype(np.int64)
    if len(order) == 1:
        return bits, np.full(2, order[0], np.uint16), np.ones(2, np.int64)
    by_first_bit = np.repeat(np.arange(len(order)), 1 << (bits - sizes))
    index = _reverse_bits(np.arange(1 << bits) << (MAX_LENGTH - bits)).astype(np.int64)
    entries = by_first_bit[index]
    return bits, order.astype(np.uint16)[entries], sizes[entries]


def _canonical_order(lengths: np.ndarray) -> np.ndarray:
    used = np.flatnonzero(lengths)
    return used[np.argsort(lengths[used], kind="stable")]


def _reverse_bits(numbers: np.ndarray) -> np.ndarray:
    """Reverses the 16 bits of each number."""
    x = numbers.astype(np.uint32)
    for shift, mask in ((1, 0x5555), (2, 0x3333), (4, 0x0F0F), (8, 0x00FF)):
        m, s = np.uint32(mask), np.uint32(shift)
        x = ((x >> s) & m) | ((x & m) << s)
    return x
