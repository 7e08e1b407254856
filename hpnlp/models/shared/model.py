"""The base class of models: their optional members, with defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from hpnlp.types import Statistics


class BaseModel:
    """Optional members of a Model, as of one without statistics, changing buffers and carry that is trained as it is used.

    Attributes:
      is_stackable: Whether the loss runs under vmap, so that an ensemble of equal models is one program.
      has_taps: Whether the loss returns logits and states that a distillation compares (`models.prediction.PredictionModel`).
      predicts_next_words: Whether the hidden state of each token predicts the next word: `apply` then calls the methods
        `token_states(batch, deterministic) -> (h [B, T, D], carry)`, `label_losses(h, labels)` and `next_logits(h)`.
      training_arrays: Names of the arrays of a batch that only training reads.
      changes_weights: Whether the weights that the model applies are others than its parameters.
    """

    is_stackable: ClassVar[bool] = False
    has_taps: ClassVar[bool] = False
    predicts_next_words: ClassVar[bool] = False
    training_arrays: ClassVar[tuple[str, ...]] = ()
    changes_weights: ClassVar[bool] = False

    def auxiliary_loss(self, statistics: Statistics) -> dict[str, jax.Array]:
        """No statistics have a loss.

        Args:
          statistics: Not read.

        Returns:
          No losses.
        """
        return {}

    def advance(self, buffers: Any, statistics: Statistics, step: jax.Array, rng: jax.Array) -> Any:
        """Buffers for the next step, which are those of this one.

        Args:
          buffers: The model's buffers.
          statistics: Not read.
          step: Not read.
          rng: Not read.

        Returns:
          The buffers.
        """
        return buffers

    def initial_carry(self, batch_size: int) -> Any:
        """The collection "carry" of empty sequences; None for a model that carries nothing."""
        return None

    def carry_axes(self) -> Any:
        """Logical axes of the arrays of the carry, a tree like it; they begin with "layers" and "batch"."""
        return None

    def check_layout(self, layout: Any) -> None:
        """Checks that the model is trained on a layout over devices; raises InputError if it is not."""

    def allowed_updates(self, params: Any, updates: Any, rate: jax.Array) -> Any:
        """Updates of parameters as the model requires, for a learning rate, a float32 scalar."""
        return updates

    def plain(self, weights: Mapping[str, Any]) -> tuple[Any, Any]:
        """The Model that is used, and its weights."""
        return self, weights
