"""Proposal distributions over words, and the negative samples that sampled losses draw from them.

A proposal distribution is a small frozen record with `draw(key, shape)` and `log_prob(ids)`: `Uniform`, `LogUniform`,
`AliasSampler` (any distribution, made by `unigram` from counts) or `LearnedUnigram`. `sample` draws words for a batch or for
each token, and returns the expected counts by which sampled losses correct their scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.softmax.alias_sampler import AliasSampler
from hpnlp.types import InputError

# Least q of a word for `unigram`, as a share of 1 / V: the precision of draws, 2^-55, is 1/30,000 of it.
RAREST = 2.0**-40


@runtime_checkable
class Sampler(Protocol):
    """A proposal distribution q over the ids 0 to vocab - 1."""

    @property
    def vocab(self) -> int:
        """V, the number of words."""
        ...

    def draw(self, key: Array, shape: tuple[int, ...]) -> Int[Array, "..."]:
        """Independent draws from q, int32.

        Args:
          key: PRNG key of the random numbers.
          shape: Shape of the result.

        Returns:
          Ids of words.
        """
        ...

    def log_prob(self, ids: Int[Array, "..."]) -> Float[Array, "..."]:
        """Log-probabilities of words, float32.

        Args:
          ids: Ids of words, of any shape.

        Returns:
          Log-probabilities of the same shape.
        """
        ...


class Samples(NamedTuple):
    """Words drawn from a proposal distribution.

    Attributes:
      ids: [S] words that the batch shares, or [N, S] words of each token; int32.
      log_expected: Log of the expected count of each drawn word among the samples; float32, of the shape of ids.
      labels_expected: [N] float32, the same for the label of each token.
    """

    ids: Int[Array, "*shape"]
    log_expected: Float[Array, "*shape"]
    labels_expected: Float[Array, " N"]


@dataclasses.dataclass(frozen=True)
class Uniform:
    """The same probability for all words, 1 / V."""

    vocab: int

    def draw(self, key: Array, shape: tuple[int, ...]) -> Int[Array, "..."]:
        return jax.random.randint(key, shape, 0, self.vocab, jnp.int32)

    def log_prob(self, ids: Int[Array, "..."]) -> Float[Array, "..."]:
        return jnp.full(ids.shape, -np.log(self.vocab), jnp.float32)


@dataclasses.dataclass(frozen=True)
class LogUniform:
    """q(k) = log((k + 2) / (k + 1)) / log(V + 1): Zipf's law, for ids sorted by falling frequency.

    The relative error of the probability of a word in `draw` is about V / 2^23.
    """

    vocab: int

    def draw(self, key: Array, shape: tuple[int, ...]) -> Int[Array, "..."]:
        # 2^x - 1 for x uniform in [0, log2(V + 1)). The integer and the fractional part of x come from a random number each:
        # one float32 number has too few values to reach all words of a large vocabulary with their probabilities.
        bits = np.log2(self.vocab + 1.0)
        integer, fraction = (jax.random.uniform(key, shape, jnp.float32) for key in jax.random.split(key))
        integer = jnp.floor(integer * np.float32(bits))
        last = np.floor(bits)
        fraction = fraction * jnp.where(integer == last, np.float32(bits - last), np.float32(1))
        ids = jnp.ldexp(jnp.exp2(fraction), integer.astype(jnp.int32)).astype(jnp.int32) - 1
        return jnp.clip(ids, 0, self.vocab - 1)

    def log_prob(self, ids: Int[Array, "..."]) -> Float[Array, "..."]:
        k = ids.astype(jnp.float32) + 1.0
        return jnp.log(jnp.log1p(1.0 / k)) - np.float32(np.log(np.log1p(self.vocab)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LearnedUnigram:
    """Frequencies of the labels so far: begin with `LearnedUnigram.start(V)`, and update with `seen`.

    Attributes:
      counts: [V] int32; each begins at 1. Once they sum to more than 2^30, all are halved and rounded up. They are integers
        because draws by a cumulative sum of float32 would miss rare words of a large vocabulary.

    Cost:
      A call of `draw` takes O(V) for the cumulative sum, and a bisection for each word.
    """

    counts: Int[Array, " V"]

    @staticmethod
    def start(vocab: int) -> LearnedUnigram:
        """The distribution before the first batch: uniform.

        Args:
          vocab: V, the number of words.

        Returns:
          Counts of 1.
        """
        return LearnedUnigram(jnp.ones(vocab, jnp.int32))

    @property
    def vocab(self) -> int:
        """V, the number of words."""
        return self.counts.shape[0]

    def seen(self, labels: Int[Array, " N"], weights: Float[Array, " N"] | None = None) -> LearnedUnigram:
        """Adds the labels of a batch to the counts.

        Args:
          labels: [N] ids; those that are no words are not counted.
          weights: [N]; tokens of weight 0 are not counted. None for no such tokens.

        Returns:
          The new distribution.
        """
        counted = labels >= 0  # negative ids would index from the end
        if weights is not None:
            counted = counted & (weights != 0)
        counts = self.counts.at[labels].add(counted.astype(jnp.int32), mode="drop")
        return LearnedUnigram(jnp.where(counts.sum(dtype=jnp.int32) > 1 << 30, (counts + 1) // 2, counts))

    def draw(self, key: Array, shape: tuple[int, ...]) -> Int[Array, "..."]:
        below = jnp.cumsum(self.counts, dtype=jnp.int32)
        at = jax.random.randint(key, shape, 0, below[-1], jnp.int32)
        return jnp.searchsorted(below, at, side="right").astype(jnp.int32)

    def log_prob(self, ids: Int[Array, "..."]) -> Float[Array, "..."]:
        total = self.counts.sum(dtype=jnp.int32)
        return jnp.log(self.counts[ids].astype(jnp.float32)) - jnp.log(total.astype(jnp.float32))


def unigram(counts: ArrayLike | Sequence[Any], power: float = 1.0) -> AliasSampler:
    """The distribution proportional to counts ** power.

    Args:
      counts: [V] numbers over 0.
      power: Finite; 0.75 in Mikolov et al. 2013.

    Returns:
      A sampler that draws in O(1).

    Raises:
      InputError: A count is not a number over 0, the power is not finite, or q of a word is under 2^-40 / V, so that the word
        would never be drawn and its score never be corrected.

    Cost:
      O(V log V) on the host.

    References:
      Mikolov et al. 2013, "Distributed representations of words and phrases and their compositionality", sec. 2.2.
    """
    counts = np.asarray(counts, np.float64)
    if counts.ndim != 1 or not counts.size:
        raise InputError(f"counts {counts.shape}: expected [V], one number for each word")
    invalid = np.flatnonzero(~(counts > 0) | ~np.isfinite(counts))
    if invalid.size:
        word = invalid[0]
        raise InputError(
            f"{invalid.size} counts are not numbers over 0, the first is that of word {word} ({counts[word]:g}): add 1 to all"
        )
    if not np.isfinite(power):
        raise InputError(f"power {power}: expected a finite number, 1 for the counts as they are")
    with np.errstate(over="ignore", invalid="ignore"):
        log_q = power * np.log(counts)
        log_q -= log_q.max()
    log_q -= np.log(np.exp(log_q).sum())
    never_drawn = np.flatnonzero(~(np.exp(log_q) * len(log_q) >= RAREST))  # includes NaN, as of a power of 1e306
    if never_drawn.size:
        word = never_drawn[0]
        raise InputError(
            f"{never_drawn.size} words would never be drawn, the first is word {word} (count {counts[word]:g}, power "
            f"{power:g}): add to the counts, or lower the power"
        )
    return AliasSampler.from_log_probs(log_q)


@array_op(" | | N", labels="N")
def sample(
    sampler: Sampler, key: Array, count: int, labels: Int[Array, " N"], *, per_token: bool = False, unique: bool = False
) -> Samples:
    """Draws negative samples for a batch, or for each token.

    With repetition, the expected count of a word is count * q. Without repetition, words are drawn until `count` different
    words have been drawn, and the expected count of a word is the probability 1 - (1 - q)^tries that it is among them, given
    the number of draws; TensorFlow computes the same.

    Args:
      sampler: The proposal distribution.
      key: PRNG key of the random numbers.
      count: Number S of samples.
      labels: [N] words of the tokens, whose expected counts are returned as well.
      per_token: Draws [N, S] words, S for each token, in place of S words that the batch shares.
      unique: Draws without repetition.

    Returns:
      The samples.

    Raises:
      InputError: count is under 1, or over the number of words with `unique`.

    Cost:
      O(S), times N with `per_token`. `unique` takes 5 V bytes more, times N with `per_token`; it takes many draws where S is
      near V or where some words are rare.

    References:
      Jean et al. 2015, "On using very large target vocabulary for neural machine translation".
    """
    if count < 1:
        raise InputError(f"count {count}: expected at least 1 sample")
    if unique and count > sampler.vocab:
        raise InputError(f"{count} unique samples of {sampler.vocab} words: lower count, or set unique=False")
    if unique:
        if per_token:
            ids, tries = jax.vmap(lambda key: _unique(sampler, key, count))(jax.random.split(key, labels.shape[0]))
        else:
            ids, tries = _unique(sampler, key, count)
        tries_of_ids = tries[:, None] if per_token else tries
        expected = _log_inclusion(sampler.log_prob(ids), tries_of_ids.astype(jnp.float32))
        return Samples(ids, expected, _log_inclusion(sampler.log_prob(labels), tries.astype(jnp.float32)))
    ids = sampler.draw(key, (labels.shape[0], count) if per_token else (count,))
    log_count = np.float32(np.log(count))
    return Samples(ids, sampler.log_prob(ids) + log_count, sampler.log_prob(labels) + log_count)


def _log_inclusion(log_q: Array, tries: Array) -> Array:
    """log(1 - (1 - q)^tries), the log-probability that a word is among the draws; 0 for q = 1."""
    log_never = tries * jnp.log1p(-jnp.exp(log_q))
    return jnp.log(-jnp.expm1(log_never))


def _unique(sampler: Sampler, key: Array, count: int) -> tuple[Int[Array, " S"], Int[Array, ""]]:
    """(the first `count` different words of a stream of draws, the number of draws until the last of them)."""
    size = max(count, 128)
    order = jnp.arange(size, dtype=jnp.int32)

    def draw_more(state: PyTree) -> Any:
        key, seen, distinct, tries, ids = state
        key, draw_key = jax.random.split(key)
        drawn = sampler.draw(draw_key, (size,))
        is_first = jnp.full(sampler.vocab, size, jnp.int32).at[drawn].min(order)[drawn] == order
        is_new = is_first & ~seen[drawn]
        place = distinct + jnp.cumsum(is_new.astype(jnp.int32)) - 1
        ids = ids.at[jnp.where(is_new, place, count)].set(drawn, mode="drop")
        until_enough = jnp.argmax(place >= count - 1).astype(jnp.int32) + 1
        used = jnp.where(place[-1] >= count - 1, until_enough, size)
        return key, seen.at[drawn].set(True), place[-1] + 1, tries + used, ids

    start = key, jnp.zeros(sampler.vocab, jnp.bool_), jnp.int32(0), jnp.int32(0), jnp.zeros(count, jnp.int32)
    _, _, _, tries, ids = lax.while_loop(lambda state: state[2] < count, draw_more, start)
    return ids, tries
