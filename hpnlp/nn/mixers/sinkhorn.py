"""Sparse Sinkhorn attention as a mixer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.mixers.checks import check_decoding, check_mask, dropout_option
from hpnlp.ops.attention import Causal, Full
from hpnlp.ops.attention.bucketed.sinkhorn import SortSettings, sinkhorn_attention
from hpnlp.ops.attention.bucketed.sinkhorn_cache import SinkhornCache, extend_sinkhorn_cache, start_sinkhorn_cache
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import MixerInputs, MixerOutput, MixerTraits, Projection, option


class SinkhornMixer(Mixer):
    """Softmax attention of each block of tokens to itself and to a learned mixture of other blocks.

    Blocks are counted from the start of the sequence, also where it holds several documents.

    Cost: as `sinkhorn_attention`. Decoding reads all earlier tokens.

    References: Tay et al. 2020, "Sparse Sinkhorn attention", arXiv 2002.11296.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True, rope=True),
        "k": Projection("kv_heads", norm=True, rope=True),
        "v": Projection("kv_heads"),
    }
    traits: ClassVar[MixerTraits] = MixerTraits()

    block: int = option(64, "Tokens of a block.", least=1)
    iterations: int = option(
        5, "Number of times that rows and columns of the soft permutation are normalised.", least=1
    )
    temperature: float = option(
        0.75, "Divides the scores of pairs of blocks; the smaller, the closer the mixture is to one block.", above=0
    )
    dropout: float = dropout_option()

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        settings, rate = self._settings(mask), 0.0 if inputs.deterministic else self.dropout
        o = sinkhorn_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            settings,
            segment_ids=inputs.segment_ids,
            dropout_rate=rate,
            rng=inputs.rng if rate else None,
            streams=inputs.streams if rate else None,
        )
        if inputs.capacity is None:
            return MixerOutput(o)
        lengths = inputs.lengths()
        return MixerOutput(
            o, cache=start_sinkhorn_cache(inputs.q, inputs.k, inputs.v, lengths, settings, inputs.capacity)
        )

    def extend(self, inputs: MixerInputs, mask: AnyMask, cache: SinkhornCache) -> tuple[jax.Array, SinkhornCache]:
        """Mixes new tokens with the preceding ones.

        Args:
          inputs: q, k and v of the new tokens. A sequence is one segment.
          mask: `Causal()`.
          cache: Cache of the preceding tokens.

        Returns:
          `(o [B, T, N, H], the extended cache)`.

        Raises:
          InputError: Dropout is on, or the mask is not `Causal()`.
        """
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        check_decoding(inputs, self.dropout)
        check_mask("Sinkhorn attention with a cache", mask, Causal())
        return extend_sinkhorn_cache(inputs.q, inputs.k, inputs.v, cache, self._settings(mask))

    def within(self, mask: AnyMask) -> Any:
        """The mask of the pairs that may influence each other.

        Args:
          mask: `Causal()` or `Full()`.

        Returns:
          The mask.

        Raises:
          InputError: Another mask, which does not apply to mixtures of tokens.
        """
        return check_mask("Sinkhorn attention", mask, Causal(), Full())

    def _settings(self, mask: AnyMask) -> SortSettings:
        return SortSettings(self.block, self.iterations, self.temperature, self.within(mask) == Causal())
