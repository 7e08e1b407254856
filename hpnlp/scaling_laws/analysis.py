"""Analysis of a study: fits in three conventions and by four approaches, optima, and predictions of held-out runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hpnlp.scaling_laws.diagnostics import warnings
from hpnlp.scaling_laws.fit import DELTA, Estimate, Fit, Optimum, fit, interpolated_flops
from hpnlp.scaling_laws.flops import CONVENTIONS
from hpnlp.scaling_laws.members import TrainedMember, split, to_points
from hpnlp.types import InputError

FACTORS = (1.0, 10.0, 100.0, 1000.0)  # multiples of the largest fitted budget whose optimum is listed
OTHER_FORMS = ("kaplan", "isoflop", "envelope")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The loss of a held-out run and its prediction."""

    member: TrainedMember  #: the run
    predicted: Estimate  #: the prediction, with the interval of a single run

    @property
    def relative_error(self) -> float:
        """Predicted over measured loss, less 1."""
        return self.predicted.value / self.member.loss - 1


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The results of a study.

    Attributes:
      fitted: Runs that were fitted.
      delta: Border of the Huber loss.
      convention: Name of the convention of `law`, `others`, `optima` and `predictions`.
      law: The additive form.
      conventions: Name of a convention -> the additive form in it.
      others: Name of another form -> its fit, or the reason why there is none.
      optima: Optima at FACTORS times the largest budget.
      predictions: Held-out runs.
      warnings: Reasons to doubt the fits.
    """

    fitted: Sequence[TrainedMember]
    delta: float | int
    convention: str
    law: Fit
    conventions: Mapping[str, Fit]
    others: Mapping[str, Fit | str]
    optima: Sequence[Optimum]
    predictions: Sequence[Prediction]
    warnings: Sequence[str]


def analyse(
    members: Sequence[TrainedMember],
    convention: str,
    held_out: int,
    delta: float | int = DELTA,
    level: float | int = 0.9,
) -> Analysis:
    """Fits the runs of a study.

    Args:
      members: The runs.
      convention: An entry of CONVENTIONS.
      held_out: Number of runs with the most FLOPs that are predicted and not fitted.
      delta: Border of the Huber loss.
      level: Probability of intervals.

    Returns:
      The results.

    Raises:
      InputError: The runs do not determine the additive form.
    """
    fitted, kept = split(members, held_out)
    laws = {name: fit(to_points(fitted, name), delta=delta) for name in CONVENTIONS}
    law, points = laws[convention], laws[convention].points
    others: dict[str, Fit | str] = {}
    for form in OTHER_FORMS:
        try:
            others[form] = fit(points, form, delta=delta)
        except InputError as error:
            others[form] = str(error)
    flops, largest = interpolated_flops(points), float(points.c.max())
    predictions = []
    for member, n, d in zip(kept, *(to_points(kept, convention).arrays()[x] for x in ("n", "d")), strict=True):
        predictions.append(Prediction(member, law.predict(float(n), float(d), level=level)))
    texts = [text for each in (law, *others.values()) if not isinstance(each, str) for text in warnings(each, level)]
    optima = [law.optimum(factor * largest, flops, level) for factor in FACTORS]
    return Analysis(fitted, delta, convention, law, laws, others, optima, predictions, list(dict.fromkeys(texts)))


def to_json(analysis: Analysis, level: float | int = 0.9) -> dict[str, Any]:
    """Content of scaling.json, in full precision.

    Args:
      analysis: The results.
      level: Probability of intervals.

    Returns:
      Plain values.
    """
    held = {id(prediction.member) for prediction in analysis.predictions}
    runs = [*analysis.fitted, *(prediction.member for prediction in analysis.predictions)]
    return {
        "convention": analysis.convention,
        "delta": analysis.delta,
        "level": level,
        "noise": analysis.law.points.noise(),
        "points": [_point(run, id(run) in held) for run in runs],
        "fits": {name: _fit(law, level) for name, law in analysis.conventions.items()},
        "others": {
            name: each if isinstance(each, str) else _fit(each, level) for name, each in analysis.others.items()
        },
        "optima": [dataclasses.asdict(optimum) for optimum in analysis.optima],
        "predictions": [
            {"run": p.member.name, "loss": p.member.loss, **dataclasses.asdict(p.predicted), "error": p.relative_error}
            for p in analysis.predictions
        ],
        "warnings": list(analysis.warnings),
    }


def _point(run: TrainedMember, is_held_out: bool) -> dict[str, Any]:
    counted = {
        name: {"n": law.parameters(run.size), "c": run.tokens * law.flops_per_token(run.size)}
        for name, law in CONVENTIONS.items()
    }
    return {
        "run": run.name,
        "d": run.tokens,
        "loss": run.loss,
        "error": run.error,
        "seed": run.seed,
        "seconds": run.seconds,
        "held_out": is_held_out,
        "conventions": counted,
    }


def _fit(law: Fit, level: float | int) -> dict[str, Any]:
    names = [*law.constants, *(["a"] if "a" not in law.constants else [])]
    return {
        "form": law.form,
        "constants": dict(law.constants),
        "intervals": {name: dataclasses.asdict(law.interval(name, level)) for name in names},
        "covariance": law.covariance.tolist(),
        "objective": law.objective,
        "starts": law.starts,
        "agreeing": law.agreeing,
    }
