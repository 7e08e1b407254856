"""Attention with random features: FAVOR+ and its later forms in place of the softmax, and random feature attention (RFA).

Both are linear attention after a feature map, with a state of constant size. Shape letters: P random projections, M features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.attention.linear.linear_attention import linear_attention
from hpnlp.ops.attention.linear.random_features import log_features, stable_keys, stable_queries, trigonometric_features
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.types import InputError

# Least sum of the weights of positive features, whose square is a float32 number. A query has a smaller sum if its features are
# almost 0 wherever those of the keys are not; its output is then close to 0.
MIN_WEIGHT = 1e-18
# Least mean weight of RFA. The weights are estimates of numbers in (0, 1], which may be negative, and so may their sum.
MIN_MEAN_WEIGHT = 0.02


@array_op("B T N", q="B T N", k="B S K")
def random_feature_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    w: Float[Array, "P H"],
    *,
    kind: str = "positive",
    rho: Float[Array, " K"] | None = None,
    causal: bool = True,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N Hv"]:
    """An estimate of softmax attention by positive random features, in time and memory linear in the length.

    The weight of a pair is `phi(q) . phi(k)`, an unbiased estimate of `exp(q . k / sqrt(H))`; the output is the mean of the
    values by these weights. With more features, it tends to softmax attention. The number of features that an error requires
    grows exponentially with |q + k|^2 / sqrt(H).

    Args:
      q: Queries. The N query heads are groups of N / K, each for one key head.
      k: Keys.
      v: Values.
      w: Random projections, from `random_projections`.
      kind: Feature map, see `log_features`.
      rho: Parameter of optimal features, of each key head, from `optimal_rho`.
      causal: True for attention to preceding tokens and the token itself; False for all tokens.
      segment_ids: Tokens of different segments do not influence each other.

    Returns:
      o in v's dtype.

    Raises:
      InputError: Another kind; or shapes that do not match, as for `linear_attention`.

    Cost: That of `linear_attention` with M features, and P H multiplications and M exponentials for each query and key.

    References:
      Choromanski et al. 2021, "Rethinking attention with Performers", arXiv 2009.14794, eq. 4 to 7 and lemma 1.
      Likhosherstov et al. 2022, "Chefs' random tables", arXiv 2205.15317.
    """
    queries, keys = softmax_features(q, k, w, kind, rho)
    result: Any = linear_attention(
        queries, keys, v, causal=causal, normalize=True, segment_ids=segment_ids, eps=MIN_WEIGHT
    )
    return result.astype(v.dtype)


def softmax_features(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    w: Float[Array, "P H"],
    kind: str = "positive",
    rho: Float[Array, " K"] | None = None,
) -> tuple[Float[Array, "B T N M"], Float[Array, "B S K M"]]:
    """Features of queries and keys whose inner products are proportional to estimates of exp(q . k / sqrt(H)).

    Each query and each key is made stable by itself (`stable_queries`, `stable_keys`), not by a maximum over tokens.

    Args:
      q: Queries.
      k: Keys.
      w: Random projections.
      kind: Feature map.
      rho: Parameter of optimal features, of each key head.

    Returns:
      Features of the queries and of the keys, float32, for `linear_attention` with `normalize=True` and `eps=MIN_WEIGHT`.

    Raises:
      InputError: Another kind, or query heads that are no multiple of the key heads.
    """
    factor = jnp.float32(q.shape[-1] ** -0.25)
    of_queries = None if rho is None else jnp.repeat(rho, _groups(q, k))[None, None]
    of_keys = None if rho is None else rho[None, None]
    queries = stable_queries(log_features(factor * q.astype(jnp.float32), w, kind, of_queries))
    return queries, stable_keys(log_features(factor * k.astype(jnp.float32), w, kind, of_keys))


class RFATerms(NamedTuple):
    """Operands of the two linear attentions of RFA.

    Attributes:
      q: `[B, T, N, M]`, features of the queries.
      k: `[B, S, K, M]`, features of the keys, multiplied by 1 - g if there are gates.
      v: `[B, S, K, Hv + 1]`, values, followed by 1.
      queries: `[B, T, 1 or K, 1]`, ones: queries that sum the factors of the keys.
      factors: `[B, S, 1 or K, 1]`, the keys of the sums of factors: 1 or 1 - g.
      values: `[B, S, 1 or K, 1]`, ones: their values.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    queries: jax.Array
    factors: jax.Array
    values: jax.Array


def rfa_terms(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    w: Float[Array, "P H"],
    scale: Float[Array, "K H"] | None = None,
    log_gate: Float[Array, "B S K"] | None = None,
) -> RFATerms:
    """Features of queries and keys of random feature attention, each a function of its own token.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      w: Random projections.
      scale: As for `rfa_attention`.
      log_gate: As for `rfa_attention`.

    Returns:
      float32 operands of `linear_attention` without normalisation, with log_decay=log_gate: q, k and v give the numerators and
      denominators of `rfa_quotient`, and queries, factors and values give the sums of factors.

    Raises:
      InputError: Query heads that are no multiple of the key heads.
    """
    phi_q = trigonometric_features(_normalized(q, scale, _groups(q, k)), w)
    phi_k = trigonometric_features(_normalized(k, scale, 1), w)
    heads = 1 if log_gate is None else k.shape[2]
    ones = [jnp.ones((*x.shape[:2], heads, 1), jnp.float32) for x in (q, k)]
    queries, values, _ = vary_alike(*ones, phi_k)
    factors = values
    if log_gate is not None:
        factors = -jnp.expm1(log_gate.astype(jnp.float32))[..., None]
        phi_k = phi_k * factors
    v = jnp.concatenate([v.astype(jnp.float32), jnp.ones((*v.shape[:-1], 1), jnp.float32)], axis=-1)
    return RFATerms(phi_q, phi_k, v, queries, factors, values)


def rfa_quotient(sums: Float[Array, "B T N _"], mass: Float[Array, "B T J 1"]) -> Float[Array, "B T N Hv"]:
    """Divides the sums of values of RFA by the sums of weights, which are at least MIN_MEAN_WEIGHT times the sums of factors.

    Args:
      sums: Sums of the weighted values, and of the weights.
      mass: Sums of the factors of the keys, for J = 1 or K heads.

    Returns:
      The quotients; 0 where a query sees no key.
    """
    least = jnp.maximum(MIN_MEAN_WEIGHT * mass, MIN_WEIGHT)
    if mass.shape[2] > 1:
        least = jnp.repeat(least, sums.shape[2] // mass.shape[2], axis=2)
    return sums[..., :-1] / jnp.maximum(sums[..., -1:], least)


@array_op("B T N", q="B T N", k="B S K")
def rfa_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    w: Float[Array, "P H"],
    *,
    scale: Float[Array, "K H"] | None = None,
    log_gate: Float[Array, "B S K"] | None = None,
    causal: bool = True,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Random feature attention (RFA), in time and memory linear in the length.

    Queries and keys are normalised to length 1 and multiplied by `scale`. The weight of a pair is the product of their
    trigonometric features, an estimate of `exp(-|q - k|^2 / 2)`, which for scale 1 is proportional to `exp(q . k)`. The output
    is the mean of the values by these weights. With gates g, sums decay from token to token, and recent tokens have more
    weight: `S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T`.

    Weights may be negative. The sum of the weights of a query is therefore taken to be at least MIN_MEAN_WEIGHT times the
    number of keys (with gates, times the sum of their factors), so that outputs are bounded. The code of the paper has a
    constant in its place, which does not grow with the number of keys.

    Args:
      q: Queries. The N query heads are groups of N / K, each for one key head.
      k: Keys.
      v: Values.
      w: Random projections, from `random_projections`.
      scale: Factors of the features of normalised queries and keys, the sigma of the paper; None for 1.
      log_gate: Logarithms of the gates, finite and at most 0; causal only. None for no gates.
      causal: True for attention to preceding tokens and the token itself; False for all tokens.
      segment_ids: Tokens of different segments do not influence each other.

    Returns:
      o in v's dtype.

    Raises:
      InputError: Gates without causal; or shapes that do not match, as for `linear_attention`.

    Cost: That of `linear_attention` with M = 2 P features, and P H multiplications, P sines and P cosines for each query and
    key.

    References: Peng et al. 2021, "Random feature attention", arXiv 2103.02143, eq. 5 to 7.
    """
    terms = rfa_terms(q, k, v, w, scale, log_gate)
    options = {"causal": causal, "segment_ids": segment_ids, "log_decay": log_gate}
    sums: Any = linear_attention(terms.q, terms.k, terms.v, **options)
    mass: Any = linear_attention(terms.queries, terms.factors, terms.values, **options)
    return rfa_quotient(sums, mass).astype(v.dtype)


def _groups(q: jax.Array, k: jax.Array) -> int:
    """Number of query heads for each key head."""
    if q.shape[2] % k.shape[2]:
        raise InputError(f"q {q.shape}, k {k.shape}: expected a number of query heads that is a multiple of key heads")
    return q.shape[2] // k.shape[2]


def _normalized(x: jax.Array, scale: jax.Array | None, groups: int) -> jax.Array:
    """Vectors of length 1 times the scale of their head; 0 stays 0."""
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), 1e-12))
    return x if scale is None else x * jnp.repeat(scale.astype(jnp.float32), groups, axis=0)[None, None]
