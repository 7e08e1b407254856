"""Stages of recipes: their base classes, kinds of changes, and calibration data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hpnlp.types import REQUIRED, InputError, check_options, keyword_only, option

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


NONZERO = "nonzero"  # in place of a share: the units that have weights other than 0 stay


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of a recipe. The fields of a subclass are its arguments; `text` is given by the recipe."""

    # STRUCTURE (which units there are), FACTORS (matrices become products) or NUMBERS (of fewer bits).
    changes: ClassVar[str] = STRUCTURE

    text: str = keyword_only(option(REQUIRED, "Spec of the stage, for messages and reports."))

    def __post_init__(self) -> None:
        check_options(self)

    def compress(self, config: Any, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        """Makes a model smaller, a pure function.

        Args:
          config: Config of the model.
          weights: Weights of the model.
          calibration: Data for stages that need them; None for none.

        Returns:
          `(config, weights)` of the smaller model.

        Raises:
          InputError: The stage does not fit the model, or needs calibration data.
        """
        raise NotImplementedError


def share_option() -> Any:
    """The argument `share` of stages for which it is a number."""
    return option(REQUIRED, "Share of the units that stays; at least one of each layer.", above=0, most=1)


def by_option() -> Any:
    """The argument `by` of stages that remove units."""
    text = "Importance of a unit: gradient, |weight x gradient| on calibration data; or magnitude, the squares of its weights."
    return option("gradient", text, among=("gradient", "magnitude"))


@dataclasses.dataclass(frozen=True)
class UnitStage(Stage):
    """A stage that keeps the most important units."""

    unit: ClassVar[str]  # name of the stage and of its units

    share: int | float | str = option(
        REQUIRED,
        "Share of the units that stays; at least one of each layer. Or nonzero for those that have weights other than 0, as "
        "trained with train.weights=group_lasso.",
        rule=("more than 0 and at most 1, or nonzero", lambda x: x == NONZERO or not isinstance(x, str) and 0 < x <= 1),
    )
    by: str = by_option()
    across_layers: bool = option(
        False,
        "The most important units of all layers stay, at least one of each; otherwise the same share of each layer.",
    )

    def unit_counts(self, config: Any, weights: PyTree) -> list[int]:
        """Number of units of each layer, or group of layers; 0 for layers without. InputError if no layer has units."""
        raise NotImplementedError

    def check_keeps_units(self, counts: Sequence[int]) -> None:
        """Raises InputError for a share that is less than half of a unit in all layers. Every layer keeps at least one unit."""
        if not isinstance(self.share, str) and self.share * (most := max(counts)) < 0.5:
            raise InputError(
                f"{self.unit}({self.share}): {self.share * most:.2g} of {most} {self.unit} would stay in a layer: expected a "
                f"share of at least {1 / most:.2g}, with which one stays"
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
