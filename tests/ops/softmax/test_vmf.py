"""Bessel functions against scipy, mpmath and quadrature; the loss against its definition."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from hpnlp.ops.softmax.vmf import bessel_ratio, log_iv, log_normalizer, vmf_loss
from tests.contracts import ONCE, assert_close, once
from tests.messages import raises

PIECE = 4096  # number of kappas in one call of a program
# Relative tolerance of functions without a zero at kappa > 0; the truncated series is least accurate at order 15, dim 32.
RELATIVE = {"float32": 2e-6, "float64": 1e-12}
# Results of mpmath_figures where `ive` of scipy underflows in float64, and at the ends of the range.
FROZEN = {
    (32, 2.0**-10): (-142.26855616133071, 3.0517578098250156e-5, 0.031249999917824479),
    (32, 2.0**17): (131065.18845307556, 0.9998817509259014, 9.0211893396724254e-10),
    (300, 2.0**-10): (-1736.0776994914883, 3.2552083332990683e-6, 0.0033333333332280713),
    (300, 1.0): (-703.28673380129042, 0.0033332965423815021, 0.0033332229620914252),
    (1024, 2.0**-10): (-6576.0024489282958, 9.5367431640538433e-7, 0.00097656249999734066),
    (1024, 64.0): (-906.8349792258111, 0.062258213286796159, 0.00096528687220345115),
    (4096, 2.0**-10): (-29171.921418052849, 2.3841857910154895e-7, 0.00024414062499995839),
    (4096, 16.0): (-9307.67826780435, 0.0039061904262611099, 0.00024412945515098179),
    (4096, 512.0): (-2181.5929488507566, 0.12310649581834928, 0.00023326651517773045),
    (4096, 2.0**16): (65497.569482836644, 0.96924532241229259, 4.6184104720068341e-7),
}


def mpmath_figures(dim, kappa):
    """(log I_{m/2-1}, r = I_{m/2} / I_{m/2-1}, r') from mpmath with 60 digits."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        v, kappa = mpmath.mpf(dim) / 2 - 1, mpmath.mpf(float(kappa))
        lower, upper = (mpmath.besseli(v + i, kappa, maxterms=10**7) for i in (0, 1))
        ratio = upper / lower
        return mpmath.log(lower), ratio, 1 - ratio**2 - (2 * v + 1) * ratio / kappa


def log_area(dim):
    """Logarithm of the area of the unit sphere in `dim` dimensions."""
    return math.log(2) + dim / 2 * math.log(math.pi) - math.lgamma(dim / 2)


def normalizer(dim, kappa, log_i):
    return (dim / 2 - 1) * np.log(kappa) - dim / 2 * np.log(2 * np.pi) - log_i


def everything(dim, kappa):
    """(log I, its derivative, log C, r, r' as minus the second derivative of log C), in the dtype of kappa."""
    each = lambda f: jax.vmap(jax.grad(f))  # noqa: E731
    log_c = functools.partial(log_normalizer, dim)
    log_i = functools.partial(log_iv, dim / 2 - 1)
    second = each(jax.grad(log_c))
    return log_i(kappa), each(log_i)(kappa), log_c(kappa), bessel_ratio(dim / 2, kappa), -second(kappa)


@functools.cache
def program(dim, dtype):
    with jax.enable_x64(dtype == "float64"):
        arguments = jax.ShapeDtypeStruct((PIECE,), dtype)
        lowered = jax.jit(functools.partial(everything, dim)).lower(arguments)
        return lowered.compile(compiler_options=ONCE)


def run(dim, kappa, dtype):
    """Results of `everything` as float64, by one program for each dim and dtype."""
    pieces = np.pad(kappa, (0, -len(kappa) % PIECE), constant_values=1.0).reshape(-1, PIECE)
    with jax.enable_x64(dtype == "float64"):
        actual = [program(dim, dtype)(jnp.asarray(piece, dtype)) for piece in pieces]
    assert all(x.dtype == dtype for row in actual for x in row)
    return [np.concatenate(column).astype(np.float64)[: len(kappa)] for column in zip(*actual, strict=True)]


def assert_logarithm(actual, expected, dim, dtype):
    """Tolerance 1e-10 in float64; in float32 relative to max(1, |expected|), and twice as much for orders under 15."""
    scale = 1.0 if dtype == "float64" else np.maximum(1.0, np.abs(expected))
    tolerance = 1e-10 if dtype == "float64" else 2e-6 if dim >= 32 else 4e-6
    assert np.max(np.abs(actual - expected) / scale) <= tolerance


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(
    "dim", [2, pytest.param(31, marks=pytest.mark.slow), 32, pytest.param(300, marks=pytest.mark.slow)]
)
def test_matches_scipy(dim, dtype):
    kappa = np.logspace(-3, 5, 97).astype(np.float32).astype(np.float64)
    lower, upper = (special.ive(dim / 2 - i, kappa) for i in (1, 0))
    kappa, lower, upper = (x[upper > 1e-290] for x in (kappa, lower, upper))
    assert len(kappa) > 20
    expected = np.log(lower) + kappa
    log_i, slope, log_c, ratio, _ = run(dim, kappa, dtype)
    assert_logarithm(log_i, expected, dim, dtype)
    assert_logarithm(log_c, normalizer(dim, kappa, expected), dim, dtype)
    np.testing.assert_allclose(ratio, upper / lower, rtol=RELATIVE[dtype])
    np.testing.assert_allclose(slope, upper / lower + (dim / 2 - 1) / kappa, rtol=RELATIVE[dtype])


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("dim", sorted({dim for dim, _ in FROZEN}))
def test_matches_mpmath_where_scipy_underflows(dim, dtype):
    kappa = np.array([kappa for other, kappa in FROZEN if other == dim])
    log_i, ratio, curve = np.array([FROZEN[dim, k] for k in kappa]).T
    actual = run(dim, kappa, dtype)
    assert_logarithm(actual[0], log_i, dim, dtype)
    assert_logarithm(actual[2], normalizer(dim, kappa, log_i), dim, dtype)
    np.testing.assert_allclose(actual[3], ratio, rtol=RELATIVE[dtype])
    np.testing.assert_allclose(actual[4], curve, rtol=RELATIVE[dtype])


@pytest.mark.parametrize(
    "dim", [2, pytest.param(31, marks=pytest.mark.slow), 32, pytest.param(300, marks=pytest.mark.slow), 4096]
)
def test_float32_is_accurate_near_zeros(dim):
    """Compared with float64 on a dense grid; a sum of rounded terms of the size of the order would have 100 times the error."""
    kappa = np.logspace(-3, 6, 3001)
    wide = run(dim, kappa, "float64")
    crossings = [i for column in (0, 2) for i in np.flatnonzero(np.diff(np.sign(wide[column])))]
    assert len(crossings) == 2 * (dim > 2)
    kappa = np.concatenate([kappa, *(kappa[i] * np.linspace(0.7, 1.4, 1000) for i in crossings)])
    kappa = kappa.astype(np.float32).astype(np.float64)
    actual, wide = run(dim, kappa, "float32"), run(dim, kappa, "float64")
    for i in (0, 2):
        assert_logarithm(actual[i], wide[i], dim, "float32")
    for i in (1, 3):
        np.testing.assert_allclose(actual[i], wide[i], rtol=2e-6)
    # Under order 15, the slope at a large kappa is a difference of larger numbers.
    np.testing.assert_allclose(actual[4], wide[4], rtol=2e-6 if dim >= 32 else 3e-4, atol=0)
    np.testing.assert_allclose(actual[4], wide[4], rtol=0, atol=4e-7)
    assert (actual[3] < 1).all() and (actual[3] > 0).all()


@pytest.mark.oracle
@pytest.mark.parametrize("dim", [2, 3, 16, 31, 32, 33, 64, 100, 300, 512, 1024, 2048, 4096])
def test_matches_mpmath(dim):
    """Values and derivatives, on a grid that is denser around the zeros."""
    mpmath = pytest.importorskip("mpmath")
    wide = np.logspace(-3, 5, 401)
    signs = (np.flatnonzero(np.diff(np.sign(column))) for column in run(dim, wide, "float64")[:3:2])
    near = [wide[i] * np.linspace(1.0, 1.05, 5) for crossings in signs for i in crossings]
    kappa = np.concatenate([wide[::8], *near]).astype(np.float32).astype(np.float64)
    definition = [mpmath_figures(dim, k) for k in kappa]
    with mpmath.workdps(60):
        powers = [(mpmath.mpf(dim) / 2 - 1) * mpmath.log(float(k)) for k in kappa]
        log_two_pi_power = mpmath.mpf(dim) / 2 * mpmath.log(2 * mpmath.pi)
        log_c = np.array(
            [float(power - log_two_pi_power - row[0]) for power, row in zip(powers, definition, strict=True)]
        )
    log_i, ratio, curve = (np.array([float(x) for x in column]) for column in zip(*definition, strict=True))
    for dtype in RELATIVE:
        actual = run(dim, kappa, dtype)
        assert_logarithm(actual[0], log_i, dim, dtype)
        assert_logarithm(actual[2], log_c, dim, dtype)
        np.testing.assert_allclose(actual[1], ratio + (dim / 2 - 1) / kappa, rtol=RELATIVE[dtype])
        np.testing.assert_allclose(actual[3], ratio, rtol=RELATIVE[dtype])
        low = dim < 32 and dtype == "float32"
        np.testing.assert_allclose(actual[4], curve, rtol=3e-4 if low else RELATIVE[dtype])
    for key in FROZEN:
        if key[0] == dim:
            np.testing.assert_allclose([float(x) for x in mpmath_figures(*key)], FROZEN[key], rtol=1e-15)


def test_matches_closed_form_in_three_dimensions():
    kappa = np.logspace(-1, 2.5, 40)
    _, _, log_c, ratio, curve = run(3, kappa, "float64")
    np.testing.assert_allclose(log_c, np.log(kappa / (4 * np.pi * np.sinh(kappa))), rtol=1e-13)
    np.testing.assert_allclose(ratio, 1 / np.tanh(kappa) - 1 / kappa, rtol=1e-12)
    np.testing.assert_allclose(curve, 1 / kappa**2 - 1 / np.sinh(kappa) ** 2, rtol=1e-10)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(
    "dim", [2, pytest.param(31, marks=pytest.mark.slow), pytest.param(32, marks=pytest.mark.slow), 4096]
)
def test_ends_of_the_range(dim, dtype):
    """The density is uniform at 0; results are finite up to 1e12."""
    kappa = np.array([0.0, 1e-30, 1e-20, 1e-8, 1e6, 1e8, 1e12])
    log_i, slope, log_c, ratio, curve = run(dim, kappa, dtype)
    tolerance = 1e-6 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(log_c[:4], -log_area(dim), rtol=tolerance)
    np.testing.assert_allclose(curve[:4], 1 / dim, rtol=tolerance)
    np.testing.assert_allclose(ratio[:4], kappa[:4] / dim, rtol=tolerance)
    assert (ratio[1:] > 0).all() and (ratio < 1).all() and (np.diff(ratio) >= 0).all()
    for x in (log_c, ratio, curve, log_i[1:], slope[1:]):
        assert np.isfinite(x).all()
    assert log_i[0] == (0 if dim == 2 else -np.inf) and slope[0] == (0 if dim == 2 else np.inf)


def test_third_derivatives_match_recurrence():
    """Compared with the derivative of r' = 1 - r^2 - (m - 1) r / kappa, where its terms do not cancel."""
    kappa = np.array([2.0, 9.0, 55.0])
    _, _, _, r, slope = run(31, kappa, "float64")
    expected = -2 * r * slope - 30 * (slope / kappa - r / kappa**2)
    with jax.enable_x64(True):
        third = jax.vmap(jax.grad(jax.grad(jax.grad(functools.partial(log_normalizer, 31)))))
        actual = once(third, jnp.asarray(kappa))
    np.testing.assert_allclose(-actual, expected, rtol=1e-8)


def test_shapes_and_dtypes_are_preserved():
    functions = (
        functools.partial(log_iv, 15),
        functools.partial(bessel_ratio, 16),
        functools.partial(log_normalizer, 32),
    )
    all_of = lambda kappa: [function(kappa) for function in functions]  # noqa: E731
    kappa = jnp.linspace(0.5, 30, 6).astype(jnp.bfloat16)
    flat = once(all_of, kappa.astype(jnp.float32))
    assert_close(once(all_of, kappa), flat)
    assert_close(once(jax.vmap(all_of), kappa.reshape(2, 3)), [x.reshape(2, 3) for x in flat])
    assert_close(once(all_of, kappa[0]), [x[0] for x in flat])


def arrays(n=5, dim=100, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    h, targets = (jnp.asarray((rng.standard_normal((n, dim)) * scale).astype(dtype)) for scale in (2.0, 0.3))
    return h, targets, jnp.asarray(rng.integers(0, 3, n).astype(jnp.float32)).at[0].set(1.5)


def definition(h, targets, weights=None, norm_penalty=0.0, product_scale=1.0):
    """The losses and their gradient by h, one token at a time in float64."""
    losses, slopes = [], []
    for e, target in zip(*(np.asarray(x, np.float64) for x in (h, targets)), strict=True):
        dim, kappa, length = len(e), np.linalg.norm(e), np.linalg.norm(target)
        w = target / length if length else target
        lower, upper = (special.ive(dim / 2 - i, kappa) for i in (1, 0))
        log_c = normalizer(dim, kappa, np.log(lower) + kappa)
        losses.append(-log_c + norm_penalty * kappa - product_scale * (e @ w))
        slopes.append((upper / lower + norm_penalty) * e / kappa - product_scale * w)
    factors = np.ones(len(losses)) if weights is None else np.asarray(weights, np.float64)
    return factors * losses, factors[:, None] * slopes


OPTIONS = {
    "plain": {},
    "norm_penalty": {"norm_penalty": 0.3},
    "product_scale": {"product_scale": 0.4},
    "all": {"norm_penalty": 0.2, "product_scale": 0.7, "weights": True},
}


def loss_and_slope(h, targets, **options):
    """The losses of the tokens, and the gradient of their sum in h."""
    loss = lambda h: (lambda each: (each.sum(), each))(vmf_loss(h, targets, **options))  # noqa: E731
    slope, each = jax.grad(loss, has_aux=True)(h)
    return each, slope


@pytest.mark.parametrize(("n", "dim", "name"), [(1, 9, "all"), *((5, 100, name) for name in OPTIONS)])
def test_matches_definition(n, dim, name):
    h, targets, weights = arrays(n, dim)
    options = OPTIONS[name]
    loss_options = options | ({"weights": weights} if "weights" in options else {})
    loss, slope = once(functools.partial(loss_and_slope, **loss_options), h, targets)
    assert loss.dtype == slope.dtype == jnp.float32
    expected, expected_slope = definition(h, targets, **loss_options)
    np.testing.assert_allclose(loss, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(slope, expected_slope, rtol=2e-6, atol=1e-6)


def test_second_derivatives_and_target_gradients():
    h, targets, weights = (np.asarray(x, np.float64) for x in arrays(2, 31))
    options = {"norm_penalty": 0.1, "product_scale": 0.9}
    kappa = np.linalg.norm(h, axis=1)
    *_, ratio, curve = run(31, kappa, "float64")
    along = h[:, :, None] * h[:, None] / kappa[:, None, None] ** 2
    rows = ((ratio + 0.1) / kappa)[:, None, None] * (np.eye(31) - along) + curve[:, None, None] * along
    with jax.enable_x64(True):
        h, targets, weights = (jnp.asarray(x) for x in (h, targets, weights))
        single_loss = lambda e, w: vmf_loss(e[None], w[None], **options)[0]  # noqa: E731
        hessian = once(jax.vmap(jax.hessian(single_loss)), h, targets)
        loss = lambda targets, weights: vmf_loss(h, targets, weights=weights, **options)  # noqa: E731
        along = targets[::-1], weights[::-1]
        forward = once(lambda *x: jax.jvp(loss, x, along)[1], targets, weights)
        reverse = once(jax.jacrev(loss, (0, 1)), targets, weights)
        ends = once(
            lambda *x: [loss(*(a + e * b for a, b in zip(x, along, strict=True))) for e in (1e-5, -1e-5)],
            targets,
            weights,
        )
    np.testing.assert_allclose(hessian, rows, atol=1e-12)
    np.testing.assert_allclose(forward, np.subtract(*map(np.asarray, ends)) / 2e-5, rtol=1e-7)
    by_parts = sum((np.asarray(d) * np.asarray(x)).reshape(2, -1).sum(1) for d, x in zip(reverse, along, strict=True))
    np.testing.assert_allclose(forward, by_parts, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_state_has_finite_derivatives(dtype):
    """The density is uniform, the gradient points to the target, and the curvature is 1 / m, that of -log C."""
    dim = 32
    h, targets = jnp.zeros((1, dim), dtype), arrays(1, dim)[1]
    loss, slope = once(functools.partial(loss_and_slope, norm_penalty=0.1), h, targets)
    assert slope.dtype == h.dtype
    np.testing.assert_allclose(loss, log_area(dim), rtol=1e-6)
    w = np.asarray(targets) / np.linalg.norm(targets)
    np.testing.assert_allclose(slope.astype(jnp.float32), -w, atol=1e-6 if dtype == "float32" else 2e-3)
    hessian = once(jax.hessian(lambda h: vmf_loss(h, targets).sum()), h.astype(jnp.float32))
    np.testing.assert_allclose(hessian.reshape(dim, dim), np.eye(dim) / dim, atol=1e-7)


def test_gradients_are_finite_for_any_norm():
    norms = 10.0 ** np.arange(-30, 9, 2, dtype=np.float32)
    h, targets, _ = arrays(len(norms), 300)
    h = h / jnp.linalg.norm(h, axis=1, keepdims=True) * jnp.asarray(norms)[:, None]
    loss, slope = once(functools.partial(loss_and_slope, norm_penalty=0.1), h, targets)
    assert np.isfinite(loss).all() and np.isfinite(slope).all()
    assert (np.linalg.norm(slope, axis=1) < 2.2).all()  # at most |r| + penalty + |w|


def test_loss_depends_on_target_direction_only():
    h, targets, _ = arrays(3)
    targets = targets.at[1].set(0.0)
    grads = jax.grad(lambda h, targets: vmf_loss(h, targets).sum(), (0, 1))
    loss, scaled = (once(vmf_loss, h, x) for x in (targets, targets * 1000.0))
    np.testing.assert_allclose(loss, scaled, rtol=1e-6)
    np.testing.assert_allclose(loss, definition(h, targets)[0], rtol=2e-6)
    dh, dtargets = once(grads, h, targets)
    np.testing.assert_allclose(dh, definition(h, targets)[1], atol=1e-6)
    np.testing.assert_allclose((dtargets * targets).sum(axis=1), np.zeros(3), atol=1e-6)
    assert not np.asarray(dtargets[1]).any()


def test_sixteen_bit_states_accumulate_in_float32():
    h, targets, _ = arrays(7, 1024, "bfloat16")
    loss, slope = once(loss_and_slope, h, targets)
    assert (loss.dtype, slope.dtype) == (jnp.float32, jnp.bfloat16)
    wide = once(loss_and_slope, *(x.astype(jnp.float32) for x in (h, targets)))
    np.testing.assert_array_equal(loss, wide[0])
    np.testing.assert_array_equal(slope, wide[1].astype(jnp.bfloat16))
    mixed = once(vmf_loss, h, targets.astype(jnp.float32))
    np.testing.assert_array_equal(mixed, loss)


def test_tokens_of_weight_zero_do_not_contribute():
    """NaN in such tokens changes no loss and no gradient."""
    h, targets, weights = arrays()
    weights = weights.at[2].set(0.0)
    silent = (weights == 0)[:, None]
    grads = jax.value_and_grad(lambda h, targets, weights: vmf_loss(h, targets, weights=weights).sum(), (0, 1, 2))
    dirty = once(grads, *(jnp.where(silent, jnp.nan, x) for x in (h, targets)), weights)
    clean = once(grads, h, targets, weights)
    for a, b in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.abs(clean[1][0]).sum(axis=1) == 0, silent[:, 0])


def test_vmap_and_checkpoint():
    h, targets, _ = arrays(4)
    loss = functools.partial(loss_and_slope, norm_penalty=0.1)
    pairs = lambda x: x.reshape(2, 2, -1)  # noqa: E731
    actual = once(lambda h, targets: jax.vmap(jax.checkpoint(loss))(pairs(h), pairs(targets)), h, targets)
    assert_close((actual[0].reshape(4), actual[1].reshape(4, -1)), once(loss, h, targets))


def test_invalid_arguments_raise():
    for call, message in (
        (lambda: log_iv(-0.5, jnp.ones(2)), "order -0.5: expected a number of at least 0"),
        (lambda: log_iv(math.nan, jnp.ones(2)), "order nan"),
        (lambda: bessel_ratio(0.5, jnp.ones(2)), "order 0.5: expected a number of at least 1"),
        (lambda: log_normalizer(1, jnp.ones(2)), "dim 1: expected an integer of at least 2"),
        (lambda: vmf_loss(jnp.ones((2, 1)), jnp.ones((2, 1))), "m at least 2"),
        (lambda: vmf_loss(jnp.ones((2, 3)), jnp.ones((2, 3)), norm_penalty=-1.0), "norm_penalty -1.0"),
        (lambda: vmf_loss(jnp.ones((2, 3)), jnp.ones((2, 3)), product_scale=1.5), "product_scale 1.5"),
        (lambda: vmf_loss(jnp.ones((2, 3)), jnp.ones((2, 3)), product_scale=0.0), "product_scale 0.0"),
        # Without beartype, which would raise first.
        (lambda: inspect.unwrap(log_iv)(1, jnp.ones(2, jnp.int32)), "kappa is int32: expected floating-point"),
        (lambda: inspect.unwrap(log_iv)(jnp.ones(()), jnp.ones(2)), "known while tracing"),
        (lambda: inspect.unwrap(vmf_loss)(jnp.ones((2, 3)), jnp.ones((2, 4))), "targets"),
        (lambda: inspect.unwrap(vmf_loss)(jnp.ones((2, 2, 3)), jnp.ones((2, 2, 3))), "flatten tokens"),
        (
            lambda: inspect.unwrap(vmf_loss)(jnp.ones((2, 3)), jnp.ones((2, 3)), weights=jnp.ones(3)),
            "weights has shape",
        ),
    ):
        raises(message, call)
