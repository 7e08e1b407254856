"""Random projections as a buffer of a mixer, drawn anew from time to time."""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import DTypeLike

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.layers import buffer
from hpnlp.nn.mixers.checks import check_mask
from hpnlp.ops.attention import Causal, Full
from hpnlp.ops.attention.linear.random_features import PROJECTIONS, projection_count, random_projections
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import InputError


class RandomProjections(Mixer):
    """The buffer of a mixer with random features: projections that all heads share, drawn anew every `redraw` steps.

    Attributes:
      features: Number of features M.
      projections: Distribution of the projections, see `random_projections`.
      redraw: Number of training steps between draws; 0 for none.
    """

    features: int = 128
    projections: str = "orthogonal"
    redraw: int = 0

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


def check_projections(
    features: int, kind: str, kinds: tuple[str, ...], projections: str, redraw: int, spec: str
) -> None:
    """Checks the arguments of a mixer with random features.

    Args:
      features: Number of features.
      kind: Feature map.
      kinds: Feature maps of the mixer.
      projections: Distribution of the projections.
      redraw: Steps between draws.
      spec: The mixer, for messages.

    Raises:
      InputError: An argument that is not possible.
    """
    for value, names in ((kind, kinds), (projections, PROJECTIONS)):
        if value not in names:
            raise InputError(f"{spec}: expected one of {', '.join(names)}, not {value}")
    try:
        projection_count(features, kind)
    except InputError as error:
        raise InputError(f"{spec}: {error}") from error
    if redraw < 0:
        raise InputError(f"{spec}: expected a number of steps between draws, or 0 for none")
