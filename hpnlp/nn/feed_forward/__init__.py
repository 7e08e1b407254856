"""Feed-forward networks: the position-wise branches of Blocks. `model.mlp` names entries of FEED_FORWARDS."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hpnlp.model_interfaces.model_parallel import NO_TENSOR_PARALLEL, TensorParallel
from hpnlp.nn.feed_forward.mlp import ACTIVATIONS, mlp
from hpnlp.nn.feed_forward.network import FeedForward as FeedForward
from hpnlp.nn.layers import Initializer, dense_init
from hpnlp.spec import build, lookup, parse_one
from hpnlp.table import Table

FEED_FORWARDS: Table[Callable[..., Any]] = Table(
    {
        **{kind: mlp(kind) for kind in ACTIVATIONS},
        "base": "hpnlp.nn.feed_forward.routers:Base",
        "bias_balanced": "hpnlp.nn.feed_forward.routers:BiasBalanced",
        "expert_choice": "hpnlp.nn.feed_forward.routers:ExpertChoice",
        "gshard": "hpnlp.nn.feed_forward.routers:GShard",
        "hash": "hpnlp.nn.feed_forward.routers:Hash",
        "noisy_top_k": "hpnlp.nn.feed_forward.routers:NoisyTopK",
        "st_moe": "hpnlp.nn.feed_forward.routers:StMoE",
        "switch": "hpnlp.nn.feed_forward.routers:Switch",
        "top_k": "hpnlp.nn.feed_forward.routers:TopK",
    }
)


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


def described_network(text: str) -> FeedForward:
    """Returns a network of one column, for its properties.

    Inside a method of a module, Flax would make the network a submodule. It is therefore cached: configs construct it, and
    methods of modules read the cached one.

    Args:
      text: The spec of an entry of FEED_FORWARDS.

    Returns:
      The network, without a parent.

    Raises:
      InputError: As `build_feed_forward`.
    """
    return _described(lookup(FEED_FORWARDS, parse_one(text, "model.mlp").name, "model.mlp"), text)


@functools.cache
def _described(entry: Callable[..., Any], text: str) -> FeedForward:
    """The network; `entry` is the table entry that the text names, which tests replace."""
    return build_feed_forward(text, hidden=1)
