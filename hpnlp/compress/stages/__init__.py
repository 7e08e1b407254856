"""Stages of recipes: kinds of changes, the type of their functions, and calibration data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.models.shared.body import ConfigOfModel

# Kinds of changes.
STRUCTURE, FACTORS, NUMBERS = "structure", "factors", "numbers"


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Data of a run for compressors that need gradients or the inputs of matrices.

    Attributes:
      gradients: A function of (config, weights) that returns the gradient of the mean loss over some batches, a tree like the
        parameters.
      squares: A function of (config, weights) that returns the sum of the squared gradients of the mean losses of single
        sequences or texts, a tree like the parameters; None if the data have no single ones.
      is_outline: Weights are tracers, and only the shapes of the result are of interest: stages choose any units, bits or
        factors where weights would decide which ones, and raise InputError where weights would decide how many.
    """

    gradients: Callable[[Any, Any], Any]
    squares: Callable[[Any, Any], Any] | None = None
    is_outline: bool = False


Compressor = Callable[[Any, Any, Calibration | None], tuple[Any, Any]]


NONZERO = "nonzero"  # in place of a share: the units that have weights other than 0 stay


def check_share(name: str, share: int | float) -> None:
    """Checks the share of the units or weights that stay.

    Args:
      name: Name of the stage.
      share: The share.

    Raises:
      InputError: It is not over 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise InputError(f"{name}({share}): expected the share that stays, over 0 and at most 1")


def check_unit_arguments(name: str, share: int | float | str, by: str) -> None:
    """Checks arguments of a stage that removes units.

    Args:
      name: Name of the stage.
      share: Share of the units that stays, or NONZERO.
      by: Measure of their importance.

    Raises:
      InputError: `share` is out of range, or `by` is unknown.
    """
    if isinstance(share, str) and share != NONZERO:
        raise InputError(f"{name}({share!r}): expected the share that stays, over 0 and at most 1, or {NONZERO}")
    if not isinstance(share, str):
        check_share(name, share)
    if by not in ("gradient", "magnitude"):
        raise InputError(f"{name}(by={by!r}): expected gradient or magnitude")


def check_keeps_units(name: str, share: int | float | str, counts: Sequence[int]) -> None:
    """Checks that a share is at least half of a unit in some layer. Every layer keeps at least one unit.

    Args:
      name: Name of the stage and of its units.
      share: Share of the units that stays, or NONZERO.
      counts: Number of units of each layer.

    Raises:
      InputError: The share is less than half of a unit in all layers.
    """
    if isinstance(share, str):
        return
    if share * (most := max(counts)) < 0.5:
        raise InputError(
            f"{name}({share}): {share * most:.2g} of {most} {name} would stay in a layer: expected a share of at least "
            f"{1 / most:.2g}, with which one stays"
        )


def calibration_gradients(name: str, config: Any, weights: Any, calibration: Calibration | None) -> Any:
    """Gradients of the parameters on calibration data.

    Args:
      name: Name of the stage that needs them.
      config: Config of the model.
      weights: Weights of the model.
      calibration: The data.

    Returns:
      A tree like the parameters.

    Raises:
      InputError: There are no data.
    """
    if calibration is None:
        raise InputError(f"{name}(by='gradient') needs calibration data: use by=magnitude, or pass some")
    return calibration.gradients(config, weights)


def squared_gradients(name: str, config: ConfigOfModel, weights: PyTree, calibration: Calibration | None) -> Any:
    """Sums of squared gradients of single sequences or texts: the diagonal of the empirical Fisher information.

    Args:
      name: Name of the stage that needs them.
      config: Config of the model.
      weights: Weights of the model.
      calibration: The data.

    Returns:
      A tree like the parameters; ones where only shapes are of interest.

    Raises:
      InputError: There are no data, or they have no single sequences or texts.
    """
    if calibration is None or (calibration.squares is None and not calibration.is_outline):
        raise InputError(f"{name} needs calibration data of single sequences or texts: use by=magnitude, or pass some")
    if calibration.squares is None:
        return jax.tree.map(jnp.ones_like, weights)
    squares = calibration.squares(config, weights)
    if not any(bool(jnp.any(leaf > 0)) for leaf in jax.tree.leaves(squares)):
        raise InputError(
            f"{name}: the loss of a single text of this model has no gradient, as of contrastive losses: use by=magnitude"
        )
    return squares


def check_known_widths(
    name: str, calibration: Calibration | None, across_layers: bool, share: int | float | str = 1.0
) -> None:
    """Checks that the widths of a result do not depend on weights, where only shapes are known.

    Args:
      name: Name of the stage.
      calibration: Calibration data, or the mark that weights are unknown.
      across_layers: The units of all layers are compared.
      share: Share of the units that stays, or NONZERO.

    Raises:
      InputError: Weights are unknown, and the widths depend on them.
    """
    if calibration is not None and calibration.is_outline and across_layers:
        raise InputError(f"{name}(across_layers=True): the weights decide on the widths: plan without across_layers")
    if calibration is not None and calibration.is_outline and share == NONZERO:
        raise InputError(f"{name}({NONZERO}): the weights decide how many units stay: plan with a number")
