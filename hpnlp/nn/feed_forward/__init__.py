"""Feed-forward networks: the position-wise branches of Blocks. `model.mlp` names entries of FEED_FORWARDS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from hpnlp.model_parallel import NO_TENSOR_PARALLEL, TensorParallel
from hpnlp.nn.feed_forward.mlp import ACTIVATIONS, mlp
from hpnlp.nn.layers import Initializer, dense_init
from hpnlp.spec import build, parse_one
from hpnlp.types import MixerInputs, MixerOutput

FEED_FORWARDS: dict[str, Callable[..., Any]] = {kind: mlp(kind) for kind in ACTIVATIONS}


@runtime_checkable
class FeedForward(Protocol):
    """The position-wise branch of a Block: a Flax module, made by an entry of FEED_FORWARDS.

    Entries are called with the keyword arguments `hidden`, the number of columns; `use_bias`; `down_init`, the initialiser of
    the projection to the residual stream; `tensor_parallel`; and `name`. Other arguments of an entry are those of the spec
    string.

    A feed-forward network may return statistics and have buffers, with the same optional attributes and methods as a
    `types.Mixer`: `statistic_axes`, `auxiliary_loss` and `advance`. A statistic with an axis "mlp" holds one sum per column.
    """

    def __call__(self, inputs: MixerInputs) -> MixerOutput:
        """Transforms each token.

        Args:
          inputs: `x` `[B, T, D]`, the normalised hidden states of the tokens, with positions, segment_ids and deterministic; no
            projections.

        Returns:
          `o` `[B, T, D]`; under tensor parallelism only the tokens that this device keeps. The last product of a network sums
          and selects them by `tensor_parallel.reduce_output`, as `nn.layers.Dense` does; a network without such a product
          selects them by `tensor_parallel.local_tokens`.
        """
        ...


def build_feed_forward(
    text: str,
    *,
    hidden: int,
    use_bias: bool = False,
    down_init: Initializer = dense_init,
    tensor_parallel: TensorParallel = NO_TENSOR_PARALLEL,
) -> FeedForward:
    """Makes a feed-forward network from a spec string.

    Args:
      text: The spec of an entry of FEED_FORWARDS, such as "swiglu".
      hidden: Number of columns.
      use_bias: Biases on all projections.
      down_init: Initialiser of the projection to the residual stream.
      tensor_parallel: Division of the columns over devices.

    Returns:
      The module, without a name.

    Raises:
      InputError: Unknown name, or wrong arguments.
    """
    arguments = {"hidden": hidden, "use_bias": use_bias, "down_init": down_init, "tensor_parallel": tensor_parallel}
    return build(parse_one(text, "model.mlp"), FEED_FORWARDS, "model.mlp", **arguments, name=None)
