"""Second moments of the inputs of a model's kernels on calibration data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hpnlp.compress.matrices import is_table, map_matrices
from hpnlp.compress.stages import Calibration
from hpnlp.models.variables import BUFFERS, FROZEN
from hpnlp.ops.weight import is_weight
from hpnlp.ops.weights import ObservedWeight
from hpnlp.ops.weights.calibrated.observed import is_observed
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.models.shared.body import ConfigOfModel


def listed_matrices(weights: PyTree, *, experts: bool = False) -> list[tuple[str, Any]]:
    """All matrices of a model, as in `map_matrices`.

    Args:
      weights: Weights of the model.
      experts: Those of experts are listed, too.

    Returns:
      (path, array or Weight), stacked ones as they are.
    """
    listed: list[tuple[str, Any]] = []

    def note(path: str, w: PyTree) -> Any:
        listed.append((path, w))
        return w

    map_matrices(note, weights, stacked=True, experts=experts)
    return [(path, w) for path, w in listed if path.split("/")[0] not in (BUFFERS, FROZEN)]


def map_arrays(function: Callable[[str, Any], Any], path: str, w: PyTree) -> Any:
    """Applies a function to a matrix, or to both factors of a product of matrices.

    Args:
      function: A function of the path and an array or ObservedWeight.
      path: The path.
      w: An array, an ObservedWeight, or another Weight whose fields are these.

    Returns:
      The result, or the Weight with the results in place of its fields.
    """
    if not is_weight(w) or is_observed(w):
        return function(path, w)
    return dataclasses.replace(w, **{f.name: function(path, getattr(w, f.name)) for f in dataclasses.fields(w)})


def with_input_moments(
    name: str,
    config: ConfigOfModel,
    weights: PyTree,
    calibration: Calibration | None,
    reads_inputs: Callable[[str], bool] = lambda path: not is_table(path),
) -> Any:
    """Replaces kernels by `ObservedWeight`s with the second moments of their inputs on calibration data.

    Args:
      name: The stage, for the message.
      config: Config of the model.
      weights: Weights of the model.
      calibration: The data.
      reads_inputs: Function of the path of a matrix; by default, kernels are observed. Matrices of experts never are.

    Returns:
      The weights. Moments are 0 where weights are not known.

    Raises:
      InputError: There are no data.
    """
    if calibration is None:
        raise InputError(f"{name} needs calibration data: pass some, or leave out the arguments that read inputs")

    def observe(path: str, w: Any) -> Any:
        def observe_array(path: str, w: Any) -> Any:
            return ObservedWeight(w, jnp.zeros((w.shape[0], w.shape[0])))

        return map_arrays(observe_array, path, w) if reads_inputs(path) else w

    observed = map_matrices(observe, weights)
    if calibration.is_outline:
        return observed
    gradients = calibration.gradients(config, observed)
    # Gradients lack the collections that are not trained.
    untrained = {name: tree for name, tree in observed.items() if name not in gradients}

    def with_moments(node: PyTree, gradient: PyTree) -> Any:
        return dataclasses.replace(node, moments=gradient.moments) if is_observed(node) else node

    trained = {name: tree for name, tree in observed.items() if name in gradients}
    merged = jax.tree.map(with_moments, trained, dict(gradients), is_leaf=is_observed)
    return {**merged, **untrained}
