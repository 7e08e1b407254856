"""Splash, interpreted on the CPU, against jax.nn and the reference; and lowered for a TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import Blockwise, Causal, Fixed, Full, Operands, PerHead, Window, bigbird, reference
from hpnlp.ops.attention.dispatch import require_supported, unsupported
from hpnlp.ops.attention.kernels.splash_masks import ComputedMask, LoadedMask, seen_keys, translate
from hpnlp.ops.attention.kernels.splash_tpu import splash
from hpnlp.types import InputError
from tests.contracts import ONCE, PATTERNS, assert_close, once
from tests.messages import raises

pytestmark = pytest.mark.slow  # the interpreter is slow


def interpreted(q, k, v, mask=Full(), **options):  # noqa: B008  (frozen)
    return splash(q, k, v, mask, Operands(**options), block_size=128, interpret=True)


def lowered(q, k, v, mask, **options):
    return splash(q, k, v, mask, Operands(**options))


def make(shape, dtype="float32"):
    """shape: B, T, S, N, K, H, Hv."""
    b, t, s, n, k, h, hv = shape
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(x).astype(dtype)) for x in ((b, t, n, h), (b, s, k, h), (b, s, k, hv))]


def scored(function, mask, options):
    """(gradients of a random weighting of outputs and finite lses, (o, lse))."""

    def value(q, k, v):
        o, lse = function(q, k, v, mask, return_lse=True, **options)
        rng = np.random.default_rng(1)
        wo, wl = (jnp.asarray(rng.standard_normal(x.shape).astype(jnp.float32)) for x in (o, lse))
        total = jnp.sum(o.astype(jnp.float32) * wo) + jnp.sum(jnp.where(jnp.isneginf(lse), jnp.float32(0), lse) * wl)
        return total, (o, lse)

    return jax.grad(value, (0, 1, 2), has_aux=True)


def ids(*rows):
    """Segments of the given lengths."""
    return jnp.asarray([np.repeat(np.arange(len(row)), row) for row in rows], jnp.int32)


def test_patterns_match_jax_nn():
    """Each head has a pattern. The last queries are beyond all keys, so that in some patterns they see nothing."""
    heads = len(PATTERNS)
    q, k, v = make((1, 150, 137, heads, heads, 8, 8))
    o = once(lambda q, k, v: interpreted(q, k, v, PerHead(PATTERNS)), q, k, v)
    see = PerHead(PATTERNS).to_dense(150, 137)
    expected = jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(see)[None])
    sees_any = see.any(axis=2).T
    assert not sees_any.all()
    assert_close(o, jnp.where(sees_any[None, :, :, None], expected, jnp.float32(0)))


TWO = ids((30, 110), (140,))
# (B, T, S, N, K, H, Hv), mask, options: loaded and computed masks, with and without empty rows.
CASES = {
    "causal": ((1, 130, 130, 4, 2, 8, 8), Causal(), {}),
    "empty rows": ((2, 150, 137, 2, 1, 8, 6), Window(5, 2), {"kv_lengths": jnp.asarray([0, 100], jnp.int32)}),
    "chunks": ((2, 140, 140, 2, 2, 8, 8), Causal() & Blockwise(48), {"segment_ids": TWO, "kv_segment_ids": TWO}),
    "loaded": (
        (1, 129, 200, 2, 2, 8, 8),
        bigbird(16, causal=True),
        {"segment_ids": ids((60, 9, 60)), "kv_segment_ids": ids((100, 0, 50, 50))},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_match_reference(name):
    """The log-sum-exp and its gradient as well."""
    shape, mask, options = CASES[name]
    arrays = make(shape)
    ours, expected = (once(scored(f, mask, options), *arrays) for f in (interpreted, reference))
    assert_close(ours, expected)


def test_16_bit_gradients_match_reference():
    arrays = make((1, 130, 130, 2, 1, 64, 64), "bfloat16")
    sums = lambda f: lambda *a: jnp.sum(jnp.square(f(*a, Causal(), scale=0.1).astype(jnp.float32)))  # noqa: E731
    ours, expected = (once(jax.grad(sums(f), (0, 1, 2)), *arrays) for f in (interpreted, reference))
    assert_close(ours, expected, "bfloat16")


def test_soft_cap_matches_reference_of_jax():
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    q, k, v = make((1, 128, 128, 1, 1, 8, 8))
    ours = once(lambda *a: interpreted(*a, Causal(), soft_cap=0.5), q, k, v)
    mask = jnp.asarray(Causal().to_dense(128))
    rows = [x[0, :, 0] for x in (q * jnp.float32(8**-0.5), k, v)]
    theirs = kernels.attention_reference(mask, *rows, None, attn_logits_soft_cap=0.5)
    assert_close(ours[0, :, 0], theirs)


@pytest.mark.parametrize(
    ("mask", "options", "hidden"),
    [
        (Full(), {"kv_lengths": jnp.asarray([90], jnp.int32)}, slice(90, None)),
        (Full(), {"segment_ids": ids((40, 60)), "kv_segment_ids": ids((30, 80, 30))}, slice(110, None)),
        (Causal(), {}, slice(100, None)),
    ],
)
def test_hidden_nan_changes_nothing(mask, options, hidden):
    q, k, v = make((1, 100, 140, 1, 1, 8, 8))
    run = jax.jit(scored(interpreted, mask, options), compiler_options=ONCE)
    poison = lambda x, value: x.at[:, hidden].set(value)  # noqa: E731
    clean, dirty = (run(q, poison(k, value), poison(v, value)) for value in (0.0, np.nan))
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


def test_rows_that_see_nothing_have_zero_gradients():
    """The cotangent of their lse is not finite."""

    def loss(q, k, v):
        o, lse = interpreted(q, k, v, kv_lengths=jnp.zeros(1, jnp.int32), return_lse=True)
        return jnp.sum(o) + jnp.sum(jnp.exp(lse) * lse), lse

    grads, lse = once(jax.grad(loss, (0, 1, 2), has_aux=True), *make((1, 5, 5, 1, 1, 8, 8)))
    assert jnp.isneginf(lse).all() and not any(np.asarray(g).any() for g in grads)


@pytest.mark.parametrize("mask", [Fixed(6, 0), PerHead((Fixed(6, 0), ~Full()))], ids=repr)
def test_empty_masks_give_zeros(mask):
    arrays = make((1, 3, 5, 2, 2, 4, 4))
    grads, (o, lse) = scored(interpreted, mask, {})(*arrays)
    assert o.shape == (1, 3, 2, 4) and not o.any() and jnp.isneginf(lse).all()
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("mask", PATTERNS, ids=repr)
def test_loaded_blocks_match_the_dense_mask(mask):
    """The blocks are padded; a block of equal elements may be a single element."""
    tiles = LoadedMask(mask, 45, 41, (16, 16))
    spans = [[(slice(i, i + 16), slice(j, j + 16)) for j in range(0, 48, 16)] for i in range(0, 48, 16)]
    blocks = np.block([[np.broadcast_to(tiles[span], (16, 16)) for span in row] for row in spans])
    dense = mask.to_dense(45, 41)
    assert tiles.shape == blocks.shape
    np.testing.assert_array_equal(blocks[:45], np.pad(dense, ((0, 0), (0, 7))))
    np.testing.assert_array_equal(blocks[45:], np.pad(dense[[-1] * 3], ((0, 0), (0, 7))))
    np.testing.assert_array_equal(seen_keys(translate(mask, 2, 45, 41, (16, 16))), dense.any(axis=0))


def test_cheap_masks_are_computed_and_others_loaded():
    """Computed elements are those of the blocks. Masks that differ by head are loaded."""
    cheap = (Causal(), Window(5, 2), Causal() & Blockwise(7), Causal().shift(3) & Window(9))
    at = (np.arange(48)[:, None], np.arange(64)[None, :])
    for mask in cheap:
        head_mask = translate(mask, 2, 48, 41, (48, 64)).masks[0]
        assert head_mask.shape == (48, 64)
        assert isinstance(head_mask, ComputedMask) and (head_mask.q_sequence == np.arange(48)).all()
        np.testing.assert_array_equal(head_mask.mask_function(*at), head_mask[0:48, 0:64])
    loaded = (Full(), bigbird(4, causal=True), PerHead(cheap[:2]))
    assert not any(isinstance(translate(mask, 2, 48, 41, (48, 64)).masks[0], ComputedMask) for mask in loaded)


@pytest.mark.parametrize(
    ("mask", "dtype", "options"),
    [
        (Causal() & Window(300), "bfloat16", {}),
        (PerHead((Causal(), Full(), bigbird(64, causal=True))), "float32", {"segments": True}),
    ],
    ids=["computed", "loaded"],
)
def test_lowers_for_tpu(mask, dtype, options):
    """The program obeys the tiling rules, which the interpreter does not check. It has three kernels and three for the lse."""
    arrays = make((2, 1100, 1300, 3, 1, 80, 72), dtype)
    segments = {"segment_ids": ids((1000, 100)) * 2, "kv_segment_ids": ids((1000, 300)) * 2}
    options = jax.tree.map(lambda x: jnp.concatenate([x, x]), segments) if options else {}
    function = scored(lowered, mask, options)
    exported = jax.export.export(jax.jit(function), platforms=["tpu"])(*arrays)
    assert exported.mlir_module().count("tpu_custom_call") == 6


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"positions": jnp.zeros((1, 8), jnp.int32)}, ["kv_positions", "positions"]),
        ({"dropout_rate": 0.1, "rng": jax.random.key(0)}, ["dropout_rate"]),
        ({"bias": jnp.zeros((1, 2, 8, 8))}, ["bias"]),
        ({"return_lse": True, "soft_cap": 2.0}, ["return_lse with soft_cap"]),
        ({"mask": PerHead((Full(), Full(), Full()))}, ["a mask for 3 heads with 2"]),
        ({"dtype": "float16"}, ["dtype float16"]),
        ({"segment_ids": jnp.zeros((1, 8), jnp.int32), "scale": 2.0, "dropout_rate": 0.0, "return_lse": True}, []),
    ],
)
def test_unsupported_calls_are_named(change, expected):
    mask, dtype = change.pop("mask", Full()), change.pop("dtype", "float32")
    assert unsupported("splash", *make((1, 8, 8, 2, 1, 4, 4), dtype), mask, Operands(**change)) == expected


def test_meshes_need_shard_map():
    """It runs in a shard_map without check_vma, and refuses other places on a mesh."""
    q, _, _ = make((2, 130, 130, 2, 2, 8, 8))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = {"mesh": mesh, "in_specs": jax.P("data"), "out_specs": jax.P("data")}
    with jax.set_mesh(mesh):
        assert unsupported("splash", q, q, q, Full(), Operands()) == ["a mesh outside of shard_map"]
        by_shard = jax.shard_map(lambda q: interpreted(q, q, q, Causal()), **split, check_vma=False)
        assert_close(once(by_shard, q), reference(q, q, q, Causal()))

        def checked(q):
            require_supported("splash", q, q, q, Causal(), Operands())
            return q

        raises("does not support shard_map with check_vma", lambda: jax.shard_map(checked, **split)(q))


def test_invalid_calls_raise():
    arrays = make((1, 8, 8, 2, 1, 4, 4))
    raises("block_size 100: expected a positive multiple of 128", splash, *arrays, block_size=100)
    with pytest.raises(InputError, match="return_lse with soft_cap: remove it"):
        require_supported("splash", *arrays, Full(), Operands(soft_cap=1.0, return_lse=True))
