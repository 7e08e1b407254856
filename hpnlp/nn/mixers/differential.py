"""Differential attention: the difference of two softmax attentions over shared values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.layers import RMSNorm, param
from hpnlp.nn.mixers.checks import check_decoding, dropout_option
from hpnlp.ops.attention import attend
from hpnlp.ops.attention.decoding.kv_cache import KVCache, start_cache
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import InputError, MixerInputs, MixerOutput, MixerTraits, Projection, option

NORM_EPS = 1e-5


class DifferentialMixer(Mixer):
    """Two softmax attentions for each pair of heads, of which the second is subtracted with a learned weight.

    Query heads 2i and 2i + 1 form a pair, and so do key heads 2j and 2j + 1. The values of a pair of key heads, side by side,
    are one value of width 2H. For a pair that reads the key heads k1, k2 and their value v:

        o = norm(softmax(q1 k1^T / sqrt(H)) v - lambda softmax(q2 k2^T / sqrt(H)) v) (1 - lambda_init)
        lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init

    norm is an RMS norm over the 2H features of each pair, with a scale that all pairs share, as lambda. The paper increases
    lambda_init with the depth of the layer, as 0.8 - 0.6 exp(-0.3 depth); here it is an argument, so that `model.form` and
    `model.mixer` can give layers different values. Query heads share key heads by pairs: the heads of a pair never read the
    same key head.

    Cost: that of softmax attention whose values have twice the width, 1.5 times the products. The KV cache has the size of
    that of softmax attention; a decoding step computes twice the products of the scores.

    References: Ye et al. 2024, "Differential Transformer", arXiv 2410.05258, eq. 1 to 3 and sec. 2.1.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True, rope=True),
        "k": Projection("kv_heads", norm=True, rope=True),
        "v": Projection("kv_heads"),
    }
    traits: ClassVar[MixerTraits] = MixerTraits()

    lambda_init: float = option(0.8, "Initial weight of the attention that is subtracted.", least=0, below=1)
    dropout: float = dropout_option("Rate of dropout on the probabilities of both attentions.")

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        mask, q, k, v = self.within(mask), inputs.q, inputs.k, inputs.v
        group = _check_heads(q, k)
        rate = 0.0 if inputs.deterministic else self.dropout
        streams = inputs.streams if rate else None
        if streams is not None:
            streams = _by_key_head(streams[..., None], k.shape[2], group)[..., 0]
        o: Any = attend(
            _by_key_head(q, k.shape[2], group),
            k,
            jnp.repeat(_paired(v), 2, axis=2),
            mask,
            segment_ids=inputs.segment_ids,
            kv_segment_ids=inputs.kv_segment_ids,
            positions=None if mask.relative else inputs.positions,
            kv_positions=None if mask.relative else inputs.kv_positions,
            dropout_rate=rate,
            rng=inputs.rng if rate else None,
            streams=streams,
        )
        o = o.reshape(*q.shape[:2], k.shape[2] // 2, 2, group, 2 * v.shape[3])
        cache = None
        if inputs.capacity is not None:
            cache = start_cache(_paired(k), _paired(v), inputs.lengths(), mask, inputs.capacity)
        return MixerOutput(self._difference(o[:, :, :, 0], o[:, :, :, 1]), cache=cache)

    def extend(self, inputs: MixerInputs, mask: AnyMask, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Mixes new tokens with all preceding ones.

        Args:
          inputs: q, k and v of the new tokens. A sequence is one segment.
          mask: A static Mask.
          cache: Cache of the preceding tokens; a pair of key heads is one head of width 2H.

        Returns:
          `(o [B, T, N, H], the extended cache)`.

        Raises:
          InputError: Dropout is on.
        """
        check_decoding(inputs, self.dropout)
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        q, k, v = inputs.q, inputs.k, inputs.v
        group = _check_heads(q, k)
        size = q.shape[3]
        # A query with zeros in place of the other head's features reads its own half of a pair of keys. The cache scales scores
        # by the root of the width 2H.
        q = (q.astype(jnp.float32) * 2**0.5).astype(q.dtype).reshape(*q.shape[:2], k.shape[2] // 2, group, 2, size)
        first = jnp.pad(q[..., 0, :], ((0, 0),) * 4 + ((0, size),))
        second = jnp.pad(q[..., 1, :], ((0, 0),) * 4 + ((size, 0),))
        q = jnp.stack([first, second], axis=3).reshape(*q.shape[:2], -1, 2 * size)
        o, cache = cache.extend(q, _paired(k), _paired(v), self.within(mask))
        o = o.reshape(*q.shape[:2], k.shape[2] // 2, 2, group, 2 * v.shape[3])
        return self._difference(o[:, :, :, 0], o[:, :, :, 1]), cache

    def within(self, mask: AnyMask) -> Any:
        """The pairs that influence each other.

        Args:
          mask: A static Mask, the same for all heads.

        Returns:
          The mask.

        Raises:
          InputError: Heads have masks of their own.
        """
        if mask.heads is not None:
            raise InputError(
                f"differential attention cannot apply {mask}: pass one mask for all heads, since pairs of heads share values"
            )
        return mask

    @nn.compact
    def _difference(self, first: jax.Array, second: jax.Array) -> jax.Array:
        """`[B, T, N, H]` from both attentions of each pair, `[B, T, K / 2, N / K, 2H]` each."""
        size = first.shape[-1] // 2
        init = nn.initializers.normal(0.1)
        q1, k1, q2, k2 = (
            param(self, f"lambda_{name}", init, (size,), ("head_dim",)) for name in ("q1", "k1", "q2", "k2")
        )
        weight = jnp.exp(jnp.sum(q1 * k1)) - jnp.exp(jnp.sum(q2 * k2)) + self.lambda_init
        o = first.astype(jnp.float32) - weight * second.astype(jnp.float32)
        o = RMSNorm(NORM_EPS, "head_dim", name="norm")(o) * (1 - self.lambda_init)
        return o.astype(first.dtype).reshape(*first.shape[:2], -1, size)


def _check_heads(q: jax.Array, k: jax.Array) -> int:
    """Number of query heads of each key head."""
    if k.shape[2] % 2:
        raise InputError(
            f"differential attention of {q.shape[2]} query and {k.shape[2]} key heads (on each device): expected even numbers, "
            "since heads form pairs; change model.heads, model.kv_heads or plan.tensor"
        )
    return q.shape[2] // k.shape[2]


def _by_key_head(q: jax.Array, kv_heads: int, group: int) -> jax.Array:
    """Query heads in the order of the key heads that they read; x `[..., N, H]`."""
    pairs = q.reshape(*q.shape[:-2], kv_heads // 2, group, 2, q.shape[-1])
    return jnp.swapaxes(pairs, -3, -2).reshape(q.shape)


def _paired(x: jax.Array) -> jax.Array:
    """Pairs of heads side by side: `[B, T, K / 2, 2H]` from `[B, T, K, H]`."""
    return x.reshape(*x.shape[:2], x.shape[2] // 2, 2 * x.shape[3])
