"""Transformer-XL: a segment memory with relative positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from hpnlp.nn.mixers.checks import check_decoding
from hpnlp.nn.mixers.relative_positions import RelativePositions
from hpnlp.nn.mixers.segment_memory import SegmentMemoryMixer
from hpnlp.ops.attention.decoding.kv_cache import KVCache, start_cache
from hpnlp.types import InputError, MixerInputs, MixerOutput, Projection


class TransformerXLMixer(SegmentMemoryMixer):
    """A segment memory (`SegmentMemoryMixer`) whose scores depend on the distance of query and key by `RelativePositions`.

    RoPE does not rotate its queries and keys. Parameters do not depend on `memory`, so that a model can be evaluated with
    a longer memory than that of its training.

    Cost: that of `SegmentMemoryMixer`, and another product of queries and M + 1 embeddings of distances for each head.

    References: Dai et al. 2019, "Transformer-XL", arXiv 1901.02860, sec. 3.2 and 3.3.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True),
        "k": Projection("kv_heads", norm=True, source="carry"),
        "v": Projection("kv_heads", source="carry"),
    }

    def setup(self) -> None:
        self.relative = RelativePositions()

    def __call__(self, inputs: MixerInputs, mask: Any) -> MixerOutput:
        assert inputs.k is not None and inputs.v is not None
        window = self.within(mask)
        o = self.relative(inputs, self.memory + 1, 0.0 if inputs.deterministic else self.dropout)
        cache = None
        if inputs.capacity is not None:
            cache = start_cache(inputs.k, inputs.v, inputs.lengths(), window, inputs.capacity)
        return MixerOutput(o, cache=cache, carry=None if inputs.carry is None else self._last(inputs))

    def extend(self, inputs: MixerInputs, mask: Any, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Attends from further tokens to the M tokens before each of them; see `extend_cache`.

        Args:
          inputs: x, q, k and v of the further tokens. A sequence is one segment.
          mask: `Causal()`.
          cache: Cache of the preceding tokens.

        Returns:
          `(o [B, T, N, H], the extended cache)`.

        Raises:
          InputError: Dropout is on.
        """
        check_decoding(inputs, self.dropout)
        assert inputs.k is not None and inputs.v is not None
        q, by_distance = self.relative.for_cache(inputs, self.memory + 1)
        return cache.extend(q, inputs.k, inputs.v, self.within(mask), by_distance)


def transformer_xl(memory: int = 128, *, dropout: float = 0.0, name: str | None = None) -> TransformerXLMixer:
    """Entry of MIXERS: Transformer-XL, a sliding window with relative positions that reaches into earlier batches.

    Args:
      memory: Number of preceding tokens that a token attends to.
      dropout: Rate of dropout on attention probabilities.
      name: Name of the module.

    Returns:
      The mixer.

    Raises:
      InputError: `memory` is less than 1.
    """
    if memory < 1:
        raise InputError(f"model.mixer=transformer_xl({memory}): expected a memory of at least 1 token")
    return TransformerXLMixer(memory, dropout, name=name)
