"""Forms of the loss as a function of parameters N, tokens D or FLOPs C, with their gradients and starting points.

Each function takes parameters of the fit `[..., P]` and logarithms of the variables, one array `[..., M]` for each, and returns
the logarithm of the loss `[..., M]` and its derivatives `[..., M, P]`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping

import numpy as np

from hpnlp.scaling_laws.points import Points

LARGEST_LOG = 300.0  # the square of a constant with this logarithm is still finite

LogLoss = Callable[..., tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class LossForm:
    """A form of the loss.

    Attributes:
      formula: The formula, as text.
      constants: Names of its constants.
      positive: Constants whose logarithm is fitted.
      variables: Names of its variables, fields of `Points`.
      log_loss: Logarithm of the loss, and its derivatives by the parameters of the fit.
      starts: Function of the points that returns `[S, P]` parameters from which a fit starts.
      exponent: Function of the constants `[..., P]` that returns a, where N* grows as C^a for C = 6 N D; None for a form
        that does not divide the FLOPs between N and D.
    """

    formula: str
    constants: tuple[str, ...]
    positive: tuple[str, ...]
    variables: tuple[str, ...]
    log_loss: LogLoss
    starts: Callable[[Points], np.ndarray]
    exponent: Callable[[np.ndarray], np.ndarray] | None = None

    def logs(self, points: Points) -> list[np.ndarray]:
        """Logarithms of the variables of points.

        Returns:
          An array `[M]` for each variable.
        """
        return [np.log(getattr(points, name)) for name in self.variables]

    def to_constants(self, parameters: np.ndarray) -> np.ndarray:
        """Constants of a fit.

        Args:
          parameters: `[..., P]`, in which those of `positive` constants are logarithms.

        Returns:
          `[..., P]` constants.
        """
        result = np.array(parameters, np.float64)
        for index, name in enumerate(self.constants):
            if name in self.positive:
                result[..., index] = np.exp(np.clip(result[..., index], -LARGEST_LOG, LARGEST_LOG))
        return result

    def to_parameters(self, constants: np.ndarray) -> np.ndarray:
        """Inverse of `to_constants`.

        Args:
          constants: `[..., P]` constants.

        Returns:
          `[..., P]` parameters of the fit.
        """
        result = np.array(constants, np.float64)
        for index, name in enumerate(self.constants):
            if name in self.positive:
                result[..., index] = np.log(result[..., index])
        return result


def _columns(parameters: np.ndarray) -> list[np.ndarray]:
    """Each parameter as an array `[..., 1]`, against which the points broadcast."""
    return [parameters[..., index, None] for index in range(parameters.shape[-1])]


def _log_sum(*terms: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logarithm of the sum of the exponentials of terms, and the share of each term in that sum."""
    stacked = np.stack(np.broadcast_arrays(*terms))
    largest = stacked.max(0)
    shares = np.exp(stacked - largest)
    total = shares.sum(0)
    return largest + np.log(total), list(shares / total)


def additive(parameters: np.ndarray, n: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log(E + A N^-alpha + B D^-beta), of the parameters log A, log B, log E, alpha and beta."""
    a, b, e, alpha, beta = _columns(parameters)
    value, (of_n, of_d, floor) = _log_sum(a - alpha * n, b - beta * d, e + 0.0 * n)
    return value, np.stack([of_n, of_d, floor, -of_n * n, -of_d * d], axis=-1)


def kaplan(parameters: np.ndarray, n: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The logarithm alphaD log((Nc/N)^(alphaN/alphaD) + Dc/D), of the logarithms of Nc, Dc, alphaN and alphaD."""
    n_c, d_c, log_alpha_n, log_alpha_d = _columns(parameters)
    alpha_n, alpha_d = np.exp(log_alpha_n), np.exp(log_alpha_d)
    size = alpha_n / alpha_d * (n_c - n)
    sums, (of_n, of_d) = _log_sum(size, d_c - d)
    by_alpha = of_n * alpha_n * (n_c - n)  # times alphaN, since its logarithm is fitted
    return alpha_d * sums, np.stack([of_n * alpha_n, of_d * alpha_d, by_alpha, alpha_d * sums - by_alpha], axis=-1)


def floor(parameters: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log(E + A C^-alpha), of the parameters log A, log E and alpha."""
    a, e, alpha = _columns(parameters)
    value, (of_c, of_floor) = _log_sum(a - alpha * c, e + 0.0 * c)
    return value, np.stack([of_c, of_floor, -of_c * c], axis=-1)


def _additive_starts(points: Points) -> np.ndarray:
    """Shares of E, N and D in the mean log loss, with several exponents."""
    n, d, loss = (np.log(x).mean() for x in (points.n, points.d, points.loss))
    return np.array([
        (loss + np.log((1 - e) * s) + alpha * n, loss + np.log((1 - e) * (1 - s)) + beta * d, loss + np.log(e), alpha, beta)
        for e, s, alpha, beta in itertools.product((0.2, 0.5, 0.8), (0.2, 0.5, 0.8), (0.2, 0.5, 0.9), (0.2, 0.5, 0.9))
    ])  # fmt: skip


def _kaplan_starts(points: Points) -> np.ndarray:
    """Shares of N and D in the mean log loss, with several exponents."""
    n, d, loss = (np.log(x).mean() for x in (points.n, points.d, points.loss))
    exponents = (0.05, 0.1, 0.2, 0.4)
    starts = []
    for share, alpha_n, alpha_d in itertools.product((0.2, 0.5, 0.8), exponents, exponents):
        n_c = n + alpha_d / alpha_n * (np.log(share) + loss / alpha_d)
        starts.append((n_c, d + np.log(1 - share) + loss / alpha_d, np.log(alpha_n), np.log(alpha_d)))
    return np.array(starts)


def _floor_starts(points: Points) -> np.ndarray:
    """Shares of E in the mean log loss, with several exponents."""
    c, loss = np.log(points.c).mean(), np.log(points.loss).mean()
    shares, exponents = (0.1, 0.3, 0.5, 0.7, 0.9), (0.05, 0.1, 0.2, 0.4, 0.8)
    return np.array([
        (loss + np.log(1 - e) + alpha * c, loss + np.log(e), alpha) for e, alpha in itertools.product(shares, exponents)
    ])  # fmt: skip


LOSS_FORMS: Mapping[str, LossForm] = {
    "additive": LossForm(
        "E + A N^-alpha + B D^-beta",
        ("A", "B", "E", "alpha", "beta"),
        ("A", "B", "E"),
        ("n", "d"),
        additive,
        _additive_starts,
        lambda constants: constants[..., 4] / (constants[..., 3] + constants[..., 4]),
    ),
    "kaplan": LossForm(
        "((Nc/N)^(alphaN/alphaD) + Dc/D)^alphaD",
        ("Nc", "Dc", "alphaN", "alphaD"),
        ("Nc", "Dc", "alphaN", "alphaD"),
        ("n", "d"),
        kaplan,
        _kaplan_starts,
        lambda constants: constants[..., 3] / (constants[..., 2] + constants[..., 3]),
    ),
    "floor": LossForm("E + A C^-alpha", ("A", "E", "alpha"), ("A", "E"), ("c",), floor, _floor_starts),
}
