"""Sparse Sinkhorn attention as a mixer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.mixers.checks import check_decoding, check_mask
from hpnlp.ops.attention import Causal, Full
from hpnlp.ops.attention.bucketed.sinkhorn import SortSettings, sinkhorn_attention
from hpnlp.ops.attention.bucketed.sinkhorn_cache import SinkhornCache, extend_sinkhorn_cache, start_sinkhorn_cache
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import InputError, MixerInputs, MixerOutput, MixerTraits, Projection


class SinkhornMixer(Mixer):
    """Softmax attention of each block of tokens to itself and to a learned mixture of other blocks.

    Blocks are counted from the start of the sequence, also where it holds several documents.

    Attributes:
      block: Tokens of a block.
      iterations: Number of times that rows and columns of the soft permutation are normalised.
      temperature: Divides the scores of pairs of blocks; the smaller, the closer the mixture is to one block.
      dropout: Rate of dropout on attention probabilities.

    Cost: as `sinkhorn_attention`. Decoding reads all earlier tokens.

    References: Tay et al. 2020, "Sparse Sinkhorn attention", arXiv 2002.11296.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True, rope=True),
        "k": Projection("kv_heads", norm=True, rope=True),
        "v": Projection("kv_heads"),
    }
    traits: ClassVar[MixerTraits] = MixerTraits()

    block: int = 64
    iterations: int = 5
    temperature: float = 0.75
    dropout: float = 0.0

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


def sinkhorn(
    block: int = 64, iterations: int = 5, temperature: float = 0.75, *, dropout: float = 0.0, name: str | None = None
) -> SinkhornMixer:
    """Entry of MIXERS: attention to the token's block and to a mixture of other blocks.

    Args:
      block: Tokens of a block.
      iterations: Number of times that rows and columns of the soft permutation are normalised.
      temperature: Divides the scores of pairs of blocks.
      dropout: Rate of dropout on attention probabilities.
      name: Name of the module.

    Returns:
      The mixer.

    Raises:
      InputError: A block of less than one token, less than one iteration, or a temperature that is not positive.
    """
    entry = f"model.mixer=sinkhorn(block={block}, iterations={iterations}, temperature={temperature})"
    if block < 1 or iterations < 1:
        raise InputError(f"{entry}: expected a block of at least 1 token and at least 1 iteration")
    if not temperature > 0:
        raise InputError(f"{entry}: expected a positive temperature")
    return SinkhornMixer(block, iterations, temperature, dropout, name=name)
