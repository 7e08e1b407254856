"""Layers that hold parameters: Dense, Embed, RMSNorm, LayerNorm, MLP, dropout.

Parameters are float32 and carry the logical names of their axes; a layer computes in the dtype of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from hpnlp.ops.dropout import keep_mask, seed_words
from hpnlp.ops.linear import linear
from hpnlp.ops.norms import layer_norm, rms_norm
from hpnlp.spec import lookup
from hpnlp.types import NO_TENSOR_PARALLEL, TableRows, TensorParallel, Zero2Parameter

Initializer = Callable[..., Any]

dense_init: Initializer = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
embed_init: Initializer = nn.initializers.normal(0.02)


def param(module: nn.Module, name: str, init: Initializer, shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
    """A float32 parameter of `module` whose axes have the logical names `axes`; or what is given instead."""
    given = module.get_variable("params", name)
    if isinstance(given, TableRows | Zero2Parameter):
        return given
    value: Any = module.param(name, nn.with_logical_partitioning(init, axes), shape, jnp.float32)
    return value


class Dense(nn.Module):
    """`x @ kernel + bias` over the last axis. axes: logical names of the kernel's input and output axis.

    branches: whose end the product is, where devices share it: each may have a part of the kernel's input axis.
    """

    features: int
    axes: tuple[str, str]
    use_bias: bool = False
    init: Initializer = dense_init
    tensor_parallel: TensorParallel = NO_TENSOR_PARALLEL

    @nn.compact
    def __call__(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*own F"]:
        kernel = param(self, "kernel", self.init, (x.shape[-1], self.features), self.axes)
        bias = param(self, "bias", nn.initializers.zeros, (self.features,), self.axes[1:]) if self.use_bias else None
        if self.tensor_parallel.is_identity:
            return linear(x, kernel, bias)
        y = self.tensor_parallel.reduce_output(linear(x, kernel), self.axes[0])
        return y if bias is None else y + bias.astype(y.dtype)[None, None]


class Embed(nn.Module):
    """A table of rows, looked up by id. axis: the logical name of its rows."""

    rows: int
    dim: int
    axis: str = "vocab"

    def setup(self) -> None:
        self.table = param(self, "table", embed_init, (self.rows, self.dim), (self.axis, "embed"))

    def __call__(self, ids: Int[Array, "*tokens"], dtype: Any = jnp.float32) -> Float[Array, "*tokens D"]:
        return self.table[ids].astype(dtype)


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich 2019, eq. 4) over the last axis, in float32."""

    eps: float = 1e-6
    axis: str = "hidden"

    @nn.compact
    def __call__(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        scale = param(self, "scale", nn.initializers.ones, (x.shape[-1],), (self.axis,))
        return rms_norm(x, scale, self.eps)


class LayerNorm(nn.Module):
    """Layer normalisation (Ba et al. 2016, eq. 4) over the last axis, in float32."""

    eps: float = 1e-5
    axis: str = "hidden"

    @nn.compact
    def __call__(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        scale = param(self, "scale", nn.initializers.ones, (x.shape[-1],), (self.axis,))
        bias = param(self, "bias", nn.initializers.zeros, (x.shape[-1],), (self.axis,))
        return layer_norm(x, scale, bias, self.eps)


NORMS: dict[str, Callable[..., nn.Module]] = {"rms": RMSNorm, "layer": LayerNorm}

# The activation of each MLP. Those of GATED apply it to a second projection, which gates the first (Shazeer 2020, eq. 6).
MLPS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
    "swiglu": jax.nn.silu,
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),
    "geglu_exact": lambda x: jax.nn.gelu(x, approximate=False),
}
GATED = ("swiglu", "geglu", "geglu_exact")


class MLP(nn.Module):
    """The feed-forward branch: `down(f(up(x)))`, or `down(f(gate(x)) * up(x))` for the kinds of GATED."""

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
    """Zeroes entries with probability `rate` and scales the rest by 1 / (1 - rate); `rng` None means none.

    ids: a number for each token, by which and by the place in D it is decided what goes, wherever the token is computed.
    """
    if rng is None or rate == 0.0:
        return x
    assert ids is not None
    places = jnp.arange(x.shape[-1], dtype=jnp.uint32)[None, None]
    keep = keep_mask(seed_words(rng), ids[..., None], places, jnp.zeros((1, 1, 1), jnp.uint32), rate)
    # In float32, because 1 - rate rounded to 16 bits would shift the mean.
    return jnp.where(keep, (x.astype(jnp.float32) / (1.0 - rate)).astype(x.dtype), jnp.zeros((), x.dtype))
