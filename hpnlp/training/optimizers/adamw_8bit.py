"""AdamW with moments of 8 bits."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from hpnlp.ops.dynamic_quantization import dequantize, is_quantized, quantize
from hpnlp.training.optim import OptimizerConfig, is_matrix, parameter_name

# Matrices with fewer numbers keep float32 moments: their memory does not matter.
LEAST_SIZE = 4096
# Names of the parameters whose moments are quantized; embedding tables are not (Dettmers et al. 2022, section 2.3).
_QUANTIZED = ("kernel", "head")


def adamw8bit(config: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """AdamW that stores the moments of large matrices in 8 bits, and computes each update in float32.

    The moments of a matrix whose rows have n numbers take 2 + 8/n bytes per number instead of 8. Embedding tables and small
    matrices keep float32 moments. Where rows are sharded over devices, only the rows' largest magnitudes are exchanged,
    8 bytes per row.

    References:
      Dettmers et al. 2022, "8-bit optimizers via block-wise quantization".
    """
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    decay = optax.add_decayed_weights(config.weight_decay, mask=is_matrix)
    return optax.chain(_with_8_bit_moments(adam), decay, optax.scale_by_learning_rate(rate))


def _with_8_bit_moments(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """`adam` with quantized `mu` and `nu` in its state."""

    def init(params: PyTree) -> Any:
        return _quantize_moments(adam.init(params), jax.tree_util.tree_map_with_path(_takes_8_bits, params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[Any, Any]:
        # Read off the state, because a table's size is smaller where only some of its rows are trained.
        takes_8_bits = jax.tree.map(is_quantized, state.mu, is_leaf=is_quantized)
        updates, state = adam.update(updates, _dequantize_moments(state), params)
        return updates, _quantize_moments(state, takes_8_bits)

    return optax.GradientTransformation(init, update)


def _takes_8_bits(path: KeyPath, leaf: jax.Array) -> bool:
    return parameter_name(path) in _QUANTIZED and leaf.size >= LEAST_SIZE


def _quantize_moments(state: Any, takes_8_bits: Any) -> Any:
    """Adam's state with the moments in 8 bits where the tree `takes_8_bits` is True."""

    def pack(moments: PyTree, signed: bool) -> Any:
        return jax.tree.map(lambda yes, x: quantize(x, signed=signed) if yes else x, takes_8_bits, moments)

    return state._replace(mu=pack(state.mu, True), nu=pack(state.nu, False))


def _dequantize_moments(state: PyTree) -> Any:
    """Adam's state with all moments in float32."""

    def unpack(moments: PyTree, signed: bool) -> Any:
        return jax.tree.map(
            lambda x: dequantize(x, signed=signed) if is_quantized(x) else x, moments, is_leaf=is_quantized
        )

    return state._replace(mu=unpack(state.mu, True), nu=unpack(state.nu, False))
