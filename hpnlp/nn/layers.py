"""Layers that hold parameters or buffers: Dense, Embed, RMSNorm, LayerNorm, MLP, dropout.

Parameters are float32 and carry the logical names of their axes; a layer computes in the dtype of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from hpnlp.model_parallel import NO_TENSOR_PARALLEL, TensorParallel, Zero2Parameter
from hpnlp.ops.dropout import keep_mask, seed_words
from hpnlp.ops.linear import linear
from hpnlp.ops.norms import layer_norm, rms_norm
from hpnlp.spec import lookup
from hpnlp.types import TableRows

Initializer = Callable[..., Any]

dense_init: Initializer = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
embed_init: Initializer = nn.initializers.normal(0.02)


def param(module: nn.Module, name: str, init: Initializer, shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
    """A float32 parameter of a module.

    Args:
      module: The module.
      name: Name of the parameter.
      init: Initialiser.
      shape: Shape of the parameter.
      axes: Logical names of its axes.

    Returns:
      The parameter: an array, or the `TableRows` or `Zero2Parameter` that was passed in its place.
    """
    variable = module.get_variable("params", name)
    if isinstance(variable, TableRows | Zero2Parameter):
        return variable
    value: Any = module.param(name, nn.with_logical_partitioning(init, axes), shape, jnp.float32)
    return value


def buffer(
    module: nn.Module, name: str, init: Initializer, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> jax.Array:
    """A float32 buffer of a module: an array that the optimizer does not change.

    Args:
      module: The module.
      name: Name of the buffer.
      init: Initialiser; a buffer of zeros or ones needs no key.
      shape: Shape of the buffer.
      axes: Logical names of its axes; None for an axis that is never divided.

    Returns:
      The buffer. It has no gradient.
    """
    boxed = nn.with_logical_partitioning(init, axes)

    def initial() -> Any:
        return boxed(module.make_rng("params"), shape, jnp.float32)

    return jax.lax.stop_gradient(nn.meta.unbox(module.variable("buffers", name, initial).value))


class Dense(nn.Module):
    """`x @ kernel + bias` over the last axis.

    Attributes:
      features: Output features.
      axes: Logical names of the kernel's input and output axis.
      use_bias: Add a bias.
      init: Initialiser of the kernel.
      tensor_parallel: For the last product of a branch, of whose input axis each device may have a slice; the devices'
          partial products are summed.
    """

    features: int
    axes: tuple[str, str]
    use_bias: bool = False
    init: Initializer = dense_init
    tensor_parallel: TensorParallel = NO_TENSOR_PARALLEL

    @nn.compact
    def __call__(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*local_tokens F"]:
        kernel = param(self, "kernel", self.init, (x.shape[-1], self.features), self.axes)
        bias = param(self, "bias", nn.initializers.zeros, (self.features,), self.axes[1:]) if self.use_bias else None
        if self.tensor_parallel.is_identity:
            return linear(x, kernel, bias)
        y = self.tensor_parallel.reduce_output(linear(x, kernel), self.axes[0])
        return y if bias is None else y + bias.astype(y.dtype)[None, None]


class Embed(nn.Module):
    """A table of rows, looked up by id.

    Attributes:
      rows: Number of rows.
      dim: Features of a row.
      axis: Logical name of the axis of rows.
    """

    rows: int
    dim: int
    axis: str = "vocab"

    def setup(self) -> None:
        self.table = param(self, "table", embed_init, (self.rows, self.dim), (self.axis, "embed"))

    def __call__(self, ids: Int[Array, "*tokens"], dtype: Any = jnp.float32) -> Float[Array, "*tokens D"]:
        return self.table[ids].astype(dtype)


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich 2019, eq. 4) over the last axis, in float32.

    Attributes:
      eps: Added to the mean square.
      axis: Logical name of the normalised axis.
    """

    eps: float = 1e-6
    axis: str = "hidden"

    @nn.compact
    def __call__(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        scale = param(self, "scale", nn.initializers.ones, (x.shape[-1],), (self.axis,))
        return rms_norm(x, scale, self.eps)


class LayerNorm(nn.Module):
    """Layer normalisation (Ba et al. 2016, eq. 4) over the last axis, in float32.

    Attributes:
      eps: Added to the variance.
      axis: Logical name of the normalised axis.
    """

    eps: float = 1e-5
    axis: str = "hidden"

    @nn.compact
    def __call__(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        scale = param(self, "scale", nn.initializers.ones, (x.shape[-1],), (self.axis,))
        bias = param(self, "bias", nn.initializers.zeros, (x.shape[-1],), (self.axis,))
        return layer_norm(x, scale, bias, self.eps)


NORMS: dict[str, Callable[..., nn.Module]] = {"rms": RMSNorm, "layer": LayerNorm}


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


# The activation of each kind of MLP. The kinds in GATED apply it to a second projection, by which they multiply the first
# (Shazeer 2020, "GLU variants improve transformer", eq. 6).
MLPS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_exact": gelu_exact,
    "relu": jax.nn.relu,
    "swiglu": jax.nn.silu,
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),
    "geglu_exact": gelu_exact,
}
GATED = ("swiglu", "geglu", "geglu_exact")


class MLP(nn.Module):
    """The feed-forward branch: `down(f(up(x)))`, or `down(f(gate(x)) * up(x))` for the kinds in GATED.

    Attributes:
      hidden: Number of columns of up and gate.
      kind: Entry of MLPS, the activation f.
      use_bias: Biases on all projections.
      down_init: Initialiser of the last projection.
      tensor_parallel: Division of the columns over devices.
    """

    hidden: int
    kind: str = "gelu"
    use_bias: bool = False
    down_init: Initializer = dense_init
    tensor_parallel: TensorParallel = NO_TENSOR_PARALLEL

    @nn.compact
    def __call__(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        activation = lookup(MLPS, self.kind, "model.mlp")
        x, size = self.tensor_parallel.gather_tokens(x), self.tensor_parallel.local_size("mlp", self.hidden)
        h = checkpoint_name(Dense(size, ("embed", "mlp"), self.use_bias, name="up")(x), "hidden")
        if self.kind in GATED:
            gate = checkpoint_name(Dense(size, ("embed", "mlp"), self.use_bias, name="gate")(x), "hidden")
            h = activation(gate) * h
        else:
            h = activation(h)
        return Dense(x.shape[-1], ("mlp", "embed"), self.use_bias, self.down_init, self.tensor_parallel, name="down")(h)


def dropout(
    x: Float[Array, "B T D"], rate: float, rng: jax.Array | None, ids: Int[Array, "B T"] | None
) -> Float[Array, "B T D"]:
    """Zeroes entries at random and scales the others by 1 / (1 - rate).

    Args:
      x: An array.
      rate: Probability that an entry is zeroed.
      rng: Key; None for no dropout.
      ids: A number for each token. Whether an entry is zeroed depends on rng, this number and the index in D only, so that
          every layout over devices zeroes the same entries.

    Returns:
      The array, in the dtype of x.
    """
    if rng is None or rate == 0.0:
        return x
    assert ids is not None
    features = jnp.arange(x.shape[-1], dtype=jnp.uint32)[None, None]
    keep = keep_mask(seed_words(rng), ids[..., None], features, jnp.zeros((1, 1, 1), jnp.uint32), rate)
    # In float32, because 1 - rate rounded to 16 bits would shift the mean.
    return jnp.where(keep, (x.astype(jnp.float32) / (1.0 - rate)).astype(x.dtype), jnp.zeros((), x.dtype))
