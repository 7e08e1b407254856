"""The stage `magnitude` of recipes, which zeroes weights."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hpnlp.compress.matrices import is_table, map_matrices
from hpnlp.compress.stages import Calibration, Stage, squared_gradients
from hpnlp.compress.stages.moments import listed_matrices, map_arrays, with_input_moments
from hpnlp.ops.weights import prune_by_moments
from hpnlp.ops.weights.calibrated.observed import split_observed
from hpnlp.ops.weights.sparse import largest
from hpnlp.types import REQUIRED, Array, option

if TYPE_CHECKING:
    from hpnlp.models.shared.body import ConfigOfModel


@dataclasses.dataclass(frozen=True)
class MagnitudeStage(Stage):
    """Sets the smallest weights of each kernel of each layer to 0. Files become smaller, products do not become faster.

    Of equal magnitudes, the first stay.
    """

    share: int | float = option(REQUIRED, "Share of the weights that stays.", above=0, most=1)
    by: str = option(
        "magnitude",
        "magnitude; inputs, by the error of products with inputs of calibration data, of each 128 rows, and the other weights "
        "are changed, see `hpnlp.ops.weights.prune_by_moments`; fisher, by weight^2 x mean squared gradient on calibration "
        'data (LeCun et al. 1989, "Optimal brain damage", with the Fisher information in place of the Hessian); or random for '
        "weights drawn at random, with which results are compared.",
        among=("magnitude", "inputs", "fisher", "random"),
    )

    def compress(self, config: ConfigOfModel, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        if self.by == "inputs":
            observed = with_input_moments("magnitude(by='inputs')", config, weights, calibration)
            return config, map_matrices(self._by_inputs, observed)
        if self.by == "fisher":
            squares = dict(listed_matrices(squared_gradients("magnitude(by='fisher')", config, weights, calibration)))

            def by_fisher(path: str, w: Array) -> Any:
                return self._keep_largest(path, w, w**2 * squares[path]) if path in squares else w

            return config, map_matrices(by_fisher, weights, stacked=True)
        function = self._by_magnitude if self.by == "magnitude" else self._at_random
        # Both factors of a low-rank matrix are matrices.
        return config, map_matrices(functools.partial(map_arrays, function), weights, stacked=True)

    def _keep_largest(self, path: str, w: Array, rank: Array) -> Any:
        if is_table(path):
            return w
        mask = largest(rank, self.share) if w.ndim == 2 else jax.vmap(lambda layer: largest(layer, self.share))(rank)
        return jnp.where(mask, w, jnp.zeros_like(w))

    def _by_magnitude(self, path: str, w: Array) -> Any:
        return self._keep_largest(path, w, jnp.abs(w))

    def _at_random(self, path: str, w: Array) -> Any:
        return self._keep_largest(path, w, jax.random.uniform(jax.random.key(zlib.crc32(path.encode())), w.shape))

    def _by_inputs(self, path: str, w: PyTree) -> Any:
        matrix, moments = split_observed(w)
        return w if moments is None else prune_by_moments(matrix, moments, self.share)
