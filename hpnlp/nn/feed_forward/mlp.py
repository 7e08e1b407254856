"""MLPs: position-wise networks of one hidden layer, gated or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from hpnlp.model_interfaces.model_parallel import NO_TENSOR_PARALLEL, TensorParallel
from hpnlp.nn.feed_forward.network import FeedForward
from hpnlp.nn.layers import Dense, Initializer, dense_init
from hpnlp.ops.helpers.checkpoint_names import HIDDEN
from hpnlp.types import MixerInputs, MixerOutput


@jax.custom_jvp
def gelu_exact(x: jax.Array) -> jax.Array:
    """GELU by the error function (Hendrycks & Gimpel 2016), x P(X <= x) of a standard normal X.

    It has a derivative of its own, because JAX 0.12 cannot differentiate the error function inside `shard_map`.

    Args:
      x: An array.

    Returns:
      An array of the same shape and dtype.
    """
    return jax.nn.gelu(x, approximate=False)


@gelu_exact.defjvp
def _gelu_exact_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    half, sqrt_half, scale = (np.array(value, x.dtype) for value in (0.5, 0.5**0.5, (2 * np.pi) ** -0.5))
    below = half * jax.lax.erfc(-x * sqrt_half)  # P(X <= x)
    return gelu_exact(x), dx * (below + x * jnp.exp(-half * x * x) * scale)


# The activation of each kind of MLP. The kinds in GATED apply it to a second projection, which multiplies the first one
# (Shazeer 2020, "GLU variants improve transformer", eq. 6).
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_exact": gelu_exact,
    "relu": jax.nn.relu,
    "swiglu": jax.nn.silu,
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),
    "geglu_exact": gelu_exact,
}
GATED = ("swiglu", "geglu", "geglu_exact")


class MLP(FeedForward):
    """The feed-forward branch: `down(f(up(x)))`, or `down(f(gate(x)) * up(x))` for the kinds in GATED.

    Attributes:
      kind: Entry of ACTIVATIONS, the activation f.
    """

    kind: str = "gelu"
    starts_experts: ClassVar[bool] = True

    @property
    def is_gated(self) -> bool:
        return self.kind in GATED

    @nn.compact
    def __call__(self, inputs: MixerInputs) -> MixerOutput:
        x = inputs.x
        assert x is not None
        size = self.tensor_parallel.local_size("mlp", self.hidden)
        h = checkpoint_name(Dense(size, ("embed", "mlp"), self.use_bias, name="up")(x), HIDDEN)
        if self.kind in GATED:
            gate = checkpoint_name(Dense(size, ("embed", "mlp"), self.use_bias, name="gate")(x), HIDDEN)
            h = ACTIVATIONS[self.kind](gate) * h
        else:
            h = ACTIVATIONS[self.kind](h)
        down = Dense(x.shape[-1], ("mlp", "embed"), self.use_bias, self.down_init, self.tensor_parallel, name="down")
        return MixerOutput(down(h))


def mlp(kind: str) -> Callable[..., MLP]:
    """Makes the entry of FEED_FORWARDS for a kind of MLP.

    Args:
      kind: Entry of ACTIVATIONS.

    Returns:
      A function from the other attributes of an MLP to the module.
    """

    def make_mlp(
        *,
        hidden: int,
        use_bias: bool = False,
        down_init: Initializer = dense_init,
        tensor_parallel: TensorParallel = NO_TENSOR_PARALLEL,
        name: str | None = None,
    ) -> MLP:
        return MLP(hidden, use_bias, down_init, tensor_parallel, kind, name=name)

    return make_mlp
