"""`WeightTechnique`: how training replaces the kernels that layers read, and changes the updates of kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from hpnlp.types import check_options, keyword_only, option

if TYPE_CHECKING:
    from hpnlp.models.backbone import BackboneConfig


@dataclasses.dataclass(frozen=True)
class WeightTechnique:
    """Training of the matrices of a model; methods take one matrix [D, F], or [L, D, F] of stacked layers.

    The fields of a subclass are the arguments of `train.weights`; `steps` is given by the run.
    """

    steps: int = keyword_only(option(0, "Steps of the run, for schedules."))

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def input_bits(self) -> int:
        """Bits to which products with the matrices round their inputs: 8 or 1; 0 for inputs as they are."""
        return 0

    @property
    def has_scores(self) -> bool:
        """Whether each matrix has scores of its shape, which are trained beside it and begin as 0."""
        return False

    @property
    def parameters(self) -> int | float:
        """Size of the two factors that are trained in place of each matrix, as a share of its parameters; 0 for no factors."""
        return 0

    @property
    def share(self) -> Any:
        """Function of the step, float32 [], to the share of the weights that stays; None without a schedule."""
        return None

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        """The matrix that layers read.

        Args:
          w: The parameter.
          scores: Its scores, if `has_scores`; its factors, a `LowRankWeight`, where `parameters` gives it some.
          threshold: float32 [] or [L], the threshold for the present share, if there is a schedule.
          rng: Key in training; None in evaluation.

        Returns:
          A matrix of the same shape, through which gradients reach w and scores.
        """
        raise NotImplementedError

    def allowed(self, w: Array, update: Array) -> Any:
        """The update that the optimizer may make.

        Args:
          w: The parameter before the update.
          update: What the optimizer adds to it. Optimizers such as muon compute it from whole matrices, so that it need not be
            0 where the gradient is.

        Returns:
          An update of the same shape.
        """
        return update

    def updates(
        self, config: BackboneConfig, kernels: Mapping[str, Any], updates: Mapping[str, Any], rate: ArrayLike
    ) -> dict[str, Any]:
        """The updates that the optimizer may make of all kernels.

        Args:
          config: Config of the model.
          kernels: Kernels by path, before the update.
          updates: What the optimizer adds to each.
          rate: Learning rate of the step, float32 [].

        Returns:
          Updates by path; by default, `allowed` of each.
        """
        return {path: self.allowed(w, updates[path]) for path, w in kernels.items()}

    def ranked(self, w: Array, scores: PyTree) -> Any:
        """Numbers of which the largest stay, in the shape of w; for techniques with a schedule."""
        return jnp.abs(w)

    def score_penalty(self, scores: Any) -> Array | None:
        """Penalty of the scores of one matrix, float32 []; None without a penalty."""
        return None
