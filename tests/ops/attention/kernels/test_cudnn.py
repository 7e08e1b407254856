"""The calls to cuDNN without a GPU: computed by jax.nn's other implementation, and lowered for CUDA by JAX."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import Blockwise, Causal, Full, Operands, PerHead, Window, attend, reference
from hpnlp.ops.attention.dispatch import unsupported
from tests.contracts import ONCE, assert_close, once

SEGMENTS = jnp.asarray([[0] * 9 + [1] * 15, [0] * 20 + [3] * 4], jnp.int32)
LENGTHS = jnp.asarray([0, 17], jnp.int32)
SELF = {"segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS}
# name -> (T, S, mask, options, (mask type, sliding window) in the program that jax.nn lowers for cuDNN)
CASES = {
    "full": (24, 24, Full(), {"scale": 0.5}, ("NO_MASK", 0)),
    "causal": (24, 40, Causal(), {}, ("CAUSAL", 0)),
    "window": (24, 24, Window(5, 0), {}, ("CAUSAL", 6)),
    "both": (22, 26, Window(5) & Causal(), {}, ("CAUSAL", 6)),
    "segments": (24, 24, Causal(), SELF, ("CAUSAL", 0)),
    "lengths": (22, 24, Full(), {"kv_lengths": LENGTHS}, ("PADDING", 0)),
    "causal lengths": (24, 24, Causal(), {"kv_lengths": LENGTHS}, ("PADDING_CAUSAL", 0)),
}
cases = pytest.mark.parametrize("name", CASES)


def make(t, s, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(x).astype(dtype)) for x in ((2, t, 4, 8), (2, s, 2, 8), (2, s, 2, 8))]


@pytest.fixture
def dense(monkeypatch):
    """Calls to cuDNN are computed by XLA."""
    attention = jax.nn.dot_product_attention

    def by_xla(q, k, v, bias, mask, *, implementation, **options):
        assert implementation == "cudnn"
        # In float32, as jax.nn's gradients in 16 bits are not clean under strict promotion.
        wide = [None if x is None else x.astype(jnp.float32) for x in (q, k, v, bias)]
        with jax.numpy_rank_promotion("allow"):
            return attention(*wide, mask, implementation="xla", **options).astype(q.dtype)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def call_cudnn(q, k, v, mask, **options):
    return attend(q, k, v, mask, impl="cudnn", **options)


def scored(function, mask, options):
    def value(q, k, v):
        o = function(q, k, v, mask, **options)
        weights = np.random.default_rng(1).standard_normal(o.shape)
        return jnp.sum(o.astype(jnp.float32) * jnp.asarray(weights, jnp.float32)), o

    return jax.grad(value, (0, 1, 2), has_aux=True)


@cases
def test_results_and_gradients_match_reference(name, dense):
    t, s, mask, options, _ = CASES[name]
    arrays = make(t, s)
    ours, expected = (once(scored(f, mask, options), *arrays) for f in (call_cudnn, reference))
    assert_close(ours, expected, "bfloat16")


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=repr)
def test_keys_beyond_the_lengths_change_nothing(mask, dense):
    """An example without keys gives 0, and its queries may be NaN."""
    q, k, v = make(24, 24)
    hidden = (jnp.arange(24)[None] >= LENGTHS[:, None])[:, :, None, None]
    poison = lambda x, value: jnp.where(hidden, jnp.bfloat16(value), x)  # noqa: E731
    run = jax.jit(scored(call_cudnn, mask, {"kv_lengths": LENGTHS}), compiler_options=ONCE)
    clean, dirty = (run(q.at[0].set(value), poison(k, value), poison(v, value)) for value in (0, np.nan))
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(a, b)
        assert not a[0].any() and a[1].any()


def test_bias_and_its_gradient_match_plain_softmax(dense):
    q, k, v = make(24, 26)
    bias = jnp.asarray(np.random.default_rng(2).standard_normal((1, 4, 24, 26)).astype(jnp.bfloat16))
    total = lambda o: jnp.sum(jnp.square(o.astype(jnp.float32)))  # noqa: E731

    def plain(bias):
        groups = [jnp.repeat(x, 2, axis=2).astype(jnp.float32) for x in (k, v)]
        scores = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), groups[0]) * 8**-0.5
        scores = jnp.where(jnp.tri(24, 26, dtype=bool), scores + bias.astype(jnp.float32), -jnp.inf)
        return total(jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), groups[1]))

    with jax.numpy_rank_promotion("allow"):
        ours, expected = (
            once(jax.value_and_grad(f), bias)
            for f in (lambda bias: total(call_cudnn(q, k, v, Causal(), bias=bias)), plain)
        )
    assert float(ours[0]) == pytest.approx(float(expected[0]), rel=1e-2)
    assert_close(ours[1], expected[1], "bfloat16")


@cases
def test_lowered_program_has_the_mask_of_the_call(name, monkeypatch):
    """The checks of jax.nn pass as well."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 90800)
    t, s, mask, options, expected = CASES[name]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    traced = jax.jit(scored(call_cudnn, mask, options)).trace(*make(t, s))
    text = traced.lower(lowering_platforms=("cuda",)).as_text().replace("\\22", '"')
    kinds = re.findall(r'"mask_type": "(\w+)"', text)
    windows = [int(x) for x in re.findall(r'"sliding_window_length": (\d+)', text)]
    assert set(zip(kinds, windows, strict=True)) == {expected} and len(kinds) == 2


BIAS = jnp.zeros((1, 4, 24, 24), jnp.bfloat16)
OTHER_SEGMENTS = "kv_segment_ids other than segment_ids"


@pytest.mark.parametrize(
    ("t", "mask", "options", "expected"),
    [
        (24, Window(5, 1), {}, ["mask Window(left=5, right=1)"]),
        (24, Causal() & Blockwise(4), {}, [f"mask {Causal() & Blockwise(4)}"]),
        (24, PerHead((Full(),) * 4), {}, [f"mask {PerHead((Full(),) * 4)}"]),
        (26, Window(5, 0), {}, ["a window with T 26 over S 24"]),
        (24, Window(5, 0), {"kv_lengths": LENGTHS}, ["a window with kv_lengths"]),
        (24, Full(), {"segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS + 1}, [OTHER_SEGMENTS]),
        (24, Full(), {"kv_segment_ids": SEGMENTS}, [OTHER_SEGMENTS]),
        (24, Full(), SELF | {"kv_lengths": LENGTHS}, ["kv_lengths with segment_ids"]),
        (24, Full(), {"bias": BIAS, "kv_lengths": LENGTHS}, ["bias with kv_lengths"]),
        (24, Full(), {"bias": BIAS[:, :1]}, ["bias other than bfloat16[1, N, T, S]"]),
        (24, Full(), {"bias": BIAS.astype(jnp.float32)}, ["bias other than bfloat16[1, N, T, S]"]),
        (24, Full(), {"return_lse": True, "dropout_rate": 0.1, "rng": 0, "soft_cap": 3.0},
         ["dropout_rate", "return_lse", "soft_cap"]),
        (24, Full(), {"dropout_rate": 0.0, "return_lse": False, "positions": None}, []),
    ],
)  # fmt: skip
def test_unsupported_operands_are_named(t, mask, options, expected):
    assert unsupported("cudnn", *make(t, 24), mask, Operands(**options)) == expected


@pytest.mark.parametrize(
    ("shapes", "dtype", "options", "expected"),
    [
        (((1, 9, 2, 8), (1, 8, 2, 8)), "bfloat16", set(), ["odd lengths: T 9, S 8"]),
        (((1, 8, 2, 8), (1, 8, 2, 8)), "float16", {"segment_ids"}, ["segment_ids in float16"]),
        (((1, 8, 2, 8), (1, 9, 2, 8)), "bfloat16", {"bias"}, ["odd lengths: T 8, S 9"]),
        (((1, 8, 2, 12), (1, 8, 2, 12)), "float32", set(), ["dtype float32", "head size 12"]),
        (((1, 8, 2, 136), (1, 8, 2, 128)), "float16", set(), ["head size 128", "head size 136"]),
        (((1, 8, 2, 8), (1, 0, 2, 8)), "float16", set(), ["an empty axis"]),
    ],
)
def test_unsupported_shapes_and_dtypes_are_named(shapes, dtype, options, expected):
    (b, t, n, h), (_, s, _, _) = shapes
    q, k, v = jnp.zeros(shapes[0], dtype), jnp.zeros((b, s, n, h), dtype), jnp.zeros(shapes[1], dtype)
    ids = jnp.zeros((b, t), jnp.int32)
    every = {"segment_ids": ids, "kv_segment_ids": ids, "bias": jnp.zeros((1, n, t, s), dtype)}
    options_of_call = {name: every[name] for name in every if name.removeprefix("kv_") in options}
    assert unsupported("cudnn", q, k, v, Full(), Operands(**options_of_call)) == expected
