"""Splash, interpreted on the CPU, against jax.nn and the dense twin; and lowered for the TPU that is not here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import Blockwise, Causal, Fixed, Full, PerHead, Window, bigbird, reference
from hpnlp.ops.attention.kernels.splash_masks import Computed, Tiles, seen_keys, translated
from hpnlp.ops.attention.kernels.splash_tpu import beyond_splash, splash
from hpnlp.types import InputError
from tests.contracts import ONCE, PATTERNS, assert_close, once

pytestmark = pytest.mark.slow  # the interpreter takes its time


def interpreted(*args, **options):
    return splash(*args, **options, block_size=128, interpret=True)


def make(shape, dtype="float32"):
    """shape: B, T, S, N, K, H, Hv."""
    b, t, s, n, k, h, hv = shape
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(x), dtype) for x in ((b, t, n, h), (b, s, k, h), (b, s, k, hv))]


def scored(function, mask, options):
    """(gradients of a sum that weighs outputs and finite lses at random, (o, lse))."""

    def value(q, k, v):
        o, lse = function(q, k, v, mask, return_lse=True, **options)
        rng = np.random.default_rng(1)
        wo, wl = (jnp.asarray(rng.standard_normal(x.shape), jnp.float32) for x in (o, lse))
        total = jnp.sum(o.astype(jnp.float32) * wo) + jnp.sum(jnp.where(jnp.isneginf(lse), jnp.float32(0), lse) * wl)
        return total, (o, lse)

    return jax.grad(value, (0, 1, 2), has_aux=True)


def ids(*rows):
    """Segments of the given lengths."""
    return jnp.asarray([np.repeat(np.arange(len(row)), row) for row in rows], jnp.int32)


def test_every_pattern():
    """A head each; the last queries are beyond all keys, so that some patterns let them see nothing."""
    heads = len(PATTERNS)
    q, k, v = make((1, 150, 137, heads, heads, 8, 8))
    o = once(lambda q, k, v: interpreted(q, k, v, PerHead(PATTERNS)), q, k, v)
    see = PerHead(PATTERNS).to_dense(150, 137)
    expected = jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(see)[None])
    some = see.any(axis=2).T
    assert not some.all()
    assert_close(o, jnp.where(some[None, :, :, None], expected, jnp.float32(0)))


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
def test_values_and_gradients_equal_the_dense_twin(name):
    """Also those of the log-sum-exp."""
    shape, mask, options = CASES[name]
    arrays = make(shape)
    ours, twin = (once(scored(f, mask, options), *arrays) for f in (interpreted, reference))
    assert_close(ours, twin)


def test_sixteen_bits():
    arrays = make((1, 130, 130, 2, 1, 64, 64), "bfloat16")
    sums = lambda f: lambda *a: jnp.sum(jnp.square(f(*a, Causal(), scale=0.1).astype(jnp.float32)))  # noqa: E731
    ours, twin = (once(jax.grad(sums(f), (0, 1, 2)), *arrays) for f in (interpreted, reference))
    assert_close(ours, twin, "bfloat16")


def test_soft_cap():
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
def test_hidden_nans_change_nothing(mask, options, hidden):
    q, k, v = make((1, 100, 140, 1, 1, 8, 8))
    run = jax.jit(scored(interpreted, mask, options), compiler_options=ONCE)
    poison = lambda x, value: x.at[:, hidden].set(value)  # noqa: E731
    clean, dirty = (run(q, poison(k, value), poison(v, value)) for value in (0.0, np.nan))
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


def test_rows_that_see_nothing_have_no_gradient():
    """Also where the cotangent of their lse is not finite."""

    def loss(q, k, v):
        o, lse = interpreted(q, k, v, kv_lengths=jnp.zeros(1, jnp.int32), return_lse=True)
        return jnp.sum(o) + jnp.sum(jnp.exp(lse) * lse), lse

    grads, lse = once(jax.grad(loss, (0, 1, 2), has_aux=True), *make((1, 5, 5, 1, 1, 8, 8)))
    assert jnp.isneginf(lse).all() and not any(np.asarray(g).any() for g in grads)


@pytest.mark.parametrize("mask", [Fixed(6, 0), PerHead((Fixed(6, 0), ~Full()))], ids=repr)
def test_a_mask_that_allows_nothing(mask):
    arrays = make((1, 3, 5, 2, 2, 4, 4))
    grads, (o, lse) = scored(interpreted, mask, {})(*arrays)
    assert o.shape == (1, 3, 2, 4) and not o.any() and jnp.isneginf(lse).all()
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("mask", PATTERNS, ids=repr)
def test_blocks_of_a_mask(mask):
    """As the kernel's planner asks for them, padded; a block that is all alike may come as one element."""
    tiles = Tiles(mask, 45, 41, (16, 16))
    spans = [[(slice(i, i + 16), slice(j, j + 16)) for j in range(0, 48, 16)] for i in range(0, 48, 16)]
    found = np.block([[np.broadcast_to(tiles[span], (16, 16)) for span in row] for row in spans])
    dense = mask.to_dense(45, 41)
    assert tiles.shape == found.shape
    np.testing.assert_array_equal(found[:45], np.pad(dense, ((0, 0), (0, 7))))
    np.testing.assert_array_equal(found[45:], np.pad(dense[[-1] * 3], ((0, 0), (0, 7))))
    np.testing.assert_array_equal(seen_keys(translated(mask, 2, 45, 41, (16, 16))), dense.any(axis=0))


def test_which_masks_the_kernel_computes_itself():
    """Elementwise as they stand in blocks; those of several heads it loads."""
    cheap = (Causal(), Window(5, 2), Causal() & Blockwise(7), Causal().shift(3) & Window(9))
    at = (np.arange(48)[:, None], np.arange(64)[None, :])
    for mask in cheap:
        one = translated(mask, 2, 48, 41, (48, 64)).masks[0]
        assert one.shape == (48, 64)
        assert isinstance(one, Computed) and (one.q_sequence == np.arange(48)).all()
        np.testing.assert_array_equal(one.mask_function(*at), one[0:48, 0:64])
    loaded = (Full(), bigbird(4, causal=True), PerHead(cheap[:2]))
    assert not any(isinstance(translated(mask, 2, 48, 41, (48, 64)).masks[0], Computed) for mask in loaded)


@pytest.mark.parametrize(
    ("mask", "dtype", "options"),
    [
        (Causal() & Window(300), "bfloat16", {}),
        (PerHead((Causal(), Full(), bigbird(64, causal=True))), "float32", {"segments": True}),
    ],
    ids=["computed", "loaded"],
)
def test_lowers_for_tpu(mask, dtype, options):
    """The tiling rules, which no interpreter asks for: forward and backward, three kernels and three for lse."""
    arrays = make((2, 1100, 1300, 3, 1, 80, 72), dtype)
    segments = {"segment_ids": ids((1000, 100)) * 2, "kv_segment_ids": ids((1000, 300)) * 2}
    options = jax.tree.map(lambda x: jnp.concatenate([x, x]), segments) if options else {}
    function = scored(splash, mask, options)
    exported = jax.export.export(jax.jit(function), platforms=["tpu"])(*arrays)
    assert exported.mlir_module().count("tpu_custom_call") == 6


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"positions": jnp.zeros((1, 8), jnp.int32)}, ["positions"]),
        ({"dropout_rate": 0.1, "rng": jax.random.key(0)}, ["dropout_rate"]),
        ({"bias": jnp.zeros((1, 2, 8, 8))}, ["bias"]),
        ({"return_lse": True, "soft_cap": 2.0}, ["return_lse with soft_cap"]),
        ({"mask": PerHead((Full(), Full(), Full()))}, ["a mask for 3 heads with 2"]),
        ({"dtype": "float16"}, ["dtype float16"]),
        ({"segment_ids": jnp.zeros((1, 8), jnp.int32), "scale": 2.0, "dropout_rate": 0.0, "return_lse": True}, []),
    ],
)
def test_what_is_beyond_it(change, told):
    mask, dtype = change.pop("mask", Full()), change.pop("dtype", "float32")
    assert beyond_splash(*make((1, 8, 8, 2, 1, 4, 4), dtype), mask, change) == told


def test_on_a_mesh():
    """It runs where the mesh is split by hand, and says so where it is not."""
    q, _, _ = make((2, 130, 130, 2, 2, 8, 8))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = {"mesh": mesh, "in_specs": jax.P("data"), "out_specs": jax.P("data")}
    with jax.set_mesh(mesh):
        assert beyond_splash(q, q, q, Full(), {}) == ["a mesh outside of shard_map"]
        own = jax.shard_map(lambda q: interpreted(q, q, q, Causal()), **split, check_vma=False)
        assert_close(once(own, q), reference(q, q, q, Causal()))
        with pytest.raises(InputError, match="does not honour shard_map with check_vma"):
            jax.shard_map(lambda q: interpreted(q, q, q, Causal()), **split)(q)


def test_what_cannot_be_is_said():
    arrays = make((1, 8, 8, 2, 1, 4, 4))
    with pytest.raises(InputError, match="block_size 100: expected a positive multiple of 128"):
        splash(*arrays, block_size=100)
    with pytest.raises(InputError, match="return_lse with soft_cap: leave it out"):
        splash(*arrays, soft_cap=1.0, return_lse=True)
