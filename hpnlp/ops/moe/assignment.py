"""Balanced assignment of tokens to experts by an auction, and experts from a hash of token ids."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.counter_rng import mix
from hpnlp.ops.custom_vjp import vary_alike
from hpnlp.ops.moe.routing import ROUTING


@array_op()
def balanced_assignment(
    scores: Float[Array, "T E"], real: Bool[Array, " T"], tolerance: float = 1e-3
) -> Int[Array, " T"]:
    """Assigns each token to one expert, so that no expert has more than `ceil(n / E)` of the n tokens without padding.

    An auction: every token without an expert bids for the expert with the largest difference of score and price; an expert
    with more bids than places keeps the highest ones, and its price rises to the lowest of these. Later tokens displace
    earlier ones: not causal.

    Args:
      scores: Scores of the pairs.
      real: False for padding.
      tolerance: Least rise of a price, relative to the range of the scores.

    Returns:
      The expert of each token; E for padding. The sum of its scores is within n x tolerance x range of the largest one.

    Cost: O(T E) per round; the number of rounds grows with 1 / tolerance where many scores are alike.

    References: Lewis et al. 2021, "BASE layers", arXiv 2103.16716; Bertsekas 1992, "Auction algorithms for network flow
    problems".
    """
    count, experts = scores.shape
    scores = lax.stop_gradient(scores.astype(jnp.float32))
    places = -(-jnp.sum(real, dtype=jnp.int32) // experts)
    spread = jnp.max(scores, initial=-jnp.inf, where=real[:, None]) - jnp.min(
        scores, initial=jnp.inf, where=real[:, None]
    )
    step = tolerance * jnp.maximum(jnp.where(jnp.isfinite(spread), spread, 0.0), 1e-6)
    most = -(-count // experts)
    numbers = jnp.arange(experts, dtype=jnp.int32)

    def unassigned(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(real & (state[0] == experts))

    def bid(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        expert, bids, prices = state
        values = scores - prices[None]
        best, choice = lax.top_k(values, min(2, experts))
        second = best[:, -1] if experts > 1 else best[:, 0]
        bidding = real & (expert == experts)
        new_bid = prices[choice[:, 0]] + best[:, 0] - second + step
        expert = jnp.where(bidding, choice[:, 0], expert)
        bids = jnp.where(bidding, new_bid, bids)
        of_expert = jnp.where(expert[:, None] == numbers[None], bids[:, None], -jnp.inf)  # [T, E]
        highest, holders = lax.top_k(of_expert.T, most)  # [E, most]
        keeps = (jnp.arange(most) < places)[None] & jnp.isfinite(highest)
        # A token holds one bid, so that it appears with one expert only.
        is_kept = jnp.zeros(count, bool).at[holders.reshape(-1)].max(keeps.reshape(-1))
        lowest = jnp.take_along_axis(highest, jnp.maximum(places - 1, 0)[None, None].repeat(experts, 0), 1)[:, 0]
        prices = jnp.where(jnp.isfinite(lowest), jnp.maximum(prices, lowest), prices)
        return jnp.where(is_kept, expert, experts), bids, prices

    zeros = jnp.full(count, experts, jnp.int32), jnp.zeros(count), jnp.zeros(experts)
    expert, bids, prices, _ = vary_alike(*zeros, scores)
    start = expert, bids, prices
    return checkpoint_name(lax.while_loop(unassigned, bid, start)[0], ROUTING)


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
    return lax.top_k((order >> 1).astype(jnp.int32), k)[1].astype(jnp.int32)
