"""A feed-forward network with buffers, statistics, an auxiliary loss and a metric, for tests."""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.model_interfaces.model_parallel import NO_TENSOR_PARALLEL, TensorParallel
from hpnlp.nn.feed_forward import FeedForward
from hpnlp.nn.layers import Dense, buffer, dense_init
from hpnlp.types import MixerInputs, MixerOutput

DECAY = 0.9


class CenteredColumns(FeedForward):
    """An MLP whose columns have their running average subtracted before the activation.

    Statistics are sums of columns and the number of tokens. The metric is the mean square of the inputs.
    """

    statistic_axes: ClassVar = {"columns": ("mlp",), "tokens": ()}

    @nn.compact
    def __call__(self, inputs: MixerInputs) -> MixerOutput:
        x = inputs.x
        assert x is not None
        size = self.tensor_parallel.local_size("mlp", self.hidden)
        columns = Dense(size, ("embed", "mlp"), self.use_bias, name="up")(x)
        average = buffer(self, "average", nn.initializers.zeros, (size,), ("mlp",))
        h = jax.nn.gelu(columns - average.astype(columns.dtype)[None, None])
        down = Dense(x.shape[-1], ("mlp", "embed"), self.use_bias, self.down_init, self.tensor_parallel, name="down")
        real = jnp.ones(x.shape[:2], jnp.float32) if inputs.segment_ids is None else jnp.sign(inputs.segment_ids)
        real = real.astype(jnp.float32)
        statistics = {"columns": (real[..., None] * columns).sum((0, 1)), "tokens": real.sum()}
        square = (real * jnp.square(x.astype(jnp.float32)).mean(-1)).sum()
        return MixerOutput(down(h), {"input_square": (square, real.sum())}, statistics)

    def advance(self, buffers: Any, statistics: Any, step: jax.Array, rng: jax.Array) -> Any:
        mean = statistics["columns"] / statistics["tokens"]
        return {"average": DECAY * buffers["average"] + (1 - DECAY) * mean}

    def auxiliary_loss(self, statistics: Any) -> dict[str, Any]:
        return {"columns_loss": jnp.square(statistics["columns"] / statistics["tokens"]).mean()}


def centered_columns(
    *,
    hidden: int,
    use_bias: bool = False,
    down_init: Any = dense_init,
    tensor_parallel: TensorParallel = NO_TENSOR_PARALLEL,
    name: str | None = None,
) -> CenteredColumns:
    return CenteredColumns(hidden, use_bias, down_init, tensor_parallel, name=name)
