"""Fourier transforms as a mixer (FNet)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp

from hpnlp.nn.mixers.checks import dropout_option
from hpnlp.nn.mixers.low_rank import TRAITS, AllTokensMixer, real_tokens
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.ops.fourier import fourier_mix
from hpnlp.types import MixerInputs, MixerOutput, MixerTraits, Projection, option


class FourierMixer(AllTokensMixer):
    """Real part of the Fourier transform of the hidden states over tokens and features (`fourier_mix`), without parameters.

    Padding counts as zeros, and its output is 0. The transform is that of all T places of a sequence, so that the output of a
    text depends on T: in training and in evaluation, texts should be padded to one length.

    Cost: O(B T D (log T + log D)) time.

    References: Lee-Thorp et al. 2021, "FNet: mixing tokens with Fourier transforms", eq. 3.
    """

    entry: ClassVar[str] = "fnet"
    needs: ClassVar[Mapping[str, Projection]] = {}
    traits: ClassVar[MixerTraits] = TRAITS

    scale: str = option(
        "unit",
        "unit for (T D) ** -0.5, with which outputs are of the size of the inputs, as a residual stream needs it; none for "
        'the paper\'s sums, which need a norm after they are added: model.norm_placement="post".',
        among=("unit", "none"),
    )
    dropout: float = dropout_option("Ignored: a Fourier transform has no attention probabilities.", has_effect=False)

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.x is not None
        self.within(mask)
        x, real = inputs.x, real_tokens(inputs)
        scale = 1.0 if self.scale == "none" else (x.shape[1] * x.shape[2]) ** -0.5
        if real is None:
            return MixerOutput(fourier_mix(x, scale))
        zero = jnp.zeros((), x.dtype)
        o = fourier_mix(jnp.where(real[..., None], x, zero), scale)
        return MixerOutput(jnp.where(real[..., None], o, zero))
