"""A class that has the members of a mixer, and not the base class, gets the defaults when it is put into MIXERS."""

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.models.lm import LM, LMConfig
from hpnlp.nn.mixers import MIXERS
from hpnlp.ops.attention import Causal
from hpnlp.types import MixerOutput, MixerTraits


class PlainMean(nn.Module):
    """The mean of the tokens so far."""

    needs: ClassVar = {}
    traits: ClassVar = MixerTraits(bidirectional=False, isolates_segments=False, decodes=False)

    scale: float = 1.0
    dropout: float = 0.0

    def __call__(self, inputs, mask):
        counts = jnp.arange(1, inputs.x.shape[1] + 1, dtype=jnp.float32)[None, :, None]
        return MixerOutput(self.scale * jnp.cumsum(inputs.x, axis=1) / counts)

    def within(self, mask):
        return mask & Causal()


def test_a_class_without_the_base_is_an_entry(monkeypatch):
    monkeypatch.setitem(MIXERS, "mean", PlainMean)
    assert issubclass(MIXERS["mean"], Mixer) and MIXERS["mean"](0.5).scale == 0.5 and not MIXERS["mean"]().carries
    model = LM(LMConfig(layers=1, dim=16, heads=2, vocab=11, max_len=8, mixer="mean(0.5)"))
    batch = model.example_batch(2, 8)
    weights = model.init(jax.random.key(0), batch)
    assert jnp.isfinite(model.apply(weights, batch, method="loss").sum)
