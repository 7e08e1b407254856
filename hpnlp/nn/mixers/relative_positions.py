"""The learned parts of Transformer-XL's relative positions, which several mixers share."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.nn.layers import dense_init, param
from hpnlp.ops.attention import Operands
from hpnlp.ops.attention.memory.relative import distance_scores, relative_attention
from hpnlp.ops.attention.positions.rope import frequencies
from hpnlp.ops.linear import linear
from hpnlp.ops.weight import dense
from hpnlp.types import InputError, MixerInputs


class RelativePositions(nn.Module):
    """Attention with scores of content and of distance: ((q + u) . k + (q + v) . W R[distance]) * H ** -0.5.

    R are sinusoids of D features, W is a matrix [D, N H], and u and v are vectors of each head. None of them depends on the
    number of distances, so that a model can be evaluated with more distances than it was trained with.

    References: Dai et al. 2019, "Transformer-XL", arXiv 1901.02860, sec. 3.3.
    """

    def __call__(self, inputs: MixerInputs, distances: int, rate: float) -> jax.Array:
        """Attends to keys that are consecutive and end with those of the queries.

        Args:
          inputs: x, q, k, v and segments, also of the keys.
          distances: Number of keys that a query sees, itself included.
          rate: Rate of dropout on attention probabilities.

        Returns:
          `[B, T, N, H]`.
        """
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        operands = Operands(
            segment_ids=inputs.segment_ids,
            kv_segment_ids=inputs.kv_segment_ids,
            dropout_rate=rate,
            rng=inputs.rng if rate else None,
            streams=inputs.streams if rate else None,
        )
        return relative_attention(inputs.q, inputs.k, inputs.v, *self.embeddings(inputs, distances), operands)

    def embeddings(self, inputs: MixerInputs, distances: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The learned arguments of `relative_attention`.

        Args:
          inputs: x, q and k.
          distances: As for `__call__`.

        Returns:
          `(r [R, N, H], u [N, H], v [N, H])`, with R at most the number of keys.
        """
        assert inputs.q is not None and inputs.k is not None
        kernel, content_bias, position_bias = self._parameters(inputs)
        table = sinusoid_table(min(distances, inputs.k.shape[1]), kernel.shape[0])
        r = linear(jnp.asarray(table, inputs.q.dtype), kernel)
        return r.reshape(-1, *inputs.q.shape[2:]), content_bias, position_bias

    def for_cache(self, inputs: MixerInputs, distances: int) -> tuple[jax.Array, jax.Array]:
        """Queries and scores of distances for `extend_cache`.

        Args:
          inputs: x and q.
          distances: As for `__call__`.

        Returns:
          `(q + u [B, T, N, H], float32 scores by distance [B, T, N, distances])`.

        Cost: O(B T N D (H + distances)). For a few tokens, that is less than the projection of all sinusoids.
        """
        assert inputs.q is not None
        q, (kernel, content_bias, position_bias) = inputs.q, self._parameters(inputs)
        by_head = jnp.asarray(dense(kernel)).astype(q.dtype).reshape(-1, *q.shape[2:])
        queries = jnp.einsum("btnh,dnh->btnd", q + position_bias.astype(q.dtype)[None, None], by_head)
        table = jnp.broadcast_to(
            jnp.asarray(sinusoid_table(distances, kernel.shape[0]), q.dtype)[:, None],
            (distances, q.shape[2], kernel.shape[0]),
        )
        no_bias = jnp.zeros(table.shape[1:], q.dtype)
        scores = distance_scores(queries, table, no_bias, scale=q.shape[-1] ** -0.5)
        return q + content_bias.astype(q.dtype)[None, None], scores

    @nn.compact
    def _parameters(self, inputs: MixerInputs) -> tuple[Any, Any, Any]:
        """W, u and v; of the device's heads."""
        assert inputs.x is not None and inputs.q is not None
        dim, (heads, size) = inputs.x.shape[-1], inputs.q.shape[2:]
        if dim % 2:
            raise InputError(f"model.dim={dim} with relative positions: sinusoids come in pairs, choose an even number")
        kernel = param(self, "kernel", dense_init, (dim, heads * size), ("embed", "heads"))
        init, axes = nn.initializers.normal(0.02), ("heads", "head_dim")
        return kernel, *(param(self, name, init, (heads, size), axes) for name in ("content_bias", "position_bias"))


def sinusoid_table(distances: int, dim: int) -> np.ndarray:
    """`ops.attention.positions.rope.sinusoids` of the distances from 0 on, as a constant.

    Args:
      distances: Number of distances.
      dim: Number of features D.

    Returns:
      float32 `[distances, D]`.
    """
    angles = np.outer(np.arange(distances), frequencies(dim))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
