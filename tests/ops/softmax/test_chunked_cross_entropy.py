"""The exact loss without the logits, against the logits, float64 and torch."""

from __future__ import annotations

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.measure import count_flops
from hpnlp.ops.softmax import linear_cross_entropy, merged_lse, partial_cross_entropy
from hpnlp.types import InputError
from tests.contracts import assert_close, assert_float16_has_gradients, once

OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "weights": {"weights": True},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.01},
    "soft_cap": {"soft_cap": 3.0},
    "temperature": {"temperature": 0.7},
    "all": {
        "bias": True,
        "weights": True,
        "label_smoothing": 0.2,
        "z_loss": 0.01,
        "soft_cap": 2.0,
        "temperature": 1.5,
    },
}
# N, V, D, words of a block: a divisor, none, one block, a prime, less than a block, one word, one token
SIZES = [(9, 40, 5, 8), (9, 43, 5, 8), (9, 43, 5, 43), (9, 43, 5, None), (4, 3, 2, 8), (4, 1, 2, None), (1, 7, 3, 2)]


def arrays(n=9, vocab=43, dim=5, dtype="float32", ignored=True):
    rng = np.random.default_rng(n * vocab)
    labels = rng.integers(0, vocab, n)
    labels[1::4] = -100 if ignored else labels[1::4]
    h, w = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((n, dim), (vocab, dim)))
    extra = {"bias": jnp.asarray(rng.standard_normal(vocab), jnp.float32)}
    extra["weights"] = jnp.asarray(rng.integers(0, 3, n), jnp.float32).at[0].set(1.5)
    return h, w, jnp.asarray(labels, jnp.int32), extra


def operands(options, extra):
    return {name: extra[name] if value is True else value for name, value in options.items()}


def exact(h, w, labels, *, reduction, bias=None, weights=None, **options):
    """The definition, a token at a time in float64."""
    smooth, z, cap, heat = (
        options.get(name, value)
        for name, value in (("label_smoothing", 0), ("z_loss", 0), ("soft_cap", None), ("temperature", 1))
    )
    h, w = (np.asarray(x, np.float64) for x in (h, w))
    found, factors = [], []
    for i, label in enumerate(np.asarray(labels)):
        s = h[i] @ w.T + (0 if bias is None else np.asarray(bias, np.float64))
        s = (s if cap is None else cap * np.tanh(s / cap)) / heat
        lse = np.log(np.exp(s - s.max()).sum()) + s.max()
        factors.append(0.0 if label == -100 else 1.0 if weights is None else float(weights[i]))
        target = (1 - smooth) * s[max(label, 0)] + smooth * s.mean()
        found.append(factors[-1] * (lse - target + z * lse**2))
    return {"none": np.array(found), "sum": sum(found), "mean": sum(found) / (sum(factors) or 1)}[reduction]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_the_definition(options, reduction):
    h, w, labels, extra = arrays()
    given = operands(options, extra) | {"reduction": reduction}
    for impl, block in (("auto", None), ("vocabulary", 8), ("tokens", 4), ("reference", None)):
        if impl == "tokens" and reduction == "none":
            continue
        loss = once(functools.partial(linear_cross_entropy, impl=impl, block_size=block, **given), h, w, labels)
        assert loss.dtype == jnp.float32
        np.testing.assert_allclose(loss, exact(h, w, labels, **given), rtol=2e-6, atol=1e-6)


def weighed(labels, options, **more):
    """The losses of all tokens, weighted at random, as a function of what has a gradient."""

    def loss(h, w, extra):
        each = linear_cross_entropy(h, w, labels, **operands(options, extra), reduction="none", **more)
        return jnp.sum(each * jnp.cos(jnp.arange(each.size, dtype=jnp.float32)))

    return loss


@pytest.mark.parametrize(("n", "vocab", "dim", "block"), SIZES, ids=str)
def test_gradients_for_any_cotangent_equal_those_of_the_logits(n, vocab, dim, block):
    h, w, labels, extra = arrays(n, vocab, dim)
    ours, twin = (
        once(jax.value_and_grad(weighed(labels, OPTIONS["all"], **more), (0, 1, 2)), h, w, extra)
        for more in ({"impl": "vocabulary", "block_size": block}, {"impl": "reference"})
    )
    assert_close(ours, twin)
    assert np.isfinite(ours[0]) and all(np.isfinite(x).all() for x in jax.tree.leaves(ours[1]))


def summed(labels, options, **more):
    """Something that is not linear in the loss, as a function of what has a gradient."""

    def loss(h, w, extra):
        reduction = "mean" if "weights" in options else "sum"
        return jnp.sin(linear_cross_entropy(h, w, labels, **operands(options, extra), reduction=reduction, **more))

    return loss


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize(("n", "vocab", "dim", "block"), SIZES, ids=str)
def test_gradients_made_along_with_the_loss_equal_those_of_the_logits(monkeypatch, n, vocab, dim, block, name):
    """In chunks that divide the tokens or do not, with blocks that divide the words or do not, and of nothing at all."""
    monkeypatch.setattr(sys.modules[linear_cross_entropy.__module__], "LOGITS", 30)
    monkeypatch.setattr(sys.modules[linear_cross_entropy.__module__], "SMALLEST", 4)
    h, w, labels, extra = arrays(n, vocab, dim)
    ours, twin = (
        once(jax.value_and_grad(summed(labels, OPTIONS[name], **more), (0, 1, 2)), h, w, extra)
        for more in ({"impl": "tokens", "block_size": block}, {"impl": "reference"})
    )
    assert_close(ours, twin)
    assert np.isfinite(ours[0]) and all(np.isfinite(x).all() for x in jax.tree.leaves(ours[1]))


def test_only_the_gradients_that_are_asked_for_are_made():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 16), (4096, 16))]
    labels = jnp.zeros(64, jnp.int32)
    loss = functools.partial(linear_cross_entropy, labels=labels, impl="tokens", block_size=16)
    products = lambda run: count_flops(jax.jit(run), *shapes) / (2 * 64 * 4096 * 16)  # noqa: E731
    assert products(loss) == pytest.approx(1, rel=0.01)
    assert products(jax.grad(loss)) == pytest.approx(2, rel=0.01)
    assert products(jax.grad(loss, 1)) == pytest.approx(2, rel=0.01)
    assert products(jax.grad(loss, (0, 1))) == pytest.approx(3, rel=0.01)


def test_no_token():
    h, w = jnp.ones((0, 3)), jnp.ones((5, 3))
    for more in ({}, {"impl": "vocabulary", "block_size": 2}):
        run = jax.value_and_grad(functools.partial(linear_cross_entropy, **more), (0, 1))
        found = once(run, h, w, jnp.zeros(0, jnp.int32))
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(found))


@pytest.mark.parametrize("name", ["plain", "all"])
def test_second_derivatives_of_chunks(name):
    h, w, labels, extra = arrays(3, 11, 2)
    along = jax.tree.map(jnp.sin, (h, w, extra))

    def everything(loss):
        slope = lambda *given: jax.jvp(loss, given, along)[1]  # noqa: E731
        return slope(h, w, extra), jax.grad(slope, (0, 1))(h, w, extra), jax.hessian(loss)(h, w, extra)

    ours, twin = (
        once(lambda more=more: everything(summed(labels, OPTIONS[name], **more)))
        for more in ({"impl": "tokens", "block_size": 2}, {"impl": "reference"})
    )
    assert_close(ours, twin)


@pytest.mark.parametrize("name", ["plain", "soft_cap", "all"])
def test_forward_mode_and_second_derivatives(name):
    options = OPTIONS[name]
    h, w, labels, extra = arrays(3, 11, 2)
    along = jax.tree.map(jnp.sin, (h, w, extra))

    def everything(loss):
        slope = lambda *given: jax.jvp(loss, given, along)[1]  # noqa: E731
        return slope(h, w, extra), jax.grad(slope, (0, 1))(h, w, extra), jax.hessian(loss)(h, w, extra)

    ours, twin = (
        once(lambda more=more: everything(weighed(labels, options, **more)))
        for more in ({"block_size": 4}, {"impl": "reference"})
    )
    assert_close(ours, twin)


@pytest.mark.parametrize("impl", ["tokens", "vocabulary"])
def test_vmap_over_each_argument(impl):
    h, w, labels, extra = arrays()
    given = (jnp.stack([h, -h]), w, labels, extra["bias"]), (h, jnp.stack([w, -w]), labels, extra["bias"])
    given += ((h, w, jnp.stack([labels, labels[::-1]]), extra["bias"]),)
    given += ((h, w, labels, jnp.stack([extra["bias"], -extra["bias"]])),)
    run = functools.partial(linear_cross_entropy, impl=impl, block_size=8)
    grads = jax.grad(lambda h, w, labels, bias: run(h, w, labels, bias=bias), (0, 1))
    for i, args in enumerate(given):
        axes = tuple(0 if i == at else None for at in range(4))
        found = once(jax.vmap(grads, axes), *args)
        apart = [once(grads, *(x[j] if i == at else x for at, x in enumerate(args))) for j in range(2)]
        assert_close(found, jax.tree.map(lambda *x: jnp.stack(x), *apart))


def test_statistics():
    h, w, labels, extra = arrays(ignored=False)

    def run(impl):
        options = {"impl": impl, "block_size": 8 if impl == "auto" else None, "return_stats": True}
        return lambda h, w: linear_cross_entropy(h, w, labels, bias=extra["bias"], **options)

    ours, twin = (once(run(impl), h, w) for impl in ("auto", "reference"))
    assert_close(ours, twin)
    s = np.asarray(h, np.float64) @ np.asarray(w, np.float64).T + np.asarray(extra["bias"])
    np.testing.assert_array_equal(ours[2], s.argmax(axis=1))
    np.testing.assert_allclose(ours[1], np.log(np.exp(s).sum(axis=1)), rtol=2e-6)
    slope = lambda impl: jax.grad(lambda h: jnp.sin(run(impl)(h, w)[1]).sum())  # noqa: E731
    assert_close(once(slope("auto"), h), once(slope("reference"), h))


@pytest.mark.parametrize("impl", ["tokens", "vocabulary"])
def test_a_confident_token_has_a_loss_and_a_gradient(impl):
    """As float64 has them: lse - logit and softmax - 1 would be 0."""
    h, w = jnp.array([[30.0]]), jnp.array([[1.0], [0.0], [-0.5]])
    run = functools.partial(linear_cross_entropy, impl=impl, block_size=2)
    loss, slope = once(jax.value_and_grad(lambda h: run(h, w, jnp.array([0]))), h)
    rest = np.exp(-30.0) + np.exp(-45.0)
    np.testing.assert_allclose(loss, np.log1p(rest), rtol=1e-6)
    np.testing.assert_allclose(slope[0, 0], (-np.exp(-30.0) - 1.5 * np.exp(-45.0)) / (1 + rest), rtol=1e-6)


@pytest.mark.parametrize("impl", ["tokens", "vocabulary"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_accumulate_in_float32(dtype, impl):
    """Many blocks, or chunks: a sum of their parts in 16 bits would be far off."""
    h, w, labels, _ = arrays(*((7, 3001) if impl == "vocabulary" else (601, 11)), 16, dtype)
    loss, (dh, dw) = once(
        jax.value_and_grad(functools.partial(linear_cross_entropy, impl=impl, block_size=8), (0, 1)), h, w, labels
    )
    assert (loss.dtype, dh.dtype, dw.dtype) == (jnp.float32, h.dtype, w.dtype)
    np.testing.assert_allclose(loss, exact(h, w, labels, reduction="mean"), rtol=1e-5)
    wide = [x.astype(jnp.float32) for x in (h, w)]
    expected = once(jax.grad(functools.partial(linear_cross_entropy, impl="reference"), (0, 1)), *wide, labels)
    for found, twin in zip((dh, dw), expected, strict=True):
        assert np.linalg.norm(np.asarray(found, np.float32) - twin) <= 0.01 * np.linalg.norm(twin)


@pytest.mark.parametrize("impl", ["tokens", "vocabulary"])
def test_means_over_many_tokens_have_gradients_in_float16(impl):
    """Of words that are no label, p / N is under the smallest float16, here by a factor as of 400,000 tokens."""
    h, w, _, _ = arrays(4096, 5000, 4)
    labels = jnp.arange(4096, dtype=jnp.int32) % 7
    slope = jax.grad(lambda h, w, labels: linear_cross_entropy(h, w, labels, impl=impl) / 100, 1)
    found, expected = once(slope, h.astype(jnp.float16), w, labels), once(slope, h, w, labels)
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)
    far = np.linalg.norm((found - expected)[7:]) / np.linalg.norm(expected[7:])
    assert far < 0.01


SMALL = {
    "tokens": {"impl": "tokens"},
    "vocabulary": {"impl": "vocabulary"},
    "blocks": {"block_size": 8},
    "reference": {"impl": "reference"},
}


@pytest.mark.parametrize("form", [*SMALL, "partial"])
def test_gradients_of_small_parts_in_float16(form):
    """Of a word, under the smallest float16; and of a block of words, of which all have much in common, few of its digits."""
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.standard_normal((64, 8)) * 0.1, jnp.float32)
    w = jnp.asarray(0.1 + 0.03 * rng.standard_normal((4096, 8)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 4096, 64), jnp.int32)

    def loss(h, w):
        weights = jnp.full(64, 1e-4)
        if form == "partial":
            lse, target, _ = partial_cross_entropy(h, w, labels, 0)
            return (weights * (lse - target)).sum()
        return linear_cross_entropy(h, w, labels, weights=weights, reduction="sum", **SMALL[form])

    assert_float16_has_gradients(loss, h, w)


def test_gradients_of_float32_parameters_under_sixteen_bit_activations():
    h, w, labels, _ = arrays(dtype="bfloat16")
    grads = once(jax.grad(linear_cross_entropy, (0, 1)), h, w.astype(jnp.float32), labels)
    assert (grads[0].dtype, grads[1].dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("impl", ["tokens", "vocabulary"])
def test_tokens_that_do_not_count_are_nothing(impl):
    """NaN there, any label there: neither the loss nor a gradient knows, and with no token left both are 0."""
    h, w, labels, extra = arrays()
    weights = extra["weights"].at[2].set(0.0)
    silent = (np.asarray(weights) == 0) | (np.asarray(labels) == -100)
    dirty = jnp.where(jnp.asarray(silent)[:, None], jnp.nan, h)
    run = jax.value_and_grad(
        lambda h, w, labels: linear_cross_entropy(h, w, labels, weights=weights, impl=impl, block_size=8), (0, 1)
    )
    clean = once(run, h, w, labels)
    for other in (labels, jnp.where(weights == 0, 10**6, labels)):
        for a, b in zip(jax.tree.leaves(once(run, dirty, w, other)), jax.tree.leaves(clean), strict=True):
            np.testing.assert_array_equal(a, b)
    nothing = once(jax.value_and_grad(linear_cross_entropy, (0, 1)), dirty, w, jnp.full_like(labels, -100))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(nothing))


@pytest.mark.parametrize("impl", ["tokens", "vocabulary", "reference"])
def test_a_word_that_is_ruled_out(impl):
    """Even that whose number stands for tokens that do not count."""
    h, w, _, _ = arrays(3, 11)
    bias, labels, weights = jnp.zeros(11).at[0].set(-jnp.inf), jnp.array([4, 7, 2]), jnp.array([1.0, 0.0, 2.0])
    run = lambda h, w, bias, weights: linear_cross_entropy(h, w, labels, bias=bias, weights=weights, impl=impl)  # noqa: E731
    loss, grads = once(jax.value_and_grad(run, (0, 1, 3)), h, w, bias, weights)
    assert np.isfinite(loss) and all(np.isfinite(x).all() for x in grads) and not np.asarray(grads[1][0]).any()


def test_a_label_that_is_no_word_is_nan_where_it_is_not_known():
    h, w, _, _ = arrays(3)
    for label in (43, -1):
        each = once(
            functools.partial(linear_cross_entropy, reduction="none", block_size=8), h, w, jnp.array([1, label, 2])
        )
        np.testing.assert_array_equal(np.isnan(each), [False, True, False])
        assert np.isnan(once(linear_cross_entropy, h, w, jnp.array([1, label, 2])))


@pytest.mark.parametrize("cuts", [(0, 20, 43), (0, 20, 30, 43), (0, 9, 20, 43)], ids=str)
@pytest.mark.parametrize("ruled_out", [slice(20), slice(20, None)], ids=["first", "last"])
@pytest.mark.parametrize("label", [19, 20])
def test_slices_of_words_that_are_ruled_out(cuts, ruled_out, label):
    """As padding to a multiple of the devices, which may fill several; and where a label is one of them."""
    h, w, labels, extra = arrays(ignored=False)
    bias = extra["bias"].at[ruled_out].set(-jnp.inf)
    labels = jnp.where(jnp.isneginf(bias[labels]), label, labels)

    def merged(h, w, bias):
        slices = list(zip(cuts, cuts[1:], strict=False))
        parts = [partial_cross_entropy(h, w[a:b], labels, a, bias=bias[a:b]) for a, b in slices]
        return (merged_lse(*(part[0] for part in parts)) - sum(part[1] for part in parts)).mean()

    whole = lambda h, w, bias: linear_cross_entropy(h, w, labels, bias=bias)  # noqa: E731
    found, expected = (once(jax.value_and_grad(f, (0, 1, 2)), h, w, bias) for f in (merged, whole))
    assert_close(found, expected)
    assert all(np.isfinite(x).all() for x in found[1])


@pytest.mark.parametrize("cuts", [(0, 43), (0, 7, 43), (0, 1, 20, 42, 43)], ids=str)
def test_slices_merge(cuts):
    h, w, labels, extra = arrays(ignored=False)
    options = {"soft_cap": 3.0, "temperature": 0.8}

    def merged(h, w):
        parts = [
            partial_cross_entropy(h, w[a:b], labels, a, bias=extra["bias"][a:b], **options)
            for a, b in zip(cuts, cuts[1:], strict=False)
        ]
        lse = merged_lse(*(part[0] for part in parts))
        target, total = (sum(part[i] for part in parts) for i in (1, 2))
        return (0.9 * (lse - target) + 0.1 * (lse - total / 43)).mean()

    whole = functools.partial(
        linear_cross_entropy, bias=extra["bias"], label_smoothing=0.1, impl="reference", **options
    )
    found = once(jax.value_and_grad(merged, (0, 1)), h, w)
    assert_close(found, once(jax.value_and_grad(lambda h, w: whole(h, w, labels), (0, 1)), h, w))


def test_over_eight_devices(monkeypatch):
    """The vocabulary or the tokens on a manual axis, or on one that the compiler divides."""
    monkeypatch.setattr(sys.modules[linear_cross_entropy.__module__], "LOGITS", 16 * 16)
    h, w, labels, _ = arrays(16, 1024, ignored=False)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, cut = jax.P(), jax.P("d")
    grads = lambda f: jax.value_and_grad(lambda h, w: f(h, w, labels), (0, 1))  # noqa: E731
    expected = once(grads(functools.partial(linear_cross_entropy, impl="reference")), h, w)

    def by_words(h, w, labels):
        lse, target, _ = partial_cross_entropy(h, w, labels, jax.lax.axis_index("d") * w.shape[0])
        top = jax.lax.pmax(jax.lax.stop_gradient(lse), "d")
        lse = jnp.log(jax.lax.psum(jnp.exp(lse - top), "d")) + top
        return (lse - jax.lax.psum(target, "d")).mean()

    def by_tokens(h, w, labels):
        return jax.lax.pmean(linear_cross_entropy(h, w, labels), "d")

    for function, specs in ((by_words, (whole, cut, whole)), (by_tokens, (cut, whole, cut))):
        apart = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=whole)
        assert_close(once(grads(apart), h, w), expected)
        placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip((h, w), specs, strict=False)]
        assert_close(once(grads(linear_cross_entropy), *placed), expected)


def sizes(tokens, vocab, dim, compiled=True, **options):
    shapes = (tokens, dim), (vocab, dim)
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes] + [
        jax.ShapeDtypeStruct((tokens,), jnp.int32)
    ]
    run = jax.jit(jax.grad(functools.partial(linear_cross_entropy, **options), (0, 1)))
    return run, given, run.lower(*given).compile().memory_analysis().temp_size_in_bytes if compiled else None


def test_memory_is_that_of_two_blocks_and_not_of_the_vocabulary():
    _, _, small = sizes(1024, 32768, 64, impl="vocabulary")
    _, _, large = sizes(1024, 131072, 64, impl="vocabulary")
    assert large < 1.1 * small < 3 * 1024 * 4096 * 4 < sizes(1024, 32768, 64, impl="reference")[2] / 2


def test_memory_is_that_of_a_chunk_and_not_of_the_tokens():
    options = {"impl": "tokens", "block_size": 128}
    _, _, small = sizes(256, 131072, 16, **options)
    _, _, large = sizes(1024, 131072, 16, **options)
    assert large - small < 4 * 768 * 16 * 4  # copies of h
    assert small < (128 * 131072 + 4 * 2**22) * 4


def test_without_gradients_memory_is_that_of_a_block():
    """Of all tokens by some words, in either form."""
    for impl in ("tokens", "vocabulary"):
        given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 8), (32768, 8))]
        given.append(jax.ShapeDtypeStruct((4096,), jnp.int32))
        program = jax.jit(functools.partial(linear_cross_entropy, impl=impl)).lower(*given).compile()
        assert program.memory_analysis().temp_size_in_bytes < 3 * 2**22 * 4


def test_auto_takes_chunks_while_they_are_worth_it():
    """By what is left of the vocabulary's size in the memory: three products while a chunk of tokens fits, else four."""
    for tokens, vocab, products in ((4096, 50_000, 3), (4096, 262_144, 4), (64, 262_144, 3), (64, 2**23, 4)):
        run, given, _ = sizes(tokens, vocab, 2, compiled=False)
        assert count_flops(run, *given) == pytest.approx(2 * products * tokens * vocab * 2, rel=0.05)


def test_four_products():
    run, given, _ = sizes(64, 4096, 16, impl="vocabulary", block_size=256)
    assert count_flops(run, *given) == pytest.approx(8 * 64 * 4096 * 16, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"w": jnp.ones((0, 5))}, "empty"),
        ({"labels": jnp.full(9, 43)}, "label is 43: expected 0 to 42"),
        ({"labels": jnp.full(9, -1)}, "label is -1"),
        ({"reduction": "avg"}, "mean, sum, none"),
        ({"impl": "fast"}, "auto, tokens, vocabulary"),
        ({"impl": "tokens", "reduction": "none"}, "'none' and return_stats take 'vocabulary'"),
        ({"label_smoothing": 1.5}, "0 to 1"),
        ({"soft_cap": 0.0}, "soft_cap"),
        ({"temperature": 0.0}, "over 0"),
        ({"block_size": 0}, "at least 1, or None"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said(changes, told):
    h, w, labels, _ = arrays()
    given = {"h": h, "w": w, "labels": labels} | changes
    with pytest.raises(InputError, match=told):
        linear_cross_entropy(**given)


def test_shapes_that_do_not_fit_are_said_where_no_checker_runs():
    """Beartype, which checks annotations while tests run, would speak first."""
    program = """
import jax.numpy as jnp
from hpnlp.ops.softmax import linear_cross_entropy
from hpnlp.types import InputError
h, w, labels = jnp.ones((9, 5)), jnp.ones((43, 5)), jnp.ones(9, jnp.int32)
wrong = {"h": h[:, :4]}, {"h": h[None]}, {"labels": labels[1:]}, {"labels": h[:, 0]}, {"bias": h[:, 0]}, {"weights": w[:, 0]}
for changes in wrong:
    try:
        linear_cross_entropy(**({"h": h, "w": w, "labels": labels} | changes))
    except InputError as error:
        print(error)
"""
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    expected = (
        "h (9, 4), w (43, 5)", "flatten tokens", "labels has shape (8,): expected (9,)", "expected integers",
        "bias has shape (9,): expected (43,)", "weights has shape (43,)",
    )  # fmt: skip
    for line, words in zip(told, expected, strict=True):
        assert words in line


@pytest.mark.oracle
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_equals_torch(reduction, smoothing):
    import torch
    import torch.nn.functional as F

    h, w, labels, extra = arrays(33, 101, 16)
    turned = [torch.from_numpy(np.array(x)).requires_grad_() for x in (h, w, extra["bias"])]
    theirs = F.cross_entropy(
        F.linear(turned[0], turned[1], turned[2]),
        torch.from_numpy(np.array(labels)).long(),
        reduction=reduction,
        label_smoothing=smoothing,
    )
    cotangent = np.cos(np.arange(33, dtype=np.float32)) if reduction == "none" else np.float32(1.7)
    theirs.backward(torch.tensor(cotangent))

    def ours(h, w, bias):
        return linear_cross_entropy(
            h, w, labels, bias=bias, reduction=reduction, label_smoothing=smoothing, block_size=16
        )

    loss, pull = jax.vjp(jax.jit(ours), h, w, extra["bias"])
    np.testing.assert_allclose(loss, theirs.detach().numpy(), rtol=2e-6, atol=2e-6)
    for mine, other in zip(pull(jnp.asarray(cotangent)), turned, strict=True):
        np.testing.assert_allclose(mine, other.grad.numpy(), atol=1e-5)
