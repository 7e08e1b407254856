"""Ops take numpy arrays wherever they take jax arrays, also under transformations."""

import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hpnlp.ops
from hpnlp.ops import dropout, dynamic_quantization, linear, norms
from hpnlp.ops import reversible as reversible_layers
from hpnlp.ops.attention import Causal, Window, attend, cache, decode, flash, merge, position, reference
from hpnlp.ops.attention.reference import as_flags
from hpnlp.ops.search import build_ivf, build_lsh, exact_search, ivf_search, lsh_candidates, lsh_search
from hpnlp.ops.softmax import adaptive, classes, codes, cross_entropy, grouped, margin, sampled, sampling, tree, vmf
from hpnlp.ops.softmax import samplers as proposals

RNG = np.random.default_rng(0)
N, D, V = 6, 4, 8
KEY = np.array([0, 7], np.uint32)


def x(*shape):
    """float64, as numpy makes arrays."""
    return RNG.standard_normal(shape)


def ids(*shape, below=V):
    return RNG.integers(0, below, shape)


QKV = x(2, 12, 4, 8), x(2, 12, 2, 8), x(2, 12, 2, 8)
LONG = x(1, 40, 2, 8), x(1, 40, 1, 8), x(1, 40, 1, 8)
PLACES = np.broadcast_to(np.arange(12), (2, 12))
SEGMENTS = PLACES // 5
H, TABLE, LABELS, BIAS = x(N, D), x(V, D), ids(N), x(V)
WEIGHTS = np.arange(N) / 2.0
TREE = tree.balanced_tree(V)
CLASSES = classes.equal_size_classes(V, 3)
CODE = codes.binary_code(V)
IVF, LSH = build_ivf(x(64, D), cells=4), build_lsh(x(64, D), bits=2, tables=2)
HEAD, TAILS = x(5, D), ((x(2, D), x(2, 2)), (x(1, D), x(3, 1)))
SAMPLES = proposals.Samples(ids(5), x(5), x(N))
CACHE = cache.KVCache(x(4, 16, 8), x(4, 16, 8), np.array([12, 7]))


def operands(q, k, v, segments, positions, lengths, dense, bias, sinks, scale):
    return attend(
        q, k, v, Causal(), segment_ids=segments, positions=positions, kv_lengths=lengths, dense_mask=dense, bias=bias,
        sinks=sinks, scale=scale, return_lse=True,
    )  # fmt: skip


def dropped(q, k, v, key, streams, tokens):
    return attend(
        q, k, v, Window(3), global_tokens=tokens, dropout_rate=0.5, rng=key, streams=streams, block_size=4, impl="xla"
    )


def layers(params, x1, x2, operand):
    branch = lambda own, stream, operand: (jnp.tanh(stream * own["a"][None] + operand[None]), own["a"].sum())  # noqa: E731
    return reversible_layers.reversible([(branch, branch)], params, x1, x2, operand)


def hybrid(function, *more):
    return lambda class_logits, bit_logits, *rest: function(class_logits, bit_logits, *rest, CODE, *more)


MANY = (
    *QKV, SEGMENTS, PLACES, np.array([12, 9]), RNG.random((2, 1, 12, 12)) < 0.8, x(4, 12, 12), x(4), np.array(0.3)
)  # fmt: skip
GROUPED = H, TABLE, ids(N, below=2), ids(N, below=4), np.array([0, 4, 8])
ADAPTIVE = {"cutoffs": (3, 5)}
# name of a public op -> calls of it: (function, arguments).
CALLS = {
    "attention.attend": (
        (lambda *a: attend(*a, Causal()), QKV),
        (lambda *a: attend(*a, Causal(), block_size=4), LONG),
        (operands, MANY),
        (dropped, (*LONG, KEY, ids(1, 2), ids(1, 3, below=40))),
    ),
    "attention.flash.flash": ((flash, QKV),),
    "attention.reference.reference": (
        (reference, QKV),
        (
            lambda *a: reference(*a[:3], Causal(), segment_ids=a[3], sinks=a[4], bias=a[5]),
            (*QKV, SEGMENTS, x(4), x(12, 12)),
        ),
    ),
    "attention.reference.as_flags": ((lambda t: as_flags(t, 12), (ids(2, 3),)),),
    "attention.parts.merge": ((lambda *a: merge(a[:2], a[2:]), (x(3, 4), x(3), x(3, 4), x(3))),),
    "attention.decode.attend_cache": (
        (
            lambda q, k, v, at, held: decode.attend_cache(q, k, v, Causal(), at, held),
            (x(2, 1, 4, 8), x(4, 12, 8), x(4, 12, 8), PLACES[:, :1] + 9, PLACES),
        ),
    ),
    "attention.cache.start_cache": (
        (lambda k, v, n: cache.start_cache(k, v, n, Causal(), 16), (*QKV[1:], np.array([12, 7]))),
    ),
    "attention.cache.extend_cache": (
        (
            lambda q, k, v, held: cache.extend_cache(q, k, v, Causal(), held),
            (x(2, 1, 4, 8), x(2, 1, 2, 8), x(2, 1, 2, 8), CACHE),
        ),
    ),
    "attention.position.rope": ((position.rope, (QKV[0], PLACES)),),
    "attention.position.sinusoids": ((lambda at: position.sinusoids(at, 8), (PLACES,)),),
    "attention.position.t5_buckets": ((position.t5_buckets, (PLACES,)),),
    "attention.position.t5_bias": (
        (lambda table, *q: attend(*q, bias=position.t5_bias(table, max_distance=20)), (x(8, 4), *QKV)),
        (
            lambda table, a, b, c: position.t5_bias(table, max_distance=20)(a, b, c),
            (x(8, 4), ids(3, 1, below=4), ids(1, 5), ids(1, 5)),
        ),
    ),
    "attention.position.shaw": ((position.shaw, (QKV[0], x(5, 8), PLACES, PLACES)),),
    "attention.position.relative_shift": ((lambda a: position.relative_shift(a, 3), (x(2, 3, 5),)),),
    "attention.position.transformer_xl": (
        (lambda q, r, u, v: position.transformer_xl(q, r, u, v, 12), (QKV[0], x(23, 4, 8), x(4, 8), x(4, 8))),
    ),
    "dropout.seed_words": ((dropout.seed_words, (KEY,)),),
    "dropout.keep_mask": (
        (lambda s, h, q, k: dropout.keep_mask(s, h, q, k, 0.5), (KEY, ids(3, 1, 1), ids(1, 4, 1), ids(1, 1, 4))),
    ),
    "dynamic_quantization.quantize": (
        (lambda a: dynamic_quantization.quantize(a, signed=True), (H,)),
        (lambda a: dynamic_quantization.quantize(a, signed=False), (H,)),
    ),
    "dynamic_quantization.dequantize": (
        (
            lambda a: dynamic_quantization.dequantize(a, signed=True),
            (dynamic_quantization.Quantized(ids(N, D).astype(np.uint8), x(N, 1)),),
        ),
    ),
    "linear.linear": ((linear.linear, (x(2, 3, D), x(D, 5), x(5))), (linear.linear, (np.float16(H), x(D, 5)))),
    "linear.product": ((linear.product, (H, x(D, 5))),),
    "linear.widened": ((linear.widened, (np.float16(H), TABLE)),),
    "norms.rms_norm": ((lambda a, s: norms.rms_norm(a, s, 1e-6), (H, x(D))),),
    "norms.layer_norm": ((lambda a, s, b: norms.layer_norm(a, s, b, 1e-6), (H, x(D), x(D))),),
    "reversible.reversible": ((layers, ({"a": np.float32(x(3, D))}, np.float32(H), np.float32(H), np.float32(x(D)))),),
    "search.exact.exact_search": (
        (lambda q, w, b: exact_search(q, w, 2, bias=b), (H, TABLE, BIAS)),
        (lambda q, w: exact_search(q, w, 2, block_size=3), (H, TABLE)),
    ),
    "search.ivf.ivf_search": ((lambda q: ivf_search(IVF, q, 2, probes=2), (H,)),),
    "search.lsh.lsh_search": ((lambda q: lsh_search(LSH, q, 2, probes=2), (H,)),),
    "search.lsh.lsh_candidates": ((lambda q: lsh_candidates(LSH, q, probes=2), (H,)),),
    "softmax.cross_entropy.logits": ((lambda h, w, b: cross_entropy.logits(h, w, bias=b), (H, TABLE, BIAS)),),
    "softmax.cross_entropy.linear_cross_entropy": tuple(
        (
            lambda h, w, y, b, m, kw=kw: cross_entropy.linear_cross_entropy(h, w, y, bias=b, weights=m, **kw),
            (H, TABLE, LABELS, BIAS, WEIGHTS),
        )
        for kw in (
            {},
            {"impl": "vocabulary", "block_size": 3},
            {"impl": "reference"},
            {"reduction": "none", "return_stats": True, "z_loss": 0.1},
        )
    )
    + ((cross_entropy.linear_cross_entropy, (np.float16(H), TABLE, LABELS)),),
    "softmax.cross_entropy.partial_cross_entropy": (
        (cross_entropy.partial_cross_entropy, (H, TABLE, LABELS, np.array(2))),
    ),
    "softmax.cross_entropy.merged_lse": ((cross_entropy.merged_lse, (x(N), x(N))),),
    "softmax.cross_entropy.without_silent": ((cross_entropy.without_silent, (H, LABELS, WEIGHTS)),),
    "softmax.adaptive.adaptive_nll": (
        (
            lambda h, head, tails, y, b: adaptive.adaptive_nll(h, head, tails, y, **ADAPTIVE, head_bias=b),
            (H, HEAD, TAILS, LABELS, x(5)),
        ),
    ),
    "softmax.adaptive.adaptive_log_probs": (
        (
            lambda h, head, tails, b: adaptive.adaptive_log_probs(h, head, tails, **ADAPTIVE, head_bias=b),
            (H, HEAD, TAILS, x(5)),
        ),
    ),
    "softmax.adaptive.adaptive_top_k": (
        (
            lambda h, head, tails, b: adaptive.adaptive_top_k(h, head, tails, k=2, **ADAPTIVE, head_bias=b),
            (H, HEAD, TAILS, x(5)),
        ),
    ),
    "softmax.adaptive.adaptive_sample": (
        (lambda h, head, tails, k: adaptive.adaptive_sample(h, head, tails, key=k, **ADAPTIVE), (H, HEAD, TAILS, KEY)),
    ),
    "softmax.classes.class_nll": (
        (
            lambda h, c, w, y, b, e: classes.class_nll(h, c, w, CLASSES, y, class_bias=b, word_bias=e),
            (H, x(3, D), TABLE, LABELS, x(3), BIAS),
        ),
    ),
    "softmax.classes.class_log_probs": (
        (
            lambda h, c, w, b, e: classes.class_log_probs(h, c, w, CLASSES, class_bias=b, word_bias=e),
            (H, x(3, D), TABLE, x(3), BIAS),
        ),
    ),
    "softmax.classes.class_top_k": (
        (
            lambda h, c, w, b, e: classes.class_top_k(h, c, w, CLASSES, 2, class_bias=b, word_bias=e),
            (H, x(3, D), TABLE, x(3), BIAS),
        ),
    ),
    "softmax.classes.class_sample": (
        (lambda h, c, w, k: classes.class_sample(h, c, w, CLASSES, k), (H, x(3, D), TABLE, KEY)),
    ),
    "softmax.codes.code_nll": tuple(
        (lambda z, y, loss=loss: codes.code_nll(z, y, CODE, loss=loss), (x(N, 3), LABELS)) for loss in codes.LOSSES
    ),
    "softmax.codes.code_log_normalizer": ((lambda z: codes.code_log_normalizer(z, CODE), (x(N, 3),)),),
    "softmax.codes.code_log_probs": ((lambda z: codes.code_log_probs(z, CODE), (x(N, 3),)),),
    "softmax.codes.code_top_k": ((lambda z: codes.code_top_k(z, CODE, 2), (x(N, 3),)),),
    "softmax.codes.code_sample": ((lambda z, k: codes.code_sample(z, CODE, k), (x(N, 3), KEY)),),
    "softmax.codes.hybrid_nll": ((hybrid(codes.hybrid_nll), (x(N, 4), x(N, 3), LABELS)),),
    "softmax.codes.hybrid_log_probs": ((hybrid(codes.hybrid_log_probs), (x(N, 4), x(N, 3))),),
    "softmax.codes.hybrid_top_k": ((hybrid(codes.hybrid_top_k, 2), (x(N, 4), x(N, 3))),),
    "softmax.codes.hybrid_sample": (
        (lambda c, z, k: codes.hybrid_sample(c, z, CODE, k, temperature=0.5), (x(N, 4), x(N, 3), KEY)),
    ),
    "softmax.grouped.grouped_nll": ((lambda *a: grouped.grouped_nll(*a, block=2, width=2), GROUPED),),
    "softmax.grouped.known_labels": ((lambda y: grouped.known_labels(y, N, V), (LABELS,)),),
    "softmax.grouped.best_of": ((grouped.best_of, (x(2), ids(2), x(3), ids(3))),),
    "softmax.margin.hardest": ((lambda s, i, y: margin.hardest(s, i, y, 2), (x(N, 5), ids(5), LABELS)),),
    "softmax.margin.margin_loss": ((margin.margin_loss, (x(N), x(N, 3))),),
    "softmax.margin.triplet_loss": ((margin.triplet_loss, (H, x(N, D), x(N, 3, D))),),
    "softmax.sampled.scores": (
        (sampled.scores, (H, x(N, D), x(5, D))),
        (sampled.scores, (np.float16(H), x(N, D), x(N, 5, D))),
    ),
    "softmax.sampled.hits": ((sampled.hits, (SAMPLES, LABELS)),),
    "softmax.sampled.sampled_softmax": ((sampled.sampled_softmax, (x(N), x(N, 5), SAMPLES, LABELS)),),
    "softmax.sampled.importance_sampling": ((sampled.importance_sampling, (x(N), x(N, 5), SAMPLES)),),
    "softmax.sampled.adaptive_importance_sampling": (
        (
            lambda h, y, z, s: sampled.adaptive_importance_sampling(h, y, z, s, effective=2.0, block=5),
            (H, x(N, D), x(5, D), SAMPLES),
        ),
    ),
    "softmax.sampled.noise_contrastive": ((sampled.noise_contrastive, (x(N), x(N, 5), SAMPLES)),),
    "softmax.sampled.negative_sampling": ((sampled.negative_sampling, (x(N), x(N, 5))),),
    "softmax.samplers.sample": tuple(
        (lambda k, y, s=sampler, kw=kw: proposals.sample(s, k, 3, y, **kw), (KEY, LABELS))
        for sampler in (
            proposals.Uniform(V),
            proposals.LogUniform(V),
            proposals.unigram(1.0 + np.arange(V)),
            proposals.LearnedUnigram.start(V),
        )
        for kw in ({}, {"unique": True})
    ),
    "softmax.sampling.sample": ((lambda z, k: sampling.sample(z, k, top_k=3, top_p=0.9), (x(N, V), KEY)),),
    "softmax.sampling.pick": (
        (lambda z, p, a: sampling.pick(z, p, temperature=0.5, allowed=a), (x(N, V), RNG.random(N), np.arange(V) > 2)),
    ),
    "softmax.sampling.restrict": ((lambda z: sampling.restrict(z, top_k=3, top_p=0.9), (x(N, V),)),),
    "softmax.tree.tree_nll": (
        (lambda h, w, y, b: tree.tree_nll(h, w, TREE, y, bias=b), (H, x(V - 1, D), LABELS, x(V - 1))),
    ),
    "softmax.tree.path_nll": ((tree.path_nll, (H, x(N, 3, D), np.sign(x(N, 3)), x(N, 3))),),
    "softmax.tree.tree_paths": ((lambda y: tree.tree_paths(TREE, y), (LABELS,)),),
    "softmax.tree.tree_rows": ((lambda y: tree.tree_rows(TREE, y), (LABELS,)),),
    "softmax.tree.tree_log_probs": (
        (lambda h, w, b: tree.tree_log_probs(h, w, TREE, bias=b), (H, x(V - 1, D), x(V - 1))),
    ),
    "softmax.tree.tree_top_k": ((lambda h, w, b: tree.tree_top_k(h, w, TREE, 2, bias=b), (H, x(V - 1, D), x(V - 1))),),
    "softmax.tree.tree_sample": tuple(
        (lambda h, w, k, t=t: tree.tree_sample(h, w, TREE, k, temperature=t), (H, x(V - 1, D), KEY))
        for t in (1.0, 0.5, 0.0)
    ),
    "softmax.vmf.log_iv": ((lambda k: vmf.log_iv(2, k), (np.abs(x(N)),)),),
    "softmax.vmf.bessel_ratio": ((lambda k: vmf.bessel_ratio(2, k), (np.abs(x(N)),)),),
    "softmax.vmf.log_normalizer": ((lambda k: vmf.log_normalizer(D, k), (np.abs(x(N)),)),),
    "softmax.vmf.vmf_loss": ((lambda h, w, m: vmf.vmf_loss(h, w, weights=m), (H, x(N, D), WEIGHTS)),),
}

# Modules without public ops: the executor and kernels behind `attend`, masks, blocks of logits behind the losses, helpers.
INTERNAL = {
    *(f"attention.{name}" for name in ("algebra", "backends", "blocks", "cudnn", "hopper", "hopper_backward")),
    *(
        f"attention.{name}"
        for name in ("layout", "lookback", "mask", "mosaic", "orders", "pallas_gpu", "panels", "patterns")
    ),
    *(f"attention.{name}" for name in ("splash_masks", "splash_tpu", "tile", "validate", "visits")),
    *("array_op", "arrays", "hashing", "manual", "turns", "softmax.blocks", "softmax.similarity", "softmax.tree_build"),
}
# Functions that compute on the host, from numbers and numpy arrays, and parts of other ops.
ON_HOST = {
    "attention.explain",
    "attention.parts.forward",
    "attention.parts.backward",
    *(f"attention.position.{name}" for name in ("yarn", "frequencies", "alibi", "alibi_slopes")),
    *(f"search.exact.{name}" for name in ("recall", "check_search", "check_bias", "product", "top_k", "best_of")),
    *("search.ivf.build_ivf", "search.lsh.build_lsh", "search.lsh.probe_sets"),
    *("softmax.adaptive.adaptive_shapes", "softmax.codes.binary_code", "softmax.codes.convolutional_code"),
    *(f"softmax.classes.{name}" for name in ("classes_from", "equal_size_classes", "equal_mass_classes")),
    *("softmax.grouped.check_k", "softmax.samplers.unigram"),
}


# Searches in loops of unknown length.
NO_GRADIENT = {"softmax.classes.class_top_k", "softmax.tree.tree_top_k"}


def public_functions():
    for module in pkgutil.walk_packages(hpnlp.ops.__path__, "hpnlp.ops."):
        short = module.name.removeprefix("hpnlp.ops.")
        if short not in INTERNAL:
            for name, value in vars(importlib.import_module(module.name)).items():
                own = inspect.isfunction(value) and value.__module__ == module.name
                if own and not name.startswith("_"):
                    yield f"{short}.{name}"


def test_every_public_op_is_in_the_table():
    assert set(public_functions()) == set(CALLS) | ON_HOST


def floats(tree):
    """The leaves of a tree that have gradients."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def split(function, arguments):
    """(`function` of a list of leaves, giving the leaves that have gradients; the leaves; the places of those with some)."""
    leaves, form = jax.tree.flatten(arguments)
    of_leaves = lambda leaves: floats(function(*jax.tree.unflatten(form, leaves)))  # noqa: E731
    return of_leaves, leaves, [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def transformed(function, arguments, differentiate):
    """Results of a call, and of `jax.vjp` of it where something has a gradient."""
    of_leaves, leaves, places = split(function, arguments)

    def of_floats(*values):
        return of_leaves([values[places.index(i)] if i in places else leaf for i, leaf in enumerate(leaves)])

    results = [function(*arguments)]
    if differentiate and places and floats(results):
        outputs, pull = jax.vjp(of_floats, *(leaves[i] for i in places))
        results += [outputs, pull([jnp.ones_like(x) for x in outputs])]
    return results


@pytest.mark.parametrize("name", CALLS)
def test_numpy_arrays_are_as_good_as_jax_arrays(name):
    """Traced only: errors and other dtypes arise while tracing, and compiling all of this would take minutes."""
    for function, arguments in CALLS[name]:
        found = jax.eval_shape(lambda: transformed(function, arguments, name not in NO_GRADIENT))  # noqa: B023
        assert all(leaf.dtype.itemsize <= 4 for leaf in jax.tree.leaves(found))
