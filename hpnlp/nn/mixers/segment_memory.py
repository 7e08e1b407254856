"""Sliding-window attention whose window reaches into the tokens of earlier batches, from a memory of their hidden states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.ops.attention import Causal, Window, attend
from hpnlp.ops.attention.decoding.kv_cache import KVCache, start_cache
from hpnlp.types import InputError, MixerInputs, MixerOutput, MixerTraits, Projection


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentMemory:
    """Consecutive tokens of each sequence, as arrays or as the logical names of their axes.

    Attributes:
      states: `[B, M, D]`, hidden states that the mixer read.
      positions: int32 `[B, M]`, positions of the tokens within their documents.
      segment_ids: int32 `[B, M]`; 0 where there is no token.
    """

    states: Any
    positions: Any
    segment_ids: Any

    def followed_by(self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> SegmentMemory:
        """Appends the tokens that follow.

        Args:
          x: `[B, T, D]`, their hidden states.
          positions: int32 `[B, T]`.
          segment_ids: int32 `[B, T]`.

        Returns:
          M + T tokens, with states of x's dtype.
        """
        pairs = ((self.states.astype(x.dtype), x), (self.positions, positions), (self.segment_ids, segment_ids))
        return SegmentMemory(*(jnp.concatenate(pair, axis=1) for pair in pairs))


class SegmentMemoryMixer(nn.Module):
    """Softmax attention to the last M tokens and the token itself, of which earlier batches may have brought some.

    The memory of Transformer-XL: keys and values are projections of the hidden states in the memory, through which no gradient
    passes, and of the tokens' own; queries are projections of the tokens alone. Each token sees the same number of
    tokens wherever its sequence begins, as with `same_length` in the authors' code (in the paper, the memory is cut off for no
    token of a sequence). So the output is that of a sliding window over the whole stream, and a cache of the last M + 1
    keys decodes it. Keys in the memory are computed with the present parameters, from hidden states of earlier parameters.

    Attributes:
      memory: Number of tokens M before a token that it attends to. The carry holds the last M tokens of a sequence.
      dropout: Rate of dropout on attention probabilities.

    Cost: as sliding-window attention, and the projections of M more tokens to keys and values. The carry takes M D numbers for
    each sequence and layer.

    References: Dai et al. 2019, "Transformer-XL", arXiv 1901.02860, sec. 3.2, without its relative positions.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True, rope=True),
        "k": Projection("kv_heads", norm=True, rope=True, source="carry"),
        "v": Projection("kv_heads", source="carry"),
    }
    traits: ClassVar[MixerTraits] = MixerTraits(bidirectional=False)
    carry_axes: ClassVar[SegmentMemory] = SegmentMemory(("batch", None, "embed"), ("batch", None), ("batch", None))

    memory: int = 128
    dropout: float = 0.0

    def initial_carry(self, batch: int, dim: int, dtype: Any) -> SegmentMemory:
        """The memory before the first tokens.

        Args:
          batch: Number of sequences B.
          dim: Features of the hidden states D.
          dtype: Dtype of the hidden states.

        Returns:
          Zeros, of which no token sees any.
        """
        ids = jnp.zeros((batch, self.memory), jnp.int32)
        return SegmentMemory(jnp.zeros((batch, self.memory, dim), dtype), ids, ids)

    def __call__(self, inputs: MixerInputs, mask: Any) -> MixerOutput:
        assert inputs.x is not None and inputs.q is not None and inputs.k is not None and inputs.v is not None
        mask, rate = self.within(mask), 0.0 if inputs.deterministic else self.dropout
        o: Any = attend(
            inputs.q,
            inputs.k,
            inputs.v,
            mask.shift(inputs.k.shape[1] - inputs.q.shape[1]),  # indices of keys count from the memory
            segment_ids=inputs.segment_ids,
            kv_segment_ids=inputs.kv_segment_ids,
            dropout_rate=rate,
            rng=inputs.rng if rate else None,
            streams=inputs.streams if rate else None,
        )
        cache = None
        if inputs.capacity is not None:
            cache = start_cache(inputs.k, inputs.v, inputs.lengths(), mask, inputs.capacity)
        return MixerOutput(o, cache=cache, carry=None if inputs.carry is None else self._last(inputs))

    def extend(self, inputs: MixerInputs, mask: Any, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Mixes further tokens with the last M before each of them; see `extend_cache`.

        Args:
          inputs: q, k and v of the further tokens. A sequence is one segment.
          mask: `Causal()`.
          cache: Cache of the preceding tokens.

        Returns:
          `(o [B, T, N, H], the extended cache)`.

        Raises:
          InputError: Dropout is on.
        """
        if self.dropout and not inputs.deterministic:
            raise InputError("extend with dropout: decoding is deterministic, pass deterministic=True")
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        return cache.extend(inputs.q, inputs.k, inputs.v, self.within(mask))

    def within(self, mask: Any) -> Any:
        """The window.

        Args:
          mask: `Causal()`.

        Returns:
          The mask of the pairs that influence each other.

        Raises:
          InputError: Another mask, which would not hold for the tokens in the memory.
        """
        if mask != Causal():
            raise InputError(
                f"a segment memory cannot apply the mask {mask}: pass Causal(), or choose another model.mixer"
            )
        return Window(self.memory, 0)

    def _last(self, inputs: MixerInputs) -> SegmentMemory:
        """The last M tokens of the carry and x together."""
        assert inputs.x is not None and inputs.positions is not None and inputs.segment_ids is not None
        tokens = inputs.carry.followed_by(inputs.x, inputs.positions, inputs.segment_ids)
        return jax.tree.map(lambda array, old: array[:, -self.memory :].astype(old.dtype), tokens, inputs.carry)


def segment_memory(memory: int = 128, *, dropout: float = 0.0, name: str | None = None) -> SegmentMemoryMixer:
    """Entry of MIXERS: a sliding window that reaches into earlier batches.

    Args:
      memory: Number of preceding tokens that a token attends to.
      dropout: Rate of dropout on attention probabilities.
      name: Name of the module.

    Returns:
      The mixer.

    Raises:
      InputError: No token to remember.
    """
    if memory < 1:
        raise InputError(f"model.mixer=segment_memory({memory}): expected a memory of at least 1 token")
    return SegmentMemoryMixer(memory, dropout, name=name)
