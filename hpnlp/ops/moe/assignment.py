"""Balanced assignment of tokens to experts by an auction, and experts from a hash of token ids."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.checkpoint_names import ROUTING
from hpnlp.ops.helpers.counter_rng import mix
from hpnlp.ops.helpers.custom_vjp import vary_alike


@array_op()
def balanced_assignment(
    scores: Float[Array, "T E"], real: Bool[Array, " T"], tolerance: float = 1e-3, rounds: int = 1000
) -> Int[Array, " T"]:
    """Assigns each token to one expert, so that no expert has more than `ceil(n / E)` of the n tokens without padding.

    An auction: every token without an expert bids for the expert with the largest difference of score and price; an expert
    with more bids than places keeps the highest ones, and its price rises to the lowest of these. Later tokens displace
    earlier ones: not causal.

    Args:
      scores: Scores of the pairs. NaN and -inf count as the least finite score of the token, inf as its largest one.
      real: False for padding.
      tolerance: Least rise of a price, relative to the largest difference of two scores of a token.
      rounds: Largest number of rounds. Tokens without an expert after them get the free places of experts in order.

    Returns:
      The expert of each token; E for padding. If the auction ends within `rounds`, the sum of the tokens' scores is within
      n x tolerance x that difference of the largest possible sum.

    Cost: O(T E) per round. The number of rounds grows with 1 / tolerance where many scores are alike: up to 350 for 1024
    tokens and 64 experts with independent scores, 1400 where all tokens prefer the same experts.

    References: Lewis et al. 2021, "BASE layers", arXiv 2103.16716; Bertsekas 1992, "Auction algorithms for network flow
    problems".
    """
    count, experts = scores.shape
    # A constant for all scores of a token does not change the best assignment.
    scores = _finite(lax.stop_gradient(scores.astype(jnp.float32)))
    scores = scores - jnp.max(scores, axis=1, keepdims=True)
    places = -(-jnp.sum(real, dtype=jnp.int32) // experts)
    # Scores relative to each token's best one keep prices near the range, where float32 resolves a step.
    step = tolerance * jnp.maximum(-jnp.min(scores, initial=0.0, where=real[:, None]), 1e-30)
    most = -(-count // experts)
    numbers = jnp.arange(experts, dtype=jnp.int32)

    def is_unfinished(state: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.any(real & (state[0] == experts)) & (state[3] < rounds)

    def bid(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        expert, bids, prices, number = state
        values = scores - prices[None]
        best, choice = lax.top_k(values, min(2, experts))
        bidding = real & (expert == experts)
        new_bid = prices[choice[:, 0]] + best[:, 0] - best[:, -1] + step
        expert = jnp.where(bidding, choice[:, 0], expert)
        bids = jnp.where(bidding, new_bid, bids)
        by_expert = jnp.where(expert[None] == numbers[:, None], bids[None], -jnp.inf)  # [E, T]
        highest, holders = lax.top_k(by_expert, most)  # [E, most]
        has_place = (jnp.arange(most) < places)[None] & jnp.isfinite(highest)
        # A token has a bid for a single expert, so that it appears as the holder of one place at most.
        is_kept = jnp.zeros(count, bool).at[holders.reshape(-1)].max(has_place.reshape(-1))
        lowest = lax.dynamic_index_in_dim(highest, jnp.maximum(places - 1, 0), axis=1, keepdims=False)
        prices = jnp.where(jnp.isfinite(lowest), jnp.maximum(prices, lowest), prices)
        return jnp.where(is_kept, expert, experts), bids, prices, number + 1

    start = jnp.full(count, experts, jnp.int32), jnp.zeros(count), jnp.zeros(experts), jnp.zeros((), jnp.int32)
    *start, _ = vary_alike(*start, scores)
    expert = lax.while_loop(is_unfinished, bid, tuple(start))[0]
    return checkpoint_name(_in_free_places(expert, real, places, experts), ROUTING)


def _finite(scores: jax.Array) -> jax.Array:
    """The scores `[T, E]`; NaN and -inf as the least finite score of the token, inf as its largest one."""
    is_finite = jnp.isfinite(scores)
    high = jnp.max(scores, axis=1, keepdims=True, initial=-jnp.inf, where=is_finite)
    low = jnp.min(scores, axis=1, keepdims=True, initial=jnp.inf, where=is_finite)
    has_finite = jnp.any(is_finite, axis=1, keepdims=True)
    high, low = jnp.where(has_finite, high, 0.0), jnp.where(has_finite, low, 0.0)
    # Differences of the largest numbers of float32 would overflow.
    return jnp.clip(jnp.where(jnp.isnan(scores), low, jnp.clip(scores, low, high)), -1e37, 1e37)


def _in_free_places(expert: jax.Array, real: jax.Array, places: jax.Array, experts: int) -> jax.Array:
    """The assignment, with tokens that have no expert in the free places of experts, in the order of both."""
    is_left = real & (expert == experts)
    free = places - jnp.bincount(expert, length=experts + 1)[:experts]
    number = jnp.cumsum(is_left) - 1
    return jnp.where(is_left, jnp.searchsorted(jnp.cumsum(free), number, side="right"), expert).astype(jnp.int32)


@array_op("N k", tokens="N")
def hashed_experts(tokens: Int[Array, " N"], k: int, experts: int, seed: int = 0) -> Int[Array, "N k"]:
    """Experts from token ids: fixed pseudo-random numbers, the same for every occurrence of a word.

    Args:
      tokens: Token ids.
      k: Experts per token, which differ from each other.
      experts: Number of experts E.
      seed: Number of the hash function.

    Returns:
      k distinct experts for each token.

    References: Roller et al. 2021, "Hash layers for large sparse models", arXiv 2106.04426.
    """
    key = mix(tokens.astype(jnp.uint32) + jnp.uint32(seed * 0x9E3779B1 & 0xFFFFFFFF))
    order = mix(key[:, None] + jnp.arange(experts, dtype=jnp.uint32)[None] * jnp.uint32(0x27D4EB2F))
    # Bits of the expert's number make the keys distinct without an order among experts that all tokens share.
    return checkpoint_name(lax.top_k((order >> 1).astype(jnp.int32), k)[1].astype(jnp.int32), ROUTING)
