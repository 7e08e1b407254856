"""Linear attention by its definition, written to be read: the recurrence first, then a second witness by all pairs of tokens.

Faster forms are tested against both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.attention.linear.state import normalized
from hpnlp.ops.helpers.array_op import array_op


@array_op("B T N", q="B T N")
def reference_linear_recurrence(
    q: Float[Array, "B T N M"],
    k: Float[Array, "B T K M"],
    v: Float[Array, "B T K H"],
    *,
    log_decay: Float[Array, "..."] | None = None,
    beta: Float[Array, "B T K"] | None = None,
    normalize: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    eps: float = 0.0,
) -> Float[Array, "B T N H"]:
    """Causal linear attention token by token, without validation of the arguments: `o_t = q_t^T S_t`.

    The state is `S_t = d_t S_{t-1} + k_t u_t^T`, where u_t is the value v_t, or `beta_t (v_t - k_t^T d_t S_{t-1})` with the
    delta rule. Segments begin with a state of zeros; tokens of a segment are consecutive. See `linear_attention` for the
    arguments.

    Cost: O(B N T M H) time, in T steps.

    References:
      Katharopoulos et al. 2020, "Transformers are RNNs", eq. 16 to 20; Yang et al. 2024, "Gated delta networks", eq. 10.
    """
    decay = jnp.ones_like(k) if log_decay is None else jnp.exp(_by_feature(log_decay.astype(jnp.float32), k))
    group = q.shape[2] // k.shape[2]  # query heads that read a key head
    qs, ks, vs, ds = q.astype(jnp.float32), *(jnp.repeat(x.astype(jnp.float32), group, 2) for x in (k, v, decay))
    s, z, outputs = jnp.zeros_like(ks[:, 0, :, :, None] * vs[:, 0, :, None]), jnp.zeros_like(ks[:, 0]), []
    for t in range(q.shape[1]):
        d = ds[:, t]
        if t and segment_ids is not None:
            d = jnp.where((segment_ids[:, t] == segment_ids[:, t - 1])[:, None, None], d, jnp.float32(0))
        s, z, u = d[..., None] * s, d * z, vs[:, t]
        if beta is not None:
            rate = jnp.repeat(beta[:, t].astype(jnp.float32), group, 1)
            u = rate[..., None] * (u - jnp.einsum("bnm,bnmh->bnh", ks[:, t], s))
        s, z = s + ks[:, t, :, :, None] * u[:, :, None], z + ks[:, t]
        o = jnp.einsum("bnm,bnmh->bnh", qs[:, t], s)
        outputs.append(normalized(o, jnp.einsum("bnm,bnm->bn", qs[:, t], z), eps) if normalize else o)
    return jnp.stack(outputs, axis=1).astype(q.dtype)


@array_op("B T N", q="B T N")
def reference_linear_attention(
    q: Float[Array, "B T N M"],
    k: Float[Array, "B S K M"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = True,
    log_decay: Float[Array, "..."] | None = None,
    beta: Float[Array, "B S K"] | None = None,
    normalize: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    eps: float = 0.0,
) -> Float[Array, "B T N H"]:
    """Linear attention with a matrix of all pairs of tokens, without validation of the arguments.

    With the delta rule, the values that a sequence writes are the solution of a linear system of all its tokens.

    Args:
      q: Queries, after the feature map.
      k: Keys, after the feature map.
      v: Values.
      causal: True for attention to preceding tokens and the token itself only.
      log_decay: As for `linear_attention`.
      beta: As for `linear_attention`.
      normalize: As for `linear_attention`.
      segment_ids: As for `linear_attention`.
      eps: As for `linear_attention`.

    Returns:
      o in q's dtype.

    Cost: O(B N T S M) time and memory with a decay for each feature; O(B N T S) memory without. With beta, O(B K T^3) time.

    References:
      Katharopoulos et al. 2020, "Transformers are RNNs", eq. 4 and 8; Yang et al. 2023, "Gated linear attention transformers",
      eq. 3; Yang et al. 2024, "Gated delta networks", eq. 10.
    """
    (b, t, n, m), (s, heads) = q.shape, k.shape[1:3]
    visible = jnp.tril(jnp.ones((t, s), bool)) if causal else jnp.ones((t, s), bool)
    visible = jnp.broadcast_to(visible[None], (b, t, s))
    if segment_ids is not None:
        visible &= segment_ids[:, :, None] == segment_ids[:, None, :]
    queries = q.astype(jnp.float32).reshape(b, t, heads, n // heads, m)
    k, values = k.astype(jnp.float32), v.astype(jnp.float32)
    decay = _decay(log_decay, visible, heads) if log_decay is not None else None
    if beta is not None:
        products = _products(k[:, :, :, None], k, decay)[..., 0, :, :]  # [B, K, T, S]
        products = jnp.where((visible & ~jnp.eye(t, dtype=bool)[None])[:, None], products, jnp.float32(0))
        rate = beta.astype(jnp.float32).transpose(0, 2, 1)[..., None]
        system = jnp.eye(t, dtype=jnp.float32)[None, None] + rate * products
        values = jax.scipy.linalg.solve_triangular(system, rate * values.transpose(0, 2, 1, 3), lower=True)
        values = values.transpose(0, 2, 1, 3)
    weights = _products(queries, k, decay)
    weights = jnp.where(visible[:, None, None], weights, jnp.float32(0))
    o = jnp.einsum("bkgts,bskh->btkgh", weights, values)
    if normalize:
        o = normalized(o, weights.sum(axis=-1).transpose(0, 3, 1, 2), eps)
    return o.reshape(b, t, n, -1).astype(q.dtype)


def _by_feature(log_decay: Array, k: Array) -> Array:
    """A decay of each head, token or feature, [B, T, K, M]."""
    log_decay = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    return jnp.broadcast_to(log_decay if log_decay.ndim == 4 else log_decay[None, None], k.shape)


def _decay(log_decay: Array, visible: Array, heads: int) -> Array:
    """[B, T, S, K, 1 or M], the decay from token s to token t: a product over visible tokens after s, up to t."""
    b, t = visible.shape[:2]
    if log_decay.ndim == 1:
        log_decay = jnp.broadcast_to(log_decay[None, None], (b, t, heads))
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    total = jnp.einsum(
        "btu,bukm->btkm", visible.astype(jnp.float32), log_decay.astype(jnp.float32), precision="highest"
    )
    difference = total[:, :, None] - total[:, None]
    return jnp.exp(jnp.where(visible[..., None, None], difference, jnp.float32(0)))


def _products(q: Array, k: Array, decay: Array | None) -> Array:
    """[B, K, G, T, S], inner products of queries [B, T, K, G, M] and keys [B, S, K, M], with the decay of each feature."""
    if decay is None:
        return jnp.einsum("btkgm,bskm->bkgts", q, k)
    decay = jnp.broadcast_to(decay, (*decay.shape[:-1], k.shape[-1]))
    return jnp.einsum("btkgm,bskm,btskm->bkgts", q, k, decay)
