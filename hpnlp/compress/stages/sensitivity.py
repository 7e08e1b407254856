"""Bits for each kernel of each layer, by the curvature of the loss.

References:
  Shen et al. 2020, "Q-BERT": fewer bits where the loss is flat, by the top eigenvalue of the Hessian.
  Dong et al. 2020, "HAWQ-V2", section 3: the mean of its diagonal in place of the top eigenvalue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hpnlp.ops.weights import quantize


def mean_curvature(gradient: Callable[[Any], Any], params: PyTree, draws: int = 4, seed: int = 0) -> Any:
    """Mean of the diagonal of the Hessian over each matrix, by Hutchinson's estimator.

    Args:
      gradient: A function of the parameters that returns the gradient of the loss.
      params: Parameters.
      draws: Number of random vectors.
      seed: Seed of the vectors.

    Returns:
      A tree like the parameters: float64 [], or [L] for [L, D, F]; the magnitude of the mean of v * (H v).

    Cost:
      `draws` products of the Hessian with a vector, each about twice as expensive as a gradient.
    """
    leaves, tree = jax.tree.flatten(params)
    sums: list[Any] = [0.0] * len(leaves)
    for draw in range(draws):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), draw), len(leaves))
        signs = [jax.random.rademacher(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
        _, products = jax.jvp(gradient, (params,), (jax.tree.unflatten(tree, signs),))
        for i, (sign, product) in enumerate(zip(signs, jax.tree.leaves(products), strict=True)):
            axes = tuple(range(max(sign.ndim - 2, 0), sign.ndim))
            sums[i] = sums[i] + np.asarray(jnp.mean(sign * product, axis=axes), np.float64)
    return jax.tree.unflatten(tree, [abs(np.asarray(total) / draws) for total in sums])


def choose_bits(
    matrices: Mapping[str, Any], curvatures: Mapping[str, float], budget: int | float, choices: Sequence[int]
) -> dict[str, int]:
    """Bits of each matrix for a budget of mean bits.

    All matrices begin with the fewest bits. The matrix whose next bits lower the estimated increase of the loss,
    curvature * |w - rounded w|^2 / 2, the most for each bit that they take, gets them, as long as the budget lasts.

    Args:
      matrices: [D, F] by name.
      curvatures: Mean curvature of each matrix.
      budget: Largest mean number of bits of a weight.
      choices: Numbers of bits, ascending.

    Returns:
      Number of bits by name.
    """
    cost = {
        name: [curvatures[name] * float(jnp.sum((w - quantize(w, bits).dense()) ** 2)) / 2 for bits in choices]
        for name, w in matrices.items()
    }
    level = dict.fromkeys(matrices, 0)
    left = (budget - choices[0]) * sum(w.size for w in matrices.values())

    def gain(name: str) -> float:
        at = level[name]
        return (cost[name][at] - cost[name][at + 1]) / (_step(choices, at) * matrices[name].size)

    while True:
        able = [
            name
            for name in matrices
            if level[name] + 1 < len(choices) and _step(choices, level[name]) * matrices[name].size <= left
        ]
        if not able:
            return {name: choices[at] for name, at in level.items()}
        best = max(able, key=gain)
        left -= _step(choices, level[best]) * matrices[best].size
        level[best] += 1


def _step(choices: Sequence[int], at: int) -> int:
    return choices[at + 1] - choices[at]
