"""Distributions over tokens as binary decisions: the bits of a token's id, the most significant first.

Mixtures of the log-odds of decisions are normalised for any weights, because the decisions are (the PAQ family of compressors).
Decision b of a token depends on the b bits before it, its prefix. A decision whose result 1 leaves no id under V is not one.

References: Mahoney 2005, "Adaptive weighing of context models for lossless data compression".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.helpers.array_op import array_op


def path_length(vocab: int) -> int:
    """Number of decisions of a token.

    Args:
      vocab: Number of ids V.

    Returns:
      The smallest L with 2^L >= V.
    """
    return max(1, (vocab - 1).bit_length())


@array_op("...", ids="...")
def path_bits(ids: Int[Array, "*N"], length: int) -> Int[Array, "*N L"]:
    """The decisions of tokens.

    Args:
      ids: Ids from 0 to 2^L - 1.
      length: Number of decisions L.

    Returns:
      int32, 0 or 1.
    """
    return _prefixes(ids, length)[0] & 1


@array_op("...", ids="...")
def is_decided(ids: Int[Array, "*N"], vocab: int) -> Bool[Array, "*N L"]:
    """Decisions that have one possible result, 0, because ids with a 1 there do not exist.

    Args:
      ids: Ids under V.
      vocab: Number of ids V.

    Returns:
      True for these decisions.
    """
    prefixes, shifts = _prefixes(ids, path_length(vocab))
    return ((prefixes | 1) << shifts) >= vocab


@array_op("N", log_probs="N")
def path_log_odds(log_probs: Float[Array, "N V"], ids: Int[Array, " N"]) -> Float[Array, "N L"]:
    """Log-odds of the decisions of one token under a distribution of tokens.

    Args:
      log_probs: Log-probabilities, which need not be normalised.
      ids: The token of each row.

    Returns:
      log p(1) - log p(0) of each decision, given the bits before it; float32. Infinite where one of both is 0.

    Cost: 2 V logarithms and exponentials per row.
    """
    vocab = log_probs.shape[1]
    length = path_length(vocab)
    level = jnp.pad(log_probs.astype(jnp.float32), ((0, 0), (0, (1 << length) - vocab)), constant_values=-jnp.inf)
    odds = []
    for shift in range(length):  # from the leaves to the root
        pairs = level.reshape(level.shape[0], -1, 2)
        parents = (ids >> (shift + 1))[:, None, None]
        pair = jnp.take_along_axis(pairs, parents, axis=1)[:, 0]
        odds.append(pair[:, 1] - pair[:, 0])
        level = jnp.logaddexp(pairs[..., 0], pairs[..., 1])
    return jnp.stack(odds[::-1], axis=1)


@array_op("...", ids="...")
def path_log_prob(log_odds: Float[Array, "*N L"], ids: Int[Array, "*N"], vocab: int) -> Float[Array, "*N"]:
    """Log-probability of tokens, given the log-odds of their decisions.

    Args:
      log_odds: Log-odds of each decision on the path of the token.
      ids: The tokens.
      vocab: Number of ids V.

    Returns:
      The sums of the logarithms, float32. Over all ids, the probabilities sum to 1 if equal decisions have equal log-odds.
    """
    signs = (2 * path_bits(ids, path_length(vocab)) - 1).astype(jnp.float32)
    steps = jax.nn.log_sigmoid(signs * log_odds.astype(jnp.float32))
    return jnp.sum(jnp.where(is_decided(ids, vocab), jnp.float32(0.0), steps), axis=-1)


@array_op("...", voters="... K")
def vote_counts(
    voters: Int[Array, "*N K"], ids: Int[Array, "*N"], decay: float, length: int
) -> tuple[Float[Array, "*N L 2"], Float[Array, "*N L 2"]]:
    """Votes of tokens for the decisions of another token: those with the same bits before a decision vote on it.

    Args:
      voters: Tokens that vote; negative for none.
      ids: The token whose decisions they vote on.
      decay: Factor of the weight of each vote relative to the one before it, in (0, 1].
      length: Number of decisions L.

    Returns:
      `(numbers of votes, sums of weights)` for 0 and for 1, float32.
    """
    prefixes = _prefixes(ids, length)[0][..., None]  # [*N, L, 1]
    of_voters = jnp.swapaxes(_prefixes(voters, length)[0], -1, -2)  # [*N, L, K]
    agrees = (voters[..., None, :] >= 0) & (of_voters >> 1 == prefixes >> 1)
    votes = jnp.stack([agrees & (of_voters & 1 == value) for value in (0, 1)], axis=-2).astype(jnp.float32)
    weights = decay ** jnp.arange(voters.shape[-1], dtype=jnp.float32)
    return votes.sum(axis=-1), jnp.einsum("...k,k->...", votes, weights)


def _prefixes(ids: Array, length: int) -> tuple[Array, Array]:
    """The bits of ids up to each decision, and the numbers of bits behind it, `[*N, L]`."""
    ids = jnp.asarray(ids, jnp.int32)
    shifts = jnp.broadcast_to(jnp.arange(length - 1, -1, -1, dtype=jnp.int32), (*ids.shape, length))
    return ids[..., None] >> shifts, shifts
