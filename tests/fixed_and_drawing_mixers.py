"""Mixers for tests: one of a fixed length, and one that draws."""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.layers import param
from hpnlp.nn.mixers.exact import ExactMixer
from hpnlp.ops.attention import Full
from hpnlp.types import MixerInputs, MixerOutput, MixerTraits


class TokenMixer(Mixer):
    """A learned weight for each pair of tokens (MLP-Mixer, Tolstikhin et al. 2021, with one layer), within segments."""

    needs: ClassVar = {}
    traits: ClassVar = MixerTraits(any_length=False, decodes=False)

    @nn.compact
    def __call__(self, inputs: MixerInputs, mask: Any) -> MixerOutput:
        assert inputs.x is not None
        length = inputs.x.shape[1]
        weights = param(self, "pairs", nn.initializers.normal(0.3), (length, length), ("positions", "positions"))
        visible = jnp.asarray(mask.to_dense(length, length))[None]
        if inputs.segment_ids is not None:
            visible = visible & (inputs.segment_ids[:, :, None] == inputs.segment_ids[:, None])
        pairs = jnp.where(visible, weights[None], 0.0).astype(inputs.x.dtype)
        return MixerOutput(jnp.einsum("bts,bsd->btd", pairs, inputs.x))

    def within(self, mask: Any) -> Any:
        return mask


def token_mixer(*, dropout: float = 0.0, name: str | None = None) -> TokenMixer:
    return TokenMixer(name=name)


class NoisyKeys(ExactMixer):
    """Attention whose keys are multiplied by random numbers, the same for all tokens and heads."""

    traits: ClassVar = MixerTraits(draws=True)

    strength: float = 0.5

    def __call__(self, inputs: MixerInputs, mask: Any) -> MixerOutput:
        return super().__call__(self._noisy(inputs), mask)

    def extend(self, inputs: MixerInputs, mask: Any, cache: Any) -> tuple[Any, Any]:
        return super().extend(self._noisy(inputs), mask, cache)

    def _noisy(self, inputs: MixerInputs) -> MixerInputs:
        assert inputs.k is not None and inputs.draws is not None
        noise = jax.random.normal(inputs.draws, inputs.k.shape[-1:], jnp.float32)
        return dataclasses.replace(
            inputs, k=inputs.k * (1 + self.strength * noise).astype(inputs.k.dtype)[None, None, None]
        )


def noisy_keys(scale: float = 0.5, *, dropout: float = 0.0, name: str | None = None) -> NoisyKeys:
    return NoisyKeys(Full(), dropout, strength=scale, name=name)
