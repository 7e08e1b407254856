"""Binary and convolutional codes of the ids of a vocabulary."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt8

from hpnlp.types import AnyArray, InputError


def _static() -> Any:
    return dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Code:
    """A convolutional code of the ids 0 to vocab - 1; hashable, without arrays.

    The bits of an id, the highest first, enter a shift register of K bits; K - 1 zeros follow and empty it. At each of these
    B + K - 1 steps every generator outputs a bit, the parity of some bits of the register. A word has the
    L = len(generators) (B + K - 1) coded bits of all steps, those of one step side by side.

    Raises:
      InputError: vocab is not 1 to 2^31 - 1, bits do not suffice, or generators are not 1 to 2^16 - 1.
    """

    #: V, the number of words.
    vocab: int = _static()
    #: B, the number of bits in which an id is written.
    bits: int = _static()
    #: Bits of the register that each output sums modulo 2; the newest bit is the highest. The longest one has K bits.
    generators: tuple[int, ...] = _static()

    def __post_init__(self) -> None:
        if not 1 <= self.vocab < 1 << 31:
            raise InputError(f"vocab {self.vocab}: expected 1 to {(1 << 31) - 1} words")
        least = (self.vocab - 1).bit_length()
        if not least <= self.bits <= 31:
            raise InputError(f"bits {self.bits}: {self.vocab} words need at least {least}, and int32 ids at most 31")
        if not self.generators or not all(0 < g < 1 << 16 for g in self.generators):
            octal = ", ".join(f"{g:o}" for g in self.generators)
            raise InputError(f"generators ({octal}), in octal: expected one or more, each from 1 to 177777")

    @property
    def constraint(self) -> int:
        """K, the length of the shift register."""
        return max(self.generators).bit_length()

    @property
    def steps(self) -> int:
        """B + K - 1, the number of steps of the register."""
        return self.bits + self.constraint - 1

    @property
    def length(self) -> int:
        """L, the number of coded bits of a word."""
        return len(self.generators) * self.steps

    def encode(self, ids: AnyArray) -> Any:
        """Coded bits of words.

        Args:
          ids: [N] integers, of numpy or JAX.

        Returns:
          [N, L] uint8, 0 or 1; of numpy for numpy ids.

        Cost:
          O(N L) time and memory.
        """
        xp = np if isinstance(ids, np.ndarray) else jnp
        size, newest = self.constraint, np.arange(self.bits - 1, -self.constraint, -1)
        # The register at each step is a window of the id's bits, whose lowest bit is the newest one; beyond the id, zeros.
        right, left = (np.maximum(x, 0).astype(np.uint32)[None] for x in (newest, -newest))
        windows = ((ids.astype(np.uint32)[:, None] >> right) << left) & np.uint32((1 << size) - 1)
        # Generators have the newest bit highest, windows have it lowest.
        masks = (np.uint32(int(f"{g:0{size}b}"[::-1], 2)) for g in self.generators)
        coded = [xp.bitwise_count(windows & mask).astype(np.uint8) & np.uint8(1) for mask in masks]
        return xp.stack(coded, axis=-1).reshape(ids.shape[0], self.length)

    def table(self) -> UInt8[np.ndarray, "V L"]:
        """Coded bits of all words.

        Returns:
          [V, L] uint8.

        Cost:
          O(V L) time and memory; less than a second for half a million words.
        """
        return self.encode(np.arange(self.vocab))
