"""Random feature maps of queries and keys, whose inner products are unbiased estimates of softmax or Gaussian kernels.

Linear attention with these features approximates softmax attention. Maps of positive features return logarithms, which
`stable_queries` and `stable_keys` turn into numbers without overflow.

Shape letters: P random projections, M features, H head size.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.types import InputError

PROJECTIONS = ("orthogonal", "sphere", "iid")
KINDS = ("positive", "hyperbolic", "optimal")
# The largest feature of a key is between e**-30 and e**30, so that sums over many keys, and their squares, which occur in
# gradients of quotients, neither overflow nor vanish in float32.
MAX_KEY_EXPONENT = 30.0
HALF_PI = 201 / 128, 4.8351287841796875e-4, math.pi / 2 - 201 / 128 - 4.8351287841796875e-4


def random_projections(
    key: jax.Array, count: int, dim: int, projections: str = "orthogonal"
) -> Float[Array, "{count} {dim}"]:
    """Draws the vectors w of random features, each with the distribution N(0, I) or close to it.

    Args:
      key: Key.
      count: Number of vectors, P.
      dim: Size of a vector, H.
      projections: "orthogonal" draws blocks of H orthogonal vectors, with lengths of their own that have the chi distribution
        of H degrees of freedom, so that each vector by itself has the distribution N(0, I). "sphere" gives all vectors the
        length sqrt(H), which has less variance and a bias that decreases with H. "iid" draws independent vectors.

    Returns:
      The vectors, float32.

    Raises:
      InputError: Another name of `projections`.

    Cost: a QR decomposition of an H x H matrix for each H vectors, unless "iid".

    References:
      Choromanski et al. 2021, "Rethinking attention with Performers", arXiv 2009.14794, sec. 2.4.
      Yu et al. 2016, "Orthogonal random features", arXiv 1610.09072.
    """
    if projections not in PROJECTIONS:
        raise InputError(f"projections={projections!r}: expected one of {', '.join(PROJECTIONS)}")
    directions, lengths = jax.random.split(key)
    gaussian = jax.random.normal(lengths, (count, dim), jnp.float32)
    if projections == "iid":
        return gaussian
    blocks = jax.random.orthogonal(directions, dim, (-(-count // dim),), jnp.float32)
    rows = blocks.reshape(-1, dim)[:count]
    if projections == "sphere":
        return rows * jnp.float32(math.sqrt(dim))
    return rows * jnp.sqrt(jnp.sum(jnp.square(gaussian), axis=1, keepdims=True))


def projection_count(features: int, kind: str) -> int:
    """Number of random projections of a feature map.

    Args:
      features: Number of features M.
      kind: Entry of KINDS, or "trigonometric".

    Returns:
      P: M, or M / 2 for the maps that make two features of a projection.

    Raises:
      InputError: An odd number of features for such a map, or less than one projection.
    """
    each = 2 if kind in ("hyperbolic", "trigonometric") else 1
    if features < each or features % each:
        expected = "at least 1" if each == 1 else "an even number over 0"
        raise InputError(f"{features} {kind} features: expected {expected}")
    return features // each


def log_features(
    x: Float[Array, "*tokens H"],
    w: Float[Array, "P H"],
    kind: str = "positive",
    rho: Float[Array, "..."] | None = None,
) -> Float[Array, "*tokens M"]:
    """Logarithms of positive random features `phi`, for which `E[phi(x) . phi(y)] = exp(x . y)`.

    - positive: `exp(w . x - |x|^2 / 2)`, FAVOR+.
    - hyperbolic: the same of w and of -w; M = 2 P features.
    - optimal: `D exp(A |w|^2 + B w . x - |x|^2 / 2)` with `A = (1 - 1 / rho) / 8`, `B = sqrt(1 - 4 A)` and
      `D = (1 - 4 A)^(H / 4)`, where `optimal_rho` gives the least variance. With rho = 1 they are the positive features.

    All are divided by sqrt(M).

    Args:
      x: Queries or keys, multiplied by H^(-1/4) for the scores of softmax attention.
      w: Random projections.
      kind: Entry of KINDS.
      rho: For optimal features: float32 numbers in (0, 1], which are broadcast to the tokens; the same for queries and keys.

    Returns:
      The logarithms, float32.

    Raises:
      InputError: Another kind, or optimal features without rho.

    Cost: P H multiplications for each token.

    References:
      Choromanski et al. 2021, arXiv 2009.14794, lemma 1 (positive and hyperbolic).
      Likhosherstov et al. 2022, "Chefs' random tables", arXiv 2205.15317, theorem 3.2 and sec. 3.3 (optimal).
    """
    if kind not in KINDS or (kind == "optimal" and rho is None):
        raise InputError(
            f"kind={kind!r} with rho={rho}: expected one of {', '.join(KINDS)}, and rho for optimal features"
        )
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    projected = x @ w.T
    if kind == "hyperbolic":
        projected = jnp.concatenate([projected, -projected], axis=-1)
    square = 0.5 * jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    constant = -0.5 * math.log(projected.shape[-1])
    if kind != "optimal":
        return projected - (square - constant)
    a = jnp.broadcast_to((1.0 - 1.0 / jnp.asarray(rho, jnp.float32)) / 8.0, x.shape[:-1])[..., None]
    squares = jnp.sum(jnp.square(w), axis=1).reshape(*[1] * (x.ndim - 1), -1)
    constants = (0.25 * x.shape[-1]) * jnp.log1p(-4.0 * a) + constant
    return a * squares + jnp.sqrt(1.0 - 4.0 * a) * projected + (constants - square)


def optimal_rho(gamma: Float[Array, "*groups"], dim: int) -> Float[Array, "*groups"]:
    """The parameter of optimal features with the least variance.

    Args:
      gamma: Mean of |q + k|^2 over pairs of queries and keys, as they are passed to `log_features`.
      dim: Head size H.

    Returns:
      Numbers in (0, 1]: the positive root of `2 gamma rho^2 + (2 gamma + H) rho - H = 0`, which minimises
      `H log(1 + rho) - H log(rho) / 2 + gamma rho`, the logarithm of the second moment of an estimate.

    References: Likhosherstov et al. 2022, arXiv 2205.15317, theorem 3.3.
    """
    total = 2.0 * gamma + dim
    return (2.0 * dim) / (total + jnp.sqrt(total * total + (8.0 * dim) * gamma))


def stable_queries(logs: Float[Array, "*tokens M"]) -> Float[Array, "*tokens M"]:
    """Features of queries, divided by the largest feature of the query; normalised attention does not depend on this factor.

    Args:
      logs: Logarithms of features.

    Returns:
      Features in [0, 1], float32.
    """
    return jnp.exp(logs - jax.lax.stop_gradient(jnp.max(logs, axis=-1, keepdims=True)))


def stable_keys(logs: Float[Array, "*tokens M"]) -> Float[Array, "*tokens M"]:
    """Features of keys. Features of a very long key are scaled by a constant of that key, so that they stay in range.

    Features of a key whose largest one is between e^-30 and e^30 are exact; those of another are multiplied by the number that
    makes the largest one e^-30 or e^30. No feature depends on another token, so that outputs do not depend on later tokens,
    and a state that was kept while decoding stays valid. Gradients treat the number as a constant.

    Args:
      logs: Logarithms of features.

    Returns:
      Features, float32.

    References: The code of Choromanski et al. 2021 subtracts the maximum over all keys, later ones included.
    """
    # The gradient of a maximum is NaN where the compiler computes the operand twice, with different roundings.
    largest = jax.lax.stop_gradient(jnp.max(logs, axis=-1, keepdims=True))
    return jnp.exp(logs + (jnp.clip(largest, -MAX_KEY_EXPONENT, MAX_KEY_EXPONENT) - largest))


def trigonometric_features(x: Float[Array, "*tokens H"], w: Float[Array, "P H"]) -> Float[Array, "*tokens 2*P"]:
    """Random Fourier features `[sin(w . x), cos(w . x)] / sqrt(P)`, for which `E[phi(x) . phi(y)] = exp(-|x - y|^2 / 2)`.

    For x and y of length 1, this is `exp(x . y)` times a constant. Estimates may be negative.

    Args:
      x: Queries or keys.
      w: Random projections.

    Returns:
      M = 2 P features of absolute value at most 1 / sqrt(P), float32.

    Cost: P H multiplications for each token.

    References:
      Rahimi and Recht 2007, "Random features for large-scale kernel machines".
      Peng et al. 2021, "Random feature attention", arXiv 2103.02143, eq. 3 and 4.
    """
    angles = x.astype(jnp.float32) @ w.astype(jnp.float32).T
    return jnp.concatenate(_sin_cos(angles), axis=-1) * jnp.float32(w.shape[0] ** -0.5)


@jax.custom_jvp
def _sin_cos(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sine and cosine by Taylor polynomials, for angles of up to a few thousand.

    On two cores, XLA:CPU takes 42 ms for both of 2 million numbers, and 1.5 ms for these polynomials.
    """
    quadrant = jnp.round(x * (2.0 / math.pi))
    # pi / 2 in three parts, of which the first two have so few bits that their products with quadrants are exact.
    x = ((x - quadrant * HALF_PI[0]) - quadrant * HALF_PI[1]) - quadrant * HALF_PI[2]
    square = x * x
    sine = x + x * square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square * (1 / 362880))))
    cosine = 1 / 24 + square * (-1 / 720 + square * (1 / 40320 + square * (-1 / 3628800)))
    cosine = (1 - 0.5 * square) + square * square * cosine
    index = quadrant.astype(jnp.int32)
    swaps, negative = (index & 1) == 1, (index & 2) == 2
    sine, cosine = jnp.where(swaps, cosine, sine), jnp.where(swaps, sine, cosine)
    return jnp.where(negative, -sine, sine), jnp.where(negative ^ swaps, -cosine, cosine)


@_sin_cos.defjvp
def _sin_cos_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[Any, Any]:
    sine, cosine = _sin_cos(primals[0])
    return (sine, cosine), (cosine * tangents[0], -sine * tangents[0])
