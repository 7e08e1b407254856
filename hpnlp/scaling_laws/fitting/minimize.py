"""Robust fits of many problems at once: Levenberg-Marquardt for the sum of Huber losses of log losses, in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpnlp.scaling_laws.fitting.forms import LogLoss

LARGEST_STEP = 5.0  # largest change of a parameter in one iteration
TINY = 1e-12  # added to the diagonal, since a constant whose term has vanished has the derivative 0


def huber(residuals: np.ndarray, delta: float | int) -> np.ndarray:
    """Sum of the Huber losses of residuals.

    Args:
      residuals: `[..., M]`.
      delta: Residuals up to delta count as r^2 / 2, larger ones linearly.

    Returns:
      `[...]` sums.
    """
    size = np.abs(residuals)
    return np.where(size <= delta, 0.5 * residuals**2, delta * (size - 0.5 * delta)).sum(-1)


def minimize(
    log_loss: LogLoss,
    starts: np.ndarray,
    variables: Sequence[np.ndarray],
    targets: np.ndarray,
    delta: float | int,
    iterations: int = 200,
) -> tuple[np.ndarray, np.ndarray]:
    """Minimises the sum of the Huber losses of log_loss - targets from each start, or for each of S data sets.

    Each iteration solves a least-squares problem with the weights of the Huber loss (1 for small residuals, delta / |r| for
    others), and keeps the step if the sum decreases. Nothing stops early: with the sum in place of the mean, and without a
    tolerance, starts that reach the minimum agree to about 1e-8.

    Args:
      log_loss: A form of the loss.
      starts: `[S, P]` parameters.
      variables: Logarithms of the variables, each `[M]` or `[S, M]`.
      targets: `[M]` or `[S, M]` log losses.
      delta: Border of the Huber loss; infinity for least squares.
      iterations: Number of iterations.

    Returns:
      `[S, P]` parameters and `[S]` sums.
    """
    parameters, damping = np.array(starts, np.float64), np.full(len(starts), 1e-2)
    value, slopes = log_loss(parameters, *variables)
    best = huber(value - targets, delta)
    eye = np.eye(parameters.shape[-1])
    for _ in range(iterations):
        residuals = value - targets
        weights = np.minimum(1.0, delta / np.maximum(np.abs(residuals), 1e-300))
        gradient = np.einsum("smp,sm->sp", slopes, weights * residuals)
        hessian = np.einsum("smp,sm,smq->spq", slopes, weights, slopes)
        diagonal = np.einsum("spp->sp", hessian)
        damped = hessian + (damping[:, None] * diagonal + TINY)[..., None] * eye
        step = np.linalg.solve(damped, gradient[..., None])[..., 0]
        tried = parameters - np.clip(step, -LARGEST_STEP, LARGEST_STEP)
        with np.errstate(over="ignore", invalid="ignore"):  # a step too far is refused below
            new_value, new_slopes = log_loss(tried, *variables)
            total = huber(new_value - targets, delta)
        kept = total < best
        parameters = np.where(kept[:, None], tried, parameters)
        value = np.where(kept[:, None], new_value, value)
        slopes = np.where(kept[:, None, None], new_slopes, slopes)
        best = np.where(kept, total, best)
        damping = np.clip(np.where(kept, 0.2 * damping, 4.0 * damping), 1e-12, 1e8)
    return parameters, best
