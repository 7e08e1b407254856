"""Public call of linear attention: checks the arguments and chooses a form."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.attention.linear.chunked import bidirectional, causal_chunks, outputs
from hpnlp.ops.attention.linear.chunks import ChunkShape, contiguous, find_borders, scattered, select
from hpnlp.ops.attention.linear.state import LinearState, check_state, normalized, zero_state
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.types import InputError

# Tokens of key heads that are computed at a time on a CPU where a chunk has many intermediate results. For T 4096
# and 8 heads of 64, the forward and backward pass takes 0.7 (gla) and 0.8 (gated_delta) of the time of all tokens at once, and
# 0.19 and 0.26 of the memory.
CPU_TOKENS = 2048
# Sequences of at most so many tokens are not divided.
LEAST_TOKENS = 128


class TokenArrays(NamedTuple):
    """Arrays of a call, `[B, T, ...]` each, as `linear_attention` gets them."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array | None
    beta: jax.Array | None
    segment_ids: jax.Array | None

    @property
    def has_many_terms(self) -> bool:
        """Whether a chunk has many intermediate results: with the delta rule, or a decay of each feature."""
        return self.beta is not None or (self.log_decay is not None and self.log_decay.ndim == 4)


class LinearOptions(NamedTuple):
    """Static options of a call, as `linear_attention` gets them."""

    causal: bool
    normalize: bool
    eps: float
    chunk: int


@array_op("B T N | B", q="B T N")
def linear_attention(
    q: Float[Array, "B T N M"],
    k: Float[Array, "B S K M"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = True,
    log_decay: Float[Array, "..."] | None = None,
    beta: Float[Array, "B T K"] | None = None,
    normalize: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    eps: float = 0.0,
    chunk: int = 64,
) -> Array | tuple[Array, LinearState]:
    """Attention whose weights are inner products of queries and keys, in time and memory linear in the length.

    Causal: `o_t = q_t^T S_t` with `S_t = d_t S_{t-1} + k_t v_t^T`; not causal: `o_t = q_t^T sum_s k_s v_s^T`. There is no
    softmax and no scale: a feature map, such as elu + 1, is applied to queries and keys by the caller.

    Args:
      q: Queries. The N query heads are groups of N / K, each for one key head.
      k: Keys. Another length than that of q is accepted for attention that is not causal, without segments.
      v: Values.
      causal: True for attention to preceding tokens and the token itself; False for all tokens.
      log_decay: Logarithm of the decay d, finite and at most 0; causal only. `[K]` for a constant of each head, `[B, T, K]`
        for a number for each head and token, or `[B, T, K, M]` for one for each feature of a key.
      beta: Step size of the delta rule, causal only: a token writes `beta_t (v_t - k_t^T d_t S_{t-1})` in place of v_t. The
        state is bounded for keys of length 1 and step sizes in [0, 2].
      normalize: Divide by the sum of the weights, for positive weights.
      segment_ids: Tokens of different segments do not influence each other. Tokens of a segment may be apart, at the price of a
        gather; with state or return_state, they are consecutive.
      state: State of the tokens before the first one, which belong to its segment; causal only.
      return_state: Also return the state after the last token, of its segment; causal only.
      eps: Least size of a sum of weights; see `normalized`. With 0, a query all of whose weights are 0 gives 0.
      chunk: Number of tokens of a chunk, a power of 2.

    Returns:
      o `[B, T, N, H]` in q's dtype; with return_state the pair (o, state). Sums are float32.

    Raises:
      InputError: Shapes do not match, chunk is not a power of 2, or an option is not defined for attention that is not causal.

    Cost: O(B N T (C + M) H) time for chunks of C tokens; with a decay of each feature, log2(C) exponentials per feature more;
    with beta, O(B K T (C^2 + C M + M^2)) more. The backward pass keeps a state `[M, H]` per chunk and head; on a CPU, with
    beta or a decay of each feature, it keeps the arguments, and recomputes the forward pass for some tokens at a time.

    References:
      Katharopoulos et al. 2020, "Transformers are RNNs", arXiv 2006.16236, eq. 4 to 12; chunks and decays: Sun et al. 2023,
      "Retentive network", arXiv 2307.08621, eq. 7, and Yang et al. 2023, "Gated linear attention transformers with
      hardware-efficient training", arXiv 2312.06635, sec. 4; the delta rule: Yang et al. 2024, "Gated delta networks",
      arXiv 2412.06464, eq. 10.
    """
    tokens, options = TokenArrays(q, k, v, log_decay, beta, segment_ids), LinearOptions(causal, normalize, eps, chunk)
    _check(tokens, options, state, return_state)
    if not causal and segment_ids is None:
        return _all_pairs(q, k, v, normalize, eps)
    dtype, order = q.dtype, None
    if log_decay is not None and log_decay.ndim == 1:
        tokens = tokens._replace(log_decay=jnp.broadcast_to(log_decay[None, None], k.shape[:3]))
    if segment_ids is not None and state is None and not return_state:
        segment_ids, (q, k, v, log_decay, beta), order = contiguous(segment_ids, *tokens[:5])
        tokens = TokenArrays(q, k, v, log_decay, beta, segment_ids)
    if tokens.has_many_terms and jax.default_backend() == "cpu":
        batch, _, kv_heads, features = k.shape
        first = zero_state(batch, kv_heads, features, v.shape[-1], normalize) if state is None else state
        o, last = _in_parts(tokens, first, options)
    else:
        o, last = _in_chunks(tokens, state, options)
    o = o.astype(dtype)
    o = o if order is None else scattered(o, order)
    if return_state:
        assert last is not None
        return o, last
    return o


def _in_chunks(
    tokens: TokenArrays, state: LinearState | None, options: LinearOptions
) -> tuple[jax.Array, LinearState | None]:
    """(o float32, the state after the last token, None if not causal)."""
    q, k, v, log_decay, beta, segment_ids = tokens
    causal, normalize, eps, chunk = options
    (batch, length, heads), (kv_heads, features) = q.shape[:3], k.shape[2:]
    chunk = min(chunk, 1 << (length - 1).bit_length() if tokens.has_many_terms else length)
    shape = ChunkShape(batch, length, kv_heads, chunk)
    borders = find_borders(shape, segment_ids, causal)
    queries, keys, values = (shape.split(x) for x in (q, k, v))
    log_decay, beta = (None if x is None else shape.split(x) for x in (log_decay, beta))
    if causal:
        first = zero_state(batch, kv_heads, features, v.shape[-1], normalize) if state is None else state
        o, last = outputs(causal_chunks(queries, keys, values, log_decay, beta, borders, normalize), first, eps)
    else:
        o, last = bidirectional(queries, keys, values, borders, batch * kv_heads, normalize, eps), None
    return shape.join(o, heads), last


def _in_parts(tokens: TokenArrays, state: LinearState, options: LinearOptions) -> tuple[jax.Array, LinearState | None]:
    """`_in_chunks`, causal, for some tokens of each sequence at a time, with recomputation in the backward pass.

    Tokens are appended whose keys, decays and step sizes are 0: they leave the state as it is.
    """
    batch, length, kv_heads = tokens.k.shape[:3]
    most = max(LEAST_TOKENS, CPU_TOKENS // (batch * kv_heads))
    if length <= most:
        return _in_chunks(tokens, state, options)
    count = -(-length // most)
    size = -(-length // count)

    def split(x: Array) -> Any:
        pads = [(0, 0), (0, count * size - length), *[(0, 0)] * (x.ndim - 2)]
        x = jnp.pad(x, pads, mode="edge" if x.ndim == 2 else "constant")  # padding belongs to the last segment
        return jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)

    def step(carry: Any, part: TokenArrays) -> Any:
        state, segment = carry
        if part.segment_ids is not None:  # the state is that of the last token, perhaps of another segment
            state = jax.tree.map(functools.partial(select, part.segment_ids[:, 0] == segment), state)
            segment = part.segment_ids[:, -1]
        o, state = _in_chunks(part, state, options)
        return (state, segment), o

    arrays = [x for x in tokens if x is not None]
    state = jax.tree.map(lambda x: vary_alike(x.astype(jnp.float32), *arrays)[0], state)
    first = None if tokens.segment_ids is None else tokens.segment_ids[:, 0]
    parts = jax.tree.map(split, tokens)
    (last, _), o = lax.scan(jax.checkpoint(step, prevent_cse=False), (state, first), parts)
    return jnp.moveaxis(o, 0, 1).reshape(batch, count * size, *o.shape[3:])[:, :length], last


def _all_pairs(q: jax.Array, k: jax.Array, v: jax.Array, normalize: bool, eps: float) -> jax.Array:
    """Attention of all queries to all keys of the sequence."""
    (b, t, n, m), heads = q.shape, k.shape[2]
    k, v = (x.astype(jnp.float32).transpose(0, 2, 1, 3).reshape(b * heads, -1, x.shape[-1]) for x in (k, v))
    queries = q.astype(jnp.float32).transpose(0, 2, 1, 3).reshape(b * heads, -1, m)
    o = jnp.einsum("xtm,xmh->xth", queries, jnp.einsum("xsm,xsh->xmh", k, v))
    if normalize:
        o = normalized(o, jnp.einsum("xtm,xm->xt", queries, k.sum(axis=1)), eps)
    return o.reshape(b, n, t, -1).transpose(0, 2, 1, 3).astype(q.dtype)


def _check(tokens: TokenArrays, options: LinearOptions, state: LinearState | None, return_state: bool) -> None:
    """Raises InputError for arguments that do not fit."""
    q, k, v, log_decay, beta, segment_ids = tokens
    causal, normalize, _, chunk = options
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not (q.ndim == k.ndim == v.ndim == 4 and k.shape[:3] == v.shape[:3] and q.shape[::3] == k.shape[::3]):
        raise InputError(f"linear_attention of {shapes}: expected [B, T, N, M], [B, S, K, M] and [B, S, K, H]")
    if q.shape[2] % k.shape[2]:
        raise InputError(
            f"linear_attention of {shapes}: expected a number of query heads that is a multiple of key heads"
        )
    if q.shape[1] != k.shape[1] and (causal or segment_ids is not None):
        raise InputError(
            f"linear_attention of {shapes}: expected as many queries as keys for causal attention and for segments"
        )
    if chunk < 1 or chunk & (chunk - 1):
        raise InputError(f"chunk={chunk}: expected a power of 2")
    if segment_ids is not None and segment_ids.shape != q.shape[:2]:
        raise InputError(f"segment_ids {segment_ids.shape}: expected {q.shape[:2]}, one for each token")
    causal_only = {"log_decay": log_decay, "beta": beta, "state": state, "return_state": return_state or None}
    if not causal and (names := [name for name, value in causal_only.items() if value is not None]):
        raise InputError(f"linear_attention with causal=False and {names[0]}: leave it out, or pass causal=True")
    if log_decay is not None and log_decay.shape not in (k.shape[2:3], k.shape[:3], k.shape):
        raise InputError(f"log_decay {log_decay.shape}: expected {k.shape[2:3]}, {k.shape[:3]} or {k.shape}")
    if beta is not None and (beta.shape != k.shape[:3] or normalize):
        raise InputError(f"beta {beta.shape}, normalize={normalize}: expected {k.shape[:3]} and no normalisation")
    if state is not None:
        check_state(state, k, v)
    if state is not None and normalize != (state.z is not None):
        raise InputError(f"normalize={normalize}: expected a state with a normaliser just if outputs are normalised")
