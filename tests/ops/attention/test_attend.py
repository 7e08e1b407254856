"""attend against the reference and torch, and properties that every implementation must have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.measure import count_flops
from hpnlp.ops.attention import Causal, Full, attend, merge, reference
from hpnlp.ops.attention.block_sparse.operands import Form
from hpnlp.ops.dropout import keep_mask
from tests.contracts import ONCE, assert_close, once
from tests.messages import raises
from tests.ops.attention.forms import attend_in_form

SEGMENTS = ("segment_ids", "kv_segment_ids")
# B, T, S, N, K, H, Hv
CASES = {
    "causal": ((2, 37, 37, 4, 2, 8, 8), Causal(), {}),
    "packed": ((2, 67, 67, 4, 2, 8, 8), Causal(), {"segments": True}),
    "cross": ((2, 37, 53, 4, 1, 8, 6), Full(), {"segments": True, "lengths": True}),
    "taller": ((2, 53, 37, 4, 4, 8, 6), Causal(), {"lengths": True}),
    "positions": ((2, 40, 64, 4, 4, 8, 8), Causal(), {"positions": True, "lengths": True, "dropout_rate": 0.3}),
    "one": ((1, 1, 1, 1, 1, 8, 8), Causal(), {}),
    "wider": ((1, 7, 300, 2, 1, 8, 8), Causal(), {}),
}


def make(shape, dtype=jnp.float32, *, segments=False, lengths=False, positions=False, dropout_rate=0.0):
    rng = np.random.default_rng(0)
    b, t, s, n, k, h, hv = shape
    arrays = [jnp.asarray(rng.standard_normal(x).astype(dtype)) for x in ((b, t, n, h), (b, s, k, h), (b, s, k, hv))]
    ints = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    options = {}
    if segments:
        options["segment_ids"] = ints(np.sort(rng.integers(0, 3, (b, t)), 1))
        same = options["segment_ids"] if s == t else ints(np.sort(rng.integers(0, 4, (b, s)), 1))
        options["kv_segment_ids"] = same
    if lengths:
        options["kv_lengths"] = ints([0, s - 3][:b])
    if positions:
        options["positions"] = ints(rng.integers(0, s, (b, t)))
        options["kv_positions"] = ints(np.broadcast_to(np.arange(s), (b, s)))
    if dropout_rate:
        options |= {"dropout_rate": dropout_rate, "rng": jax.random.key(3)}
    return arrays, options


def scored(function, mask, options, seed=1):
    """A random weighting of outputs and finite lses, and its gradients."""

    def value(q, k, v):
        o, lse = function(q, k, v, mask, return_lse=True, **options)
        rng = np.random.default_rng(seed)
        wo, wl = (jnp.asarray(rng.standard_normal(x.shape).astype(jnp.float32)) for x in (o, lse))
        total = jnp.sum(o.astype(jnp.float32) * wo) + jnp.sum(jnp.where(jnp.isneginf(lse), jnp.float32(0), lse) * wl)
        return total, (o, lse)

    return jax.value_and_grad(value, (0, 1, 2), has_aux=True)


def in_blocks(form, size):
    """`attend` in one form of the executor, in blocks of `size`."""
    return functools.partial(attend_in_form, form, block_size=size)


# Short sequences run in the unrolled form and long ones in scans: here the same ones in both.
BOTH_FORMS = Form.UNROLLED, Form.SCAN
both_forms = pytest.mark.parametrize("form", BOTH_FORMS)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in ("cross", "positions", "one", "wider")),
        ("packed", "bfloat16"),
        *(pytest.param(name, "float32", marks=pytest.mark.slow) for name in ("causal", "packed", "taller")),
    ],
)
def test_results_and_gradients_match_reference(name, dtype):
    shape, mask, kinds = CASES[name]
    arrays, options = make(shape, dtype, **kinds)
    functions = [scored(f, mask, options) for f in (reference, *(in_blocks(form, 16) for form in BOTH_FORMS))]
    ((_, expected), expected_gradients), *results = once(lambda *qkv: [f(*qkv) for f in functions], *arrays)
    for (_, ours), gradients in results:
        assert_close((ours, gradients), (expected, expected_gradients), dtype)


@both_forms
def test_hidden_nan_changes_nothing(form):
    (q, k, v), _ = make((2, 33, 33, 4, 2, 8, 8))
    lengths = jnp.asarray([20, 33], jnp.int32)
    hidden = (jnp.arange(33)[None] >= lengths[:, None])[:, :, None, None]
    run = jax.jit(scored(in_blocks(form, 16), Full(), {"kv_lengths": lengths}), compiler_options=ONCE)
    clean = run(q, jnp.where(hidden, jnp.float32(0), k), jnp.where(hidden, jnp.float32(0), v))
    dirty = run(q, jnp.where(hidden, jnp.float32(np.nan), k), jnp.where(hidden, jnp.float32(np.nan), v))
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(a, b)


@both_forms
def test_hidden_nan_of_a_padding_segment_changes_nothing(form):
    """No query has segment 0, not even the padding queries of the last block."""
    (q, k, v), _ = make((1, 37, 40, 4, 2, 8, 8))
    ids = jnp.ones((1, 37), jnp.int32), jnp.ones((1, 40), jnp.int32).at[:, 33:].set(0)
    run = jax.jit(scored(in_blocks(form, 16), Full(), dict(zip(SEGMENTS, ids, strict=True))), compiler_options=ONCE)
    poison = lambda x, value: x.at[:, 33:].set(value)  # noqa: E731
    for a, b in zip(
        jax.tree.leaves(run(q, poison(k, 0.0), poison(v, 0.0))),
        jax.tree.leaves(run(q, poison(k, jnp.nan), poison(v, jnp.nan))),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@both_forms
@pytest.mark.parametrize("mixed", ["queries", "keys"])
def test_single_tiles_of_several_segments_are_computed(form, mixed):
    """The only tile must not be skipped when its other side has one segment, the second."""
    arrays, _ = make((1, 16, 16, 2, 2, 8, 8))
    two, second = jnp.repeat(jnp.arange(2, dtype=jnp.int32), 8)[None], jnp.ones((1, 16), jnp.int32)
    ids = (two, second) if mixed == "queries" else (second, two)
    options = dict(zip(SEGMENTS, ids, strict=True))
    ours, expected = once(lambda *x: [f(*x, Full(), **options) for f in (in_blocks(form, 16), reference)], *arrays)
    assert_close(ours, expected, "float32")


@both_forms
def test_rows_that_see_nothing_have_zero_gradients(form):
    """The cotangent of their lse is not finite."""
    (q, k, v), _ = make((1, 5, 5, 2, 2, 8, 8))

    def loss(q, k, v):
        o, lse = attend_in_form(form, q, k, v, kv_lengths=jnp.zeros(1, jnp.int32), return_lse=True)
        return jnp.sum(o) + jnp.sum(jnp.exp(lse) * lse)

    assert not any(np.asarray(g).any() for g in once(jax.grad(loss, (0, 1, 2)), q, k, v))


@pytest.mark.slow
@both_forms
def test_second_derivatives_match_reference(form):
    (q, k, v), _ = make((1, 20, 20, 2, 1, 4, 4))

    def curvature(function):
        inner = jax.grad(lambda q: jnp.sum(jnp.square(function(q, k, v, Causal()))))
        return once(jax.grad(lambda q: jnp.sum(jnp.sin(inner(q)))), q)

    ours = curvature(in_blocks(form, 8))
    np.testing.assert_allclose(ours, curvature(reference), atol=2e-5, rtol=2e-5)


@both_forms
def test_hidden_blocks_are_not_computed(form):
    """Exactly in the unrolled form; schedules of the scan form hold some tiles more."""
    (q, k, v), _ = make((1, 256, 256, 2, 2, 8, 8))
    count = lambda mask: count_flops(lambda *a: in_blocks(form, 32)(*a, mask), q, k, v)  # noqa: E731
    assert 36 / 64 <= count(Causal()) / count(Full()) <= (36 if form is Form.UNROLLED else 40) / 64


@pytest.mark.parametrize("shape", [(1, 3, 0), (1, 0, 3), (0, 3, 3)])
def test_empty_arrays_give_empty_results(shape):
    b, t, s = shape
    q, k = jnp.ones((b, t, 2, 4)), jnp.ones((b, s, 2, 4))

    def run(*qkv):
        gradients = jax.grad(lambda *a: attend(*a, impl="xla").sum(), (0, 1, 2))(*qkv)
        return gradients, attend(*qkv, return_lse=True, impl="xla")

    gradients, (o, lse) = jax.device_get(once(run, q, k, k))
    assert o.shape == q.shape and lse.shape == (b, t, 2) and not o.any() and np.isneginf(lse).all()
    assert not any(g.any() for g in gradients)


def test_shard_map_with_different_lengths_matches_separate_calls():
    (q, k, v), _ = make((1, 12, 12, 2, 2, 4, 4))
    lengths = jnp.arange(5, 13, dtype=jnp.int32)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def one(length):
        return jax.grad(lambda q: jnp.sum(jnp.square(attend(q, k, v, kv_lengths=length, impl="xla"))))(q)

    each = jax.shard_map(one, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P())
    # q is the same everywhere, so that its gradient is the sum over the shards.
    apart = jax.jit(one, compiler_options=ONCE)
    expected = sum(apart(lengths[i : i + 1]) for i in range(8))
    np.testing.assert_allclose(once(each, lengths), expected, atol=2e-5)


@both_forms
def test_sixteen_bits_accumulate_in_float32(form):
    """Results are as close to exact arithmetic on the same inputs as one rounding of the output allows."""
    (q, k, v), _ = make((1, 300, 300, 1, 1, 64, 64), jnp.bfloat16)
    o = once(lambda *a: attend_in_form(form, *a, Causal()), q, k, v)
    o = np.asarray(o, np.float64)[0, :, 0]
    q, k, v = (np.asarray(x, np.float64)[0, :, 0] for x in (q, k, v))
    weights = np.exp(q @ k.T / 8) * np.tri(300)
    exact = weights / weights.sum(axis=1, keepdims=True) @ v
    assert np.linalg.norm(o - exact) <= 0.004 * np.linalg.norm(exact)


def test_dropout_is_independent_over_heads_positions_and_seeds():
    """Rates lie within four standard errors, and so does the agreement of patterns of other heads, positions and seeds."""
    heads, places = jnp.arange(4)[:, None, None], jnp.arange(256)[None]

    @functools.partial(jax.jit, static_argnums=1, compiler_options=ONCE)
    def compiled(words, rate):
        return keep_mask(words, heads, places[..., None], places[:, None], rate)

    def pattern(words, rate=0.3):
        return np.asarray(compiled(np.array(words, np.uint32), rate))

    base = pattern([1, 2])
    for rate in (0.01, 0.3, 0.9):
        drops = 1 - pattern([1, 2], rate).mean(axis=(1, 2))
        assert np.all(np.abs(drops - rate) <= 4 * np.sqrt(rate * (1 - rate) / 256**2))
    other_patterns = [
        base[[1, 2, 3, 0]],
        np.roll(base, 1, axis=1),
        np.roll(base, 1, axis=2),
        pattern([1, 3]),
        pattern([2, 2]),
    ]
    agreement = 0.7**2 + 0.3**2
    for other in other_patterns:
        assert abs((base == other).mean() - agreement) <= 4 * np.sqrt(agreement * (1 - agreement) / base.size)


def test_merge_of_halves_matches_whole_call():
    (q, k, v), _ = make((2, 9, 24, 4, 2, 8, 8))

    def in_halves(q, k, v):
        halves = [attend(q, k[:, part], v[:, part], return_lse=True) for part in (slice(0, 10), slice(10, 24))]
        return merge(*halves), attend(q, k, v, return_lse=True)

    for got, want in zip(*once(in_halves, q, k, v), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


def temporary_bytes(function, length):
    x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    grads = jax.grad(lambda q, k, v: function(q, k, v, Causal()).sum(), (0, 1, 2))
    return jax.jit(grads, compiler_options=ONCE).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


def test_memory_of_the_scan_form_grows_linearly():
    long = lambda *a: attend(*a, impl="xla", block_size=64)  # noqa: E731
    # 64 and 16 query blocks: too many for the unrolled form
    assert temporary_bytes(long, 4096) < 5 * temporary_bytes(long, 1024)


def test_scan_over_layers_does_not_precompute_masks():
    x = jnp.ones((2, 2048, 4, 8))

    def layers(x, documents):
        layer = lambda x, _: (attend(x, x, x, Causal(), segment_ids=documents, impl="xla"), None)  # noqa: E731
        return jax.lax.scan(layer, x, None, length=3)[0].sum()

    arguments = x, jnp.arange(2048)[None].repeat(2, 0) // 500
    (loop,) = (
        e
        for e in jax.make_jaxpr(jax.grad(layers))(*arguments).eqns
        if e.primitive.name == "scan" and len(e.outvars) > 1
    )
    constants = sum(var.aval.size for var in loop.invars[: loop.params["num_consts"]])
    assert constants < 8 * x.size  # initial zeros; there are 256 times as many pairs of tokens


def test_memory_of_the_unrolled_form_is_below_half_of_dense():
    short = lambda *a: attend(*a, impl="xla")  # noqa: E731
    assert temporary_bytes(short, 1024) < 0.5 * temporary_bytes(reference, 1024)


def test_merge_ignores_partials_that_saw_nothing():
    (q, k, v), _ = make((1, 6, 8, 2, 2, 4, 4))
    nothing = jnp.full((1, 6, 2, 4), jnp.nan), jnp.full((1, 6, 2), -jnp.inf)

    def merged_call(q):
        part = attend(q, k, v, return_lse=True)
        o, lse = merge(nothing, part, nothing)
        return jnp.sum(jnp.square(o)) + jnp.sum(jnp.sin(lse)), (o, lse)

    def single_call(q):
        o, lse = attend(q, k, v, return_lse=True)
        return jnp.sum(jnp.square(o)) + jnp.sum(jnp.sin(lse)), (o, lse)

    def both(q):
        merged, single = (jax.grad(call, has_aux=True)(q) for call in (merged_call, single_call))
        return merged, single, merge(nothing, nothing)

    merged, single, empty = once(both, q)
    for actual, expected in zip(jax.tree.leaves(merged), jax.tree.leaves(single), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert not np.asarray(empty[0]).any() and np.isneginf(empty[1]).all()
    raises("at least one", merge)


def test_invalid_arguments_raise():
    (q, k, v), _ = make((1, 8, 8, 2, 2, 8, 8))
    for options, message in (
        ({"impl": "flesh"}, "impl"),
        ({"impl": "cudnn"}, "cudnn"),
        ({"dropout_rate": 1.0}, "dropout_rate"),
        ({"dropout_rate": 0.1}, "rng"),
        ({"block_size": 0}, "block_size"),
    ):
        raises(message, attend, q, k, v, Causal(), **options)
