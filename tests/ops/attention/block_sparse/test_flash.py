"""Every pattern and every operand through the executor, in each of its forms, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import (
    Blockwise,
    Causal,
    Full,
    Global,
    GlobalAt,
    Operands,
    PerHead,
    RandomBlocks,
    Sinks,
    Strided,
    Where,
    Window,
    attend,
    bigbird,
    flash,
    longformer,
    merge,
    reference,
    sparse_transformer_fixed,
    sparse_transformer_strided,
)
from hpnlp.ops.attention.block_sparse.decomposition import cost_model, decompose
from hpnlp.ops.attention.block_sparse.operands import Form
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule, TileGroup
from tests.contracts import ONCE, PATTERNS, assert_close, executor_with, once
from tests.ops.attention.forms import arrays, attend_in_form

# Divides no mask into residue classes.
UNEVEN = Where(lambda i, j: (i + j) % 3 == 0)
OPERANDS = {
    "segments": ("segment_ids",),
    "lengths": ("kv_lengths",),
    "positions": ("positions",),
    "dense_mask": ("dense_mask",),
    "dense_mask by head": ("dense_by_head",),
    "global_tokens": ("global_tokens",),
    "global places": ("global_places", "segment_ids"),
    "bias": ("bias",),
    "bias of a row": ("bias_row",),
    "bias function": ("function", "soft_cap"),
    "bias function at positions": ("function", "positions"),
    "soft_cap": ("soft_cap", "kv_lengths"),
    "sinks": ("sinks", "kv_lengths"),
    "dropout": ("dropout",),
    "all": ("segment_ids", "dense_mask", "global_tokens", "bias", "soft_cap", "sinks", "dropout"),
}


def executors(mask, lengths=(37, 37), undivided=False):
    """`attend` in the unrolled form and in scans, over sub-masks in permuted tokens where the mask has any.

    undivided: whether the operands keep the mask in one part.
    """
    parts = decompose.decompose(mask, *lengths, 8, 8, undivided, True)
    is_permuted = any(part.selection != decompose.ALL_TOKENS for part in parts)
    return in_forms(Form.UNROLLED, Form.PERMUTED if is_permuted else Form.SCAN)


def in_forms(*forms):
    """`attend` in each form: in blocks of 8, or of 16 where each block has operations of its own."""
    sizes = {form: 16 if form == Form.UNROLLED else 8 for form in forms}
    return {form.value: functools.partial(attend_in_form, form, block_size=size) for form, size in sizes.items()}


def assert_forms_equal(value, mask, qkv, undivided=False, functions=None):
    """`value(attend, qkv)` of each form equals that of the reference; all are computed in one program."""
    functions = functions or executors(mask, (qkv[0].shape[1], qkv[1].shape[1]), undivided)
    functions = {"reference": reference} | functions
    results = once(lambda qkv: {name: value(function, qkv) for name, function in functions.items()}, tuple(qkv))
    for name in functions:
        assert_close(results[name], results["reference"], qkv[0].dtype, name)


def operands(names, t=37, n=4):
    rng = np.random.default_rng(1)
    ints = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    slopes = jnp.asarray(rng.standard_normal(n).astype(jnp.float32))
    tokens = rng.random((2, t)) < 0.1
    table = {
        "segment_ids": {"segment_ids": ints(np.sort(rng.integers(0, 3, (2, t)), 1))},
        "kv_lengths": {"kv_lengths": ints([t - 9, 0])},
        "positions": {"positions": ints(rng.permuted(np.tile(np.arange(t), (2, 1)), axis=1))},
        "dense_mask": {"dense_mask": jnp.asarray(rng.random((2, 1, t, t)) < 0.7)},
        "dense_by_head": {"dense_mask": jnp.asarray(rng.random((n, t, t)) < 0.7)},
        "global_tokens": {"global_tokens": jnp.asarray(tokens)},
        "global_places": {"global_tokens": ints([[3, -1, 30], [0, 0, 9]])},
        "bias": {"bias": jnp.asarray(rng.standard_normal((1, n, t, t)).astype(jnp.float32))},
        "bias_row": {"bias": jnp.asarray(rng.standard_normal((2, 1, 1, t)).astype(jnp.float32))},
        "function": {"bias": slopes},
        "soft_cap": {"soft_cap": 2.5},
        "sinks": {"sinks": slopes},
        "dropout": {"dropout_rate": 0.3, "rng": jax.random.key(3)},
    }
    return {key: value for name in names for key, value in table[name].items()}


def slope_bias(slopes):
    return lambda head, q, k: slopes[head] * jnp.abs(q - k).astype(jnp.float32) / 40


def scored(function, qkv, mask, options=(), as_function=False):
    """Outputs, and gradients of a random weighting of them by q, k, v and the differentiable operands."""
    inexact = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    options = dict(options)
    leaves = {name: x for name, x in options.items() if inexact(x)}
    static = {name: x for name, x in options.items() if name not in leaves}

    def value(qkv, leaves):
        operands_and_bias = dict(leaves)
        if as_function:
            operands_and_bias["bias"] = slope_bias(operands_and_bias["bias"])
        o, lse = function(*qkv, mask, return_lse=True, **static, **operands_and_bias)
        rng = np.random.default_rng(2)
        wo, wl = (jnp.asarray(rng.standard_normal(x.shape).astype(jnp.float32)) for x in (o, lse))
        total = jnp.sum(o.astype(jnp.float32) * wo) + jnp.sum(jnp.where(jnp.isneginf(lse), jnp.float32(0), lse) * wl)
        return total, (o, lse)

    (_, outputs), gradients = jax.value_and_grad(value, (0, 1), has_aux=True)(tuple(qkv), leaves)
    return outputs, gradients


@pytest.mark.parametrize("is_unrolled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["scan", "unrolled"])
@pytest.mark.parametrize("mask", PATTERNS, ids=repr)
def test_patterns_match_reference(mask, is_unrolled):
    """In scans, over sub-masks where the mask has any; the unrolled form has no code for single patterns."""
    forms = executors(mask)
    functions = {form: f for form, f in forms.items() if (form == Form.UNROLLED.value) == is_unrolled}
    assert_forms_equal(lambda f, qkv: f(*qkv, mask, return_lse=True), mask, arrays(), functions=functions)


@pytest.mark.parametrize(
    ("mask", "forms"),
    [
        (sparse_transformer_fixed(6, 2), (Form.UNROLLED, Form.PERMUTED)),
        (Causal() & ~Strided(3) & UNEVEN | Window(1) & UNEVEN, Form),
        (~Full(), Form),
    ],
    ids=["fixed", "uneven", "none"],
)
def test_gradients_of_patterns_match_reference(mask, forms):
    assert_forms_equal(lambda f, qkv: scored(f, qkv, mask), mask, arrays(), functions=in_forms(*forms))


@pytest.mark.parametrize("empty", [GlobalAt(()), RandomBlocks(8, 0)], ids=repr)
def test_empty_patterns_match_reference(empty):
    """Alone, and as one term of a union."""
    union = Window(3) | empty
    assert_forms_equal(lambda f, qkv: [f(*qkv, mask, return_lse=True) for mask in (empty, union)], union, arrays())


# Masks and operands of the first tier, each with the form to compute it in; None for both, where no other test has one of them.
FIRST = {("longformer", "bias function"): Form.PERMUTED, ("causal", "positions"): Form.SCAN}
FIRST |= dict.fromkeys([("longformer", "all"), ("causal", "global places")])


def together():
    """Operands with a mask of several sub-masks and with an undivided one; cases that others include are slow tests."""
    cases = {("longformer", name): None for name in OPERANDS} | {("causal", "all"): Form.SCAN} | FIRST
    masks = {"longformer": longformer(8, 3), "causal": Causal()}
    marks = {case: [] if case in FIRST else [pytest.mark.slow] for case in cases}
    names = {case: ", ".join(case) for case in cases}
    return [
        pytest.param(masks[m], OPERANDS[n], form, id=names[m, n], marks=marks[m, n]) for (m, n), form in cases.items()
    ]


@pytest.mark.parametrize(("mask", "names", "form"), together())
def test_operands_match_reference(mask, names, form):
    options, as_function = operands(names), "function" in names
    undivided = not {"segment_ids", "kv_lengths", "sinks", "dropout", "soft_cap", "function"}.issuperset(names)
    functions = in_forms(form) if form else None
    value = lambda f, qkv: scored(f, qkv, mask, options, as_function)  # noqa: E731
    assert_forms_equal(value, mask, arrays(), undivided, functions)


@pytest.mark.parametrize(
    ("lengths", "mask"),
    [((53, 37), Window(5, 3) | Strided(4)), ((1, 53), Causal() & (Blockwise(5) | Global(2)))],
    ids=str,
)
def test_different_lengths_match_reference(lengths, mask):
    assert_forms_equal(lambda f, qkv: scored(f, qkv, mask), mask, arrays(*lengths))


def test_last_keys_of_residue_classes_match_reference():
    """71 tokens: two of the three classes have 24 tokens, which fill their tiles, and one has 23."""
    assert_forms_equal(lambda f, qkv: f(*qkv, Strided(3)), Strided(3), arrays(71))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_16_bit_results_match_reference(dtype):
    mask = sparse_transformer_strided(6)
    assert_forms_equal(lambda f, qkv: scored(f, qkv, mask), mask, arrays(dtype=dtype))


@pytest.mark.parametrize(
    ("mask", "names", "form"),
    [
        (sparse_transformer_fixed(6, 2, heads=4) & Window(9), ("sinks", "dropout"), Form.PERMUTED),
        (PerHead((Causal(), Window(3), Causal(), Full())), ("dense_by_head", "bias", "sinks", "dropout"), Form.SCAN),
    ],
    ids=["fixed", "mixed"],
)
def test_per_head_masks_match_reference(mask, names, form):
    """The forms share the division by heads, so that each mask runs in one of them."""
    options, as_function = operands(names), "function" in names
    value = lambda f, qkv: scored(f, qkv, mask, options, as_function)  # noqa: E731
    assert_forms_equal(value, mask, arrays(), functions=in_forms(form))


def test_user_functions_match_reference():
    mask = ~Strided(3) & Causal() & UNEVEN | Strided(7) & Where(lambda i, j: j < 9)
    assert_forms_equal(lambda f, qkv: f(*qkv, mask, return_lse=True), mask, arrays())


def test_nan_in_blocks_without_visible_pairs_is_not_read():
    """The mask hides keys from 30 on from every query: part of a block, and a whole block."""
    q, k, v = arrays()
    mask = bigbird(4, causal=True) & Where(lambda i, j: (j < 30) & (i == i))
    functions = executors(mask).values()
    run = jax.jit(lambda *qkv: [scored(f, qkv, mask) for f in functions], compiler_options=ONCE)
    clean, dirty = (run(q, k.at[:, 30:].set(value), v.at[:, 30:].set(value)) for value in (0.0, jnp.nan))
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(a, b)


def test_visible_nan_reaches_results():
    q, k, v = arrays()
    mask = Causal() & (Window(2) | Strided(5) | Sinks(1))
    functions = executors(mask).values()
    run = jax.jit(lambda k: [f(q, k, v, mask, return_lse=True) for f in functions], compiler_options=ONCE)
    sees = mask.to_dense(37)[:, 20]
    for (o, lse), clean in zip(run(k.at[0, 20, 0].set(jnp.nan)), run(k), strict=True):
        for x in (np.asarray(o), np.asarray(lse)):
            assert np.isnan(x[0, sees, :2]).all() and np.isfinite(x[0, ~sees]).all() and np.isfinite(x[0, :, 2:]).all()
            assert np.isfinite(x[1]).all()
        assert all(np.isnan(np.asarray(x)[0, sees, :2]).all() for x in merge((o, lse), clean))


@pytest.mark.slow
def test_rows_with_large_scores_match_reference():
    """One row is large in all its scores, as of padding, and one in half of them."""
    (q, k, v), mask = arrays(), Causal() & (Window(3) | Strided(5))

    def results(f, value):
        bias = jnp.zeros((1, 1, 37, 37)).at[..., 10, :].set(value).at[..., 20, 17:].set(value)
        row_bias = lambda head, i, j: jnp.where(i == 10, value, 0.0)  # noqa: E731
        by_function = jax.grad(lambda qkv: jnp.sin(f(*qkv, mask, bias=row_bias)).sum())((q, k, v))
        return scored(f, (q, k, v), mask, {"bias": bias}), by_function

    functions = [reference, *executors(mask).values()]
    run = jax.jit(lambda value: [results(f, value) for f in functions], compiler_options=ONCE)
    for value in (1e5, -1e9, float(np.finfo(np.float32).min)):
        expected, *actual = run(jnp.float32(value))
        for result in actual:
            assert_close(result, expected)


def test_padding_evaluates_a_bias_function_at_position_0():
    mask = Causal() & Strided(4)
    after = lambda x: x.astype(jnp.float32) + 1  # noqa: E731
    bias = lambda c: lambda head, i, j: c * jnp.log(after(i)) + c / after(j)  # noqa: E731
    value = lambda f, qkv: jax.grad(lambda c: f(*qkv, mask, bias=bias(c)).sum())(jnp.float32(0.3))  # noqa: E731
    assert_forms_equal(value, mask, arrays())


def test_sinks_of_minus_infinity_give_finite_gradients_in_empty_rows():
    options = {"sinks": jnp.array([0.0, -jnp.inf, 1.0, -jnp.inf]), "kv_lengths": jnp.array([0, 9])}
    functions = [reference, *executors(Causal()).values()]
    expected, *results = once(lambda qkv: [scored(f, qkv, Causal(), options) for f in functions], arrays())
    (o, _), gradients = expected
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    np.testing.assert_array_equal(o[0, :, 1], 0)
    for result in results:
        assert_close(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_are_float32_when_x64_is_enabled(dtype):
    """Sums are float32 whatever the default dtype is, in chunks of heads as well."""
    mask = Causal() & (Strided(4) | Window(2))
    with executor_with((cost_model, "STEP_SCORES", 200)), jax.enable_x64(True):
        rng = np.random.default_rng(0)
        qkv = [jnp.asarray(rng.standard_normal((2, 37, 4, 8)).astype(dtype)) for _ in range(3)]
        weights = jnp.cos(jnp.arange(37, dtype=jnp.float32))[None, :, None]

        def results(f, qkv):
            def score(*qkv):
                o, lse = f(*qkv, mask, return_lse=True)
                return jnp.sum(o.astype(jnp.float32) * weights[..., None]) + jnp.sum(lse * weights), (o, lse)

            return jax.value_and_grad(score, (0, 1, 2), has_aux=True)(*qkv)

        functions = [reference, *executors(mask).values()]
        expected, *actual = once(lambda qkv: [results(f, qkv) for f in functions], qkv)
        for result in actual:
            assert_close(result, expected)


def test_traced_scale_has_a_gradient():
    def value(f, qkv):
        return jax.value_and_grad(lambda scale: jnp.square(f(*qkv, Causal(), scale=scale)).sum())(jnp.float32(0.3))

    assert_forms_equal(value, Causal(), arrays())


@pytest.mark.slow
def test_second_derivatives_of_a_bias_match_reference():
    qkv = arrays(9)
    far = jnp.arange(9, dtype=jnp.float32)[:, None] - jnp.arange(9, dtype=jnp.float32)[None]

    def curvature(f):
        score = lambda c: jnp.square(f(*qkv, Full(), bias=c * far)).sum()  # noqa: E731
        return jax.grad(jax.grad(score))(jnp.float32(0.1))

    functions = [reference, *executors(Full(), (9, 9)).values()]
    expected, *results = once(lambda: [curvature(f) for f in functions])
    np.testing.assert_allclose(results, [expected] * len(results), rtol=1e-4)


def test_float16_gradients_under_loss_scaling_are_finite():
    q, k, v = (x * y for x, y in zip(arrays(8), (1.0, 0.01, 40.0), strict=True))
    qkv = [x.astype(jnp.float16) for x in (q, k, v)]
    score = lambda f: lambda q: (f(q, *qkv[1:], Full()).astype(jnp.float32) * 3e4).sum()  # noqa: E731
    functions = [reference, *executors(Full(), (8, 8)).values()]
    expected, *results = once(lambda q: [jax.grad(score(f))(q) for f in functions], qkv[0])
    assert np.isfinite(expected).all() and np.abs(expected).max() > 1e3
    for result in results:
        np.testing.assert_allclose(result, expected, rtol=0.02, atol=20)


def test_hidden_nan_in_a_bias_changes_nothing():
    functions = [reference, *executors(Causal()).values()]

    def results(bias):
        options = {"bias": bias}, {"bias": bias, "soft_cap": 2.0}
        return [[scored(f, arrays(), Causal(), operands) for operands in options] for f in functions]

    run = jax.jit(results, compiler_options=ONCE)
    bias = jnp.where(Causal().to_dense(37), operands(("bias",))["bias"], jnp.nan)
    expected = run(jnp.nan_to_num(bias))[0]
    for result in run(bias):
        assert_close(result, expected)


def test_integer_dtypes_give_equal_results():
    q, k, v = arrays()
    ids, places = np.sort(np.arange(74).reshape(2, 37) % 3, axis=1), np.array([[3, 36, -1], [0, 1, 2]])
    tokens = jnp.asarray(places, "int8")
    functions = executors(Causal()).values()

    def results(ids):
        return [f(q, k, v, Causal(), segment_ids=ids, global_tokens=tokens) for f in functions]

    for a, b in zip(
        *once(lambda *ids: [results(x) for x in ids], jnp.asarray(ids, "int8"), jnp.asarray(ids, "int32")), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def run_time_schedule(order, width=3, block=8):
    """A schedule of arrays: each of 5 query blocks has `width` key blocks, which data decide."""
    keys = jnp.argsort(order, axis=1)[:, :width].astype(jnp.int32)[:, None]
    keys = keys.at[2, 0, 1].set(-1)
    return BlockSchedule((TileGroup(jnp.arange(5, dtype=jnp.int32), keys, jnp.ones(5, bool)),), block, block)


def test_run_time_schedules_match_reference():
    qkv, options = arrays(), operands(("segment_ids", "bias", "dropout"))
    order = jnp.asarray(np.random.default_rng(4).standard_normal((5, 5)).astype(jnp.float32))

    def planned(q, k, v, mask, **options):
        return flash(q, k, v, mask, Operands(**options), schedule=run_time_schedule(order))

    active = np.zeros((5, 5), bool)
    for row, keys in enumerate(np.asarray(run_time_schedule(order).groups[0].keys)):
        active[row, [key for key in keys[0] if key >= 0]] = True
    dense = jnp.asarray(np.kron(active, np.ones((8, 8)))[:37, :37] > 0)

    def with_dense_mask(q, k, v, mask, **options):
        return reference(q, k, v, mask, dense_mask=dense, **options)

    options |= {"kv_segment_ids": options["segment_ids"]}
    run = lambda qkv: [scored(f, qkv, Causal(), options) for f in (planned, with_dense_mask)]  # noqa: E731
    assert_close(*once(run, qkv))


@pytest.mark.slow
def test_transformations_match_plain_call():
    """vmap over q of remat, and a shard_map over heads, with segments."""
    _, k, v = arrays()
    mask = sparse_transformer_strided(6)
    ids = operands(("segment_ids",))["segment_ids"]
    attention = in_forms(Form.PERMUTED)["permuted"]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P(None, None, "d")
    split = jax.shard_map(
        lambda q, k, v: attention(q, k, v, mask, segment_ids=ids),
        mesh=mesh,
        in_specs=(spec, spec, spec),
        out_specs=spec,
    )

    def results(q):
        gradient = lambda function: jax.grad(lambda q: jnp.sum(jnp.square(function(q))))  # noqa: E731
        whole = lambda q: attention(q, k, v, mask, segment_ids=ids)  # noqa: E731
        vmapped = jax.vmap(gradient(jax.checkpoint(whole)))(jnp.stack([q, -q]))[0]
        return vmapped, gradient(lambda q: split(q, k, v))(q), gradient(whole)(q)

    *transformed, plain = once(results, arrays()[0])
    assert_close(transformed, [plain] * 2)


@pytest.mark.slow
def test_chunks_of_heads_and_examples_match_reference():
    """Small tiles make the executor compute chunks of heads and examples after one another."""
    options = operands(("segment_ids", "bias_row", "dropout", "kv_lengths"))

    def results(qkv):
        yield scored(reference, qkv, Causal(), options)
        for tile, laid in ((200, 1 << 23), (1 << 20, 700)):
            with executor_with((cost_model, "STEP_SCORES", tile), (cost_model, "MAX_COPIED_ELEMENTS", laid)):
                yield scored(executors(Causal())["scan"], qkv, Causal(), options)

    expected, *actual = once(lambda qkv: list(results(qkv)), arrays())
    for result in actual:
        assert_close(result, expected)


def test_queries_that_see_nothing_have_zero_gradients():
    """NaN in them does not reach the gradients of keys, values and a scale that other queries have."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 24, heads, 8)).astype(jnp.float32)) for heads in (4, 2, 2))
    segments = jnp.asarray(np.arange(24) >= 20, jnp.int32)[None].repeat(2, axis=0)
    example, token, head = np.arange(2)[:, None, None], np.arange(24)[None, :, None], np.arange(4)[None, None, :]
    every_other = PerHead((Causal(), Causal().shift(-3)) * 2)
    cases = (
        (token >= 20, Causal(), {"segment_ids": segments, "kv_segment_ids": 9 * segments}),
        (token < 3, Causal().shift(-3), {}),  # known while tracing
        ((token < 3) & (head % 2 == 1), every_other, {}),
        (example == 0, Causal(), {"kv_lengths": jnp.array([0, 24], jnp.int32)}),
        (token == 5, Causal(), {"dense_mask": (jnp.arange(24) != 5)[None, None, :, None]}),
    )

    def gradients(value):
        results = []
        for blind, mask, operands in cases:

            def loss(q, k, v, scale, mask=mask, operands=operands):
                o, lse = attend(q, k, v, mask, scale=scale, return_lse=True, **operands, block_size=8)
                return (o**2).sum() + jnp.exp(lse).sum()

            dirty = jnp.where(jnp.asarray(blind)[..., None], value, q)
            results.append(jax.grad(loss, (0, 1, 2, 3))(dirty, k, v, jnp.float32(0.3)))
        return results

    run = jax.jit(gradients, compiler_options=ONCE)
    expected = run(jnp.float32(0.5))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
    for value in (jnp.nan, jnp.inf):
        for a, b in zip(jax.tree.leaves(run(jnp.float32(value))), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)
