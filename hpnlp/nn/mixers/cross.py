"""Cross-attention: softmax attention of tokens to a memory, such as the hidden states of an encoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.ops.attention import Full, attend
from hpnlp.types import MixerInputs, MixerOutput, MixerTraits, Projection


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MemoryCache:
    """Keys and values of a memory, computed once for all tokens of a sequence.

    The batch of the tokens may be a multiple of that of the memory: consecutive sequences then share a memory.

    Attributes:
      k: `[B, S, K, H]`.
      v: `[B, S, K, H]`.
      segment_ids: int32 `[B, S]`.
    """

    k: Any
    v: Any
    segment_ids: Any


class CrossMixer(nn.Module):
    """Softmax attention (Vaswani et al. 2017, sec. 3.2.3) to all vectors of the memory that have the token's segment id.

    Attributes:
      dropout: Rate of dropout on attention probabilities.

    Cost: as `attend`; a decoding step reads the cached keys and values of the memory.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True),
        "k": Projection("kv_heads", norm=True, source="memory"),
        "v": Projection("kv_heads", source="memory"),
    }
    traits: ClassVar[MixerTraits] = MixerTraits()

    dropout: float = 0.0

    def __call__(self, inputs: MixerInputs, mask: Any) -> MixerOutput:
        assert inputs.k is not None and inputs.v is not None and inputs.kv_segment_ids is not None
        cache = MemoryCache(inputs.k, inputs.v, inputs.kv_segment_ids)
        return MixerOutput(self._attend(inputs, cache), cache=None if inputs.capacity is None else cache)

    def extend(self, inputs: MixerInputs, mask: Any, cache: MemoryCache) -> tuple[jax.Array, MemoryCache]:
        """Attends with further tokens.

        Args:
          inputs: q of the tokens; segment ids, or None for segment 1.
          mask: Not used: all tokens may attend to all of the memory.
          cache: Keys and values of the memory.

        Returns:
          `(o [B, T, N, H], cache)`.
        """
        return self._attend(inputs, cache), cache

    def within(self, mask: Any) -> Any:
        """The mask over the memory.

        Args:
          mask: Mask of the model, over its own tokens.

        Returns:
          `Full()`.
        """
        return Full()

    def _attend(self, inputs: MixerInputs, cache: MemoryCache) -> jax.Array:
        assert inputs.q is not None
        segment_ids = inputs.segment_ids
        if segment_ids is None:
            segment_ids = jnp.ones(inputs.q.shape[:2], jnp.int32)
        # Consecutive sequences that share a memory, such as the beams of a search, are taken as one sequence.
        batch = cache.k.shape[0]
        q, segment_ids = inputs.q.reshape(batch, -1, *inputs.q.shape[2:]), segment_ids.reshape(batch, -1)
        rate = 0.0 if inputs.deterministic else self.dropout
        o: Any = attend(
            q,
            cache.k,
            cache.v,
            Full(),
            segment_ids=segment_ids,
            kv_segment_ids=cache.segment_ids,
            dropout_rate=rate,
            rng=inputs.rng if rate else None,
            streams=inputs.streams if rate else None,
        )
        return o.reshape(*inputs.q.shape[:3], -1)
