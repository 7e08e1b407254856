"""Base classes of the branches of a Block: the optional members of mixers and feed-forward networks, with defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn

from hpnlp.types import Array, Statistics, WithCarry


class Branch(nn.Module):
    """A mixer or feed-forward network, as one without statistics and with buffers that do not change."""

    @property
    def statistic_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        """Logical axes of each statistic that the branch returns, by name.

        A statistic with an axis "heads", "kv_heads" or "mlp" holds sums for each of these heads or columns. One without is a
        function of the tokens, the same on all devices that have these tokens and different heads or columns.
        """
        return {}

    @nn.nowrap
    def auxiliary_loss(self, statistics: Statistics) -> Mapping[str, Array]:
        """Losses of one layer, a pure function of its statistics summed over the whole batch: name -> float32 scalar."""
        return {}

    @nn.nowrap
    def advance(self, buffers: Any, statistics: Statistics, step: Array, rng: Array) -> Any:
        """Buffers of one layer for the next step, a pure function; statistics are summed over the whole batch."""
        return buffers

    @property
    def has_state(self) -> bool:
        """Whether the branch returns statistics or changes buffers."""
        return bool(self.statistic_axes) or type(self).advance is not Branch.advance


class BaseMixer(Branch):
    """A mixer, as one whose attention matrices nobody reads, and that works on any layout."""

    @property
    def carries(self) -> bool:
        """Whether the mixer carries state from batch to batch: it is a `types.WithCarry`."""
        return isinstance(self, WithCarry)

    @property
    def carry_multiple(self) -> int:
        """A divisor of the lengths of batches."""
        return 1

    @property
    def divides_heads(self) -> bool:
        """False if the mixer adds up over the heads of a layer, so that it needs all of them on one device."""
        return True

    @property
    def has_matrices(self) -> bool:
        """Whether the mixer has the method `matrices`, the attention matrices of a layer (`nn.mixers.exact.ExactMixer`)."""
        return False

    @property
    def score_options(self) -> dict[str, Any]:
        """Arguments of `ops.attention_scores` with which the scores of queries and keys are those of the mixer."""
        return {}
