"""Every public operation on a mesh of explicit axes, the default of `jax.make_mesh`, equals itself on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from hpnlp.ops import attention, linear, norms, search
from hpnlp.ops.attention import Causal, Global, PerHead, Window, attend
from hpnlp.ops.attention.decoding.kv_cache import extend_cache, start_cache
from hpnlp.ops.attention.positions import bias as relative
from hpnlp.ops.attention.positions import rope
from hpnlp.ops.convolutions.convolution import causal_conv
from hpnlp.ops.dynamic_quantization import dequantize, quantize
from hpnlp.ops.reversible import reversible
from hpnlp.ops.softmax import cross_entropy
from hpnlp.ops.softmax.structured import adaptive, binary_codes, class_based, hierarchical
from tests.contracts import ONCE, assert_close
from tests.messages import raises
from tests.ops import test_numpy

B, T, N, K, H = 4, 6, 4, 2, 4
TOKENS, D, V = 8, 4, 16
P = PartitionSpec
CALLS = {}


def call(function):
    CALLS[function.__name__] = function
    return function


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def arrays():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return {
        "q": draw(B, T, N, H),
        "k": draw(B, T, K, H),
        "v": draw(B, T, K, H),
        "h": draw(TOKENS, D),
        "table": draw(V, D),
        "bias": draw(V),
        "small": draw(4, D),
        "bits": draw(TOKENS, 4),
        "distances": draw(7, N, H),
        "tail": draw(12, 2),
        "labels": rng.integers(0, V, TOKENS).astype(np.int32),
        "positions": np.arange(T, dtype=np.int32)[None].repeat(B, 0),
        "lengths": np.asarray([1, 6, 3, 4], np.int32),
    }


# Batch and tokens are sharded over one axis of the mesh, heads and words over the other.
SPECS = {
    "q": P("data", None, "model"),
    "k": P("data", None, "model"),
    "v": P("data", None, "model"),
    "h": P("data"),
    "table": P("model"),
    "bias": P("model"),
    "small": P(),
    "bits": P("data"),
    "distances": P(None, "model"),
    "tail": P("model"),
    "labels": P("data"),
    "positions": P("data"),
    "lengths": P("data"),
}


@call
def attention_and_merge(a):
    q, k, v = a["q"], a["k"], a["v"]
    mask = Causal() & (Window(2) | Global(1))
    near = attend(q, k, v, Causal() & Window(2), return_lse=True)
    far = attend(q, k, v, Causal() & ~Window(2), return_lse=True)
    heads = PerHead((Causal(), Window(1), Causal(), Window(1)))
    bias = relative.t5_bias(a["small"], max_distance=8)
    return {
        "merge": attention.merge(near, far),
        "reference": attention.reference(q, k, v, mask, positions=a["positions"], kv_lengths=a["lengths"]),
        "per head": attend(q, k, v, heads, segment_ids=a["positions"] // 3, bias=bias),
        "dropout": attend(q, k, v, mask, dropout_rate=0.5, rng=jax.random.key(0), sinks=a["small"][0]),
    }


@call
def positions_and_caches(a):
    q, k, v = a["q"], a["k"], a["v"]
    u = a["small"].reshape(N, H)
    cache = start_cache(k, v, a["lengths"], Causal(), 2 * T)
    ring = start_cache(k, v, a["lengths"], Causal() & Window(2), 2 * T)
    return {
        "rope": rope.rope(q, a["positions"]),
        "sinusoids": rope.sinusoids(a["positions"], 4),
        "t5_buckets": relative.t5_buckets(a["positions"]),
        "shaw": relative.shaw(q, jnp.concatenate([u, u[:3]]), a["positions"], a["positions"]),
        "transformer_xl": relative.transformer_xl(q, a["distances"], u, u, T),
        "cache": extend_cache(q[:, :1], k[:, :1], v[:, :1], Causal(), cache)[0],
        "ring": extend_cache(q, k, v, Causal() & Window(2), ring),
    }


@call
def linear_norms_and_quantization(a):
    x, u = a["q"], a["small"]
    branch = lambda params, x, shared: (linear.linear(x, params["w"]) * shared, x.sum())  # noqa: E731
    layers = {"w": jnp.stack([u, u + 1.0])}
    return {
        "linear": linear.linear(x, a["table"].T, a["bias"]),
        "rms_norm": norms.rms_norm(x, u[0], 1e-6),
        "layer_norm": norms.layer_norm(x, u[0], u[1], 1e-6),
        "causal_conv": causal_conv(x.sum(axis=2), u[:3]),
        "quantized": quantize(x, signed=True),
        "dequantized": dequantize(quantize(jax.lax.stop_gradient(x), signed=True), signed=True),
        "reversible": reversible([(branch, branch)], layers, a["h"], a["h"], jnp.float32(0.5)),
    }


def total(function):
    """A function that returns (weighted sum of all float results, results)."""

    def run(a):
        out = function(a)
        leaves = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.inexact)]
        weigh = lambda x: np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)  # noqa: E731
        return sum(jnp.where(jnp.isfinite(x), x * weigh(x), 0.0).sum() for x in leaves), out

    return run


def with_gradients(function):
    """A function that returns (results, gradients of all arrays of floats)."""

    def run(a):
        floats = {name: x for name, x in a.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
        loss = lambda floats: total(function)({**a, **floats})  # noqa: E731
        gradients, out = jax.grad(loss, has_aux=True)(floats)
        return out, gradients

    return jax.jit(run, compiler_options=ONCE)


def placed(mesh, specs):
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays().items()}


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_match_one_device(name):
    expected = with_gradients(CALLS[name])(arrays())
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        inputs = placed(mesh, SPECS)
        out, gradients = with_gradients(CALLS[name])(inputs)
    assert_close((out, gradients), expected)
    for k, gradient in gradients.items():
        assert jax.typeof(gradient).sharding == jax.typeof(inputs[k]).sharding


def test_predictions_are_sharded_by_tokens():
    """The programs are only traced, because a step of their loops would synchronise all devices."""
    mesh, key = mesh_of(AxisType.Explicit), jax.random.key(0)
    words, classes = hierarchical.balanced_tree(V), class_based.equal_size_classes(V, 4)
    code, others, cutoffs = binary_codes.binary_code(V), binary_codes.binary_code(12), (4,)

    def predict(a):
        h, table, bits = a["h"], a["table"], a["bits"]
        head, tails = jnp.concatenate([a["small"], a["small"][:1]]), ((a["small"][:2], a["tail"]),)
        return (
            (hierarchical.tree_top_k(h, table, words, 2), hierarchical.tree_sample(h, table, words, key)),
            (
                class_based.class_log_probs(h, a["small"], table, classes),
                class_based.class_top_k(h, a["small"], table, classes, 2),
            ),
            class_based.class_sample(h, a["small"], table, classes, key),
            (adaptive.adaptive_log_probs(h, head, tails, cutoffs), adaptive.adaptive_top_k(h, head, tails, cutoffs, 2)),
            adaptive.adaptive_sample(h, head, tails, cutoffs, key),
            (
                binary_codes.code_log_probs(bits, code),
                binary_codes.code_top_k(bits, code, 2),
                binary_codes.code_sample(bits, code, key),
            ),
            (binary_codes.hybrid_log_probs(h, bits, others), binary_codes.hybrid_top_k(h, bits, others, 2)),
            binary_codes.hybrid_sample(h, bits, others, key),
        )

    with jax.set_mesh(mesh):
        predictions = jax.eval_shape(predict, placed(mesh, SPECS))
    assert {x.sharding.spec[0] for x in jax.tree.leaves(predictions)} == {"data"}


@pytest.mark.parametrize("name", test_numpy.CALLS)
def test_every_public_op_and_its_gradients_accept_explicit_arrays(name):
    """Traced alone, with every axis of an even size divided, as long as mesh axes are left."""
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Explicit,) * 3)

    def sharded(x):
        left = iter(mesh.axis_names)
        axes = [next(left, None) if size and size % 2 == 0 else None for size in x.shape]
        return jax.device_put(x, NamedSharding(mesh, P(*axes)))

    for function, arguments in test_numpy.CALLS[name]:
        with jax.set_mesh(mesh):
            given = jax.tree.map(lambda x: x if x is test_numpy.KEY else sharded(x), arguments)
            differentiate = name not in test_numpy.NO_GRADIENT
            jax.eval_shape(lambda *a: test_numpy.transformed(function, a, differentiate), *given)  # noqa: B023


def main_operations(a):
    return {
        "attend": attend(a["q"], a["k"], a["v"], Causal()),
        "loss": cross_entropy.linear_cross_entropy(a["h"], a["table"], a["labels"], bias=a["bias"], reduction="none"),
        "search": search.exact_search(a["h"], a["table"], 3, bias=a["bias"]),
    }


@pytest.fixture(scope="module")
def main_results():
    return with_gradients(main_operations)(arrays())


BY_BATCH = {name: P("data") if spec[:1] == ("data",) else P() for name, spec in SPECS.items()}
BY_LENGTH = {**SPECS, "q": P(None, "model"), "k": P(), "v": P(None, "model"), "h": P(None, "model"), "table": P("data")}


@pytest.mark.parametrize(
    ("kind", "specs", "manual"),
    [
        (AxisType.Explicit, dict.fromkeys(SPECS, P()), ()),
        (AxisType.Explicit, BY_LENGTH, ()),
        (AxisType.Explicit, SPECS, ("data",)),
        (AxisType.Explicit, BY_BATCH, ("data", "model")),
        (AxisType.Auto, SPECS, ()),
        (AxisType.Auto, SPECS, ("data",)),
    ],
    ids=["replicated", "length", "partly manual", "manual", "auto", "auto and manual"],
)
def test_main_operations_match_one_device_on_every_kind_of_mesh(kind, specs, manual, main_results):
    mesh, function = mesh_of(kind), main_operations
    if manual:
        options = {"in_specs": (BY_BATCH,), "out_specs": P("data"), "axis_names": set(manual)}
        function = jax.shard_map(main_operations, mesh=mesh, **options)
    with jax.set_mesh(mesh):
        assert_close(with_gradients(function)(placed(mesh, specs)), main_results)


def test_results_are_sharded_as_their_inputs():
    """While tracing, under vmap and remat, and eagerly without a surrounding mesh."""
    mesh = mesh_of(AxisType.Explicit)
    a = placed(mesh, SPECS)
    spec = lambda function, *args: jax.tree.map(lambda x: x.sharding.spec, jax.eval_shape(function, *args))  # noqa: E731
    both = lambda q, k, v: attend(q, k, v, return_lse=True)  # noqa: E731
    one = lambda q, k, v: attend(q[None], k[None], v[None])[0]  # noqa: E731
    qkv, words = (a["q"], a["k"], a["v"]), (a["h"], a["table"], a["labels"])
    loss = lambda *words: cross_entropy.linear_cross_entropy(*words)  # noqa: E731
    with jax.set_mesh(mesh):
        assert spec(both, *qkv) == (P("data", None, "model", None), P("data", None, "model"))
        assert spec(jax.vmap(one), *qkv) == P("data", None, "model", None)
        assert spec(jax.checkpoint(one), *(x[0] for x in map(np.asarray, qkv))) == P(None, None, None)
        assert spec(loss, *words) == P()
        assert spec(cross_entropy.logits, *words[:2]) == P("data", "model")
        assert spec(jax.grad(loss, (0, 1)), *words) == (P("data", None), P("model", None))
        assert spec(quantize_signed, a["h"]) == (P("data", None), P("data", None))
    normed = norms.rms_norm(a["q"], jnp.ones(H), 1e-6)
    assert normed.sharding.spec == P("data", None, "model", None)
    assert_close(normed, norms.rms_norm(jnp.asarray(arrays()["q"]), jnp.ones(H), 1e-6))


def quantize_signed(x):
    return tuple(quantize(x, signed=True))


def test_jaxpr_is_unchanged_without_an_explicit_mesh():
    qkv = [arrays()[name] for name in ("q", "k", "v")]
    assert str(jax.make_jaxpr(attend)(*qkv)) == str(jax.make_jaxpr(attend.__wrapped__)(*qkv))


def test_closure_over_an_explicit_array_raises():
    mesh = mesh_of(AxisType.Explicit)
    a = placed(mesh, SPECS)
    slopes = jax.device_put(np.arange(4, dtype=np.float32), NamedSharding(mesh, P()))
    qkv = a["q"], a["k"], a["v"]
    with jax.set_mesh(mesh):
        raises(r"closes over an array of an explicit mesh", attend, *qkv, bias=lambda head, q, k: slopes[head])
        bias = jax.tree_util.Partial(lambda slopes, head, q, k: slopes[head], slopes)
        assert jax.eval_shape(lambda *qkv: attend(*qkv, bias=bias), *qkv).shape == (B, T, N, H)
