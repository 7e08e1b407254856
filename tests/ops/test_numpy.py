"""Ops take numpy arrays wherever they take jax arrays, also under transformations."""

import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hpnlp.ops
from hpnlp.ops import dropout, dynamic_quantization, linear, norms, sampling
from hpnlp.ops import reversible as reversible_layers
from hpnlp.ops.attention import Causal, Operands, Window, attend, clustered, flash, merge, reference
from hpnlp.ops.attention.decoding import decode, kv_cache
from hpnlp.ops.attention.linear import (
    LinearState,
    linear_attention,
    linear_attention_step,
    reference_linear_attention,
    reference_linear_recurrence,
)
from hpnlp.ops.attention.linear.random_attention import random_feature_attention, rfa_attention
from hpnlp.ops.attention.memory import compression, relative
from hpnlp.ops.attention.operands import as_flags
from hpnlp.ops.attention.pair_bias import weighted
from hpnlp.ops.attention.positions import bias, rope
from hpnlp.ops.attention.selected_blocks import ChosenBlocks, attend_blocks, attend_blocks_reference
from hpnlp.ops.attention.selected_blocks import blocks as key_blocks
from hpnlp.ops.attention.selected_blocks import decode as block_cache
from hpnlp.ops.convolutions import convolution, image_convolution, light_convolution
from hpnlp.ops.search import (
    PqCodes,
    build_ivf,
    build_lsh,
    build_pq,
    exact_search,
    ivf_search,
    lsh_candidates,
    lsh_search,
    pq_search,
)  # fmt: skip
from hpnlp.ops.softmax import bit_paths, continuous_cache, cross_entropy, margin, sampled_losses, scored_words, vmf
from hpnlp.ops.softmax import proposals as proposals
from hpnlp.ops.softmax.structured import adaptive, binary_codes, class_based, grouped_softmax, hierarchical
from tests.contracts import assert_close
from tests.ops import (
    bags_calls,
    bucketed_and_low_rank_calls,
    distillation_calls,
    embeddings_calls,
    moe_calls,
    projection_calls,
    rnn_calls,
    trees_calls,
    weights_calls,
)

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
TREE = hierarchical.balanced_tree(V)
CLASSES = class_based.equal_size_classes(V, 3)
CODE = binary_codes.binary_code(V)
IVF, LSH = build_ivf(x(64, D), cells=4), build_lsh(x(64, D), bits=2, tables=2)
PQ = build_pq(x(64, D), PqCodes(2, 16), cells=4)
HEAD, TAILS = x(5, D), ((x(2, D), x(2, 2)), (x(1, D), x(3, 1)))
SAMPLES = proposals.Samples(ids(5), x(5), x(N))
STATE = LinearState(x(2, 2, 8, 8), x(2, 2, 8))
CACHE = kv_cache.KVCache(x(4, 16, 8), x(4, 16, 8), np.array([12, 7]))


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
DOCUMENTS = key_blocks.DocumentBlocks(ids(2, 3), RNG.random((2, 3)) < 0.5, ids(2, 3), ids(2, 12), 4)
CHOSEN = np.array([[0, 4, 8]] * 2), ids(2, 12, 2, 2, below=3) * [1, 0] - [0, 1]
CACHED = x(2, 3, D), x(2, 5, D), ids(2, 5), RNG.random((2, 3, 5)) < 0.7
CLUSTERS = clustered.Clusters(ids(2, 12, 4, below=3), ids(2, 3), RNG.random(2) < 0.5, 3)
GROUPED = H, TABLE, ids(N, below=2), ids(N, below=4), np.array([0, 4, 8])
ADAPTIVE = {"cutoffs": (3, 5)}
# name of a public op -> calls of it: (function, arguments).
CALLS = bucketed_and_low_rank_calls.CALLS | {
    "attention.attend.attend": (
        (lambda *a: attend(*a, Causal()), QKV),
        (lambda *a: attend(*a, Causal(), block_size=4), LONG),
        (operands, MANY),
        (lambda *a: attend(*a, bias=np.float32(0.3), scale=np.float64(0.3), soft_cap=np.float64(2.0)), QKV),
        (dropped, (*LONG, KEY, ids(1, 2), ids(1, 3, below=40))),
    ),
    "attention.block_sparse.flash.flash": ((flash, QKV),),
    "attention.reference.reference": (
        (reference, QKV),
        (
            lambda *a: reference(*a[:3], Causal(), segment_ids=a[3], sinks=a[4], bias=a[5]),
            (*QKV, SEGMENTS, x(4), x(12, 12)),
        ),
    ),
    "attention.linear.linear_attention.linear_attention": (
        (lambda *a: linear_attention(*a, normalize=True, return_state=True, chunk=8), QKV),
        (lambda *a: linear_attention(*a[:3], causal=False, segment_ids=a[3], chunk=8), (*QKV, SEGMENTS)),
        (lambda *a: linear_attention(*a, causal=False, normalize=True), QKV),
        (
            lambda *a: linear_attention(*a[:3], log_decay=a[3], beta=a[4], chunk=8),
            (*QKV, -np.abs(x(2, 12, 2, 8)), RNG.random((2, 12, 2))),
        ),
    ),
    "attention.linear.random_attention.random_feature_attention": (
        (lambda *a: random_feature_attention(*a[:4], segment_ids=a[4]), (*QKV, x(6, 8), SEGMENTS)),
        (
            lambda *a: random_feature_attention(*a[:4], kind="optimal", rho=a[4], causal=False),
            (*QKV, x(6, 8), RNG.random(2)),
        ),
    ),
    "attention.linear.random_attention.rfa_attention": (
        (
            lambda *a: rfa_attention(*a[:4], scale=a[4], log_gate=a[5], segment_ids=a[6]),
            (*QKV, x(6, 8), x(2, 8), -RNG.random((2, 12, 2)), SEGMENTS),
        ),
    ),
    "attention.linear.recurrent.linear_attention_step": (
        (lambda *a: linear_attention_step(*a[:4], log_decay=a[4]), (*(y[:, 0] for y in QKV), STATE, -np.abs(x(2)))),
    ),
    "attention.linear.reference.reference_linear_attention": (
        (
            lambda *a: reference_linear_attention(*a[:3], segment_ids=a[3], log_decay=a[4], beta=a[5]),
            (*QKV, SEGMENTS, -np.abs(x(2, 12, 2)), RNG.random((2, 12, 2))),
        ),
    ),
    "attention.linear.reference.reference_linear_recurrence": (
        (
            lambda *a: reference_linear_recurrence(*a[:3], segment_ids=a[3], log_decay=a[4], beta=a[5]),
            (*QKV, SEGMENTS, -np.abs(x(2, 12, 2)), RNG.random((2, 12, 2))),
        ),
    ),
    "attention.pair_bias.weighted": ((weighted, (QKV[0], x(1, 1, 1, 1))),),
    "attention.operands.as_flags": ((lambda t: as_flags(t, 12), (ids(2, 3),)),),
    "attention.attend.merge": ((lambda *a: merge(a[:2], a[2:]), (x(3, 4), x(3), x(3, 4), x(3))),),
    "attention.clustered.hamming_kmeans.sign_bits": ((clustered.sign_bits, (QKV[0], x(8, 5))),),
    "attention.clustered.hamming_kmeans.hamming_kmeans": (
        (lambda bits, s: clustered.hamming_kmeans(bits, 3, 2, s), (np.sign(x(2, 12, 4, 5)), SEGMENTS)),
    ),
    "attention.clustered.attention.clustered_attention": ((clustered.clustered_attention, (*QKV, CLUSTERS, SEGMENTS)),),
    "attention.clustered.attention.improved_clustered_attention": (
        (lambda *a: clustered.improved_clustered_attention(*a[:4], 2, a[4]), (*QKV, CLUSTERS, SEGMENTS)),
    ),
    "attention.selected_blocks.attend_blocks.attend_blocks": (
        (lambda *a: attend_blocks(*a[:3], ChosenBlocks(*a[3:], block=4)), (*QKV, *CHOSEN)),
        (
            lambda q, k, v, starts, chosen, visible, key: attend_blocks(
                q, k, v, ChosenBlocks(starts, chosen, 4, visible), dropout_rate=0.5, rng=key
            ),
            (*QKV, *CHOSEN, RNG.random((2, 12, 2)) < 0.8, KEY),
        ),
    ),
    "attention.selected_blocks.attend_blocks.attend_blocks_reference": (
        (lambda *a: attend_blocks_reference(*a[:3], ChosenBlocks(*a[3:], block=4)), (*QKV, *CHOSEN)),
    ),
    "attention.selected_blocks.blocks.document_blocks": (
        (lambda s: key_blocks.document_blocks(s, 2, 12, 4), (SEGMENTS,)),
    ),
    "attention.selected_blocks.blocks.block_summaries": (
        (key_blocks.block_summaries, (QKV[1], DOCUMENTS)),
        (key_blocks.block_summaries, (QKV[1], DOCUMENTS, x(2, 4))),
    ),
    "attention.selected_blocks.blocks.choose_blocks": (
        (
            lambda q, k, blocks, s, lse: key_blocks.choose_blocks(q, k, blocks, 2, segment_ids=s, lse=lse),
            (QKV[0], x(2, 3, 2, 8), DOCUMENTS, SEGMENTS, x(2, 12, 4)),
        ),
    ),
    "attention.selected_blocks.blocks.own_block_attention": ((key_blocks.own_block_attention, (*QKV, DOCUMENTS)),),
    "attention.selected_blocks.decode.start_block_cache": (
        (
            lambda k, v, n, w: block_cache.start_block_cache(k, v, n, 4, 16, w, w, has_v_summaries=True),
            (*QKV[1:], np.array([12, 7]), x(2, 4)),
        ),
    ),
    "attention.selected_blocks.decode.block_positions": (
        (lambda c, p: block_cache.block_positions(c, p, 4), (CHOSEN[1], PLACES)),
    ),
    "attention.selected_blocks.decode.attend_positions": (
        (block_cache.attend_positions, (x(2, 2, 4, 8), x(4, 16, 8), x(4, 16, 8), ids(2, 2, 2, 5))),
    ),
    "attention.decoding.decode.attend_cache": (
        (
            lambda q, k, v, at, held: decode.attend_cache(q, k, v, Causal(), at, held),
            (x(2, 1, 4, 8), x(4, 12, 8), x(4, 12, 8), PLACES[:, :1] + 9, PLACES),
        ),
    ),
    "attention.decoding.kv_cache.by_head": ((kv_cache.by_head, (x(2, 12, 4, 8),)),),
    "attention.decoding.kv_cache.start_cache": (
        (lambda k, v, n: kv_cache.start_cache(k, v, n, Causal(), 16), (*QKV[1:], np.array([12, 7]))),
    ),
    "attention.decoding.kv_cache.extend_cache": (
        (
            lambda q, k, v, held: kv_cache.extend_cache(q, k, v, Causal(), held),
            (x(2, 1, 4, 8), x(2, 1, 2, 8), x(2, 1, 2, 8), CACHE),
        ),
    ),
    "attention.memory.relative.distance_scores": (
        (lambda q, r, u: relative.distance_scores(q, r, u, scale=0.5), (QKV[0], x(5, 4, 8), x(4, 8))),
    ),
    "attention.memory.relative.relative_attention": (
        (
            lambda *a: relative.relative_attention(*a[:6], Operands(segment_ids=a[6]), block_size=5),
            (*QKV, x(6, 4, 8), x(4, 8), x(4, 8), SEGMENTS),
        ),
    ),
    "attention.memory.relative.received_attention": (
        (
            lambda *a: relative.received_attention(*a[:5], Operands(segment_ids=a[5])),
            (*QKV[:2], x(6, 4, 8), x(4, 8), x(4, 8), SEGMENTS),
        ),
    ),
    "attention.memory.relative.reference_relative_attention": (
        (
            lambda *a: relative.reference_relative_attention(*a[:6], Operands(segment_ids=a[6])),
            (*QKV, x(6, 4, 8), x(4, 8), x(4, 8), SEGMENTS),
        ),
    ),
    "attention.memory.compression.pool_memories": (
        (lambda h, at: compression.pool_memories(h, at, 3, "mean"), (x(2, 12, 4), SEGMENTS)),
        (lambda h, at: compression.pool_memories(h, at, 3, "max"), (x(2, 12, 4), SEGMENTS)),
        (lambda h, at, w: compression.pool_memories(h, at, 3, "conv", w), (x(2, 12, 4), SEGMENTS, x(12, 4))),
    ),
    "attention.memory.compression.most_used": (
        (lambda usage, at: compression.most_used(usage, at, 3), (x(2, 12), SEGMENTS)),
    ),
    "attention.memory.compression.reconstruction_errors": (
        (
            lambda *a: compression.reconstruction_errors(a[0], (a[1], a[2], a[5]), (a[3], a[4], a[5][:, ::3]), a[5]),
            (*QKV, x(2, 4, 2, 8), x(2, 4, 2, 8), SEGMENTS),
        ),
    ),
    "attention.positions.rope.rope": ((rope.rope, (QKV[0], PLACES)),),
    "attention.positions.rope.sinusoids": ((lambda at: rope.sinusoids(at, 8), (PLACES,)),),
    "attention.positions.bias.t5_buckets": ((bias.t5_buckets, (PLACES,)),),
    "attention.positions.bias.t5_bias": (
        (lambda table, *q: attend(*q, bias=bias.t5_bias(table, max_distance=20)), (x(8, 4), *QKV)),
        (
            lambda table, a, b, c: bias.t5_bias(table, max_distance=20)(a, b, c),
            (x(8, 4), ids(3, 1, below=4), ids(1, 5), ids(1, 5)),
        ),
    ),
    "attention.positions.bias.shaw": ((bias.shaw, (QKV[0], x(5, 8), PLACES, PLACES)),),
    "attention.positions.bias.relative_shift": ((lambda a: bias.relative_shift(a, 3), (x(2, 3, 5),)),),
    "attention.positions.bias.transformer_xl": (
        (lambda q, r, u, v: bias.transformer_xl(q, r, u, v, 12), (QKV[0], x(23, 4, 8), x(4, 8), x(4, 8))),
    ),
    "dropout.seed_words": ((dropout.seed_words, (KEY,)),),
    "dropout.keep_mask": (
        (lambda s, h, q, k: dropout.keep_mask(s, h, q, k, 0.5), (KEY, ids(3, 1, 1), ids(1, 4, 1), ids(1, 1, 4))),
    ),
    "dropout.random_bits": ((dropout.random_bits, (KEY, ids(3, 1, 1), ids(1, 4, 1), ids(1, 1, 4))),),
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
    "convolutions.convolution.depthwise_conv": (
        (lambda *a: convolution.depthwise_conv(*a, ahead=1), (x(2, 5, D), x(3, D), np.zeros((2, 5), np.int32))),
    ),
    "convolutions.convolution.token_windows": (
        (lambda a, at: convolution.token_windows(a, 3, at, ahead=1), (x(2, 5, D), np.zeros((2, 5), np.int32))),
    ),
    "convolutions.convolution.dilated_conv": (
        (
            lambda *a: convolution.dilated_conv(*a, ahead=1, dilation=2),
            (x(2, 5, 2, 3), x(2, 3, 3, 4), np.zeros((2, 5), np.int32)),
        ),
        (lambda a, b, c: convolution.dilated_conv(a, b, preceding=c), (x(2, 5, 2, 3), x(2, 3, 3, 4), x(2, 2, 2, 3))),
    ),
    "convolutions.image_convolution.conv2d": (
        (image_convolution.conv2d, (x(2, 5, 5, D), x(3, 3, D, 2))),
        (lambda *a: image_convolution.conv2d(*a, taps=((0, 0), (0, 1))), (x(2, 5, 5, D), x(2, D, 2))),
    ),
    "convolutions.image_convolution.depthwise_conv2d": (
        (image_convolution.depthwise_conv2d, (x(2, 5, 5, D), x(3, 3, D))),
        (lambda *a: image_convolution.depthwise_conv2d(*a, taps=((0, 0), (0, 1))), (x(2, 5, 5, D), x(2, D))),
    ),
    "convolutions.light_convolution.light_conv": (
        (lambda *a: light_convolution.light_conv(*a, ahead=1), (x(2, 5, 2, 3), x(2, 3), np.zeros((2, 5), np.int32))),
    ),
    "convolutions.light_convolution.dynamic_conv": (
        (
            lambda a, b, c: light_convolution.dynamic_conv(a, b, preceding=c),
            (x(2, 5, 2, 3), x(2, 5, 2, 3), x(2, 2, 2, 3)),
        ),
    ),
    "convolutions.convolution.causal_conv": (
        (convolution.causal_conv, (x(2, 5, D), x(3, D), np.zeros((2, 5), np.int32))),
    ),
    "convolutions.convolution.last_tokens": (
        (lambda a, n: convolution.last_tokens(a, n, 3), (x(2, 5, D), np.int32([2, 5]))),
    ),
    "linear.linear": ((linear.linear, (x(2, 3, D), x(D, 5), x(5))), (linear.linear, (np.float16(H), x(D, 5)))),
    "linear.linear_by_transpose": ((linear.linear_by_transpose, (x(2, 3, D), x(5, D), x(5))),),
    "linear.product_by_transpose": ((linear.product_by_transpose, (H, x(5, D))),),
    "linear.product": ((linear.product, (H, x(D, 5))),),
    "linear.widened": ((linear.widened, (np.float16(H), TABLE)),),
    "norms.rms_norm": ((lambda a, s: norms.rms_norm(a, s, 1e-6), (H, x(D))),),
    "norms.layer_norm": ((lambda a, s, b: norms.layer_norm(a, s, b, 1e-6), (H, x(D), x(D))),),
    "norms.group_norm": ((lambda a, s, b: norms.group_norm(a, s, b, 2, 1e-6), (x(2, 3, D), x(D), x(D))),),
    "norms.channel_moments": ((norms.channel_moments, (x(2, 3, D), np.ones(2))),),
    "norms.normalize_channels": (
        (lambda *a: norms.normalize_channels(*a, 1e-6), (x(2, 3, D), x(D), x(D) ** 2, x(D), x(D))),
    ),
    "reversible.reversible": ((layers, ({"a": np.float32(x(3, D))}, np.float32(H), np.float32(H), np.float32(x(D)))),),
    "search.exact.exact_search": (
        (lambda q, w, b: exact_search(q, w, 2, bias=b), (H, TABLE, BIAS)),
        (lambda q, w: exact_search(q, w, 2, block_size=3), (H, TABLE)),
    ),
    "search.ivf.ivf_search": ((lambda q: ivf_search(IVF, q, 2, probes=2), (H,)),),
    "search.pq.pq_search": ((lambda q: pq_search(PQ, q, 2, probes=2), (H,)),),
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
    "softmax.cross_entropy.zero_ignored_tokens": ((cross_entropy.zero_ignored_tokens, (H, LABELS, WEIGHTS)),),
    "softmax.structured.adaptive.adaptive_nll": (
        (
            lambda h, head, tails, y, b: adaptive.adaptive_nll(h, head, tails, y, **ADAPTIVE, head_bias=b),
            (H, HEAD, TAILS, LABELS, x(5)),
        ),
    ),
    "softmax.structured.adaptive.adaptive_log_probs": (
        (
            lambda h, head, tails, b: adaptive.adaptive_log_probs(h, head, tails, **ADAPTIVE, head_bias=b),
            (H, HEAD, TAILS, x(5)),
        ),
    ),
    "softmax.structured.adaptive.adaptive_top_k": (
        (
            lambda h, head, tails, b: adaptive.adaptive_top_k(h, head, tails, k=2, **ADAPTIVE, head_bias=b),
            (H, HEAD, TAILS, x(5)),
        ),
    ),
    "softmax.structured.adaptive.adaptive_sample": (
        (lambda h, head, tails, k: adaptive.adaptive_sample(h, head, tails, key=k, **ADAPTIVE), (H, HEAD, TAILS, KEY)),
    ),
    "softmax.structured.class_based.class_nll": (
        (
            lambda h, c, w, y, b, e: class_based.class_nll(h, c, w, CLASSES, y, class_bias=b, word_bias=e),
            (H, x(3, D), TABLE, LABELS, x(3), BIAS),
        ),
    ),
    "softmax.structured.class_based.class_log_probs": (
        (
            lambda h, c, w, b, e: class_based.class_log_probs(h, c, w, CLASSES, class_bias=b, word_bias=e),
            (H, x(3, D), TABLE, x(3), BIAS),
        ),
    ),
    "softmax.structured.class_based.class_top_k": (
        (
            lambda h, c, w, b, e: class_based.class_top_k(h, c, w, CLASSES, 2, class_bias=b, word_bias=e),
            (H, x(3, D), TABLE, x(3), BIAS),
        ),
    ),
    "softmax.structured.class_based.class_sample": (
        (lambda h, c, w, k: class_based.class_sample(h, c, w, CLASSES, k), (H, x(3, D), TABLE, KEY)),
    ),
    "softmax.bit_paths.path_bits": ((lambda y: bit_paths.path_bits(y, 3), (LABELS,)),),
    "softmax.bit_paths.is_decided": ((lambda y: bit_paths.is_decided(y, V), (LABELS,)),),
    "softmax.bit_paths.path_log_odds": ((bit_paths.path_log_odds, (x(N, V), LABELS)),),
    "softmax.bit_paths.path_log_prob": ((lambda z, y: bit_paths.path_log_prob(z, y, V), (x(N, 3), LABELS)),),
    "softmax.bit_paths.vote_counts": ((lambda f, y: bit_paths.vote_counts(f, y, 0.5, 3), (ids(N, 4), LABELS)),),
    "softmax.structured.binary_codes.code_nll": tuple(
        (lambda z, y, loss=loss: binary_codes.code_nll(z, y, CODE, loss=loss), (x(N, 3), LABELS))
        for loss in binary_codes.LOSSES
    ),
    "softmax.structured.binary_codes.code_log_normalizer": (
        (lambda z: binary_codes.code_log_normalizer(z, CODE), (x(N, 3),)),
    ),
    "softmax.structured.binary_codes.code_log_probs": ((lambda z: binary_codes.code_log_probs(z, CODE), (x(N, 3),)),),
    "softmax.structured.binary_codes.code_top_k": ((lambda z: binary_codes.code_top_k(z, CODE, 2), (x(N, 3),)),),
    "softmax.structured.binary_codes.code_sample": (
        (lambda z, k: binary_codes.code_sample(z, CODE, k), (x(N, 3), KEY)),
    ),
    "softmax.structured.binary_codes.hybrid_nll": ((hybrid(binary_codes.hybrid_nll), (x(N, 4), x(N, 3), LABELS)),),
    "softmax.structured.binary_codes.hybrid_log_probs": ((hybrid(binary_codes.hybrid_log_probs), (x(N, 4), x(N, 3))),),
    "softmax.structured.binary_codes.hybrid_top_k": ((hybrid(binary_codes.hybrid_top_k, 2), (x(N, 4), x(N, 3))),),
    "softmax.structured.binary_codes.hybrid_sample": (
        (lambda c, z, k: binary_codes.hybrid_sample(c, z, CODE, k, temperature=0.5), (x(N, 4), x(N, 3), KEY)),
    ),
    "softmax.structured.grouped_softmax.grouped_nll": (
        (lambda *a: grouped_softmax.grouped_nll(*a, tile=grouped_softmax.TileShape(2, 2)), GROUPED),
    ),
    "softmax.structured.grouped_softmax.known_labels": ((lambda y: grouped_softmax.known_labels(y, N, V), (LABELS,)),),
    "softmax.structured.grouped_softmax.merge_top_k": ((grouped_softmax.merge_top_k, (x(2), ids(2), x(3), ids(3))),),
    "softmax.continuous_cache.cache_log_prob": (
        (lambda *a: continuous_cache.cache_log_prob(*a, 0.3), (*CACHED, ids(2, 3))),
    ),
    "softmax.continuous_cache.cache_distribution": (
        (lambda *a: continuous_cache.cache_distribution(*a, V, 0.3), CACHED),
    ),
    "softmax.scored_words.label_log_prob": ((scored_words.label_log_prob, (x(N, 5), ids(N, 5), LABELS)),),
    "softmax.scored_words.word_distribution": (
        (lambda s, y: scored_words.word_distribution(s, y, V), (x(N, 5), ids(N, 5))),
    ),
    "softmax.scored_words.interpolate": (
        (scored_words.interpolate, (-(x(2, 3) ** 2), -(x(2, 3) ** 2), RNG.random((2, 3)).astype(np.float32))),
    ),
    "softmax.margin.hardest": ((lambda s, i, y: margin.hardest(s, i, y, 2), (x(N, 5), ids(5), LABELS)),),
    "softmax.margin.margin_loss": ((margin.margin_loss, (x(N), x(N, 3))),),
    "softmax.margin.triplet_loss": ((margin.triplet_loss, (H, x(N, D), x(N, 3, D))),),
    "softmax.sampled_losses.scores": (
        (sampled_losses.scores, (H, x(N, D), x(5, D))),
        (sampled_losses.scores, (np.float16(H), x(N, D), x(N, 5, D))),
    ),
    "softmax.sampled_losses.hits": ((sampled_losses.hits, (SAMPLES, LABELS)),),
    "softmax.sampled_losses.sampled_softmax": ((sampled_losses.sampled_softmax, (x(N), x(N, 5), SAMPLES, LABELS)),),
    "softmax.sampled_losses.importance_sampling": ((sampled_losses.importance_sampling, (x(N), x(N, 5), SAMPLES)),),
    "softmax.sampled_losses.adaptive_importance_sampling": (
        (
            lambda h, y, z, s: sampled_losses.adaptive_importance_sampling(h, y, z, s, effective=2.0, block=5),
            (H, x(N, D), x(5, D), SAMPLES),
        ),
    ),
    "softmax.sampled_losses.noise_contrastive": ((sampled_losses.noise_contrastive, (x(N), x(N, 5), SAMPLES)),),
    "softmax.sampled_losses.negative_sampling": ((sampled_losses.negative_sampling, (x(N), x(N, 5))),),
    "softmax.proposals.sample": tuple(
        (lambda k, y, s=sampler, kw=kw: proposals.sample(s, k, 3, y, **kw), (KEY, LABELS))
        for sampler in (
            proposals.Uniform(V),
            proposals.LogUniform(V),
            proposals.unigram(1.0 + np.arange(V)),
            proposals.LearnedUnigram.start(V),
        )
        for kw in ({}, {"unique": True})
    ),
    "sampling.sample": ((lambda z, k: sampling.sample(z, k, top_k=3, top_p=0.9), (x(N, V), KEY)),),
    "sampling.pick": (
        (lambda z, p, a: sampling.pick(z, p, temperature=0.5, allowed=a), (x(N, V), RNG.random(N), np.arange(V) > 2)),
    ),
    "sampling.restrict": ((lambda z: sampling.restrict(z, top_k=3, top_p=0.9), (x(N, V),)),),
    "softmax.structured.hierarchical.tree_nll": (
        (lambda h, w, y, b: hierarchical.tree_nll(h, w, TREE, y, bias=b), (H, x(V - 1, D), LABELS, x(V - 1))),
    ),
    "softmax.structured.hierarchical.path_nll": ((hierarchical.path_nll, (H, x(N, 3, D), np.sign(x(N, 3)), x(N, 3))),),
    "softmax.structured.hierarchical.tree_paths": ((lambda y: hierarchical.tree_paths(TREE, y), (LABELS,)),),
    "softmax.structured.hierarchical.tree_rows": ((lambda y: hierarchical.tree_rows(TREE, y), (LABELS,)),),
    "softmax.structured.hierarchical.tree_log_probs": (
        (lambda h, w, b: hierarchical.tree_log_probs(h, w, TREE, bias=b), (H, x(V - 1, D), x(V - 1))),
    ),
    "softmax.structured.hierarchical.tree_top_k": (
        (lambda h, w, b: hierarchical.tree_top_k(h, w, TREE, 2, bias=b), (H, x(V - 1, D), x(V - 1))),
    ),
    "softmax.structured.hierarchical.tree_sample": tuple(
        (lambda h, w, k, t=t: hierarchical.tree_sample(h, w, TREE, k, temperature=t), (H, x(V - 1, D), KEY))
        for t in (1.0, 0.5, 0.0)
    ),
    "softmax.vmf.log_iv": ((lambda k: vmf.log_iv(2, k), (np.abs(x(N)),)),),
    "softmax.vmf.bessel_ratio": ((lambda k: vmf.bessel_ratio(2, k), (np.abs(x(N)),)),),
    "softmax.vmf.log_normalizer": ((lambda k: vmf.log_normalizer(D, k), (np.abs(x(N)),)),),
    "softmax.vmf.vmf_loss": ((lambda h, w, m: vmf.vmf_loss(h, w, weights=m), (H, x(N, D), WEIGHTS)),),
}
CALLS |= weights_calls.CALLS | distillation_calls.CALLS | rnn_calls.CALLS | trees_calls.CALLS
CALLS |= embeddings_calls.CALLS | bags_calls.CALLS | moe_calls.CALLS | projection_calls.CALLS

# Modules without public ops: the executor and kernels of `attend`, masks, blocks of logits of the losses, helpers.
INTERNAL = {
    *("attention.decoding.slots", "attention.dispatch", "attention.validate"),
    *(
        f"attention.masks.{name}"
        for name in ("base", "lookback", "papers", "patterns", "per_head", "selected_tokens", "table")
    ),
    *(f"attention.linear.{name}" for name in ("chunked", "chunks", "decay", "delta", "random_features", "state")),
    *(f"attention.kernels.{name}" for name in ("cudnn", "hopper", "hopper_backward", "mosaic", "pallas_gpu")),
    *("attention.kernels.splash_masks", "attention.kernels.splash_tpu"),
    *(f"attention.block_sparse.{name}" for name in ("array_blocks", "block_mask", "chunks", "operands")),
    *(f"attention.block_sparse.decomposition.{name}" for name in ("cost_model", "decompose", "permuted")),
    *(f"attention.block_sparse.{name}" for name in ("scan", "schedule", "steps", "tile", "unrolled")),
    "attention.selected_blocks.row_tiles",
    *(f"moe.{name}" for name in ("dispatch", "exchange", "grouped", "schedule")),
    *bucketed_and_low_rank_calls.INTERNAL,
    *rnn_calls.INTERNAL,
    *(f"helpers.{name}" for name in ("array_op", "arrays", "counter_rng", "custom_vjp", "device", "stacks")),
    *("moe.pallas_gpu", "softmax.chunked_cross_entropy", "softmax.structured.word_order", "softmax.structured.trees"),
    "search.cells",
}
# Functions that compute on the host, from numbers and numpy arrays, and functions that only other ops call.
ON_HOST = {
    "convolutions.image_convolution.window_taps",
    "attention.attend.explain",
    *("helpers.checksum.word_sum", "helpers.checksum.byte_sum"),
    *("attention.pair_bias.is_pair_bias", "dynamic_quantization.is_quantized", "table_rows.is_row_subset"),
    *("table_rows.find_rows", "weights.calibrated.observed.is_observed", "weights.calibrated.observed.split_observed"),
    *("linear.prefers_transpose", "weights.ranges.steps"),
    *("attention.operands.scale_queries", "attention.reference.dense_attention"),
    *("attention.reference.visible_pairs", "attention.symbolic_lengths.has_symbols"),
    "attention.symbolic_lengths.symbolic_attention",
    *(f"attention.linear.random_attention.{name}" for name in ("rfa_quotient", "rfa_terms", "softmax_features")),
    *("attention.positions.rope.yarn", "attention.positions.rope.frequencies"),
    *("attention.positions.bias.alibi", "attention.positions.bias.alibi_slopes"),
    *(f"search.exact.{name}" for name in ("recall", "check_search", "check_bias", "product", "top_k", "padded_top_k")),
    *("search.pq.build_pq", "search.pq.decode"),
    *("search.ivf.build_ivf", "search.lsh.build_lsh", "search.lsh.probe_sets", "softmax.bit_paths.path_length"),
    *(
        "softmax.structured.adaptive.adaptive_shapes",
        "softmax.structured.binary_codes.binary_code",
        "softmax.structured.binary_codes.convolutional_code",
    ),
    *(
        f"softmax.structured.class_based.{name}"
        for name in ("classes_from", "equal_size_classes", "equal_mass_classes")
    ),
    *("moe.experts.expert_count", "weight.leading_axes"),
    *("moe.routing.check_groups", "softmax.structured.grouped_softmax.check_k", "softmax.proposals.unigram"),
    *bucketed_and_low_rank_calls.BY_OPS,
    *weights_calls.ON_HOST,
    *trees_calls.ON_HOST,
    *embeddings_calls.ON_HOST,
    *bags_calls.ON_HOST,
    *projection_calls.ON_HOST,
}


# Searches by loops of unknown length.
NO_GRADIENT = {
    "softmax.structured.class_based.class_top_k",
    "softmax.structured.hierarchical.tree_top_k",
}


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
    """(`function` of a list of leaves, giving (leaves with gradients, all); the leaves; the places of those with gradients)."""
    leaves, form = jax.tree.flatten(arguments)

    def of_leaves(leaves):
        results = function(*jax.tree.unflatten(form, leaves))
        return floats(results), results

    return of_leaves, leaves, [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def transformed(function, arguments, differentiate):
    """Results of a call, with gradients from `jax.vjp` where something has one."""
    of_leaves, leaves, places = split(function, arguments)

    def of_floats(*values):
        return of_leaves([values[places.index(i)] if i in places else leaf for i, leaf in enumerate(leaves)])

    if not differentiate or not places:
        return function(*arguments)
    outputs, pull, results = jax.vjp(of_floats, *(leaves[i] for i in places), has_aux=True)
    return results, pull([jnp.ones_like(x) for x in outputs])


@pytest.mark.parametrize("name", CALLS)
def test_numpy_arrays_are_accepted(name):
    """Calls are only traced: errors and wrong dtypes arise while tracing, and compiling would take minutes."""
    for function, arguments in CALLS[name]:
        # `jax.vjp` replaces arrays of floats by tracers, so that the plain call alone receives them.
        calls = lambda: (function(*arguments), transformed(function, arguments, name not in NO_GRADIENT))  # noqa: B023, E731
        found = jax.eval_shape(calls)
        assert all(leaf.dtype.itemsize <= 4 for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("converted", [(), (0, 3), (1, 4), (0, 1, 2)])
def test_gradients_of_numpy_arrays_outside_of_jit(converted):
    """A rule that calls another rule would hand it the caller's numpy arrays, which no trace above has replaced."""
    arguments = [np.float32(a) if a.dtype.kind == "f" else a for a in (H, TABLE, LABELS, BIAS, WEIGHTS)]

    def loss(h, w, bias, weights, labels):
        return cross_entropy.linear_cross_entropy(h, w, labels, bias=bias, weights=weights)

    def pulled(h, w, labels, bias, weights):
        value, pull = jax.vjp(lambda *floats: loss(*floats, labels), h, w, bias, weights)
        return value, pull(jnp.ones_like(value))

    found = pulled(*(jnp.asarray(a) if i in converted else a for i, a in enumerate(arguments)))
    assert_close(found, pulled(*map(jnp.asarray, arguments)))
