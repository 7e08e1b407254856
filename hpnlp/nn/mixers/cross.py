"""Cross-attention: softmax attention of tokens to a memory, such as the hidden states of an encoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.attention import Attention, Context, Sources
from hpnlp.ops.attention import Full, attend
from hpnlp.ops.attention.decoding.decode import attend_cache
from hpnlp.ops.attention.decoding.kv_cache import by_head
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import InputError, MixerInputs, MixerOutput, MixerTraits, Projection, TokenStates


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MemoryCache:
    """Keys and values of a memory, computed once for all tokens of a sequence.

    The batch of the tokens may be a multiple of B: consecutive sequences, such as the beams of a search, then share a memory.

    Attributes:
      k: `[B * K, S, H]`, as in a KVCache.
      v: `[B * K, S, H]`.
      segment_ids: int32 `[B, S]`.
    """

    k: Any
    v: Any
    segment_ids: Any

    def for_beams(self, beams: int) -> MemoryCache:
        """The cache of several continuations of each sequence, which share a memory.

        Args:
          beams: Number of continuations.

        Returns:
          This cache.
        """
        return self

    def reordered(self, order: jax.Array) -> MemoryCache:
        """The cache after continuations of a sequence are replaced by others of the same sequence, which have the same memory.

        Args:
          order: int `[B, W]`, for each continuation the index of the one that replaces it.

        Returns:
          This cache.
        """
        return self


class CrossMixer(Mixer):
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

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        assert inputs.kv_segment_ids is not None
        rate = 0.0 if inputs.deterministic else self.dropout
        o: Any = attend(
            inputs.q,
            inputs.k,
            inputs.v,
            Full(),
            segment_ids=_segments(inputs),
            kv_segment_ids=inputs.kv_segment_ids,
            dropout_rate=rate,
            rng=inputs.rng if rate else None,
            streams=inputs.streams if rate else None,
        )
        if inputs.capacity is None:
            return MixerOutput(o)
        return MixerOutput(o, cache=MemoryCache(by_head(inputs.k), by_head(inputs.v), inputs.kv_segment_ids))

    def extend(self, inputs: MixerInputs, mask: AnyMask, cache: MemoryCache) -> tuple[jax.Array, MemoryCache]:
        """Attends from new tokens to the memory.

        Args:
          inputs: q of the tokens; segment ids, or None for segment 1.
          mask: Not used: all tokens may attend to all of the memory.
          cache: Keys and values of the memory.

        Returns:
          `(o [B, T, N, H], cache)`.
        """
        assert inputs.q is not None
        # Consecutive sequences that share a memory, such as the beams of a search, are taken as one sequence.
        batch = cache.segment_ids.shape[0]
        q, segment_ids = inputs.q.reshape(batch, -1, *inputs.q.shape[2:]), _segments(inputs).reshape(batch, -1)
        is_seen = segment_ids[:, :, None] == cache.segment_ids[:, None]
        positions = jnp.zeros(segment_ids.shape, jnp.int32)
        o = attend_cache(q, cache.k, cache.v, Full(), positions, jnp.where(is_seen, 0, -1))
        return o.reshape(*inputs.q.shape[:3], -1), cache

    def within(self, mask: AnyMask) -> Any:
        """The mask over the memory.

        Args:
          mask: Mask of the model, over its own tokens.

        Returns:
          `Full()`.
        """
        return Full()


class CrossAttention(Attention):
    """Attention to the vectors of `Context.memory`, whatever `mixer` is."""

    @nn.nowrap
    def make_mixer(self) -> CrossMixer:
        """The mixer, a submodule."""
        return CrossMixer(self.dropout, name="mixer")

    @nn.nowrap
    def sources(self, mixer: Any, tokens: TokenStates, context: Context, cache: Any) -> Sources:
        """The tokens that queries are projected from, and the memory for keys and values unless the cache holds these."""
        if cache is not None:
            return Sources(tokens, tokens, None)
        memory = context.memory
        if memory is None:
            raise InputError("layers with cross-attention got no memory: pass one, or set model.memory_dim=0")
        states = memory.states.astype(tokens.states.dtype)
        return Sources(tokens, tokens, TokenStates(states, tokens.positions, memory.segment_ids))

    @nn.nowrap
    def taps(self, inputs: MixerInputs) -> dict[str, jax.Array]:
        """No taps: reports are of the attention of tokens to each other."""
        return {}


def _segments(inputs: MixerInputs) -> jax.Array:
    """Segment ids of the tokens; 1 where there are none."""
    assert inputs.q is not None
    return jnp.ones(inputs.q.shape[:2], jnp.int32) if inputs.segment_ids is None else inputs.segment_ids
