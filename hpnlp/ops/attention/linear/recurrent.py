"""Linear attention token by token, as an RNN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.ops.attention.linear.state import LinearState, check_state, normalized
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError


@array_op("B N | B K", q="B N", k="B K")
def linear_attention_step(
    q: Float[Array, "B N M"],
    k: Float[Array, "B K M"],
    v: Float[Array, "B K H"],
    state: LinearState,
    *,
    log_decay: Float[Array, "..."] | None = None,
    beta: Float[Array, "B K"] | None = None,
    eps: float = 0.0,
) -> tuple[Float[Array, "B N H"], LinearState]:
    """Linear attention of the next token of each sequence.

    `S_t = d_t S_{t-1} + k_t u_t^T` and `o_t = q_t^T S_t`, where `u_t` is the value, or `beta_t (v_t - k_t^T d_t S_{t-1})` with
    the delta rule. If the state has a normaliser, `o_t` is divided by `q_t^T z_t`.

    Args:
      q: Queries, after the feature map.
      k: Keys, after the feature map.
      v: Values.
      state: State of the preceding tokens.
      log_decay: Logarithm of the decay d, finite and at most 0: `[K]`, `[B, K]` or `[B, K, M]`.
      beta: Step size of the delta rule, for a state without a normaliser.
      eps: As for `linear_attention`.

    Returns:
      (o in q's dtype, the state with this token).

    Raises:
      InputError: Shapes do not match, or the delta rule with a normaliser.

    Cost: O(B N M H) time and the same memory, whatever the number of preceding tokens.

    References:
      Katharopoulos et al. 2020, "Transformers are RNNs", eq. 18 to 20; Yang et al. 2024, "Gated delta networks", eq. 10.
    """
    _check(q, k, v, state, log_decay, beta)
    (b, n, m), heads = q.shape, k.shape[1]
    queries = q.astype(jnp.float32).reshape(b, heads, n // heads, m)
    k, v, s, z = k.astype(jnp.float32), v.astype(jnp.float32), state.s, state.z
    if log_decay is not None:
        log_decay = log_decay[None] if log_decay.ndim == 1 else log_decay
        decay = jnp.exp(log_decay.astype(jnp.float32))
        decay = decay[..., None] if decay.ndim == 2 else decay
        s, z = s * decay[..., None], None if z is None else z * decay
    if beta is not None:
        v = beta.astype(jnp.float32)[..., None] * (v - jnp.einsum("bkm,bkmh->bkh", k, s))
    s = s + k[..., None] * v[:, :, None]
    o = jnp.einsum("bkgm,bkmh->bkgh", queries, s)
    if z is not None:
        z = z + k
        o = normalized(o, jnp.einsum("bkgm,bkm->bkg", queries, z), eps)
    return o.reshape(b, n, -1).astype(q.dtype), LinearState(s, z)


def _check(
    q: jax.Array, k: jax.Array, v: jax.Array, state: LinearState, log_decay: jax.Array | None, beta: jax.Array | None
) -> None:
    """Raises InputError for arguments that do not fit."""
    shapes = f"linear_attention_step of q {q.shape}, k {k.shape}, v {v.shape}"
    if not (q.ndim == k.ndim == v.ndim == 3 and k.shape[:2] == v.shape[:2] and q.shape[::2] == k.shape[::2]):
        raise InputError(f"{shapes}: expected [B, N, M], [B, K, M] and [B, K, H]")
    if q.shape[1] % k.shape[1]:
        raise InputError(f"{shapes}: expected a number of query heads that is a multiple of key heads")
    check_state(state, k, v)
    if log_decay is not None and log_decay.shape not in (k.shape[1:2], k.shape[:2], k.shape):
        raise InputError(f"log_decay {log_decay.shape}: expected {k.shape[1:2]}, {k.shape[:2]} or {k.shape}")
    if beta is not None and (beta.shape != k.shape[:2] or state.z is not None):
        raise InputError(f"beta {beta.shape}: expected {k.shape[:2]}, and a state without a normaliser")
