"""The von Mises-Fisher loss: a hidden state is the mean direction and the concentration of a density over word directions.

Everything is computed from G(kappa) = log(I_v(kappa) / kappa^v), where I_v is the modified Bessel function of the first kind,
and the order v is known while tracing. With z = kappa / v, s = sqrt(1 + z^2) and t = 1 / s, Debye's uniform expansion (DLMF
10.41.3) is, up to a constant,

    G = v (s - log(1 + s)) - log(s) / 2 + c(t),    c(t) = sum_j D_j(t) / v^j.

I_v itself overflows, and in log I_v and in the normaliser terms of size v cancel where these functions pass through 0.
Therefore only G(kappa) - G(anchor) is computed, in a form without cancellation near the anchor. The anchor is a float32 number
near the zero; the value at the anchor is computed on the host in float64 and added. Derivatives have expansions of their own,
because derivatives of rounded expansions lose digits. Orders under 15, for which the truncated series is not accurate, are
computed from an order of at least 15 by the recurrence I_{u-1} = I_{u+1} + (2u / kappa) I_u (DLMF 10.29.1), whose terms are
positive.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree
from numpy.polynomial import Polynomial

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.types import AnyArray, InputError

# From this order on, a series of this many terms is accurate to 1e-13 for every kappa.
ORDER, TERMS = 15.0, 12
# kappa / v at the zero of v (s + log(z / (1 + s))), the largest part of log I_v.
ZERO = 0.6627434193491816
# Added to |h|^2, so that the norm has derivatives at 0; far below the float32 rounding error of the square of a useful norm.
TINY = 1e-24


@array_op("...", kappa="...")
def log_iv(order: int | float, kappa: Float[Array, "..."]) -> Float[Array, "..."]:
    """Logarithm of the modified Bessel function of the first kind, log I_order(kappa).

    The derivative by kappa is bessel_ratio(order + 1, kappa) + order / kappa. The terms of the second derivative cancel for a
    kappa over the order: float32 keeps three digits of it at kappa = 1e5.

    Args:
      order: A number of at least 0, static.
      kappa: At least 0, of any shape.

    Returns:
      float32, or float64 for float64; at kappa 0 it is -inf, or 0 for order 0. The error is at most 2e-6 max(1, |result|) in
      float32, twice that for orders under 15, for kappa up to 1e6. In float64 it is 1e-10 for kappa up to 1e5 and orders up to
      2048, and a few units in the last place beyond.

    Raises:
      InputError: order is negative or no number, or kappa is not floating.

    Cost:
      About 100 operations an element, fewer at high orders; up to 15 divisions and logarithms more for orders under 15.

    References:
      DLMF 10.41.3, 10.41.9 and 10.29.1.
    """
    order, kappa = _checked_order(order, 0.0), _at_least_float32(kappa, "kappa")
    if order < ORDER:
        growth = _growth(order, 0.0, kappa)
        return growth + (order * jnp.log(kappa / 2.0) - math.lgamma(order + 1.0)) if order else growth
    anchor = float(np.float32(ZERO * order))
    # Near the anchor, log(kappa / anchor) would have the relative error of the quotient. The maximum keeps log1p finite where
    # it is not used.
    near = jnp.log1p(jnp.maximum((kappa - anchor) / anchor, -0.5))
    powers = order * jnp.where(kappa < anchor / 2.0, jnp.log(kappa / anchor), near)
    return _growth(order, anchor, kappa) + powers + _log_iv_on_host(order, anchor)


@array_op("...", kappa="...")
def bessel_ratio(order: int | float, kappa: Float[Array, "..."]) -> Float[Array, "..."]:
    """Ratio r = I_order(kappa) / I_{order-1}(kappa): the mean cosine to the mean direction, in 2 order dimensions.

    The derivative has an expansion of its own, because the terms of r' = 1 - r^2 - (2 order - 1) r / kappa cancel for small and
    for large kappa. For orders under 16 its absolute error is as small, but at a large kappa it loses relative accuracy, up to
    4 of 7 digits in float32.

    Args:
      order: Order of the numerator, a number of at least 1, static.
      kappa: At least 0, of any shape.

    Returns:
      float32, or float64 for float64; 0 at kappa 0 and less than 1 everywhere. The relative error of the ratio and its
      derivative is at most 1e-6 (float32) or 1e-12 (float64).

    Raises:
      InputError: order is under 1, or kappa is not floating.

    Cost:
      About 100 operations an element, fewer at high orders; up to 15 divisions more for orders under 16.

    References:
      DLMF 10.41.3 and 10.29.
    """
    return _ratio(_checked_order(order, 1.0) - 1.0, _at_least_float32(kappa, "kappa"))


@array_op("...", kappa="...")
def log_normalizer(dim: int, kappa: Float[Array, "..."]) -> Float[Array, "..."]:
    """Logarithm of the normaliser C_m(kappa) of the density C_m(kappa) exp(kappa mu.x) over unit vectors x in m dimensions.

    C_m(kappa) = kappa^{m/2-1} / ((2 pi)^{m/2} I_{m/2-1}(kappa)), where |mu| = 1. At kappa 0 the density is uniform, and the
    result is minus the logarithm of the sphere's area. The result is smooth there; its derivative by kappa is
    -bessel_ratio(m / 2, kappa).

    Args:
      dim: m, at least 2, static.
      kappa: At least 0, of any shape.

    Returns:
      float32, or float64 for float64, with the errors of `log_iv`.

    Raises:
      InputError: dim is under 2, or kappa is not floating.

    Cost:
      As `log_iv`.

    References:
      Banerjee et al. 2005, "Clustering on the unit hypersphere using von Mises-Fisher distributions", sec. 2.
    """
    if not isinstance(dim, int) or dim < 2:
        raise InputError(f"dim {dim!r}: expected an integer of at least 2, the length of the unit vectors")
    kappa = _at_least_float32(kappa, "kappa")
    order, anchor = dim / 2 - 1, 0.0
    at_anchor = math.lgamma(dim / 2) - math.log(2.0) - dim / 2 * math.log(math.pi)  # log of the uniform density
    if order >= ORDER:
        # The anchor is the zero of log C, by fixed-point iteration: v (w - log1p(w / 2)), with w = s - 1, is the largest
        # part of the difference to the value at kappa = 0.
        w = 0.0
        for _ in range(50):
            w = at_anchor / order + math.log1p(w / 2.0)
        anchor = float(np.float32(order * math.sqrt(w * (w + 2.0))))
        at_anchor = order * math.log(anchor) - dim / 2 * math.log(2.0 * math.pi) - _log_iv_on_host(order, anchor)
    return at_anchor - _growth(order, anchor, kappa)


@array_op("N", h="N")
def vmf_loss(
    h: Float[Array, "N m"],
    targets: Float[Array, "N m"],
    *,
    norm_penalty: int | float = 0,
    product_scale: int | float = 1,
    weights: Float[Array, " N"] | None = None,
) -> Float[Array, " N"]:
    """-log C_m(|h|) + norm_penalty |h| - product_scale h.w of each token, in nats, where w is the direction of its target.

    First and second derivatives are finite for |h| under 1e18, including h = 0.

    Args:
      h: [N, m] states: the direction is the mean of the density over unit vectors, the norm its concentration.
      targets: [N, m] vectors of the words, normalised here. A vector of zeros, or whose norm is not between 1e-18 and 1e18, has
        no direction: h.w is 0.
      norm_penalty: At least 0. With norm_penalty 0 and product_scale 1, the loss is the negative log-likelihood; it is negative
        where the density is over 1. A penalty over 0 keeps |h| from growing.
      product_scale: Over 0 and at most 1; under 1 it keeps |h| from growing.
      weights: [N] factors of the losses; tokens of weight 0 have loss 0 and no gradient, even where h is NaN. None for 1.

    Returns:
      [N] float32, or float64 where h is float64.

    Raises:
      InputError: Shapes do not fit, m is under 2, the penalty is negative, or the scale is not in (0, 1].

    Cost:
      O(N m) in time and memory, for any vocabulary.

    References:
      Kumar and Tsvetkov 2019, "Von Mises-Fisher loss for training sequence to sequence models with continuous outputs":
      NLLvMF, and its two regularised forms.
    """
    _check_loss(h, targets, norm_penalty, product_scale, weights)
    h = _at_least_float32(h, "h")
    targets = targets.astype(h.dtype)
    if weights is not None:
        ignored = (weights == 0)[:, None]
        h, targets = (jnp.where(ignored, 0.0, x) for x in (h, targets))
    norm = jnp.sqrt(jnp.sum(h * h, axis=1) + TINY)
    square = jnp.sum(targets * targets, axis=1)
    has_direction = square > 0
    product = jnp.sum(h * targets, axis=1) / jnp.sqrt(jnp.where(has_direction, square, 1.0))
    loss = -log_normalizer(h.shape[1], norm) - product_scale * jnp.where(has_direction, product, 0.0)
    loss = loss + norm_penalty * norm if norm_penalty else loss
    return loss if weights is None else jnp.where(ignored[:, 0], 0.0, weights.astype(h.dtype) * loss)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _growth(order: float, anchor: float, kappa: Array) -> Array:
    """G(kappa) - G(anchor); the anchor is 0 for orders under 15."""
    ratios = _ratios(order, kappa)
    top = order + len(ratios) - 1
    correction = _expansion(top).growth
    s, s0 = jnp.sqrt(1.0 + (kappa / top) ** 2), math.sqrt(1.0 + (anchor / top) ** 2)
    d = ((kappa - anchor) / top) * ((kappa + anchor) / top) / (s + s0)  # s - s0
    growth = top * (d - jnp.log1p(d / (1.0 + s0))) - jnp.log1p(d / s0) / 2.0
    t, t0 = 1.0 / s, 1.0 / s0
    # c(t) - c(t0) = quotient(t) (t - t0), with t - t0 = -d t t0.
    quotient = (correction - correction(t0)) // Polynomial([-t0, 1.0])
    growth = growth - d * t * t0 * _evaluate(quotient, t)
    for i, ratio in enumerate(ratios[:-1]):
        growth = growth + jnp.log1p(kappa * ratio / (2.0 * (top - i)))
    return growth


@_growth.defjvp
@accepts_numpy
def _(order: float, anchor: float, primals: PyTree, tangents: PyTree) -> tuple[Array, Array]:
    (kappa,), (dkappa,) = primals, tangents
    return _growth(order, anchor, kappa), _ratio(order, kappa) * dkappa


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _ratio(order: float, kappa: Array) -> Array:
    """I_{order+1} / I_order, the derivative of G."""
    return jnp.minimum(_ratios(order, kappa)[-1], 1.0 - float(jnp.finfo(kappa.dtype).epsneg))


@_ratio.defjvp
@accepts_numpy
def _(order: float, primals: PyTree, tangents: PyTree) -> tuple[Array, Array]:
    """The slope at the first order of at least ORDER, from its expansion, and at lower orders by recurrence."""
    (kappa,), (dkappa,) = primals, tangents
    ratios = _ratios(order, kappa)
    top = order + len(ratios) - 1
    correction = _expansion(top).slope
    t = jax.lax.rsqrt(1.0 + (kappa / top) ** 2)
    slope = t * t / top * (1.0 / (1.0 + t) + _evaluate(correction, t))
    for i, ratio in enumerate(ratios[:-1]):
        u = top - i
        slope = (2.0 * u - kappa * kappa * slope) / (2.0 * u + kappa * ratio) ** 2
    return _ratio(order, kappa), slope * dkappa


def _ratios(order: float, kappa: Array) -> list[Array]:
    """I_{u+1} / I_u for u from the first order of at least 15 down to `order`, in steps of 1."""
    steps = max(0, math.ceil(ORDER - order))
    top = order + steps
    correction = _expansion(top).ratio
    z = kappa / top
    t = jax.lax.rsqrt(1.0 + z * z)
    ratios = [z * t * (1.0 / (1.0 + t) - _evaluate(correction, t))]
    for i in range(steps):
        ratios.append(kappa / (2.0 * (top - i) + kappa * ratios[-1]))
    return ratios


class _Expansion(NamedTuple):
    """Polynomials in t: c of G above, p of G' = z t (1 / (1 + t) - p(t)), q of G'' = (t^2 / v) (1 / (1 + t) + q(t))."""

    growth: Polynomial
    ratio: Polynomial
    slope: Polynomial


@functools.cache
def _expansion(order: float) -> _Expansion:
    """The polynomials of an order; p and q follow from dt / dkappa = -z t^3 / v and z^2 t^2 = 1 - t^2."""
    c = sum((d / order**j for j, d in enumerate(_debye(), start=1)), Polynomial([0.0]))
    t = Polynomial([0.0, 1.0])
    p = (t / 2.0 + t**2 * c.deriv()) / order
    tp = t * p
    q = Polynomial(((t - t**3) * tp.deriv() - tp).coef[2:])
    return _Expansion(c, p, q)


@functools.cache
def _debye() -> tuple[Polynomial, ...]:
    """D_1, D_2, ... with log sum_j U_j(t) / v^j = sum_j D_j(t) / v^j: DLMF 10.41.9 for the logarithm of the sum."""
    a = Polynomial([0.0, 0.0, 1.0, 0.0, -1.0])
    slopes = [Polynomial([1 / 8, 0.0, -5 / 8])]
    terms = [slopes[0].integ()]
    for j in range(1, TERMS):
        squares = sum((slopes[i] * slopes[j - 2 - i] for i in range(j - 1)), Polynomial([0.0]))
        terms.append((a * slopes[-1] + (a * squares).integ()) / 2.0)
        slopes.append(terms[-1].deriv())
    return tuple(terms)


def _evaluate(polynomial: Polynomial, t: Array) -> Array:
    """Evaluates the polynomial for t up to 1, without the highest powers that the rounding of t's dtype hides."""
    *lower, highest = polynomial.trim(float(jnp.finfo(t.dtype).eps) / 100.0).coef.tolist()
    total = jnp.full_like(t, highest)
    for coefficient in reversed(lower):
        total = total * t + coefficient
    return total


def _log_iv_on_host(order: float, kappa: float) -> float:
    """The float64 log I_order(kappa), for an order of at least 15."""
    z = kappa / order
    s = math.sqrt(1.0 + z * z)
    largest = order * (s + math.log(z / (1.0 + s)))
    return largest - math.log(2.0 * math.pi * order * s) / 2.0 + float(_expansion(order).growth(1.0 / s))


def _at_least_float32(x: Array, name: str) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise InputError(f"{name} is {x.dtype}: expected floating-point numbers")
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _checked_order(order: object, least: float) -> float:
    if not isinstance(order, (int, float)) or not least <= order < math.inf:
        raise InputError(f"order {order!r}: expected a number of at least {least:g}, known while tracing")
    return float(order)


def _check_loss(
    h: AnyArray, targets: AnyArray, norm_penalty: int | float, product_scale: int | float, weights: AnyArray | None
) -> None:
    if h.ndim != 2 or h.shape[1] < 2 or targets.shape != h.shape:
        raise InputError(
            f"h {h.shape}, targets {targets.shape}: expected [N, m] twice, m at least 2; flatten tokens to one axis"
        )
    if weights is not None and weights.shape != h.shape[:1]:
        raise InputError(f"weights has shape {weights.shape}: expected {h.shape[:1]}")
    if not norm_penalty >= 0:
        raise InputError(f"norm_penalty {norm_penalty}: expected at least 0")
    if not 0 < product_scale <= 1:
        raise InputError(f"product_scale {product_scale}: expected more than 0 and at most 1")
