"""The alias sampler: draws from any distribution over V words in O(1) per draw (Walker 1977, Vose 1991)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AliasSampler:
    """Any distribution over words, as a table of V columns that two words share each.

    A draw takes a column uniformly, and then one of its two words: the word with the column's own number with the probability
    (threshold + fraction) / 2^32, otherwise the alias. The probability is met to 2^-55 of a column. A single float32 random
    number would draw words of q < 2^-23 / V far too often, or never.

    Attributes:
      threshold: [V] uint32.
      fraction: [V] float32, 0 to 1.
      alias: [V] int32, second word of each column.
      log_q: [V] float32, log-probability of each word.

    Cost:
      Four random numbers for each draw.

    References:
      Walker 1977, "An efficient method for generating discrete random variables with general distributions".
    """

    threshold: UInt[Any, " V"]
    fraction: Float[Any, " V"]
    alias: Int[Any, " V"]
    log_q: Float[Any, " V"]

    @classmethod
    def from_log_probs(cls, log_q: np.ndarray) -> AliasSampler:
        """Builds the table on the host.

        Args:
          log_q: [V] float64 log-probabilities, which sum to 1.

        Returns:
          The sampler, of numpy arrays.

        Cost:
          O(V log V).
        """
        keep, alias = _alias_table(np.exp(log_q))
        scaled = keep * 2.0**32
        threshold = np.minimum(np.floor(scaled), 2.0**32 - 1)
        fraction = (scaled - threshold).astype(np.float32)
        return cls(threshold.astype(np.uint32), fraction, alias.astype(np.int32), log_q.astype(np.float32))

    @property
    def vocab(self) -> int:
        """V, the number of words."""
        return self.threshold.shape[0]

    def draw(self, key: Array, shape: tuple[int, ...]) -> Int[Array, "..."]:
        columns, high, low = jax.random.split(key, 3)
        column = jax.random.randint(columns, shape, 0, self.vocab, jnp.int32)
        high, threshold = jax.random.bits(high, shape, jnp.uint32), jnp.asarray(self.threshold)[column]
        # `low` holds the low digits of the random number. They decide where the first 32 equal the threshold.
        below_fraction = jax.random.uniform(low, shape, jnp.float32) < jnp.asarray(self.fraction)[column]
        stays = (high < threshold) | (high == threshold) & below_fraction
        return jnp.where(stays, column, jnp.asarray(self.alias)[column])

    def log_prob(self, ids: Int[Array, "..."]) -> Float[Array, "..."]:
        return jnp.asarray(self.log_q)[ids]


def _alias_table(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(probability of each column to keep its own word, second word of each column) for the probabilities q [V].

    A column holds 1 / V. Columns of words below that are under-full, the others over-full. Each round matches many columns at
    once, by prefix sums: with the deficits of the under-full columns laid end to end, and the excesses of the over-full ones
    likewise, a deficit is filled by the over-full column within whose excess it begins. A column may give more than its excess
    by less than one deficit; it is then under-full, and is filled in the next round.
    """
    keep, alias = np.ones(len(q)), np.arange(len(q))
    mass = q * len(q)
    under, over = np.flatnonzero(mass < 1), np.flatnonzero(mass >= 1)
    while under.size and over.size:
        deficits, excesses = 1 - mass[under], mass[over] - 1
        begins = np.concatenate([[0.0], np.cumsum(deficits)[:-1]])
        giver = np.searchsorted(np.cumsum(excesses), begins, side="right")
        filled = giver < over.size
        # Rounds that fill few columns would be slower than the loop.
        if 64 * filled.sum() < under.size + over.size:
            _fill_one_by_one(keep, alias, mass, under.tolist(), over.tolist())
            break
        keep[under[filled]], alias[under[filled]] = mass[under[filled]], over[giver[filled]]
        np.subtract.at(mass, over[giver[filled]], deficits[filled])
        unfilled = under[~filled]
        under = np.concatenate([over[mass[over] < 1], unfilled])
        over = over[mass[over] >= 1]
    return keep, alias


def _fill_one_by_one(keep: np.ndarray, alias: np.ndarray, mass: np.ndarray, under: list[int], over: list[int]) -> None:
    """Fills one under-full column after another, in place (Vose 1991)."""
    while under and over:
        column, giver = under.pop(), over[-1]
        keep[column], alias[column] = mass[column], giver
        mass[giver] -= 1 - mass[column]
        if mass[giver] < 1:
            under.append(over.pop())
