"""Fits of scaling laws to points, with bootstrap intervals of constants, predictions and the optimum for a budget."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from scipy import special

from hpnlp.scaling_laws.fitting.forms import LOSS_FORMS, LossForm
from hpnlp.scaling_laws.fitting.frontier import FRONTIER_FORMS, FrontierForm, power_law
from hpnlp.scaling_laws.fitting.minimize import minimize
from hpnlp.scaling_laws.points import Points
from hpnlp.spec import lookup
from hpnlp.types import InputError

# form -> how the loss, or the best size, depends on N, D and C.
FORMS: Mapping[str, LossForm | FrontierForm] = {**LOSS_FORMS, **FRONTIER_FORMS}

DELTA = 1e-3  # border of the Huber loss of log losses (Hoffmann et al. 2022)
AGREEING = 1e-4  # relative excess of the objective up to which a start has reached the minimum
REFIT_ITERATIONS = 60  # few, because a bootstrap sample starts at the minimum of all points

FlopsPerToken = Callable[[np.ndarray], np.ndarray]


def six_n(n: np.ndarray) -> np.ndarray:
    """Training FLOPs of a token, 6 N.

    Args:
      n: Numbers of parameters.

    Returns:
      FLOPs.
    """
    return 6.0 * n


def interpolated_flops(points: Points) -> FlopsPerToken:
    """Training FLOPs of a token as a function of N, through those of points.

    Args:
      points: Points whose FLOPs were counted.

    Returns:
      A function that is linear between sizes in the logarithms, and proportional to N beyond them, where attention takes an
      ever smaller share.
    """
    sizes = np.unique(points.n)
    ratios = np.log([float((points.c / points.d)[points.n == n].mean()) for n in sizes]) - np.log(sizes)
    return lambda n: n * np.exp(np.interp(np.log(n), np.log(sizes), ratios))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its interval."""

    value: float | int  #: the estimate
    low: float | int  #: lower end of the interval
    high: float | int  #: upper end of the interval

    def __contains__(self, number: float | int) -> bool:
        return self.low <= number <= self.high


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The best division of a budget of FLOPs between parameters and tokens."""

    budget: float | int  #: training FLOPs C
    n: Estimate  #: parameters N*
    d: Estimate  #: tokens D*
    ratio: Estimate  #: D*/N*
    loss: Estimate | None  #: loss of the model; None for forms that do not predict losses


@dataclasses.dataclass(frozen=True)
class Fit:
    """A scaling law that was fitted to points.

    Attributes:
      form: Name of the form, an entry of FORMS.
      points: The points; none for a published law.
      constants: Name -> value, in full precision: exponents rounded to two digits, as printed by Hoffmann et al. 2022, change
        D*/N* at 5.76e23 FLOPs from 59 to 93.
      samples: `[B, P]` constants of bootstrap samples.
      residuals: Log losses of the points less their predictions; empty without points and for forms without a loss.
      freedom: Points less constants, by which intervals are wider.
      objective: Sum of the Huber losses.
      starts: Number of starting points.
      agreeing: Number of starting points that lead to this minimum.
    """

    form: str
    points: Points
    constants: Mapping[str, float]
    samples: np.ndarray
    residuals: np.ndarray
    freedom: int
    objective: float | int = 0.0
    starts: int = 1
    agreeing: int = 1

    @property
    def covariance(self) -> np.ndarray:
        """`[P, P]` covariance of the constants over the bootstrap samples."""
        return np.cov(self.samples, rowvar=False)

    @property
    def values(self) -> np.ndarray:
        """`[P]` constants."""
        return np.array(list(self.constants.values()))

    def interval(self, name: str, level: float | int = 0.9) -> Estimate:
        """A constant, or the exponent "a" of N* = G C^a for C = 6 N D, with its interval.

        Args:
          name: Name of the constant, or "a".
          level: Probability that the interval holds the true value.

        Returns:
          The estimate.

        Raises:
          InputError: The form has no such constant.
        """
        if name in self.constants:
            index = list(self.constants).index(name)
            return self._estimate(self.values[index], self.samples[:, index], level)
        exponent = getattr(FORMS[self.form], "exponent", None)
        if name != "a" or exponent is None:
            raise InputError(
                f"form {self.form} has no constant {name!r}: its constants are {', '.join(self.constants)}"
            )
        return self._estimate(float(exponent(self.values)), exponent(self.samples), level)

    def predict(self, n: float | int, d: float | int, c: float | None = None, level: float | int = 0.9) -> Estimate:
        """Loss of a model that is trained once, with an interval that includes the noise of a single run.

        Args:
          n: Parameters.
          d: Tokens.
          c: FLOPs; None for 6 N D.
          level: Probability that the loss lies in the interval.

        Returns:
          The loss.

        Raises:
          InputError: The form does not predict losses.
        """
        form = self._loss_form()
        variables = form.logs(Points(np.array([n]), np.array([d]), np.ones(1), np.array([] if c is None else [c])))
        value = form.log_loss(form.to_parameters(self.values), *variables)[0][0]
        spread = form.log_loss(form.to_parameters(self.samples), *variables)[0][:, 0]
        # Residuals are too small by the share of the points that the constants take.
        noise = self.residuals * np.sqrt(len(self.points) / self.freedom)
        drawn = np.random.default_rng(0).choice(noise, len(spread)) if len(noise) else 0.0
        return self._estimate(float(np.exp(value)), np.exp(spread + drawn), level)

    def optimum(self, budget: float | int, flops_per_token: FlopsPerToken = six_n, level: float | int = 0.9) -> Optimum:
        """Parameters and tokens with the least loss for a budget.

        Args:
          budget: Training FLOPs C.
          flops_per_token: Function of N that returns the training FLOPs of a token; 6 N by default.
          level: Probability that each interval holds the true value.

        Returns:
          N*, D*, their ratio and the loss.

        Raises:
          InputError: The budget is not a number over 0, or the form has no optimum.
        """
        if not 0 < budget < np.inf:
            raise InputError(f"budget={budget}: expected a number of FLOPs over 0")
        rows = np.concatenate([self.values[None], self.samples])
        loss = None
        if self.form in FRONTIER_FORMS:
            n = rows[:, 0] * budget ** rows[:, 1]
        else:
            form = LOSS_FORMS[self.form]
            n, losses = _best_size(form, form.to_parameters(rows), budget, flops_per_token)
            loss = self._estimate(losses[0], losses[1:], level)
        d = budget / flops_per_token(n)
        size, tokens, ratio = (self._estimate(x[0], x[1:], level) for x in (n, d, d / n))
        return Optimum(budget, size, tokens, ratio, loss)

    def _loss_form(self) -> LossForm:
        if self.form not in LOSS_FORMS:
            raise InputError(f"form {self.form} gives the best size and no loss: use the form additive or kaplan")
        return LOSS_FORMS[self.form]

    def _estimate(self, value: float | int, samples: np.ndarray, level: float | int) -> Estimate:
        """Percentiles of bootstrap samples, wider for few points as Student's distribution is than the normal one."""
        if not 0 < level < 1:
            raise InputError(f"level={level}: expected a probability between 0 and 1")
        tail = special.ndtr(special.stdtrit(self.freedom, (1 - level) / 2))
        low, high = np.quantile(samples, [tail, 1 - tail])
        return Estimate(float(value), float(low), float(high))


def fit(
    points: Points, form: str = "additive", *, delta: float | int = DELTA, bootstrap: int = 200, seed: int = 0
) -> Fit:
    """Fits a scaling law.

    Forms of the loss minimise the sum of Huber losses of log losses from many starting points (Hoffmann et al. 2022, approach
    3, with the sum in place of the mean, which lets optimizers stop too early: Besiroglu et al. 2024).

    Args:
      points: Trained models.
      form: An entry of FORMS.
      delta: Residuals of log losses count linearly beyond it; infinity for least squares.
      bootstrap: Number of samples of the points for intervals.
      seed: Seed of the samples.

    Returns:
      The fit. `warnings` lists its weaknesses.

    Raises:
      InputError: The points cannot determine the constants, or an argument is invalid.
    """
    lookup(FORMS, form, "form")
    if not delta > 0:
        raise InputError(f"delta={delta}: expected a number over 0, infinity for least squares")
    if bootstrap < 2:
        raise InputError(f"bootstrap={bootstrap}: expected at least 2 samples")
    if form in FRONTIER_FORMS:
        return _fit_frontier(points, form, FRONTIER_FORMS[form], delta, bootstrap, seed)
    law = LOSS_FORMS[form]
    _check_determined(points, form, law)
    variables, targets = law.logs(points), np.log(points.loss)
    minima, objectives = minimize(law.log_loss, law.starts(points), variables, targets, delta)
    best = minima[objectives.argmin()]
    agreeing = objectives <= objectives.min() * (1 + AGREEING) + 1e-20
    index = np.random.default_rng(seed).integers(len(points), size=(bootstrap, len(points)))
    repeated = np.repeat(best[None], bootstrap, 0)
    samples, _ = minimize(
        law.log_loss, repeated, [x[index] for x in variables], targets[index], delta, REFIT_ITERATIONS
    )
    return Fit(
        form,
        points,
        dict(zip(law.constants, law.to_constants(best).tolist(), strict=True)),
        law.to_constants(samples),
        targets - law.log_loss(best, *variables)[0],
        len(points) - len(law.constants),
        float(objectives.min()),
        len(objectives),
        int(agreeing.sum()),
    )


def _check_determined(points: Points, form: str, law: LossForm) -> None:
    """Raises InputError if there are too few points or values of a variable for the constants."""
    _check_any(points, form)
    for name in law.variables:
        values = getattr(points, name)
        if len(np.unique(values)) < 2:
            label = {"n": "size", "d": "number of tokens", "c": "number of FLOPs"}[name]
            raise InputError(
                f"form {form}: its points ({len(points)}) have one {label} only, {values[0]:,.0f}: train models of "
                "at least two, better four"
            )
    if len(points) <= len(law.constants):
        raise InputError(
            f"form {form} has {len(law.constants)} constants, and there are {len(points)} points: train at least "
            f"{len(law.constants) + 1} models"
        )
    distinct = len(np.unique(np.stack([getattr(points, name) for name in law.variables]), axis=1).T)
    if distinct < len(law.constants):
        raise InputError(
            f"form {form} has {len(law.constants)} constants, and the {len(points)} points have {distinct} different values of "
            f"{' and '.join(name.upper() for name in law.variables)}: train other sizes or tokens in place of repeated ones"
        )


def _check_any(points: Points, form: str) -> None:
    """Raises InputError if there are no points."""
    if not len(points):
        raise InputError(f"form {form}: there are no points: give the sizes, tokens and losses of trained models")


def _fit_frontier(points: Points, form: str, law: FrontierForm, delta: float | int, bootstrap: int, seed: int) -> Fit:
    """Fits N* = G C^a; samples have the noise of the residuals of the form additive."""
    _check_any(points, form)
    best, smooth = power_law(law.minima(points)), fit(points, "additive", delta=delta, bootstrap=2)
    scale = np.sqrt(len(points) / (len(points) - len(smooth.constants)))
    random, samples = np.random.default_rng(seed), []
    for _ in range(bootstrap):
        noise = np.exp(scale * random.choice(smooth.residuals, len(points)))
        with contextlib.suppress(InputError):  # too few minima in this sample
            samples.append(power_law(law.minima(dataclasses.replace(points, loss=points.loss * noise))))
    if len(samples) <= bootstrap // 2:
        raise InputError(
            f"form {form}: with the noise of the losses, {bootstrap - len(samples)} of {bootstrap} samples have fewer than two "
            "minima: train more sizes for each number of FLOPs, or use the form additive"
        )
    constants = dict(zip(law.constants, best.tolist(), strict=True))
    return Fit(form, points, constants, np.array(samples), np.empty(0), len(points) - len(smooth.constants))


def _best_size(
    form: LossForm, parameters: np.ndarray, budget: float | int, flops_per_token: FlopsPerToken
) -> tuple[np.ndarray, np.ndarray]:
    """`[B]` sizes N with the least loss for a budget and that loss, by golden-section search over log N."""
    if form.exponent is None:
        raise InputError(
            f"the form {form.formula} does not divide a budget between parameters and tokens: use additive"
        )

    def log_loss(log_n: np.ndarray) -> np.ndarray:
        log_d = np.log(budget / flops_per_token(np.exp(log_n)))
        return form.log_loss(parameters, log_n[:, None], log_d[:, None])[0][:, 0]

    ratio = (np.sqrt(5) - 1) / 2
    low, high = np.zeros(len(parameters)), np.full(len(parameters), np.log(budget))
    for _ in range(100):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        is_left = log_loss(left) < log_loss(right)
        low, high = np.where(is_left, low, left), np.where(is_left, right, high)
    middle = (low + high) / 2
    return np.exp(middle), np.exp(log_loss(middle))
