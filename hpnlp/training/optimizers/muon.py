"""Muon: momentum whose matrices are orthogonalized.

References:
  Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree

from hpnlp.training.optim import OptimizerConfig, is_matrix, parameter_name
from hpnlp.training.optimizers import sparse_rows
from hpnlp.training.optimizers.sparse_rows import ApplyToWhole

# Coefficients of x, x^3 and x^5 in the polynomial that moves singular values towards 1. Jordan et al. chose them for speed:
# the iteration settles near 1, not at 1.
QUINTIC = (3.4445, -4.7750, 2.0315)


class MuonState(NamedTuple):
    """State of Muon. The field names are part of the checkpoint format.

    Attributes:
      count: Number of updates, int32.
      mu: Momentum, a tree like the parameters.
    """

    count: Array
    mu: Any


def orthogonal(x: Array, eps: float, steps: int = 5) -> Array:
    """Approximates U V^T for each matrix U S V^T of a stack by Newton-Schulz iteration.

    Args:
      x: Matrices `[..., A, B]`.
      eps: Added to each matrix's norm before dividing by it.
      steps: Number of iterations.

    Returns:
      Matrices `[..., A, B]` with singular values near 1.

    Cost:
      4 A B min(A, B) + 2 min(A, B)^3 floating-point operations per matrix and iteration.
    """
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + eps)
    a, b, c = QUINTIC

    def iteration(_: Array, x: Array) -> Array:
        square = x @ x.mT
        return a * x + (b * square + c * square @ square) @ x

    # A loop, because the unrolled iterations would take most of a step's compilation time.
    x = lax.fori_loop(0, steps, iteration, x)
    return x.mT if is_tall else x


def scale_by_muon(decay: float, eps: float, apply_to_whole: ApplyToWhole | None = None) -> optax.GradientTransformation:
    """Orthogonalized Nesterov momentum of matrices `[..., A, B]`, times sqrt(max(1, B / A)).

    Args:
      decay: Decay of the momentum.
      eps: See `orthogonal`.
      apply_to_whole: Applies a function to matrices that are sharded over devices, as
        `hpnlp.parallel.distributed_matrices.apply_to_matrices` does; None if every device holds whole matrices.

    Returns:
      The gradient transformation.
    """

    def orthogonalize(x: Array) -> Array:
        return orthogonal(x, eps)

    def init(params: PyTree) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def direction(path: KeyPath, momentum: Array) -> Array:
        if apply_to_whole is None:
            step = orthogonalize(momentum)
        else:
            step = apply_to_whole(sparse_rows.keys(path), orthogonalize, momentum)
        return jnp.sqrt(jnp.maximum(1.0, momentum.shape[-1] / momentum.shape[-2])) * step

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[Any, MuonState]:
        mu, count = optax.tree.update_moment(updates, state.mu, decay, 1), state.count + 1
        next_mu = optax.tree.bias_correction(mu, decay, count + 1)
        grads = optax.tree.bias_correction(updates, decay, count)
        nesterov = jax.tree.map(lambda m, g: decay * m + (1 - decay) * g, next_mu, grads)
        return jax.tree_util.tree_map_with_path(direction, nesterov), MuonState(count, mu)

    return optax.GradientTransformation(init, update)


def muon(
    config: OptimizerConfig, rate: optax.Schedule, apply_to_whole: ApplyToWhole | None = None
) -> optax.GradientTransformation:
    """Muon for kernels, each layer of a stack by itself, and Adam for all other parameters."""
    adam_factor = (config.adam_learning_rate or config.learning_rate) / (config.learning_rate or 1.0)
    of_kernels = optax.chain(
        scale_by_muon(config.momentum, config.eps, apply_to_whole),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    adam = optax.adamw(
        lambda step: adam_factor * rate(step),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=is_matrix,
        nesterov=True,
    )
    return optax.partition({"muon": of_kernels, "adam": adam}, _labels)


def _labels(params: PyTree) -> Any:
    """A tree like the parameters: "muon" for kernels, "adam" for all others."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "muon" if parameter_name(path) == "kernel" else "adam", params
    )
