"""Softmax attention whose scores are sums of learned and synthesized terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.ops.attention.attend import attend
from hpnlp.ops.attention.masks.base import Full, Mask
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.ops.attention.pair_bias import BiasArrays, weighted
from hpnlp.ops.attention.reference import reference
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import AnyArray, InputError

Factors = tuple[Array, Array]


@array_op("B T N", v="B T")
def synthetic_attend(
    v: Float[Array, "B S K H"],
    factors: Sequence[Factors],
    scores: Sequence[Array],
    mask: Mask | PerHead = Full(),  # noqa: B008  (frozen)
    weights: Sequence[Any] | None = None,
    **operands: Any,
) -> Float[Array, "B T N H"]:
    """Softmax attention with a given sum of scores: `softmax(sum_i a_i b_i^T + sum_j weights_j scores_j) v`.

    Without factors, there are as many queries as keys, T = S.

    Scores that are products are computed in blocks and never stored for all pairs: dot products of queries and keys, those of
    a Dense Synthesizer (`relu(W1 x)` and W2), and those of a Factorized Random Synthesizer. Nor is the weighted sum of arrays.

    Args:
      v: Values.
      factors: Pairs of `a [B or 1, T, N, F]` and `b [B or 1, S, K or N, F]`, whose products are scores; F may differ.
      scores: Arrays `[B or 1, N, T or 1, S]`.
      mask: The pairs that may influence each other.
      weights: A number for each array of scores, float32 [], or None for 1; None for 1 for all.
      **operands: Segments, positions and dropout, as for `attend`.

    Returns:
      The mixed values, in the dtype of v. A token that sees none has 0.

    Raises:
      InputError: There are neither factors nor scores, or without factors, scores of another number of queries than S.

    Cost: O(B N T S (F + H)) time. O(B N (T + S) (F + H)) memory, and that of `scores` and their gradients.

    References:
      Tay et al. 2020, "Synthesizer: rethinking self-attention for transformer models", eqs. 2 to 7.
    """
    if not factors and not scores:
        raise InputError("no factors and no scores: pass at least one of them")
    weights = weights or [None] * len(scores)
    weights = [None if weight is None else jnp.reshape(weight, (1, 1, 1, 1)) for weight in weights]
    bias = BiasArrays(tuple(scores), tuple(weights)) if scores else None
    if factors:
        q, k = _joined(factors, v)
    else:  # attend has no form without queries: those of one feature are the cheapest
        length, heads = v.shape[1], max(x.shape[1] for x in scores)
        if wrong := [x.shape for x in scores if x.shape[2] not in (1, length)]:
            raise InputError(f"scores {wrong[0]} with {length} values: expected scores of 1 or {length} queries")
        q = jnp.zeros((v.shape[0], length, heads, 1), v.dtype)
        k = jnp.zeros((*v.shape[:3], 1), v.dtype)
    if q.shape[2] % k.shape[2] == 0 and k.shape[2] != v.shape[2]:
        v = jnp.repeat(v, k.shape[2] // v.shape[2], axis=2)
    o = attend(q, k, v, mask, bias=bias, scale=1.0, **operands)
    assert isinstance(o, jax.Array)
    return o


@array_op("B T N", v="B T")
def synthetic_attend_reference(
    v: Float[Array, "B S K H"],
    factors: Sequence[Factors],
    scores: Sequence[Array],
    mask: Mask | PerHead = Full(),  # noqa: B008  (frozen)
    weights: Sequence[Any] | None = None,
    **operands: Any,
) -> Float[Array, "B T N H"]:
    """`synthetic_attend` by its definition, with the scores of all pairs.

    Args:
      v: Values.
      factors: As for `synthetic_attend`.
      scores: As for `synthetic_attend`.
      mask: The pairs that may influence each other.
      weights: As for `synthetic_attend`.
      **operands: Segments and positions, as for `attend`.

    Returns:
      The mixed values, in the dtype of v.
    """
    total: Any = sum(weighted(x, weight) for x, weight in zip(scores, weights or [None] * len(scores), strict=True))
    for a, b in factors:
        b = jnp.repeat(b, a.shape[2] // b.shape[2], axis=2)
        batch = (max(a.shape[0], b.shape[0]),)
        a, b = (jnp.broadcast_to(x, batch + x.shape[1:]).astype(jnp.float32) for x in (a, b))
        total = total + jnp.einsum("btnf,bsnf->bnts", a, b)
    q = jnp.zeros((v.shape[0], total.shape[2] if factors else v.shape[1], total.shape[1], 1), v.dtype)
    o = reference(q, jnp.zeros((*v.shape[:3], 1), v.dtype), v, mask, bias=total, **operands)
    assert isinstance(o, jax.Array)
    return o


def tiled_scores(a: AnyArray, b: AnyArray, keys: int) -> Float[Array, "B N T S"]:
    """Scores of a Factorized Dense Synthesizer: `scores[t, s] = a[t, s % A] * b[t, s // A]`.

    Args:
      a: Scores within blocks of A keys.
      b: Factors of C blocks.
      keys: Number of keys S, at most A C.

    Returns:
      float32 scores.

    Raises:
      InputError: There are more keys than A C.

    Cost: B N T S multiplications, and the array of this size.

    References:
      Tay et al. 2020, sec. 3.2, "Factorized Dense Synthesizer": a tiled in one order, b in the other.
    """
    if keys > a.shape[3] * b.shape[3]:
        raise InputError(f"{keys} keys: expected at most {a.shape[3]} x {b.shape[3]}, the sizes of both factors")
    a, b = (jnp.asarray(x, jnp.float32).transpose(0, 2, 1, 3) for x in (a, b))
    return (b[..., :, None] * a[..., None, :]).reshape(*a.shape[:3], -1)[..., :keys]


def _joined(factors: Sequence[Factors], v: Array) -> Factors:
    """Factors side by side, so that the product of both is the sum of the products; of all sequences of the batch."""
    heads = max(b.shape[2] for _, b in factors)
    a = [jnp.broadcast_to(a, v.shape[:1] + a.shape[1:]) for a, _ in factors]
    b = [jnp.repeat(jnp.broadcast_to(b, v.shape[:1] + b.shape[1:]), heads // b.shape[2], axis=2) for _, b in factors]
    if len(factors) == 1:
        return a[0], b[0]
    return jnp.concatenate(a, axis=3), jnp.concatenate(b, axis=3)
