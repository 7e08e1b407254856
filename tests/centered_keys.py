"""A mixer with statistics and auxiliary losses, for tests."""

from typing import Any, ClassVar

import jax.numpy as jnp

from hpnlp.nn.mixers.exact import ExactMixer
from hpnlp.ops.attention import Full
from hpnlp.types import MixerInputs, MixerOutput


class CenteredKeys(ExactMixer):
    """Attention whose statistics are sums of keys by head, sums of hidden states, and the number of tokens."""

    statistic_axes: ClassVar = {"keys": ("kv_heads", None), "hidden": (None,), "tokens": ()}

    def __call__(self, inputs: MixerInputs, mask: Any) -> MixerOutput:
        out = super().__call__(inputs, mask)
        assert inputs.x is not None and inputs.k is not None
        real = jnp.ones(inputs.x.shape[:2], bool) if inputs.segment_ids is None else inputs.segment_ids > 0
        statistics = {
            "keys": jnp.where(real[..., None, None], inputs.k, 0.0).sum((0, 1)),
            "hidden": jnp.where(real[..., None], inputs.x, 0.0).sum((0, 1)),
            "tokens": real.sum(),
        }
        return MixerOutput(out.o, statistics=statistics, cache=out.cache)

    def auxiliary_loss(self, statistics: Any) -> dict[str, Any]:
        means = {name: statistics[name] / statistics["tokens"] for name in ("keys", "hidden")}
        return {f"{name}_loss": (mean**2).sum() for name, mean in means.items()}


def centered_keys(*, dropout: float = 0.0, name: str | None = None) -> CenteredKeys:
    return CenteredKeys(Full(), dropout, name=name)
