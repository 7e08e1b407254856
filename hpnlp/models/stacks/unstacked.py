"""Models whose layers are not stacked, and which divide over devices by their batch, and their configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from jaxtyping import PyTree

from hpnlp.models.shared.body import ConfigOfModel
from hpnlp.models.shared.model import BaseModel
from hpnlp.parallel.layout import Layout
from hpnlp.types import InputError, Statistics


class Unstacked(ConfigOfModel):
    """Answers of a config to the trainer and the planner, for a model whose layers are not stacked.

    Attributes:
      description: What the model is, for messages.
      no_stages: Why it has no pipeline stages.
      undivided: Why its sequences are not divided.
      divisible: What a plan can divide.
    """

    description: ClassVar[str]
    no_stages: ClassVar[str] = "whose layers are not stacked"
    undivided: ClassVar[str]
    divisible: ClassVar[str] = "the batch (plan.data, plan.fsdp)"

    def fixed_length(self) -> int:
        """Length of all sequences, 0 for any."""
        return 0

    def needed_length(self, seq_len: int) -> int:
        """Length to which sequences must be padded; see `BackboneConfig.needed_length`."""
        return self.fixed_length()

    def masks(self) -> list[Any]:
        """Masks of the layers: none."""
        return []

    def sizes(self) -> dict[str, tuple[int, str]]:
        """Sizes of the logical axes that a mesh may divide: none but the batch."""
        return {}

    @property
    def compares_examples(self) -> bool:
        """False: the loss is a sum over examples, or over tokens."""
        return False

    def check_accumulation(self, parts: int) -> None:
        """Accepts all: the loss is a sum over examples, or over tokens."""

    def check_layout(self, layout: Layout) -> None:
        """Checks that a layout has no pipeline stages and does not divide sequences.

        Args:
          layout: The plan on its devices.

        Raises:
          InputError: The plan has pipeline stages, or divides sequences.
        """
        for field, axis, reason in (("pipeline", "layers", self.no_stages), ("sequence", "length", self.undivided)):
            if layout.size(axis) > 1:
                raise InputError(
                    f"plan.{field}={layout.size(axis)}: the model is {self.description}, {reason}: set plan.{field}=1, and "
                    f"divide {self.divisible}"
                )


class UnstackedModel(BaseModel):
    """Answers of a Model to the trainer, for a model without statistics, and without buffers that change.

    A subclass that looks up other tables than the embedding has a method `rows` of its own.
    """

    def auxiliary_loss(self, statistics: Statistics) -> dict[str, jax.Array]:
        """No statistics have a loss.

        Args:
          statistics: Not read.

        Returns:
          No losses.
        """
        return {}

    def advance(self, buffers: PyTree, statistics: Statistics, step: jax.Array, rng: jax.Array) -> Any:
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

    def rows(self, batch: Mapping[str, jax.Array]) -> dict[tuple[str, ...], jax.Array]:
        """Rows of the embedding that a batch looks up.

        Args:
          batch: As for `loss`, with "tokens".

        Returns:
          Path of the table -> ids.
        """
        return {("embed", "table"): batch["tokens"].reshape(-1)}
