"""Block of the Lite Transformer: attention on half of the features, a convolution on the other half."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hpnlp.layer_report import LayerReport
from hpnlp.nn.attention import Attention, Context
from hpnlp.nn.block import Block
from hpnlp.spec import Spec


class LiteBlock(Block):
    """A Block whose mixing branch is long-short range attention.

    `config.mixer` mixes the first half of the normalised features, and a convolution of gated values the second half. The
    results of both are concatenated.

    Attributes:
      convolution: The mixer of the second half.

    References: Wu et al. 2020, "Lite Transformer with long-short range attention", sec. 4.
    """

    convolution: Spec = Spec("lightconv")  # noqa: RUF009  (frozen)

    def setup(self) -> None:
        super().setup()
        options = self.attention_options()
        options["mixer"] = self.convolution
        self.convolve = Attention(**options)

    def mix(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any, LayerReport]:
        of_attention, of_convolution = cache or (None, None)
        near, far = jnp.split(self._normed_input(self.mix_norm, x), 2, axis=-1)[::-1]
        far, of_attention, report = self.attention(far, context, of_attention)
        near, of_convolution, _ = self.convolve(near, context, of_convolution)
        y = self._drop(self._normed_result("mix", jnp.concatenate([far, near], axis=-1)), context)
        return y, (of_attention, of_convolution), report.of_branch("attention")
