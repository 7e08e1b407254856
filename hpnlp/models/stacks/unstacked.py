"""Models whose layers are not stacked, and which divide over devices by their batch, and their configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from hpnlp import compatibility
from hpnlp.compatibility import Facts
from hpnlp.models.shared.body import ConfigOfModel
from hpnlp.models.shared.model import BaseModel
from hpnlp.parallel.layout import Layout


class Unstacked(ConfigOfModel):
    """Answers of a config to the trainer and the planner, for a model whose layers are not stacked.

    Attributes:
      description: What the model is, for messages.
      no_stages: Why it has no pipeline stages.
      undivided: Why its sequences are not divided.
      divisible: What a plan can divide.
      not_recomputed: Why its layers are not rematerialised; "" if the model does not say.
    """

    description: ClassVar[str]
    no_stages: ClassVar[str] = "whose layers are not stacked"
    undivided: ClassVar[str]
    divisible: ClassVar[str] = "the batch (plan.data, plan.fsdp)"
    not_recomputed: ClassVar[str] = ""

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

    def facts(self) -> Facts:
        """Facts on the layers, for `compatibility`."""
        reasons = {"layers": self.no_stages, "length": self.undivided}
        undivided = {
            axis: (f"the model is {self.description}, {reason}", f", and divide {self.divisible}")
            for axis, reason in reasons.items()
        }
        return Facts(is_single_stack=False, undivided=undivided, not_recomputed=self.not_recomputed)

    def check_layout(self, layout: Layout) -> None:
        """Checks that a layout has no pipeline stages and does not divide sequences.

        Args:
          layout: The plan on its devices.

        Raises:
          InputError: The plan has pipeline stages, or divides sequences.
        """
        compatibility.check(layout.added_to(self.facts()))


class UnstackedModel(BaseModel):
    """Answers of a Model to the trainer, for a model that looks up rows of its embedding.

    A subclass that looks up other tables than the embedding has a method `rows` of its own.
    """

    def rows(self, batch: Mapping[str, jax.Array]) -> dict[tuple[str, ...], jax.Array]:
        """Rows of the embedding that a batch looks up.

        Args:
          batch: As for `loss`, with "tokens".

        Returns:
          Path of the table -> ids.
        """
        return {("embed", "table"): batch["tokens"].reshape(-1)}
