"""Fourier transforms as a mixer (FNet)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp

from hpnlp.nn.mixers.low_rank import TRAITS, AllTokensMixer, real_tokens
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.ops.fourier import fourier_mix
from hpnlp.spec import did_you_mean
from hpnlp.types import InputError, MixerInputs, MixerOutput, MixerTraits, Projection

SCALES = ("unit", "none")


class FourierMixer(AllTokensMixer):
    """Real part of the Fourier transform of the hidden states over tokens and features (`fourier_mix`), without parameters.

    Padding counts as zeros, and its output is 0. The transform is that of all T places of a sequence, so that the output of a
    text depends on T: in training and in evaluation, texts should be padded to one length.

    Attributes:
      scale: "unit" for (T D) ** -0.5, with which outputs are of the size of the inputs, as a residual stream needs it; "none"
          for the paper's sums, which need a norm after they are added: `model.norm_placement="post"`.

    Cost: O(B T D (log T + log D)) time.

    References: Lee-Thorp et al. 2021, "FNet: mixing tokens with Fourier transforms", eq. 3.
    """

    entry: ClassVar[str] = "fnet"
    needs: ClassVar[Mapping[str, Projection]] = {}
    traits: ClassVar[MixerTraits] = TRAITS

    scale: str = "unit"

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


def fnet(scale: str = "unit", *, dropout: float = 0.0, name: str | None = None) -> FourierMixer:
    """Entry of MIXERS: Fourier transforms over tokens and features.

    Args:
      scale: unit for outputs of the size of the inputs, none for the sums of the paper.
      dropout: Ignored: a Fourier transform has no attention probabilities.
      name: Name of the module.

    Returns:
      The mixer.

    Raises:
      InputError: An unknown scale.
    """
    if scale not in SCALES:
        raise InputError(f"model.mixer=fnet({scale}): {did_you_mean(scale, SCALES)}")
    return FourierMixer(scale, name=name)
