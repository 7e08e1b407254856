"""Sparse arrays as gaps between non-zeros, with filler zeros.

An entry is (gap, code): `gap` zeros come before it. A gap has `gap_bits` bits; where more zeros follow one another, filler
entries with code 0 are inserted, each behind 2^gap_bits - 1 zeros.

References: Han, Mao and Dally 2016, "Deep Compression", section 2.
"""

from __future__ import annotations

import numpy as np

from hpnlp.errors import InputError

GAP_BITS = range(2, 17)


def split(codes: np.ndarray, gap_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Divides integers, of which most are 0, into gaps and the codes of entries, with fillers.

    Fewer than 2^gap_bits zeros are left after the last entry.
    """
    if gap_bits not in GAP_BITS:
        raise InputError(f"gap_bits={gap_bits}: expected {GAP_BITS[0]} to {GAP_BITS[-1]}")
    used = np.flatnonzero(codes)
    span = 1 << gap_bits
    distances = np.diff(used, prepend=-1, append=codes.size)
    fillers = (distances - 1) // span  # in front of each non-zero, and of the end
    last = np.cumsum(fillers + 1) - 1  # the entry of each non-zero, and of the end
    gaps = np.full(int(last[-1]), span - 1, np.uint8 if gap_bits <= 8 else np.uint16)
    gaps[last[:-1]] = (distances - 1 - fillers * span)[:-1]
    entries = np.zeros(len(gaps), codes.dtype)
    entries[last[:-1]] = codes[used]
    return gaps, entries


def merge(gaps: np.ndarray, entries: np.ndarray, size: int, gap_bits: int) -> np.ndarray:
    """Inverse of `split`: [size] elements, zero bits where there is no entry. Entries may be of any dtype."""
    positions = np.cumsum(gaps, dtype=np.int64)
    positions += np.arange(len(gaps))
    last = int(positions[-1]) if len(gaps) else -1
    if not 0 <= size - 1 - last < 1 << gap_bits:  # also bounds the memory by the bytes of the file
        raise InputError(f"entry {last} is the last of a sparse array of {size} elements with gaps of {gap_bits} bits")
    array = np.zeros(size, entries.dtype)
    array[positions] = entries
    return array
