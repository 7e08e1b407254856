"""Random features: means and variances of their inner products, and values of large inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention.linear.random_features import (
    KINDS,
    MAX_KEY_EXPONENT,
    PROJECTIONS,
    log_features,
    optimal_rho,
    projection_count,
    random_projections,
    stable_keys,
    stable_queries,
    trigonometric_features,
)
from tests.contracts import assert_close, once
from tests.messages import raises


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def inputs(count, dim, scale, seed=0):
    """Queries and keys with entries of this standard deviation, multiplied by H^(-1/4)."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(scale * dim**-0.25 * rng.standard_normal((count, dim)), jnp.float32) for _ in range(2)]


def rho_of(q, k):
    """rho of optimal features for the mean of |q + k|^2 over all pairs."""
    q, k = np.asarray(q), np.asarray(k)
    return optimal_rho(jnp.float32(np.square(q[:, None] + k[None]).sum(-1).mean()), q.shape[1])


def kernel(q, k, w, kind):
    """Estimates of exp(q . k) for all pairs, or of exp(-|q - k|^2 / 2)."""
    if kind == "trigonometric":
        return trigonometric_features(q, w) @ trigonometric_features(k, w).T
    rho = rho_of(q, k) if kind == "optimal" else None
    return jnp.exp(log_features(q, w, kind, rho)) @ jnp.exp(log_features(k, w, kind, rho)).T


def estimates(q, k, draws, features, kind="positive", projections="orthogonal"):
    """`[draws, Q, K]`: an estimate of each pair for each draw of the projections."""

    def draw(key):
        return kernel(q, k, random_projections(key, projection_count(features, kind), q.shape[1], projections), kind)

    return np.asarray(jax.jit(functools.partial(jax.lax.map, draw))(jax.random.split(jax.random.key(0), draws)))


@pytest.mark.parametrize("projections", PROJECTIONS)
def test_projections_are_orthogonal_in_blocks(projections):
    w = np.asarray(once(lambda key: random_projections(key, 7, 3, projections), jax.random.key(1)))
    assert w.shape == (7, 3)
    lengths = np.linalg.norm(w, axis=1)
    products = np.abs((w / lengths[:, None]) @ (w / lengths[:, None]).T - np.eye(7))
    same_block = np.arange(7)[:, None] // 3 == np.arange(7)[None] // 3
    assert (products[same_block].max() < 1e-6) == (projections != "iid")
    assert (lengths.std() < 1e-6) == (projections == "sphere")


def test_features_match_their_formulas():
    """In float64 with numpy, in every kind; optimal features with rho = 1 are positive features."""
    (q, _), w = inputs(5, 4, 1.0), random_projections(jax.random.key(2), 6, 4)
    rho = jnp.asarray([0.3, 0.5, 0.7, 0.9, 1.0], jnp.float32)
    actual = once(lambda q, w: [*(log_features(q, w, kind, rho) for kind in KINDS), trigonometric_features(q, w)], q, w)
    q, w, rho = (np.asarray(x, np.float64) for x in (q, w, rho))
    square, products = np.square(q).sum(1, keepdims=True), q @ w.T
    a = ((1 - 1 / rho) / 8)[:, None]
    optimal = a * np.square(w).sum(1) + np.sqrt(1 - 4 * a) * products - square / 2 + np.log1p(-4 * a)
    expected = [
        np.exp(products - square / 2) / np.sqrt(6),
        np.exp(np.concatenate([products, -products], 1) - square / 2) / np.sqrt(12),
        np.exp(optimal) / np.sqrt(6),
    ]
    for logs, features in zip(actual, expected, strict=False):
        np.testing.assert_allclose(np.exp(np.asarray(logs)), features, rtol=1e-5)
    np.testing.assert_allclose(actual[2][-1], actual[0][-1], rtol=1e-5)
    waves = np.concatenate([np.sin(products), np.cos(products)], 1) / np.sqrt(6)
    np.testing.assert_allclose(actual[3], waves, atol=1e-6)


def test_trigonometric_features_are_accurate():
    """Angles of up to 1000, in all quadrants, and their derivatives."""
    angles = jnp.linspace(-1000, 1000, 4001, dtype=jnp.float32)[:, None]
    weights = jnp.asarray([[2.0, -3.0]], jnp.float32)

    def weighted(x):
        return jnp.sum(weights * trigonometric_features(x, jnp.ones((1, 1), jnp.float32)))

    features, gradient = once(
        lambda x: (trigonometric_features(x, jnp.ones((1, 1), jnp.float32)), jax.grad(weighted)(x)), angles
    )
    x = np.asarray(angles, np.float64)
    np.testing.assert_allclose(features, np.concatenate([np.sin(x), np.cos(x)], axis=1), atol=2e-7)
    np.testing.assert_allclose(gradient, 2 * np.cos(x) + 3 * np.sin(x), atol=1e-6)


def test_optimal_rho_minimises_the_second_moment():
    """Compared with a grid of rho; no data give rho = 1."""
    gamma = np.array([0.0, 0.1, 4.0, 16.0, 300.0], np.float32)
    rho, grid = np.asarray(optimal_rho(jnp.asarray(gamma), 8)), np.linspace(1e-3, 1.0, 4000)
    objective = 8 * np.log1p(grid) - 4 * np.log(grid) + gamma[:, None] * grid
    np.testing.assert_allclose(rho, grid[objective.argmin(1)], atol=3e-4)
    assert rho[0] == 1.0


def test_stable_features_are_proportional_to_features():
    """Ordinary keys keep their features, and each query is divided by one number; gradients are those of the formulas."""
    logs = jnp.asarray(np.random.default_rng(0).normal(0, 5, (4, 6)).astype(jnp.float32))
    queries, keys = once(lambda x: (stable_queries(x), stable_keys(x)), logs)
    assert_close(keys / jnp.exp(logs), jnp.ones_like(logs))
    ratio = queries / jnp.exp(logs)
    assert_close(ratio / ratio[:, :1], jnp.ones_like(logs))
    gradient = jax.grad(lambda x: jnp.sum(jnp.log(stable_keys(x)) * logs))(logs)
    assert_close(gradient, logs)


@pytest.mark.parametrize("kind", KINDS)
def test_features_of_long_vectors_are_finite(kind):
    """Also their gradients; the largest feature of a key stays within the bounds, and that of a query is 1."""
    x = jnp.asarray([[1e4, 0, 0, 0], [0, -1e4, 1e4, 0], [30, 30, 30, 30], [0, 0, 0, 0]], jnp.float32)
    w = random_projections(jax.random.key(0), 8, 4) * 10.0

    def features(x):
        logs = log_features(x, w, kind, jnp.float32(0.6))
        return stable_queries(logs), stable_keys(logs)

    (queries, keys), gradients = once(
        lambda x: (features(x), jax.grad(lambda x: sum(jnp.sum(y) for y in features(x)))(x)), x
    )
    assert np.isfinite(gradients).all() and np.isfinite(keys).all()
    np.testing.assert_array_equal(np.max(queries, axis=1), np.ones(4))
    assert (np.abs(np.log(np.max(keys, axis=1))) <= MAX_KEY_EXPONENT + 10).all()


def test_invalid_arguments_raise():
    x, w = jnp.ones((2, 4)), jnp.ones((3, 4))
    for call, message in (
        (lambda: random_projections(jax.random.key(0), 3, 4, "normal"), "projections='normal': expected one of"),
        (lambda: projection_count(3, "hyperbolic"), "3 hyperbolic features: expected an even number"),
        (lambda: projection_count(0, "positive"), "0 positive features"),
        (lambda: log_features(x, w, "optimal"), "rho for optimal features"),
        (lambda: log_features(x, w, "negative"), "kind='negative'"),
    ):
        raises(message, call)


@pytest.mark.slow
@pytest.mark.parametrize("projections", ["orthogonal", "iid"])
@pytest.mark.parametrize("kind", [*KINDS, "trigonometric"])
def test_estimates_are_unbiased(kind, projections):
    """The mean over 10,000 draws is within four standard errors of the kernel."""
    q, k = inputs(4, 8, 0.5)
    draws = estimates(q, k, 10_000, 16, kind, projections)
    expected = np.exp(np.asarray(q) @ np.asarray(k).T)
    if kind == "trigonometric":
        expected = np.exp(-0.5 * np.square(np.asarray(q)[:, None] - np.asarray(k)[None]).sum(-1))
    standard_error = draws.std(axis=0) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(axis=0) - expected) <= 4 * standard_error).all()
