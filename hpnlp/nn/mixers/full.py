"""The full mixer: exact softmax attention over everything that the mask allows."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.ops.attention import attend
from hpnlp.ops.attention.decode import attend_cache
from hpnlp.types import InputError, MixerInputs, MixerOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The tokens seen so far, as arrays or their shapes.

    k, v: `[B * K, S, H]`, as `ops.attention.decode` wants them, finite everywhere. lengths `[B]`: how many of the S
    places each row has filled; they come first.
    """

    k: Any
    v: Any
    lengths: Any


class FullMixer(nn.Module):
    """Softmax attention (Vaswani et al. 2017, eq. 1). Cost: T x S x N x H products, memory linear in T and S.

    The mask is over places in the row, which is the same as over positions within a segment; `positions` serve RoPE.
    """

    needs: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    wants_rope: ClassVar[bool] = True

    dropout: float = 0.0

    def __call__(self, inputs: MixerInputs, mask: Any) -> MixerOutput:
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        rate = 0.0 if inputs.deterministic else self.dropout
        o: Any = attend(
            inputs.q,
            inputs.k,
            inputs.v,
            mask,
            segment_ids=inputs.segment_ids,
            kv_segment_ids=inputs.kv_segment_ids,
            dropout_rate=rate,
            rng=inputs.rng if rate else None,
        )
        assert isinstance(o, jax.Array)
        return MixerOutput(o)

    def init_cache(self, inputs: MixerInputs, capacity: int) -> KVCache:
        """The cache after a pass over `inputs`, with room for `capacity` tokens a row.

        A row's tokens are those whose segment id is over 0, and come first.
        """
        assert inputs.k is not None and inputs.v is not None
        batch, length = inputs.k.shape[:2]
        if inputs.segment_ids is None:
            lengths = jnp.full((batch,), length, jnp.int32)
        else:
            lengths = jnp.sum(inputs.segment_ids > 0, axis=1, dtype=jnp.int32)
        filled = jnp.arange(length, dtype=jnp.int32)[None] < lengths[:, None]

        def store(x: jax.Array) -> jax.Array:
            x = _rows(jnp.where(filled[:, :, None, None], x, jnp.zeros((), x.dtype)))
            return jnp.pad(x, ((0, 0), (0, capacity - length), (0, 0)))

        return KVCache(store(inputs.k), store(inputs.v), lengths)

    def extend(self, inputs: MixerInputs, mask: Any, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Mixes a few further tokens a row with all that came before: `(o [B, T, N, H], the longer cache)`.

        Of `inputs` it reads q, k and v: a row is one segment, and what it decodes is deterministic. The caller sees to it
        that the cache has room. Memory: N x T x S scores a row.
        """
        if self.dropout and not inputs.deterministic:
            raise InputError("extend with dropout: a cache is for decoding, pass deterministic=True")
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        batch, count, heads = inputs.k.shape[:3]

        def place(rows: jax.Array, new: jax.Array) -> jax.Array:
            if batch > 8:
                grouped = rows.reshape(batch, heads, *rows.shape[1:])
                write = jax.vmap(lambda row, x, at: jax.lax.dynamic_update_slice(row, x, (0, at, 0)))
                return write(grouped, _rows(new).reshape(batch, heads, count, -1), cache.lengths).reshape(rows.shape)
            new = _rows(new)
            for row in range(batch):  # no scatter, which takes a tenth of the time of a token on a CPU
                at = (row * heads, cache.lengths[row], 0)
                rows = jax.lax.dynamic_update_slice(rows, new[row * heads : (row + 1) * heads], at)
            return rows

        longer = KVCache(place(cache.k, inputs.k), place(cache.v, inputs.v), cache.lengths + count)
        positions = cache.lengths[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        return attend_cache(inputs.q, longer.k, longer.v, mask, positions, longer.lengths), longer


def _rows(x: jax.Array) -> jax.Array:
    """`[B, T, K, H]` as `[B * K, T, H]`."""
    batch, length, heads, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch * heads, length, size)
