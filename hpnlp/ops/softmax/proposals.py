"""Which words stand for the vocabulary: proposals q over V words, drawn from in O(1) a word.

A sampler is a small frozen record with `draw(key, shape)` and `log_prob(ids)`. `sample` draws what a batch shares, or each
token its own, and says how often each word is to be expected among the drawn: what sampled losses correct their scores by.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from hpnlp.ops.array_op import array_op
from hpnlp.types import InputError

# The least share of a column, 1 / V, that `unigram` takes: what draws have it to, 2^-55, is 1 / 30,000 of it.
RAREST = 2.0**-40


@runtime_checkable
class Sampler(Protocol):
    """A distribution over ids in [0, vocab)."""

    @property
    def vocab(self) -> int: ...

    def draw(self, key: Array, shape: tuple[int, ...]) -> Int[Array, "..."]: ...

    def log_prob(self, ids: Int[Array, "..."]) -> Float[Array, "..."]: ...


class Samples(NamedTuple):
    """ids: the drawn words. log_expected: log of how often each of them was to be expected; labels_expected: the labels."""

    ids: Int[Array, "*shape"]
    log_expected: Float[Array, "*shape"]
    labels_expected: Float[Array, " N"]


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Every word alike."""

    vocab: int

    def draw(self, key: Array, shape: tuple[int, ...]) -> Int[Array, "..."]:
        return jax.random.randint(key, shape, 0, self.vocab, jnp.int32)

    def log_prob(self, ids: Int[Array, "..."]) -> Float[Array, "..."]:
        return jnp.full(ids.shape, -np.log(self.vocab), jnp.float32)


@dataclasses.dataclass(frozen=True)
class LogUniform:
    """q(k) = log((k + 2) / (k + 1)) / log(V + 1): Zipf's law, for ids sorted by falling frequency.

    Draws have this distribution to some V / 2^23 of each word's share.
    """

    vocab: int

    def draw(self, key: Array, shape: tuple[int, ...]) -> Int[Array, "..."]:
        # 2^x for x even in [0, log2(V + 1)), whole and broken part from a number each: one float32 has too few values to reach
        # the words of a large vocabulary evenly.
        bits = np.log2(self.vocab + 1.0)
        whole, broken = (jax.random.uniform(key, shape, jnp.float32) for key in jax.random.split(key))
        whole = jnp.floor(whole * np.float32(bits))
        last = np.floor(bits)
        broken = broken * jnp.where(whole == last, np.float32(bits - last), np.float32(1))
        ids = jnp.ldexp(jnp.exp2(broken), whole.astype(jnp.int32)).astype(jnp.int32) - 1
        return jnp.clip(ids, 0, self.vocab - 1)

    def log_prob(self, ids: Int[Array, "..."]) -> Float[Array, "..."]:
        k = ids.astype(jnp.float32) + 1.0
        return jnp.log(jnp.log1p(1.0 / k)) - np.float32(np.log(np.log1p(self.vocab)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Alias:
    """Any distribution, by Walker's alias method (1977): a column of the table, then one of the two words that share it.

    Made by `unigram`. (keep + rest) / 2^32 is the share of the first word in its column, rest 0 to 1. alias: the second.
    log_q: float32. A draw has a column's first word with its share to 2^-55, where one float32 number would have a word of
    q < 2^-23 / V far too often, or never. It costs O(1): four random numbers.
    """

    keep: UInt[Any, " V"]
    rest: Float[Any, " V"]
    alias: Int[Any, " V"]
    log_q: Float[Any, " V"]

    @property
    def vocab(self) -> int:
        return self.keep.shape[0]

    def draw(self, key: Array, shape: tuple[int, ...]) -> Int[Array, "..."]:
        columns, high, low = jax.random.split(key, 3)
        column = jax.random.randint(columns, shape, 0, self.vocab, jnp.int32)
        high, keep = jax.random.bits(high, shape, jnp.uint32), jnp.asarray(self.keep)[column]
        # Further digits of the number tell where the first ones do not.
        below = jax.random.uniform(low, shape, jnp.float32) < jnp.asarray(self.rest)[column]
        stays = (high < keep) | (high == keep) & below
        return jnp.where(stays, column, jnp.asarray(self.alias)[column])

    def log_prob(self, ids: Int[Array, "..."]) -> Float[Array, "..."]:
        return jnp.asarray(self.log_q)[ids]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LearnedUnigram:
    """The words' frequencies as far as they have been seen; `seen` makes the next one. Begin with `LearnedUnigram.start(V)`.

    counts: int32 [V], of which each began at 1. Whole numbers, because draws by a cumulative sum of float32 would miss rare
    words of a large vocabulary. Past a sum of 2^30 all are halved, and rounded up. A draw costs O(V): a cumulative sum, and
    a bisection a word.
    """

    counts: Int[Array, " V"]

    @staticmethod
    def start(vocab: int) -> LearnedUnigram:
        return LearnedUnigram(jnp.ones(vocab, jnp.int32))

    @property
    def vocab(self) -> int:
        return self.counts.shape[0]

    def seen(self, labels: Int[Array, " N"], weights: Float[Array, " N"] | None = None) -> LearnedUnigram:
        """With the labels of a batch counted; a token of weight 0 is none, nor is one whose label is no word."""
        counted = labels >= 0  # which would count from the end
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


def unigram(counts: Any, power: float = 1.0) -> Alias:
    """q proportional to counts ** power; 0.75 is that of Mikolov et al. 2013, "Distributed representations", sec. 2.2.

    counts: [V] numbers over 0. power: finite. Raises InputError where one is not, and where a word is so far under the others
      that it would never be drawn, q under 2^-40 / V: it would have no correction.
    Cost: O(V log V) on the host.
    """
    counts = np.asarray(counts, np.float64)
    if counts.ndim != 1 or not counts.size:
        raise InputError(f"counts {counts.shape}: expected [V], one number a word")
    wrong = np.flatnonzero(~(counts > 0) | ~np.isfinite(counts))
    if wrong.size:
        raise InputError(
            f"{wrong.size} counts are not numbers over 0, the first of word {wrong[0]} ({counts[wrong[0]]:g}): add one to each"
        )
    if not np.isfinite(power):
        raise InputError(f"power {power}: expected a finite number, 1 for the counts as they are")
    with np.errstate(over="ignore", invalid="ignore"):
        log_q = power * np.log(counts)
        log_q -= log_q.max()
    log_q -= np.log(np.exp(log_q).sum())
    q = np.exp(log_q)
    lost = np.flatnonzero(~(q * len(q) >= RAREST))  # NaN of a power that nothing bears too
    if lost.size:
        raise InputError(
            f"{lost.size} words would never be drawn, the first of them word {lost[0]} (count {counts[lost[0]]:g}, power "
            f"{power:g}): add to the counts, or lower the power"
        )
    keep, alias = _alias(q)
    scaled = keep * 2.0**32
    whole = np.minimum(np.floor(scaled), 2.0**32 - 1)
    rest = (scaled - whole).astype(np.float32)
    return Alias(whole.astype(np.uint32), rest, alias.astype(np.int32), log_q.astype(np.float32))


def _alias(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Walker's table, many columns at a time.

    Of the excess of the rich columns, laid end to end, each poor one's want is a piece, of the one in whom it begins. Who gives
    beyond its excess is poor in turn, by less than that one want, and is filled in the next round.
    """
    keep, alias = np.ones(len(q)), np.arange(len(q))
    mass = q * len(q)
    poor, rich = np.flatnonzero(mass < 1), np.flatnonzero(mass >= 1)
    while poor.size and rich.size:
        wants, excess = 1 - mass[poor], mass[rich] - 1
        begins = np.concatenate([[0.0], np.cumsum(wants)[:-1]])
        owner = np.searchsorted(np.cumsum(excess), begins, side="right")
        served = owner < rich.size
        if 64 * served.sum() < poor.size + rich.size:
            _fill(keep, alias, mass, poor.tolist(), rich.tolist())
            break
        keep[poor[served]], alias[poor[served]] = mass[poor[served]], rich[owner[served]]
        np.subtract.at(mass, rich[owner[served]], wants[served])
        left = poor[~served]
        poor = np.concatenate([rich[mass[rich] < 1], left])
        rich = rich[mass[rich] >= 1]
    return keep, alias


def _fill(keep: np.ndarray, alias: np.ndarray, mass: np.ndarray, poor: list[int], rich: list[int]) -> None:
    """One column after another, where rounds would fill few each (Vose 1991)."""
    while poor and rich:
        column, giver = poor.pop(), rich[-1]
        keep[column], alias[column] = mass[column], giver
        mass[giver] -= 1 - mass[column]
        if mass[giver] < 1:
            poor.append(rich.pop())


@array_op(" | | N", labels="N")
def sample(
    sampler: Sampler, key: Array, count: int, labels: Int[Array, " N"], *, per_token: bool = False, unique: bool = False
) -> Samples:
    """`count` words for a batch, or of each token its own, [N, count]; without repetition where they are `unique`.

    Expected counts: count * q with repetition. Without, words are drawn until `count` different ones have been, and a word
    is among them with probability 1 - (1 - q)^tries, given the tries that it took (Jean et al. 2015; as TensorFlow has it).
    Raises InputError on a count under 1, and on more unique words than there are.
    Cost: O(count), and unique 5 V bytes, for each token where they are each token's own; words that are almost never drawn are
    tried for long.
    """
    if count < 1:
        raise InputError(f"{count} samples: expected at least 1")
    if unique and count > sampler.vocab:
        raise InputError(f"{count} unique samples of {sampler.vocab} words: take fewer, or let them repeat")
    if unique:
        one = lambda key: _unique(sampler, key, count)  # noqa: E731
        ids, tries = jax.vmap(one)(jax.random.split(key, labels.shape[0])) if per_token else one(key)
        inside = lambda ids, tries: _log_inclusion(sampler.log_prob(ids), tries.astype(jnp.float32))  # noqa: E731
        return Samples(ids, inside(ids, tries[:, None] if per_token else tries), inside(labels, tries))
    ids = sampler.draw(key, (labels.shape[0], count) if per_token else (count,))
    log_count = np.float32(np.log(count))
    return Samples(ids, sampler.log_prob(ids) + log_count, sampler.log_prob(labels) + log_count)


def _log_inclusion(log_q: Array, tries: Array) -> Array:
    """log(1 - (1 - q)^tries); 0 of a word that is all there is."""
    never = tries * jnp.log1p(-jnp.exp(log_q))
    return jnp.log(-jnp.expm1(never))


def _unique(sampler: Sampler, key: Array, count: int) -> tuple[Int[Array, " S"], Int[Array, ""]]:
    """The first `count` different words of a stream of draws, and how many draws it took."""
    size = max(count, 128)
    order = jnp.arange(size, dtype=jnp.int32)

    def more(state: Any) -> Any:
        key, seen, found, tries, ids = state
        key, now = jax.random.split(key)
        drawn = sampler.draw(now, (size,))
        first = jnp.full(sampler.vocab, size, jnp.int32).at[drawn].min(order)[drawn] == order
        new = first & ~seen[drawn]
        place = found + jnp.cumsum(new.astype(jnp.int32)) - 1
        ids = ids.at[jnp.where(new, place, count)].set(drawn, mode="drop")
        enough = jnp.argmax(place >= count - 1).astype(jnp.int32) + 1
        used = jnp.where(place[-1] >= count - 1, enough, size)
        return key, seen.at[drawn].set(True), place[-1] + 1, tries + used, ids

    start = key, jnp.zeros(sampler.vocab, jnp.bool_), jnp.int32(0), jnp.int32(0), jnp.zeros(count, jnp.int32)
    _, _, _, tries, ids = lax.while_loop(lambda state: state[2] < count, more, start)
    return ids, tries
