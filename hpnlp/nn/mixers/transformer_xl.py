"""Transformer-XL: a segment memory with relative positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax

from hpnlp.nn.mixers.relative_positions import RelativePositions
from hpnlp.nn.mixers.segment_memory import SegmentMemoryMixer
from hpnlp.ops.attention import Window
from hpnlp.types import MixerInputs, Projection


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

    def _attend(self, inputs: MixerInputs, window: Window) -> jax.Array:
        return self.relative(inputs, self.memory + 1, 0.0 if inputs.deterministic else self.dropout)

    def _scored(self, inputs: MixerInputs) -> tuple[jax.Array, jax.Array | None]:
        return self.relative.for_cache(inputs, self.memory + 1)
