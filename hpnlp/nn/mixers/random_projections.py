"""Random projections as a buffer of a mixer, drawn anew from time to time."""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import DTypeLike

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.layers import buffer
from hpnlp.nn.mixers.checks import check_mask, dropout_option
from hpnlp.ops.attention import Causal, Full
from hpnlp.ops.attention.linear.random_features import PROJECTIONS, projection_count, random_projections
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import keyword_only, option


class RandomProjections(Mixer):
    """The buffer of a mixer with random features: projections that all heads share, drawn anew every `redraw` steps."""

    features: int = option(128, "Number of features M.", least=1)
    projections: str = keyword_only(option("orthogonal", "Distribution of the projections.", among=PROJECTIONS))
    redraw: int = keyword_only(
        option(1000, "Number of training steps between draws of the projections; 0 for none.", least=0)
    )
    dropout: float = dropout_option("Ignored: linear attention computes no attention probabilities.", has_effect=False)

    def drawn(self, kind: str, dim: int) -> jax.Array:
        """The projections.

        Args:
          kind: Feature map, which decides how many there are.
          dim: Head size H.

        Returns:
          float32 `[P, H]`, the buffer "projections".
        """

        def draw(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
            return random_projections(key, shape[0], shape[1], self.projections).astype(dtype)

        return buffer(self, "projections", draw, (projection_count(self.features, kind), dim), (None, None))

    def redrawn(self, w: jax.Array, step: jax.Array, rng: jax.Array) -> jax.Array:
        """The projections of the next step.

        Args:
          w: Those of this step.
          step: Number of steps done.
          rng: Key of the layer and the step.

        Returns:
          New projections after each `redraw` steps, otherwise w.
        """
        if not self.redraw:
            return w
        count, dim = w.shape
        is_due = (step + 1) % self.redraw == 0
        return jax.lax.cond(is_due, lambda: random_projections(rng, count, dim, self.projections), lambda: w)

    def within(self, mask: AnyMask) -> Any:
        return check_mask(
            "attention with random features", mask, Causal(), Full(), reason="it sums over all preceding tokens"
        )
