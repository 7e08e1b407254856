"""Iterative pruning: the stage of a recipe that removes units or weights, in several parts (Han et al. 2015)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from hpnlp.compress.layers import split_layers
from hpnlp.compress.recipe import STRUCTURE, Stage, parse_recipe
from hpnlp.compress.stages import check_keeps_units, convolutions, structure
from hpnlp.spec import Spec, parse_one
from hpnlp.types import InputError

# Stages with a share that stays: of weights, and of units.
MAGNITUDE = "magnitude"
ITERATED = (MAGNITUDE, *structure.UNITS, *convolutions.CHANNEL_STAGES)


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
    spec = parse_one(removing[-1].text, "--recipe")
    if spec.name not in ITERATED or not isinstance(_argument(spec, "share", 0), float):
        raise InputError(
            f"--iterations={iterations}: the last stage of {recipe!r} that removes units or weights is {spec}: expected one of "
            f"{', '.join(ITERATED)} with the share that stays"
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
    spec = parse_one(stage.text, "--recipe")
    shares = [_argument(spec, "share", 0) ** (number / iterations) for number in range(iterations + 1)]
    if (
        spec.name != MAGNITUDE
    ):  # the share of magnitude is that of all weights, those of other stages that of the units left
        counts = _unit_counts(spec.name, config, weights)
        check_keeps_units(spec.name, shares[-1], counts)
        left = [_units_left(counts, share, bool(_argument(spec, "across_layers", 2))) for share in shares]
        shares = [1.0, *(after / before for before, after in itertools.pairwise(left))]
    return [_with_share(spec, share) for share in shares[1:]]


def _argument(spec: Spec, name: str, place: int) -> Any:
    """An argument of a stage; None if it has its default."""
    return dict(spec.kwargs).get(name, *spec.args[place : place + 1])


def _with_share(spec: Spec, share: float) -> Stage:
    kwargs = tuple((name, value) for name, value in spec.kwargs if name != "share")
    (stage,) = parse_recipe(str(dataclasses.replace(spec, args=(float(f"{share:.6g}"), *spec.args[1:]), kwargs=kwargs)))
    return stage


def _unit_counts(name: str, config: Any, weights: Any) -> list[int]:
    """Number of units of each layer that has some."""
    if name in convolutions.CHANNEL_STAGES:
        counts = [group.count for group in convolutions.stage_groups(name, config)]
    else:
        counts = [structure.unit_count(layer, name) for layer in split_layers(config, weights)]
    if not any(counts):
        raise InputError(f"{name}: the model's layers have no {name}: leave the stage out")
    return [count for count in counts if count]


def _units_left(counts: Sequence[int], share: float, across_layers: bool) -> int:
    """Number of units of all layers that a share keeps, as in `structure.choose_units`."""
    if across_layers:
        return max(len(counts), round(share * sum(counts)))
    return sum(max(1, round(share * count)) for count in counts)
