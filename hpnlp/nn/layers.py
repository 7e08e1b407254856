"""Layers that hold variables, and functions that declare them: Dense, Embed, RMSNorm, LayerNorm, dropout.

Parameters are float32 and carry the logical names of their axes; a layer computes in the dtype of its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.cost.parts import part
from hpnlp.model_interfaces.model_parallel import NO_TENSOR_PARALLEL, TensorParallel, Zero2Parameter
from hpnlp.ops.dropout import keep_mask, seed_words
from hpnlp.ops.linear import linear, linear_by_transpose
from hpnlp.ops.norms import layer_norm, rms_norm
from hpnlp.ops.table_rows import TableRows
from hpnlp.ops.weight import Weight

Initializer = Callable[..., Any]

dense_init: Initializer = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
# Name of an additional parameter of a Dense layer: the transpose of its kernel.
TRANSPOSE = "kernel_transpose"

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
      The parameter: an array, or the `Weight`, `TableRows` or `Zero2Parameter` that was passed in its place.
    """
    variable = module.get_variable("params", name)
    if isinstance(variable, TableRows | Weight | Zero2Parameter):
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


def frozen(module: nn.Module, name: str, initial: Callable[[jax.Array], Any]) -> Any:
    """Frozen variables of a module: arrays that the task provides and that training does not change, as those of a teacher.

    A module declares them by a call in `setup` or in a compact method, and may read them by calls in other methods.

    Args:
      module: The module.
      name: Name of the variables.
      initial: Function of a key that returns a tree of arrays with the logical names of their axes, such as the parameters that
        a Flax module's `init` returns. It states names, shapes and dtypes; its values are replaced by those of the task.

    Returns:
      The tree of arrays. None where the model is applied without frozen variables.
    """
    if module.is_initializing() and not module.has_variable("frozen", name):
        module.variable("frozen", name, lambda: initial(module.make_rng("params")))
    return nn.meta.unbox(module.get_variable("frozen", name))


def with_transposes(params: PyTree) -> Any:
    """Adds the transposes of the kernels of `Dense` layers, which they then read; for decoding.

    Args:
      params: Parameters of layers, whose kernels are not stacked.

    Returns:
      The parameters, with the array TRANSPOSE beside each matrix "kernel". Other modules do not read it.

    Cost: a copy of the kernels.
    """
    if not isinstance(params, Mapping):
        return params
    added = {name: with_transposes(value) for name, value in params.items()}
    kernel = added.get("kernel")
    if isinstance(kernel, jax.Array) and kernel.ndim == 2:
        added[TRANSPOSE] = jax.lax.optimization_barrier(kernel.T)
    return added


class Dense(nn.Module):
    """`x @ kernel + bias` over the last axis. A parameter TRANSPOSE (`with_transposes`) is read in place of the kernel.

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
        if (transpose := self.get_variable("params", TRANSPOSE)) is not None:
            return linear_by_transpose(x, transpose, bias)
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

    @part("embedding")
    def __call__(self, ids: Int[Array, "*tokens"], dtype: DTypeLike = jnp.float32) -> Float[Array, "*tokens D"]:
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
    @part("norms")
    def __call__(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        scale = param(self, "scale", nn.initializers.ones, (x.shape[-1],), (self.axis,))
        return rms_norm(x, scale, self.eps)


class ZeroCenteredRMSNorm(nn.Module):
    """RMSNorm whose scale is 1 plus the parameter, so that weight decay draws the scale to 1 (as in Gemma).

    Attributes:
      eps: Added to the mean square.
      axis: Logical name of the normalised axis.
    """

    eps: float = 1e-6
    axis: str = "hidden"

    @nn.compact
    @part("norms")
    def __call__(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        scale = param(self, "scale", nn.initializers.zeros, (x.shape[-1],), (self.axis,))
        return rms_norm(x, 1.0 + scale, self.eps)


class Affine(nn.Module):
    """A scale and a bias of each feature in place of a norm (Sun et al. 2020, "MobileBERT", sec. 3.4: NoNorm).

    Attributes:
      eps: Not used; the attributes are those of a norm.
      axis: Logical name of the last axis.
    """

    eps: float = 0.0
    axis: str = "hidden"

    @nn.compact
    @part("norms")
    def __call__(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        ones = (1,) * (x.ndim - 1)
        scale = param(self, "scale", nn.initializers.ones, (x.shape[-1],), (self.axis,))
        bias = param(self, "bias", nn.initializers.zeros, (x.shape[-1],), (self.axis,))
        y = x.astype(jnp.float32) * scale.reshape(ones + scale.shape) + bias.reshape(ones + bias.shape)
        return y.astype(x.dtype)


class LayerNorm(nn.Module):
    """Layer normalisation (Ba et al. 2016, eq. 4) over the last axis, in float32.

    Attributes:
      eps: Added to the variance.
      axis: Logical name of the normalised axis.
    """

    eps: float = 1e-5
    axis: str = "hidden"

    @nn.compact
    @part("norms")
    def __call__(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        scale = param(self, "scale", nn.initializers.ones, (x.shape[-1],), (self.axis,))
        bias = param(self, "bias", nn.initializers.zeros, (x.shape[-1],), (self.axis,))
        return layer_norm(x, scale, bias, self.eps)


NORMS: dict[str, Callable[..., nn.Module]] = {
    "rms": RMSNorm,
    "rms_zero_centered": ZeroCenteredRMSNorm,
    "layer": LayerNorm,
    "affine": Affine,
}


def dropout(
    x: Float[Array, "B T D"], rate: float, rng: jax.Array | None, ids: Int[Array, "B _"] | None
) -> Float[Array, "B T D"]:
    """Zeroes entries at random and scales the others by 1 / (1 - rate).

    Args:
      x: An array.
      rate: Probability that an entry is zeroed.
      rng: Key; None for no dropout.
      ids: A number for each token, or [B, 1] for each sequence. Whether an entry is zeroed depends on rng, this number and the
          index in D only, so that every layout over devices zeroes the same entries.

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
