"""The stage `magnitude` of recipes, which zeroes weights."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hpnlp.compress.matrices import is_table, map_matrices
from hpnlp.compress.stages import STRUCTURE, Calibration, Compressor, check_share, squared_gradients
from hpnlp.compress.stages.moments import listed_matrices, map_arrays, with_input_moments
from hpnlp.ops.weights import prune_by_moments
from hpnlp.ops.weights.calibrated.observed import split_observed
from hpnlp.ops.weights.sparse import largest
from hpnlp.types import Array, InputError

if TYPE_CHECKING:
    from hpnlp.models.shared.body import ConfigOfModel


def magnitude(share: int | float, by: str = "magnitude") -> tuple[str, Compressor]:
    """Sets the smallest weights of each kernel of each layer to 0. Files become smaller, products do not become faster.

    Of equal magnitudes, the first stay.

    Args:
      share: Share of the weights that stays, in (0, 1].
      by: "magnitude"; "inputs", by the error of products with inputs of calibration data, of each 128 rows, and the other
        weights are changed, see `hpnlp.ops.weights.prune_by_moments`; "fisher", by weight^2 x mean squared gradient on
        calibration data (LeCun et al. 1989, "Optimal brain damage", with the Fisher information in place of the Hessian); or
        "random" for weights drawn at random, with which results are compared.

    Returns:
      What it changes, and the compressor.

    Raises:
      InputError: `share` is out of range, or `by` is unknown.
    """
    check_share("magnitude", share)
    if by not in ("magnitude", "inputs", "fisher", "random"):
        raise InputError(f"magnitude(by={by!r}): expected magnitude, inputs, fisher or random")

    def keep_largest(path: str, w: Array, rank: Array) -> Any:
        if is_table(path):
            return w
        mask = largest(rank, share) if w.ndim == 2 else jax.vmap(lambda layer: largest(layer, share))(rank)
        return jnp.where(mask, w, jnp.zeros_like(w))

    def by_magnitude(path: str, w: Array) -> Any:
        return keep_largest(path, w, jnp.abs(w))

    def at_random(path: str, w: Array) -> Any:
        return keep_largest(path, w, jax.random.uniform(jax.random.key(zlib.crc32(path.encode())), w.shape))

    def by_inputs(path: str, w: PyTree) -> Any:
        matrix, moments = split_observed(w)
        return w if moments is None else prune_by_moments(matrix, moments, share)

    def compress_by_inputs(config: ConfigOfModel, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        observed = with_input_moments("magnitude(by='inputs')", config, weights, calibration)
        return config, map_matrices(by_inputs, observed)

    def compress_by_fisher(config: ConfigOfModel, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        squares = dict(listed_matrices(squared_gradients("magnitude(by='fisher')", config, weights, calibration)))

        def by_fisher(path: str, w: Array) -> Any:
            return keep_largest(path, w, w**2 * squares[path]) if path in squares else w

        return config, map_matrices(by_fisher, weights, stacked=True)

    if by == "inputs":
        return STRUCTURE, compress_by_inputs
    if by == "fisher":
        return STRUCTURE, compress_by_fisher
    return STRUCTURE, _matrix_compressor(by_magnitude if by == "magnitude" else at_random, stacked=True)


def _matrix_compressor(function: Callable[[str, Any], Any], stacked: bool = False) -> Compressor:
    """Compressor that changes each matrix by itself; both factors of a low-rank matrix are matrices."""
    return lambda config, weights, calibration: (
        config,
        map_matrices(functools.partial(map_arrays, function), weights, stacked=stacked),
    )
