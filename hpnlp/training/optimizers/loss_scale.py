"""Dynamic loss scaling: a factor of the loss that keeps gradients in the range of float16, from 6e-8 to 65504.

The factor doubles after GROWTH_INTERVAL finite steps in a row, and halves at each step whose gradients are not finite; such a
step changes nothing else.

References:
  Micikevicius et al. 2018, "Mixed precision training", section 3.2.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# The loss is a sum over tokens, so that gradients are of order 1 per token whatever the batch size: for models of 32 to 512
# features the scale fell to 1024 or 2048 from every higher start. (With mean losses, 32768 is the usual start.)
INITIAL = 1024.0
GROWTH_INTERVAL = 2000
MINIMUM = 1.0


class LossScale(NamedTuple):
    """State of dynamic loss scaling. The field names are part of the checkpoint format.

    Attributes:
      value: Factor of the loss, a float32 scalar.
      finite: Number of finite steps in a row since `value` last changed, an int32 scalar.
    """

    value: jax.Array
    finite: jax.Array

    def after(self, is_finite: jax.Array) -> LossScale:
        """Scale of the next step.

        Args:
          is_finite: bool scalar; True if the gradients of this step were finite.

        Returns:
          The new scale. It is never less than MINIMUM, and never infinite.
        """
        count = self.finite + 1
        doubled = 2.0 * self.value
        grown = jnp.where((count >= GROWTH_INTERVAL) & jnp.isfinite(doubled), doubled, self.value)
        return LossScale(
            jnp.where(is_finite, grown, jnp.maximum(MINIMUM, self.value / 2.0)),
            jnp.where(is_finite & (count < GROWTH_INTERVAL), count, 0),
        )


def initial(value: float | None, dtype: str) -> LossScale | None:
    """Scale of the first step.

    Args:
      value: The factor; 0 for no scaling; None for INITIAL with float16 activations and no scaling otherwise.
      dtype: Data type of the activations.

    Returns:
      The scale, or None for no scaling.
    """
    if value is None:
        value = INITIAL if dtype == "float16" else 0.0
    return LossScale(jnp.float32(value), jnp.int32(0)) if value else None
