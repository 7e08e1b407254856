"""The chunked cross-entropy against the loss from all logits, float64 and torch."""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.measure import count_flops
from hpnlp.ops.softmax import linear_cross_entropy, merged_lse, partial_cross_entropy
from tests.contracts import ONCE, assert_close, assert_float16_has_gradients, once
from tests.messages import raises

OPTIONS = {
    "plain": {},
    "all": {"bias": True, "weights": True, "label_smoothing": 0.2, "z_loss": 0.01, "soft_cap": 2.0, "temperature": 1.5},
}
# (N, V, D, block size): no divisor of V, one word, one token, a block over V
SIZES = [(9, 43, 5, 8), (4, 1, 2, None), (1, 7, 3, 2), (4, 3, 2, 8)]


def arrays(n=9, vocab=43, dim=5, dtype="float32", ignored=True):
    rng = np.random.default_rng(n * vocab)
    labels = rng.integers(0, vocab, n)
    labels[1::4] = -100 if ignored else labels[1::4]
    h, w = (jnp.asarray(rng.standard_normal(shape).astype(dtype)) for shape in ((n, dim), (vocab, dim)))
    extra = {"bias": jnp.asarray(rng.standard_normal(vocab).astype(jnp.float32))}
    extra["weights"] = jnp.asarray(rng.integers(0, 3, n).astype(jnp.float32)).at[0].set(1.5)
    return h, w, jnp.asarray(labels, jnp.int32), extra


def select_operands(options, extra):
    return {name: extra[name] if value is True else value for name, value in options.items()}


def definition(h, w, labels, *, reduction, bias=None, weights=None, **options):
    """The losses from their definition, one token at a time in float64."""
    smooth, z, cap, heat = (
        options.get(name, value)
        for name, value in (("label_smoothing", 0), ("z_loss", 0), ("soft_cap", None), ("temperature", 1))
    )
    h, w = (np.asarray(x, np.float64) for x in (h, w))
    losses, factors = [], []
    for i, label in enumerate(np.asarray(labels)):
        s = h[i] @ w.T + (0 if bias is None else np.asarray(bias, np.float64))
        s = (s if cap is None else cap * np.tanh(s / cap)) / heat
        lse = np.log(np.exp(s - s.max()).sum()) + s.max()
        factors.append(0.0 if label == -100 else 1.0 if weights is None else float(weights[i]))
        target = (1 - smooth) * s[max(label, 0)] + smooth * s.mean()
        losses.append(factors[-1] * (lse - target + z * lse**2))
    return {"none": np.array(losses), "sum": sum(losses), "mean": sum(losses) / (sum(factors) or 1)}[reduction]


def by_tier(names, first):
    """The names as parameters of a test, of which all but the first tier's are slow: the others include them."""
    return [pytest.param(name, marks=[] if name in first else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize("name", OPTIONS)
def test_matches_definition(name):
    """All implementations and reductions in one program."""
    h, w, labels, extra = arrays()
    arguments = select_operands(OPTIONS[name], extra)
    cases = [
        {"impl": impl, "block_size": block, "reduction": reduction}
        for impl, block in (("auto", None), ("vocabulary", 8), ("tokens", 4), ("reference", None))
        for reduction in ("mean", "sum", "none")
        if (impl, reduction) != ("tokens", "none")
    ]
    losses = once(lambda h, w: [linear_cross_entropy(h, w, labels, **arguments, **case) for case in cases], h, w)
    for case, loss in zip(cases, losses, strict=True):
        expected = definition(h, w, labels, **arguments, reduction=case["reduction"])
        assert loss.dtype == jnp.float32
        np.testing.assert_allclose(loss, expected, rtol=2e-6, atol=1e-6, err_msg=str(case))


def assert_gradients_equal(make_loss, options, *arguments):
    """Value and gradients of `make_loss(**options)` are finite and equal those of the reference."""
    losses = make_loss(**options), make_loss(impl="reference")
    ours, reference = once(lambda *a: [jax.value_and_grad(loss, (0, 1, 2))(*a) for loss in losses], *arguments)
    assert_close(ours, reference)
    assert np.isfinite(ours[0]) and all(np.isfinite(x).all() for x in jax.tree.leaves(ours[1]))


def weighted_loss(labels, options, **more):
    """A function of the differentiable arguments: the sum of the losses with weights of both signs."""

    def loss(h, w, extra):
        losses = linear_cross_entropy(h, w, labels, **select_operands(options, extra), reduction="none", **more)
        return jnp.sum(losses * jnp.cos(jnp.arange(losses.size, dtype=jnp.float32)))

    return loss


@pytest.mark.parametrize(
    ("n", "vocab", "dim", "block"),
    [pytest.param(*size, marks=[] if size in SIZES[:3] else [pytest.mark.slow]) for size in SIZES],
    ids=str,
)
def test_vocabulary_blocks_gradients_match_reference(n, vocab, dim, block):
    h, w, labels, extra = arrays(n, vocab, dim)
    loss = functools.partial(weighted_loss, labels, OPTIONS["all"])
    assert_gradients_equal(loss, {"impl": "vocabulary", "block_size": block}, h, w, extra)


def nonlinear_loss(labels, options, **more):
    """A function of the differentiable arguments that is not linear in the loss."""

    def loss(h, w, extra):
        reduction = "mean" if "weights" in options else "sum"
        return jnp.sin(
            linear_cross_entropy(h, w, labels, **select_operands(options, extra), reduction=reduction, **more)
        )

    return loss


@pytest.mark.parametrize(
    ("n", "vocab", "dim", "block", "name"),
    [
        (9, 40, 5, 8, "plain"),
        (*SIZES[0], "all"),
        (*SIZES[3], "all"),
        pytest.param(*SIZES[1], "all", marks=pytest.mark.slow),
    ],
)
def test_token_chunks_gradients_match_reference(monkeypatch, n, vocab, dim, block, name):
    """Chunks divide the tokens or not, and blocks divide the words or not."""
    monkeypatch.setattr(sys.modules[linear_cross_entropy.__module__], "BLOCK_LOGITS", 30)
    monkeypatch.setattr(sys.modules[linear_cross_entropy.__module__], "MIN_BLOCK_WORDS", 4)
    h, w, labels, extra = arrays(n, vocab, dim)
    loss = functools.partial(nonlinear_loss, labels, OPTIONS[name])
    assert_gradients_equal(loss, {"impl": "tokens", "block_size": block}, h, w, extra)


@pytest.mark.parametrize(("tokens", "vocab", "chunk"), [(48, 11, 24), (40, 11, 23), (48, 90, 4)])
def test_sizes_for_accelerators_match_reference(monkeypatch, tokens, vocab, chunk):
    """Chunks are the largest aligned divisor of the tokens, else as large as fits; larger vocabularies are divided."""
    module = sys.modules[linear_cross_entropy.__module__]
    monkeypatch.setattr(module, "ACCELERATOR_BLOCK_LOGITS", 960)
    monkeypatch.setattr(module, "MIN_BLOCK_WORDS", 4)
    monkeypatch.setattr(module, "ACCELERATOR_CHUNK_LOGITS", 23 * 11 if tokens == 40 else 30 * 11)
    monkeypatch.setattr(module, "ACCELERATOR_CHUNK_TOKENS", 16)
    monkeypatch.setattr(module, "ACCELERATOR_ALIGNMENT", 4 if tokens == 48 else 7)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    sizes = module._chunk_sizes(tokens, vocab, None)
    assert sizes == ((chunk, vocab, True) if vocab == 11 else (3, vocab, False))
    h, w, labels, extra = arrays(tokens, vocab, 5)
    assert_gradients_equal(functools.partial(nonlinear_loss, labels, OPTIONS["all"]), {}, h, w, extra)


def test_unused_gradients_are_not_computed():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 16), (4096, 16))]
    labels = jnp.zeros(64, jnp.int32)
    loss = functools.partial(linear_cross_entropy, labels=labels, impl="tokens", block_size=16)
    products = lambda run: count_flops(jax.jit(run), *shapes) / (2 * 64 * 4096 * 16)  # noqa: E731
    assert products(loss) == pytest.approx(1, rel=0.01)
    assert products(jax.grad(loss)) == pytest.approx(2, rel=0.01)
    assert products(jax.grad(loss, 1)) == pytest.approx(2, rel=0.01)
    assert products(jax.grad(loss, (0, 1))) == pytest.approx(3, rel=0.01)


def test_no_tokens():
    h, w = jnp.ones((0, 3)), jnp.ones((5, 3))
    for more in ({}, {"impl": "vocabulary", "block_size": 2}):
        run = jax.value_and_grad(functools.partial(linear_cross_entropy, **more), (0, 1))
        actual = once(run, h, w, jnp.zeros(0, jnp.int32))
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(actual))


@pytest.mark.parametrize(
    ("impl", "make_loss", "block"),
    [("tokens", nonlinear_loss, 2), pytest.param("vocabulary", weighted_loss, 4, marks=pytest.mark.slow)],
)
def test_second_derivatives_match_reference(impl, make_loss, block):
    h, w, labels, extra = arrays(3, 11, 2)
    along = jax.tree.map(np.sin, (h, w, extra))

    def everything(loss):
        slope = lambda *arguments: jax.jvp(loss, arguments, along)[1]  # noqa: E731
        return slope(h, w, extra), jax.grad(slope, (0, 1))(h, w, extra), jax.hessian(loss)(h, w, extra)

    forms = {"impl": impl, "block_size": block}, {"impl": "reference"}
    assert_close(*once(lambda: [everything(make_loss(labels, OPTIONS["all"], **form)) for form in forms]))


@pytest.mark.parametrize("impl", ["tokens", "vocabulary"])
def test_vmap_over_each_argument_matches_loop(impl):
    h, w, labels, extra = arrays()
    arguments = (jnp.stack([h, -h]), w, labels, extra["bias"]), (h, jnp.stack([w, -w]), labels, extra["bias"])
    arguments += ((h, w, jnp.stack([labels, labels[::-1]]), extra["bias"]),)
    arguments += ((h, w, labels, jnp.stack([extra["bias"], -extra["bias"]])),)
    run = functools.partial(linear_cross_entropy, impl=impl, block_size=8)
    grads = jax.grad(lambda h, w, labels, bias: run(h, w, labels, bias=bias), (0, 1))
    single = jax.jit(grads, compiler_options=ONCE)
    axes = [tuple(0 if i == at else None for at in range(4)) for i in range(4)]
    of_all = once(
        lambda arguments: [jax.vmap(grads, at)(*args) for at, args in zip(axes, arguments, strict=True)], arguments
    )
    for at, args, mapped in zip(axes, jax.device_get(arguments), of_all, strict=True):
        each = [single(*(x if axis is None else x[j] for axis, x in zip(at, args, strict=True))) for j in range(2)]
        assert_close(mapped, jax.tree.map(lambda *x: np.stack(x), *each))


def test_statistics_match_reference():
    h, w, labels, extra = arrays(ignored=False)

    def run(impl):
        options = {"impl": impl, "block_size": 8 if impl == "auto" else None, "return_stats": True}
        return lambda h, w: linear_cross_entropy(h, w, labels, bias=extra["bias"], **options)

    slope = lambda impl: jax.grad(lambda h: jnp.sin(run(impl)(h, w)[1]).sum())  # noqa: E731
    impls = "auto", "reference"
    (ours, slopes), expected = once(lambda h, w: [(run(impl)(h, w), slope(impl)(h)) for impl in impls], h, w)
    assert_close((ours, slopes), expected)
    s = np.asarray(h, np.float64) @ np.asarray(w, np.float64).T + np.asarray(extra["bias"])
    np.testing.assert_array_equal(ours[2], s.argmax(axis=1))
    np.testing.assert_allclose(ours[1], np.log(np.exp(s).sum(axis=1)), rtol=2e-6)


@pytest.mark.parametrize("impl", ["tokens", "vocabulary"])
def test_confident_token_keeps_loss_and_gradient(impl):
    """Values match float64; lse - logit and softmax - 1 would round to 0."""
    h, w = jnp.array([[30.0]]), jnp.array([[1.0], [0.0], [-0.5]])
    run = functools.partial(linear_cross_entropy, impl=impl, block_size=2)
    loss, slope = once(jax.value_and_grad(lambda h: run(h, w, jnp.array([0]))), h)
    others_sum = np.exp(-30.0) + np.exp(-45.0)
    np.testing.assert_allclose(loss, np.log1p(others_sum), rtol=1e-6)
    np.testing.assert_allclose(slope[0, 0], (-np.exp(-30.0) - 1.5 * np.exp(-45.0)) / (1 + others_sum), rtol=1e-6)


@pytest.mark.parametrize("impl", ["tokens", "vocabulary"])
@pytest.mark.parametrize("dtype", by_tier(["bfloat16", "float16"], ("bfloat16",)))
def test_sixteen_bits_accumulate_in_float32(dtype, impl):
    """There are many blocks or chunks; a sum of their contributions in 16 bits would be inaccurate."""
    h, w, labels, _ = arrays(*((7, 3001) if impl == "vocabulary" else (601, 11)), 16, dtype)
    loss, (dh, dw) = once(
        jax.value_and_grad(functools.partial(linear_cross_entropy, impl=impl, block_size=8), (0, 1)), h, w, labels
    )
    assert (loss.dtype, dh.dtype, dw.dtype) == (jnp.float32, h.dtype, w.dtype)
    np.testing.assert_allclose(loss, definition(h, w, labels, reduction="mean"), rtol=1e-5)
    wide = [x.astype(jnp.float32) for x in (h, w)]
    expected = once(jax.grad(functools.partial(linear_cross_entropy, impl="reference"), (0, 1)), *wide, labels)
    for actual, reference in zip((dh, dw), expected, strict=True):
        assert np.linalg.norm(np.asarray(actual, np.float32) - reference) <= 0.01 * np.linalg.norm(reference)


SMALL = {
    "tokens": {"impl": "tokens"},
    "vocabulary": {"impl": "vocabulary"},
    "blocks": {"block_size": 8},
    "reference": {"impl": "reference"},
}


@pytest.mark.parametrize("form", by_tier([*SMALL, "partial"], ("tokens", "partial")))
def test_small_gradients_do_not_underflow_in_float16(form):
    """Gradients of a word are under the smallest float16, and those of a block of similar words would lose digits."""
    rng = np.random.default_rng(0)
    h = jnp.asarray((rng.standard_normal((64, 8)) * 0.1).astype(jnp.float32))
    w = jnp.asarray((0.1 + 0.03 * rng.standard_normal((4096, 8))).astype(jnp.float32))
    labels = jnp.asarray(rng.integers(0, 4096, 64).astype(jnp.int32))

    def loss(h, w):
        weights = jnp.full(64, 1e-4)
        if form == "partial":
            lse, target, _ = partial_cross_entropy(h, w, labels, 0)
            return (weights * (lse - target)).sum()
        mean = linear_cross_entropy(h, w, labels, weights=weights / weights.sum(), **SMALL[form])
        return weights.sum() * mean

    assert_float16_has_gradients(loss, h, w)


def test_gradients_keep_the_dtype_of_each_operand():
    h, w, labels, _ = arrays(dtype="bfloat16")
    grads = once(jax.grad(linear_cross_entropy, (0, 1)), h, w.astype(jnp.float32), labels)
    assert (grads[0].dtype, grads[1].dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("impl", ["tokens", "vocabulary"])
def test_ignored_tokens_do_not_contribute(impl):
    """NaN states and invalid labels of such tokens change nothing; with no token left, loss and gradients are 0."""
    h, w, labels, extra = arrays()
    weights = extra["weights"].at[2].set(0.0)
    silent = (np.asarray(weights) == 0) | (np.asarray(labels) == -100)
    dirty = jnp.where(jnp.asarray(silent)[:, None], jnp.nan, h)
    loss = lambda h, w, labels: linear_cross_entropy(h, w, labels, weights=weights, impl=impl, block_size=8)  # noqa: E731
    run = jax.jit(jax.value_and_grad(loss, (0, 1)), compiler_options=ONCE)
    clean = run(h, w, labels)
    for other in (labels, jnp.where(weights == 0, 10**6, labels)):
        for a, b in zip(jax.tree.leaves(run(dirty, w, other)), jax.tree.leaves(clean), strict=True):
            np.testing.assert_array_equal(a, b)
    nothing = run(dirty, w, jnp.full_like(labels, -100))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(nothing))


@pytest.mark.parametrize("impl", ["tokens", "vocabulary", "reference"])
def test_word_with_bias_of_minus_infinity(impl):
    """Word 0 is the label that ignored tokens get."""
    h, w, _, _ = arrays(3, 11)
    bias, labels, weights = jnp.zeros(11).at[0].set(-jnp.inf), jnp.array([4, 7, 2]), jnp.array([1.0, 0.0, 2.0])
    run = lambda h, w, bias, weights: linear_cross_entropy(h, w, labels, bias=bias, weights=weights, impl=impl)  # noqa: E731
    loss, grads = once(jax.value_and_grad(run, (0, 1, 3)), h, w, bias, weights)
    assert np.isfinite(loss) and all(np.isfinite(x).all() for x in grads) and not np.asarray(grads[1][0]).any()


def test_traced_invalid_labels_give_nan():
    h, w, _, _ = arrays(3)

    def both(labels):
        blocks = linear_cross_entropy(h, w, labels, reduction="none", block_size=8)
        return blocks, linear_cross_entropy(h, w, labels)

    losses, means = once(jax.vmap(both), jnp.array([[1, 43, 2], [1, -1, 2]]))
    np.testing.assert_array_equal(np.isnan(losses), [[False, True, False]] * 2)
    assert np.isnan(means).all()


@pytest.mark.parametrize("cuts", [(0, 20, 43), (0, 9, 20, 43)], ids=str)
def test_slices_with_bias_of_minus_infinity_merge(cuts):
    """As for words that pad the vocabulary to a multiple of the devices, and may fill several slices; also as labels."""
    h, w, all_labels, extra = arrays(ignored=False)

    def merged(h, w, bias, labels):
        slices = list(zip(cuts, cuts[1:], strict=False))
        statistics = [partial_cross_entropy(h, w[a:b], labels, a, bias=bias[a:b]) for a, b in slices]
        return (merged_lse(*(part[0] for part in statistics)) - sum(part[1] for part in statistics)).mean()

    def full_loss(h, w, bias, labels):
        return linear_cross_entropy(h, w, labels, bias=bias)

    def both(*arguments):
        return [jax.value_and_grad(loss, (0, 1, 2))(*arguments) for loss in (merged, full_loss)]

    run = jax.jit(both, compiler_options=ONCE)
    for ruled_out, label in itertools.product((slice(20), slice(20, None)), (19, 20)):
        bias = extra["bias"].at[ruled_out].set(-jnp.inf)
        actual, expected = run(h, w, bias, jnp.where(jnp.isneginf(bias[all_labels]), label, all_labels))
        assert_close(actual, expected)
        assert all(np.isfinite(x).all() for x in actual[1])


@pytest.mark.parametrize("cuts", [(0, 43), (0, 1, 42, 43)], ids=str)
def test_slices_merge_to_the_full_loss(cuts):
    h, w, labels, extra = arrays(ignored=False)
    options = {"soft_cap": 3.0, "temperature": 0.8}

    def merged(h, w):
        statistics = [
            partial_cross_entropy(h, w[a:b], labels, a, bias=extra["bias"][a:b], **options)
            for a, b in zip(cuts, cuts[1:], strict=False)
        ]
        lse = merged_lse(*(part[0] for part in statistics))
        target, total = (sum(part[i] for part in statistics) for i in (1, 2))
        return (0.9 * (lse - target) + 0.1 * (lse - total / 43)).mean()

    full_loss = functools.partial(
        linear_cross_entropy, bias=extra["bias"], label_smoothing=0.1, impl="reference", **options
    )
    losses = merged, lambda h, w: full_loss(h, w, labels)
    assert_close(*once(lambda h, w: [jax.value_and_grad(loss, (0, 1))(h, w) for loss in losses], h, w))


@pytest.mark.slow
def test_eight_devices_match_one(monkeypatch):
    """The vocabulary or the tokens are on a manual axis, or on an automatic one."""
    monkeypatch.setattr(sys.modules[linear_cross_entropy.__module__], "BLOCK_LOGITS", 16 * 16)
    h, w, labels, _ = arrays(16, 1024, ignored=False)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated, cut = jax.P(), jax.P("d")
    grads = lambda f: jax.value_and_grad(lambda h, w: f(h, w, labels), (0, 1))  # noqa: E731
    expected = once(grads(functools.partial(linear_cross_entropy, impl="reference")), h, w)

    def by_words(h, w, labels):
        lse, target, _ = partial_cross_entropy(h, w, labels, jax.lax.axis_index("d") * w.shape[0])
        top = jax.lax.pmax(jax.lax.stop_gradient(lse), "d")
        lse = jnp.log(jax.lax.psum(jnp.exp(lse - top), "d")) + top
        return (lse - jax.lax.psum(target, "d")).mean()

    def by_tokens(h, w, labels):
        return jax.lax.pmean(linear_cross_entropy(h, w, labels), "d")

    for function, specs in ((by_words, (replicated, cut, replicated)), (by_tokens, (cut, replicated, cut))):
        apart = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=replicated)
        assert_close(once(grads(apart), h, w), expected)
        placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip((h, w), specs, strict=False)]
        assert_close(once(grads(linear_cross_entropy), *placed), expected)


def program_and_temp_size(tokens, vocab, dim, compiled=True, **options):
    shapes = (tokens, dim), (vocab, dim)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes] + [
        jax.ShapeDtypeStruct((tokens,), jnp.int32)
    ]
    run = jax.jit(jax.grad(functools.partial(linear_cross_entropy, **options), (0, 1)))
    return run, arguments, run.lower(*arguments).compile().memory_analysis().temp_size_in_bytes if compiled else None


def test_vocabulary_blocks_memory_does_not_grow_with_the_vocabulary():
    _, _, small = program_and_temp_size(1024, 32768, 64, impl="vocabulary")
    _, _, large = program_and_temp_size(1024, 131072, 64, impl="vocabulary")
    assert large < 1.1 * small < 3 * 1024 * 4096 * 4 < program_and_temp_size(1024, 32768, 64, impl="reference")[2] / 2


def test_token_chunks_memory_does_not_grow_with_the_tokens():
    options = {"impl": "tokens", "block_size": 128}
    _, _, small = program_and_temp_size(256, 131072, 16, **options)
    _, _, large = program_and_temp_size(1024, 131072, 16, **options)
    assert large - small < 4 * 768 * 16 * 4  # copies of h
    assert small < (128 * 131072 + 4 * 2**22) * 4


def test_forward_memory_is_that_of_a_block():
    """Without gradients, both forms hold the logits of all tokens for a block of words."""
    for impl in ("tokens", "vocabulary"):
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 8), (32768, 8))]
        arguments.append(jax.ShapeDtypeStruct((4096,), jnp.int32))
        program = jax.jit(functools.partial(linear_cross_entropy, impl=impl)).lower(*arguments).compile()
        assert program.memory_analysis().temp_size_in_bytes < 3 * 2**22 * 4


def test_auto_chooses_token_chunks_for_small_vocabularies():
    """Three products if a large enough chunk of tokens fits in memory, otherwise four."""
    for tokens, vocab, products in ((4096, 50_000, 3), (4096, 262_144, 4), (64, 262_144, 3), (64, 2**23, 4)):
        run, arguments, _ = program_and_temp_size(tokens, vocab, 2, compiled=False)
        assert count_flops(run, *arguments) == pytest.approx(2 * products * tokens * vocab * 2, rel=0.05)


@pytest.mark.usefixtures("symbolic_sizes")  # a type checker would raise first
def test_invalid_arguments_raise():
    h, w, labels = np.ones((9, 5), np.float32), np.ones((43, 5), np.float32), np.ones(9, np.int32)
    for changes, message in (
        ({"h": h[:, :4]}, r"h \(9, 4\), w \(43, 5\)"),
        ({"h": h[None]}, "flatten tokens"),
        ({"labels": labels[1:]}, r"labels has shape \(8,\): expected \(9,\)"),
        ({"labels": h[:, 0]}, "expected integers"),
        ({"bias": h[:, 0]}, r"bias has shape \(9,\): expected \(43,\)"),
        ({"weights": w[:, 0]}, r"weights has shape \(43,\)"),
        ({"w": w[:0]}, "empty"),
        ({"labels": np.full(9, 43)}, "label is 43: expected 0 to 42"),
        ({"labels": np.full(9, -1)}, "label is -1"),
        ({"reduction": "avg"}, "mean, sum, none"),
        ({"impl": "fast"}, "auto, tokens, vocabulary"),
        ({"impl": "tokens", "reduction": "none"}, "expected impl='vocabulary' for reduction='none'"),
        ({"label_smoothing": 1.5}, "0 to 1"),
        ({"soft_cap": 0.0}, "soft_cap"),
        ({"temperature": 0.0}, "over 0"),
        ({"block_size": 0}, "at least 1, or None"),
    ):
        raises(message, linear_cross_entropy, **{"h": h, "w": w, "labels": labels} | changes)


@pytest.mark.oracle
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_matches_torch(reduction, smoothing):
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
