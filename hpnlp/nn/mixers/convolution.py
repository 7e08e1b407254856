"""Causal depthwise convolution as a mixer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.layers import param
from hpnlp.nn.mixers.checks import check_mask, dropout_option
from hpnlp.ops.attention import Causal, Window
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.ops.convolutions.convolution import causal_conv, last_tokens
from hpnlp.types import MixerInputs, MixerOutput, MixerTraits, Projection, option

MAX_WIDTH = 128  # the operation has one term for each token of the width


class ConvMixer(Mixer):
    """Causal depthwise convolution (`ops.convolutions.convolution.causal_conv`) of the hidden states, without projections.

    Cost: B T W D multiplications. The cache holds W - 1 hidden states of each sequence.
    """

    needs: ClassVar[Mapping[str, Projection]] = {}
    traits: ClassVar[MixerTraits] = MixerTraits(bidirectional=False)

    width: int = option(
        4, "Number of tokens W that an output depends on, the current one included.", least=1, most=MAX_WIDTH
    )
    dropout: float = dropout_option("Ignored: a convolution has no attention probabilities.", has_effect=False)

    @nn.compact
    def _taps(self, dim: int) -> jax.Array:
        # Not named "kernel": optimizers treat a kernel as a matrix, and these are D independent filters.
        init = nn.initializers.normal(self.width**-0.5)
        return param(self, "taps", init, (self.width, dim), ("taps", "embed"))

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.x is not None
        self.within(mask)
        o = causal_conv(inputs.x, self._taps(inputs.x.shape[-1]), inputs.segment_ids)
        cache = None if inputs.capacity is None else last_tokens(inputs.x, inputs.lengths(), self.width - 1)
        return MixerOutput(o, cache=cache)

    def extend(self, inputs: MixerInputs, mask: AnyMask, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mixes new tokens with the preceding ones.

        Args:
          inputs: x of the new tokens `[B, T, D]`. A sequence is one segment.
          mask: A static Mask.
          cache: Hidden states of the W - 1 preceding tokens `[B, W - 1, D]`, zeros before the sequence.

        Returns:
          `(o [B, T, D], the cache of the tokens that follow)`.
        """
        assert inputs.x is not None
        self.within(mask)
        x = jnp.concatenate([cache, inputs.x], axis=1)
        o = causal_conv(x, self._taps(x.shape[-1]))[:, self.width - 1 :]
        return o, x[:, x.shape[1] - (self.width - 1) :]

    def within(self, mask: AnyMask) -> Any:
        """The window of the convolution.

        Args:
          mask: `Causal()`.

        Returns:
          The mask of the pairs that influence each other.

        Raises:
          InputError: Another mask, which a convolution cannot honour.
        """
        check_mask("a convolution", mask, Causal())
        return Window(self.width - 1, 0)
