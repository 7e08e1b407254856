"""Iterative pruning: the stage of a recipe that removes units or weights, in several parts (Han et al. 2015)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from hpnlp.compress.recipe import COMPRESSORS, STRUCTURE, Stage, parse_recipe
from hpnlp.compress.stages import UnitStage
from hpnlp.compress.stages.zeros import MagnitudeStage
from hpnlp.spec import parse_one
from hpnlp.types import InputError

# Stages with a share that stays.
_ITERATED = (MagnitudeStage, UnitStage)


def check(recipe: str, stages: Sequence[Stage], finetune: int, iterations: int) -> None:
    """Checks that the last stage that removes units or weights can do so in several iterations.

    Args:
      recipe: The recipe.
      stages: Its stages.
      finetune: Steps of training after each iteration.
      iterations: Number of iterations.

    Raises:
      InputError: It cannot, or there is no training.
    """
    if iterations == 1:
        return
    if iterations < 1:
        raise InputError(f"--iterations={iterations}: expected at least 1")
    if not finetune:
        raise InputError(f"--iterations={iterations} trains after each one: add --finetune=STEPS")
    removing = [stage for stage in stages if stage.changes == STRUCTURE]
    last = removing[-1]
    if not isinstance(last, _ITERATED) or not isinstance(last.share, float):
        names = ", ".join(name for name, stage in COMPRESSORS.items() if issubclass(stage, _ITERATED))
        raise InputError(
            f"--iterations={iterations}: the last stage of {recipe!r} that removes units or weights is {last.text}: expected "
            f"one of {names} with the share that stays"
        )


def divided(stage: Stage, iterations: int, config: Any, weights: Any) -> list[Stage]:
    """The stage in several iterations, each of which removes the same share of what is left.

    Args:
      stage: A stage that `check` has checked.
      iterations: Number of iterations.
      config: Config of the model before the stage.
      weights: Its weights.

    Returns:
      The stages. After the last one, as much is left as after `stage`; units in layers of different sizes are rounded in each
      iteration, so that small layers may keep more.

    Raises:
      InputError: The model has no layers with such units.
    """
    if iterations == 1:
        return [stage]
    assert isinstance(stage, _ITERATED) and isinstance(stage.share, float)
    shares = [stage.share ** (number / iterations) for number in range(iterations + 1)]
    if isinstance(stage, UnitStage):  # shares are of the units left; that of magnitude is of all weights
        counts = [count for count in stage.unit_counts(config, weights) if count]
        stage.check_keeps_units(counts)
        left = [_units_left(counts, share, stage.across_layers) for share in shares]
        shares = [1.0, *(after / before for before, after in itertools.pairwise(left))]
    return [_with_share(stage, share) for share in shares[1:]]


def _with_share(stage: Stage, share: float) -> Stage:
    spec = parse_one(stage.text, "--recipe")
    kwargs = tuple((name, value) for name, value in spec.kwargs if name != "share")
    return parse_recipe(str(dataclasses.replace(spec, args=(float(f"{share:.6g}"), *spec.args[1:]), kwargs=kwargs)))[0]


def _units_left(counts: Sequence[int], share: float, across_layers: bool) -> int:
    """Number of units of all layers that a share keeps, as in `structure.choose_units`."""
    if across_layers:
        return max(len(counts), round(share * sum(counts)))
    return sum(max(1, round(share * count)) for count in counts)
