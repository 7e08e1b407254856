"""Lightweight and dynamic convolutions as mixers: convolutions of heads with weights that a softmax normalises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.layers import param
from hpnlp.nn.mixers.checks import check_decoding, check_mask, dropout_option
from hpnlp.nn.mixers.convolution import MAX_WIDTH
from hpnlp.ops.attention import Causal, Full, Window
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.ops.convolutions.convolution import last_tokens
from hpnlp.ops.convolutions.light_convolution import dynamic_conv, light_conv
from hpnlp.types import MixerInputs, MixerOutput, MixerTraits, Projection, option


class LightConvMixer(Mixer):
    """Lightweight convolution (`light_conv`) of gated values: one softmax over W taps for each head.

    The values are `v * sigmoid(gate)`, a gated linear unit of two projections. With a causal mask, an output depends on the
    last W - 1 tokens and its own; otherwise on (W - 1) // 2 earlier and W // 2 later ones.

    Cost: B T W N H multiplications. The cache holds W - 1 gated values of each sequence and head.

    References: Wu et al. 2019, "Pay less attention with lightweight and dynamic convolutions", sec. 3, with the gated linear
    unit before it. The paper's code drops the same weights for all tokens.
    """

    traits: ClassVar[MixerTraits] = MixerTraits()

    width: int = option(31, "Number of taps W.", least=1, most=MAX_WIDTH)
    dropout: float = dropout_option("Rate of dropout on the weights of each token (DropConnect).")

    @property
    def needs(self) -> Mapping[str, Projection]:
        return {"gate": Projection("heads"), "v": Projection("heads")}

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        window = self.within(mask)
        values = _gated(inputs)
        dropping = self.dropout > 0.0 and not inputs.deterministic
        o = self._convolve(
            inputs,
            values,
            segment_ids=inputs.segment_ids,
            ahead=window.right,
            rate=self.dropout if dropping else 0.0,
            rng=inputs.rng if dropping else None,
            streams=inputs.streams if dropping else None,
        )
        cache = None if inputs.capacity is None else last_tokens(values, inputs.lengths(), self.width - 1)
        return MixerOutput(o, cache=cache)

    def extend(self, inputs: MixerInputs, mask: AnyMask, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mixes new tokens with the preceding ones.

        Args:
          inputs: Projections of the new tokens. A sequence is one segment.
          mask: `Causal()`.
          cache: Gated values of the W - 1 preceding tokens `[B, W - 1, N, H]`, zeros before the sequence.

        Returns:
          `(o [B, T, N, H], the cache of the tokens that follow)`.

        Raises:
          InputError: Dropout is on, or the mask is not causal.
        """
        check_decoding(inputs, self.dropout)
        check_mask("a convolution with a cache", mask, Causal())
        values = _gated(inputs)
        o = self._convolve(inputs, values, preceding=cache)
        values = jnp.concatenate([cache, values], axis=1)
        return o, values[:, values.shape[1] - (self.width - 1) :]

    def within(self, mask: AnyMask) -> Any:
        """The window of the convolution.

        Args:
          mask: `Causal()` or `Full()`.

        Returns:
          The mask of the pairs that influence each other.

        Raises:
          InputError: Another mask, which a convolution cannot honour.
        """
        if check_mask("a convolution", mask, Causal(), Full()) == Causal():
            return Window(self.width - 1, 0)
        return Window((self.width - 1) // 2, self.width // 2)

    @nn.compact
    def _convolve(self, inputs: MixerInputs, values: jax.Array, **options: Any) -> jax.Array:
        # Not named "kernel": optimizers treat a kernel as a matrix, and these are N independent filters.
        init = nn.initializers.normal(self.width**-0.5)
        scores = param(self, "taps", init, (values.shape[2], self.width), ("heads", "taps"))
        return light_conv(values, scores, **options)


class DynamicConvMixer(LightConvMixer):
    """Dynamic convolution (`dynamic_conv`) of gated values: each token projects its hidden state to the scores of its W taps.

    Masks, cache and values are those of `LightConvMixer`.

    Cost: B T W N (D + H) multiplications.

    References: Wu et al. 2019, "Pay less attention with lightweight and dynamic convolutions", eq. 6. The paper's code projects
    the result of the gated linear unit to the scores; here, they are a projection of the hidden states, as the values are, so
    that heads are independent.
    """

    @property
    def needs(self) -> Mapping[str, Projection]:
        return {**super().needs, "scores": Projection("heads", self.width)}

    def _convolve(self, inputs: MixerInputs, values: jax.Array, **options: Any) -> jax.Array:
        return dynamic_conv(values, inputs.projections["scores"], **options)


def _gated(inputs: MixerInputs) -> jax.Array:
    """The gated linear unit of values and gates, `[B, T, N, H]`."""
    assert inputs.v is not None
    gated = inputs.v.astype(jnp.float32) * jax.nn.sigmoid(inputs.projections["gate"].astype(jnp.float32))
    return gated.astype(inputs.v.dtype)
