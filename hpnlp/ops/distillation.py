"""Losses of distillation: how far the logits, hidden states and attention scores of a student are from those of a teacher.

Gradients are those by the student; callers stop gradients by the teacher where it could have some.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.attention.masks.base import Full, Mask
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.ops.helpers.array_op import array_op

_EPS = 1e-12  # lower bound of squared lengths; added to variances


@array_op()
def logit_divergence(
    student: Float[Array, "*tokens V"], teacher: Float[Array, "*tokens V"], temperature: int | float = 1.0
) -> Float[Array, "*tokens"]:
    """Divergence of softened distributions, T^2 KL(softmax(teacher / T) || softmax(student / T)), summed over the classes.

    The factor T^2 keeps the size of gradients when T changes. The divergence is the soft cross-entropy of Hinton et al. minus
    the entropy of the teacher, which has no gradient, so that it is 0 for a student like its teacher.

    Args:
      student: Logits [..., V].
      teacher: Logits [..., V]; -inf for classes that the teacher excludes.
      temperature: T, over 0.

    Returns:
      [...] float32, nats.

    Cost:
      O(V) per token.

    References:
      Hinton et al. 2015, "Distilling the knowledge in a neural network", section 2.
    """
    log_p, log_q = (jax.nn.log_softmax(_float32(x) / jnp.float32(temperature)) for x in (teacher, student))
    return jnp.float32(temperature) ** 2 * _divergence(log_p, log_q)


@array_op()
def top_logit_divergence(
    student: Float[Array, "*tokens V"],
    teacher: Float[Array, "*tokens k"],
    ids: Int[Array, "*tokens k"],
    temperature: int | float = 1.0,
) -> Float[Array, "*tokens"]:
    """`logit_divergence` for a teacher whose k largest logits are known; it gives all other classes the probability 0.

    Args:
      student: Logits [..., V].
      teacher: The k largest logits of the teacher, [..., k].
      ids: Their classes, [..., k].
      temperature: T, over 0.

    Returns:
      [...] float32, nats; equal to `logit_divergence` for k = V.

    Cost:
      O(V) per token.
    """
    log_p = jax.nn.log_softmax(_float32(teacher) / jnp.float32(temperature))
    log_q = jax.nn.log_softmax(_float32(student) / jnp.float32(temperature))
    log_q = jnp.take_along_axis(log_q, jnp.asarray(ids, jnp.int32), axis=-1)
    return jnp.float32(temperature) ** 2 * _divergence(log_p, log_q)


def _divergence(log_p: Array, log_q: Array) -> Array:
    """Sum of p (log p - log q) over the last axis; classes with p = 0 add nothing, whatever q is."""
    p = jnp.exp(log_p)
    is_possible = p > 0
    gaps = jnp.where(is_possible, log_p, 0.0) - jnp.where(is_possible, log_q, 0.0)
    return jnp.sum(p * gaps, axis=-1)


@array_op()
def logit_regression(student: Float[Array, "*tokens V"], teacher: Float[Array, "*tokens V"]) -> Float[Array, "*tokens"]:
    """Half of the squared distance of the logits, summed over the classes.

    Args:
      student: Logits [..., V].
      teacher: Logits [..., V].

    Returns:
      [...] float32.

    Cost:
      O(V) per token.

    References:
      Ba and Caruana 2014, "Do deep nets really need to be deep?", eq. 1.
    """
    return 0.5 * jnp.sum(jnp.square(_float32(student) - _float32(teacher)), axis=-1)


@array_op()
def cosine_distance(student: Float[Array, "*tokens D"], teacher: Float[Array, "*tokens D"]) -> Float[Array, "*tokens"]:
    """1 minus the cosine of the angle between two states.

    Args:
      student: States [..., D].
      teacher: States [..., D].

    Returns:
      [...] float32, from 0 to 2; 1 where one of the states is 0.

    Cost:
      O(D) per token.

    References:
      Sanh et al. 2019, "DistilBERT", section 2.
    """
    s, t = _float32(student), _float32(teacher)
    lengths = [jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1), _EPS)) for x in (s, t)]
    return 1.0 - jnp.sum(s * t, axis=-1) / (lengths[0] * lengths[1])


@array_op()
def squared_error(student: Float[Array, "*tokens D"], teacher: Float[Array, "*tokens D"]) -> Float[Array, "*tokens"]:
    """Mean over the features of the squared difference.

    Args:
      student: States [..., D].
      teacher: States [..., D].

    Returns:
      [...] float32.

    Cost:
      O(D) per token.

    References:
      Jiao et al. 2020, "TinyBERT", eq. 8 and 9.
    """
    return jnp.mean(jnp.square(_float32(student) - _float32(teacher)), axis=-1)


@array_op()
def feature_map_error(
    student: Float[Array, "*tokens D"], teacher: Float[Array, "*tokens D"]
) -> Float[Array, "*tokens"]:
    """`squared_error` of the states after layer normalisation without parameters.

    Args:
      student: States [..., D].
      teacher: States [..., D].

    Returns:
      [...] float32.

    Cost:
      O(D) per token.

    References:
      Sun et al. 2020, "MobileBERT", eq. 2, with the normalisation of its published code.
    """
    return squared_error(_normalized(student), _normalized(teacher))


@array_op("B N", queries="B T N")
def attention_scores(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B S K H"],
    mask: Mask | PerHead = Full(),  # noqa: B008  (frozen)
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    *,
    scale: int | float | None = None,
    soft_cap: int | float | None = None,
) -> tuple[Float[Array, "B N T S"], Bool[Array, "B N T S"]]:
    """Scores of self-attention before the softmax, and the pairs that may attend.

    Args:
      queries: [B, T, N, H].
      keys: [B, T, K, H]; N is a multiple of K.
      mask: The pairs that may attend.
      segment_ids: [B, T]; tokens of different segments do not attend, and those of segment 0 are padding. None for one segment.
      positions: [B, T]; None for 0, 1, ...
      scale: Factor of the products; None for H ** -0.5.
      soft_cap: Scores become soft_cap * tanh(score / soft_cap); None for no cap.

    Returns:
      (scores float32, visible): both [B, N, T, T]. No pair with padding is visible.

    Cost:
      O(B N T^2 H) time and O(B N T^2) memory.
    """
    (b, t, n, h), kv_heads = queries.shape, keys.shape[2]
    k = jnp.repeat(_float32(keys), n // kv_heads, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", _float32(queries), k) * jnp.float32(h**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = jnp.float32(soft_cap) * jnp.tanh(scores / jnp.float32(soft_cap))
    places = jnp.broadcast_to(jnp.arange(t), (b, t)) if positions is None else jnp.asarray(positions)
    visible = jnp.zeros((b, n, t, t), bool)
    for head_mask, members in mask.by_head(n).items():
        allowed = jnp.asarray(head_mask.at(places[:, :, None], places[:, None, :]))[:, None]
        visible = visible.at[:, jnp.asarray(members)].set(allowed)
    if segment_ids is not None:
        segments = jnp.asarray(segment_ids)
        is_token = segments > 0
        same = (segments[:, :, None] == segments[:, None, :]) & is_token[:, :, None] & is_token[:, None, :]
        visible &= same[:, None]
    return scores, visible


@array_op()
def score_error(
    student: Float[Array, "B N T S"], teacher: Float[Array, "B N T S"], visible: Bool[Array, "B N T S"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Squared difference of attention scores before the softmax, over the pairs that may attend.

    Args:
      student: Scores [B, N, T, S].
      teacher: Scores [B, N, T, S].
      visible: The pairs that may attend; others, whose scores mean nothing, are left out.

    Returns:
      (sum, number of pairs), float32.

    Cost:
      O(B N T S).

    References:
      Jiao et al. 2020, "TinyBERT", eq. 7.
    """
    difference = jnp.where(visible, _float32(student) - _float32(teacher), 0.0)
    return jnp.sum(jnp.square(difference)), jnp.sum(jnp.asarray(visible), dtype=jnp.float32)


@array_op()
def attention_divergence(
    student: Float[Array, "B N T S"], teacher: Float[Array, "B N T S"], visible: Bool[Array, "B N T S"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """KL(teacher || student) of the attention of each head and query.

    Args:
      student: Scores [B, N, T, S] before the softmax.
      teacher: Scores [B, N, T, S] before the softmax.
      visible: The pairs that may attend.

    Returns:
      (sum, number of heads and queries that see a key), float32, nats.

    Cost:
      O(B N T S).

    References:
      Sun et al. 2020, "MobileBERT", eq. 3.
    """
    is_visible = jnp.asarray(visible)
    sees_any = is_visible.any(axis=-1)
    lowest = jnp.finfo(jnp.float32).min / 2  # finite, so that products with probabilities of 0 are 0
    log_p, log_q = (jax.nn.log_softmax(jnp.where(is_visible, _float32(x), lowest)) for x in (teacher, student))
    divergence = jnp.sum(jnp.where(is_visible, jnp.exp(log_p) * (log_p - log_q), 0.0), axis=-1)
    return jnp.sum(jnp.where(sees_any, divergence, 0.0)), jnp.sum(sees_any, dtype=jnp.float32)


def _float32(x: ArrayLike) -> Array:
    return jnp.asarray(x, jnp.float32)


def _normalized(x: ArrayLike) -> Array:
    centered = _float32(x) - jnp.mean(_float32(x), axis=-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + _EPS)
