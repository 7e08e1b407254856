"""Base classes of the branches of a Block: the optional members of mixers and feed-forward networks, with defaults."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn

from hpnlp.types import (
    Array,
    MixerInputs,
    MixerOutput,
    MixerTraits,
    Projection,
    Statistics,
    WithCarry,
    check_options,
)


class Branch(nn.Module):
    """A mixer or feed-forward network, as one without statistics and with buffers that do not change.

    Its fields are the arguments of the spec. The ranges that `types.option` declares are checked when it is made.
    """

    def __post_init__(self) -> None:
        check_options(self)
        super().__post_init__()

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


class Mixer(Branch):
    """A way to mix information along the sequence, such as attention over a pattern: the base class of the entries of MIXERS.

    A mixer may have two more methods. `extend(inputs, mask, cache) -> (o, cache)` mixes further tokens with those in the cache
    (`MixerTraits.decodes`). `partial(inputs, mask) -> (o, float32 lse [B, T, N])` mixes some of the keys, with the mask as
    `within` returns it and without parameters of its own; `ops.attention.merge` joins its results, as on a ring of devices.

    On a ring, a mixer with `has_state` needs `prepare(inputs) -> (inputs, statistics)`, which treats each token by itself: the
    inputs for `partial`, and the sums over these tokens. Its `__call__` does the same first.

    A mixer that carries state from one part of a sequence to the next, which is read in a later batch, is a `types.WithCarry`,
    and may be a `types.WithFurtherKeys`.

    Attributes:
      needs: The projections that the mixer reads, by name: q, k and v as fields of MixerInputs, others in its field
        `projections`; none for a mixer that reads `x`.
      traits: Its properties.
      carry_multiple: A divisor of the lengths of batches.
      divides_heads: False if the mixer adds up over the heads of a layer, so that it needs all of them on one device.
      has_matrices: Whether the mixer has the method `matrices`, its attention matrices (`nn.mixers.exact.ExactMixer`).
    """

    needs: ClassVar[Mapping[str, Projection]]
    traits: ClassVar[MixerTraits]
    carry_multiple: ClassVar[int] = 1
    divides_heads: ClassVar[bool] = True
    has_matrices: ClassVar[bool] = False

    @property
    def carries(self) -> bool:
        """Whether the mixer carries state from batch to batch."""
        return isinstance(self, WithCarry)

    @property
    def score_options(self) -> dict[str, Any]:
        """Arguments of `ops.distillation.attention_scores` with which the scores of queries and keys are those of the mixer."""
        return {}

    def __call__(self, inputs: MixerInputs, mask: Any) -> MixerOutput:
        """Mixes.

        Args:
          inputs: `x`, the projections that the mixer needs, positions and segments.
          mask: A static Mask, the pairs that may influence each other.

        Returns:
          The mixed values.

        Raises:
          InputError: The mixer cannot honour the mask.
        """
        raise NotImplementedError

    def within(self, mask: Any) -> Any:
        """The static Mask of the pairs that influence each other.

        Args:
          mask: A static Mask.

        Returns:
          The intersection of `mask` and the mixer's own pattern.
        """
        raise NotImplementedError


@functools.cache
def completed(entry: Any) -> Any:
    """An entry of MIXERS. A class that has the members of a mixer without the base class gets the defaults of `Mixer`."""
    if not isinstance(entry, type) or issubclass(entry, Mixer):
        return entry
    return type(entry.__name__, (entry, Mixer), {"__module__": entry.__module__, "__doc__": entry.__doc__})
