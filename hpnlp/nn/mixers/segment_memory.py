"""Sliding-window attention that includes tokens of earlier batches, by a memory of their hidden states (Transformer-XL)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.mixers.checks import check_decoding, check_mask, dropout_option
from hpnlp.ops.attention import Causal, Window, attend
from hpnlp.ops.attention.decoding.decode import ScoreTerms
from hpnlp.ops.attention.decoding.kv_cache import KVCache, start_cache
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import MixerInputs, MixerOutput, MixerTraits, Projection, TokenStates, option


class SegmentMemoryMixer(Mixer):
    """Softmax attention of each token to itself and the M tokens before it, in its own sequence or in earlier batches.

    The carry is the memory of Transformer-XL: the last M hidden states that the mixer read. Keys and values are projections of
    the memory, through which no gradient passes, and of the current tokens; queries are projections of the current tokens.

    Every token sees M earlier tokens, wherever its sequence begins, as with `same_length` in the authors' code. (In the paper,
    a token sees the whole memory and all earlier tokens of its sequence.) With fixed parameters, the outputs therefore equal
    those of a sliding window over the whole stream, and decoding needs a cache of M + 1 keys. In training, the hidden states
    in the memory were computed with the parameters of earlier steps, and are projected with the current ones.

    Cost: that of sliding-window attention, and the projections of M more tokens to keys and values. The carry takes M D numbers
    per sequence and layer.

    References: Dai et al. 2019, "Transformer-XL", arXiv 1901.02860, sec. 3.2, without its relative positions.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True, rope=True),
        "k": Projection("kv_heads", norm=True, rope=True, source="carry"),
        "v": Projection("kv_heads", source="carry"),
    }
    traits: ClassVar[MixerTraits] = MixerTraits(bidirectional=False)
    carry_axes: ClassVar[TokenStates] = TokenStates(("batch", None, "embed"), ("batch", None), ("batch", None))

    memory: int = option(128, "Number of earlier tokens M that a token attends to.", least=1)
    dropout: float = dropout_option()

    def initial_carry(self, batch: int, dim: int, dtype: DTypeLike) -> TokenStates:
        """The memory before the first tokens.

        Args:
          batch: Number of sequences B.
          dim: Features of the hidden states D.
          dtype: Dtype of the hidden states.

        Returns:
          A memory without tokens: zeros, with segment id 0.
        """
        ids = jnp.zeros((batch, self.memory), jnp.int32)
        return TokenStates(jnp.zeros((batch, self.memory, dim), dtype), ids, ids)

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.k is not None and inputs.v is not None
        window = self.within(mask)
        o = self._attend(inputs, window)
        cache = None
        if inputs.capacity is not None:
            cache = start_cache(inputs.k, inputs.v, inputs.lengths(), window, inputs.capacity)
        return MixerOutput(o, cache=cache, carry=None if inputs.carry is None else self._last(inputs))

    def extend(self, inputs: MixerInputs, mask: AnyMask, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Attends from new tokens to the M tokens before each of them; see `extend_cache`.

        Args:
          inputs: x, q, k and v of the new tokens. A sequence is one segment.
          mask: `Causal()`.
          cache: Cache of the preceding tokens.

        Returns:
          `(o [B, T, N, H], the extended cache)`.

        Raises:
          InputError: Dropout is on.
        """
        check_decoding(inputs, self.dropout)
        assert inputs.k is not None and inputs.v is not None
        q, by_distance = self._scored(inputs)
        return cache.extend(q, inputs.k, inputs.v, self.within(mask), ScoreTerms(by_distance=by_distance))

    def _attend(self, inputs: MixerInputs, window: Window) -> jax.Array:
        """Attention of the queries, `[B, T, N, H]`."""
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        rate = 0.0 if inputs.deterministic else self.dropout
        o: Any = attend(
            inputs.q,
            inputs.k,
            inputs.v,
            window.shift(inputs.k.shape[1] - inputs.q.shape[1]),  # indices of keys count from the memory
            segment_ids=inputs.segment_ids,
            kv_segment_ids=inputs.kv_segment_ids,
            dropout_rate=rate,
            rng=inputs.rng if rate else None,
            streams=inputs.streams if rate else None,
        )
        return o

    def _scored(self, inputs: MixerInputs) -> tuple[jax.Array, jax.Array | None]:
        """Queries, and scores by distance if there are some, as for `extend_cache`."""
        assert inputs.q is not None
        return inputs.q, None

    def within(self, mask: AnyMask) -> Any:
        """The mask of the pairs that influence each other.

        Args:
          mask: `Causal()`.

        Returns:
          `Window(M, 0)`.

        Raises:
          InputError: The mask is not `Causal()`, so that it is not defined for the tokens in the memory.
        """
        check_mask("a segment memory", mask, Causal())
        return Window(self.memory, 0)

    def _last(self, inputs: MixerInputs) -> TokenStates:
        """The last M tokens of the carry and x together."""
        tokens = inputs.carry.followed_by(TokenStates(inputs.x, inputs.positions, inputs.segment_ids))
        return jax.tree.map(lambda array, old: array[:, -self.memory :].astype(old.dtype), tokens, inputs.carry)
