"""Mixers with buffers, statistics and auxiliary losses, for tests."""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.nn.layers import buffer
from hpnlp.nn.mixers.exact import ExactMixer
from hpnlp.ops.attention import Full
from hpnlp.types import MixerInputs, MixerOutput

DECAY = 0.9


class CenteredKeys(ExactMixer):
    """Attention whose keys have their running average subtracted, if `centers`.

    Statistics are sums of keys by head, sums of hidden states, and the number of tokens.
    """

    centers: bool = True

    statistic_axes: ClassVar = {"keys": ("kv_heads", None), "hidden": (None,), "tokens": ()}

    def __call__(self, inputs: MixerInputs, mask: Any) -> MixerOutput:
        inputs, statistics = self.prepare(inputs)
        return dataclasses.replace(super().__call__(inputs, mask), statistics=statistics)

    def extend(self, inputs: MixerInputs, mask: Any, cache: Any) -> tuple[Any, Any]:
        return super().extend(self.prepare(inputs)[0], mask, cache)

    def partial(self, inputs: MixerInputs, mask: Any) -> tuple[Any, Any]:
        return super().partial(inputs, mask)

    def prepare(self, inputs: MixerInputs) -> tuple[MixerInputs, Any]:
        assert inputs.x is not None and inputs.k is not None
        real = jnp.ones(inputs.x.shape[:2], bool) if inputs.segment_ids is None else inputs.segment_ids > 0
        statistics = {
            "keys": jnp.where(real[..., None, None], inputs.k, 0.0).sum((0, 1)),
            "hidden": jnp.where(real[..., None], inputs.x, 0.0).sum((0, 1)),
            "tokens": real.sum(),
        }
        return self._centered(inputs) if self.centers else inputs, statistics

    @nn.compact
    def _centered(self, inputs: MixerInputs) -> MixerInputs:
        assert inputs.k is not None
        shape = inputs.k.shape[2:]
        average = buffer(self, "average", nn.initializers.zeros, shape, ("kv_heads", None))
        updates = buffer(self, "updates", nn.initializers.zeros, (), ())
        average = average / jnp.where(updates == 0, 1.0, 1 - DECAY**updates)  # as Adam corrects its averages
        return dataclasses.replace(inputs, k=inputs.k - average.astype(inputs.k.dtype))

    def advance(self, buffers: Any, statistics: Any, step: jax.Array, rng: jax.Array) -> Any:
        mean = statistics["keys"] / statistics["tokens"]
        average = DECAY * buffers["average"] + (1 - DECAY) * mean
        return {"average": average, "updates": buffers["updates"] + 1}

    def auxiliary_loss(self, statistics: Any) -> dict[str, Any]:
        means = {name: statistics[name] / statistics["tokens"] for name in ("keys", "hidden")}
        return {f"{name}_loss": (mean**2).sum() for name, mean in means.items()}


def centered_keys(*, dropout: float = 0.0, name: str | None = None) -> CenteredKeys:
    return CenteredKeys(Full(), dropout, name=name)


def summed_keys(*, dropout: float = 0.0, name: str | None = None) -> CenteredKeys:
    """Plain attention with the same statistics, and without buffers."""
    return CenteredKeys(Full(), dropout, centers=False, name=name)
