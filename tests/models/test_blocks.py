"""Kinds of Blocks (`model.block`): values against formulas, causality, decoding, layouts and errors."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.model_interfaces.model_parallel import NO_TENSOR_PARALLEL
from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.seq2seq import Seq2SeqModel, Seq2SeqModelConfig
from hpnlp.models.seq2seq_decode import generate
from hpnlp.nn.attention import Context, Memory
from hpnlp.nn.block import BlockConfig
from hpnlp.nn.blocks import block_kind
from hpnlp.ops.attention import Causal, Full
from hpnlp.parallel.plan import Plan
from hpnlp.spec import Spec
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from tests.contracts import once
from tests.drawn import drawn, drawn_params
from tests.messages import raises
from tests.models.test_lm import assert_greedy_ids
from tests.models.test_seq2seq import make, make_batch
from tests.training.test_step import MODEL, ONE, Run, assert_leaves_close, batch_of, initialised_state, trainer_of

CONFIG = LMConfig(vocab=11, dim=16, heads=2, layers=2, max_len=64, mlp="relu", mlp_dim=24)
LENGTH = 14


# The formulas in float64; p is a tree of parameters.


def rms(p, x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["scale"]


def relu(x):
    return np.maximum(x, 0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def by_head(p, x, heads):
    return (x @ p["kernel"]).reshape(*x.shape[:2], heads, -1)


def attention(p, x, memory, visible, heads, values=None):
    values = memory if values is None else values
    q, k, v = by_head(p["q"], x, heads), by_head(p["k"], memory, heads), by_head(p["v"], values, heads)
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    weights = softmax(np.where(visible[:, None], scores, -1e30))
    o = np.einsum("bnts,bsnh->btnh", weights, v)
    return o.reshape(*x.shape[:2], -1) @ p["out"]["kernel"]


def taps_of(x, width, ids, causal):
    """`[B, T, W, F]`: the tokens that each token reads, the latest first."""
    windows, ahead = np.zeros((*x.shape[:2], width, x.shape[2])), 0 if causal else width // 2
    for b, t, j in np.ndindex(*windows.shape[:3]):
        s = t + ahead - j
        if 0 <= s < x.shape[1] and ids[b, s] == ids[b, t]:
            windows[b, t, j] = x[b, s]
    return windows


def separable(x, taps, p, ids, causal):
    return (taps_of(x, len(taps), ids, causal) * taps).sum(2) @ p["kernel"]


def padded(x, features):
    return np.pad(x, [(0, 0), (0, 0), (0, features - x.shape[2])])


def feed(p, x):
    return relu(rms(p["feed_norm"], x) @ p["mlp"]["up"]["kernel"]) @ p["mlp"]["down"]["kernel"]


def lite(p, x, visible, ids, causal, memory):
    far, near = np.split(rms(p["mix_norm"], x), 2, axis=-1)
    conv = p["convolve"]
    values = by_head(conv["v"], near, 2) * sigmoid(by_head(conv["gate"], near, 2))
    scores = by_head(conv["scores"], near, 2) if "scores" in conv else conv["mixer"]["taps"][None, None]
    windows = taps_of(values.reshape(*x.shape[:2], -1), 5, ids, causal).reshape(*x.shape[:2], 5, 2, -1)
    near = np.einsum("btwnh,btnw->btnh", windows, np.broadcast_to(softmax(scores), (*x.shape[:2], 2, 5)))
    near = near.reshape(*x.shape[:2], -1) @ conv["out"]["kernel"]
    x = x + np.concatenate([attention(p["attention"], far, far, visible, 2), near], -1)
    return x + feed(p, x)


def evolved_encoder(p, x, visible, ids, causal, memory):
    h, c = rms(p["glu_norm"], x), p["convolutions"]
    x = x + (h @ p["glu_value"]["kernel"]) * sigmoid(h @ p["glu_gate"]["kernel"])
    h = rms(p["conv_norm"], x)
    narrow = relu(taps_of(h, 3, ids, causal).reshape(*x.shape[:2], -1) @ c["narrow"]["kernel"])
    h = rms(c["inner_norm"], relu(h @ c["wide"]["kernel"]) + padded(narrow, 64))
    x = x + padded(separable(h, c["taps"], c["out"], ids, causal), 16)
    h = rms(p["mix_norm"], x)
    x = x + attention(p["attention"], h, h, visible, 2)
    return x + feed(p, x)


def evolved_decoder(p, x, visible, ids, causal, memory):
    h, c, (states, read) = rms(p["wide_norm"], x), p["convolutions"], memory
    x = x + attention(p["wide_attention"], h, h, visible, 4)
    x = x + attention(p["first_cross_attention"], h, states, read, 2)
    h = rms(p["conv_norm"], x)
    wide = relu(separable(h, c["wide_taps"], c["wide"], ids, causal))
    h = rms(c["inner_norm"], wide + padded(separable(h, c["narrow_taps"], c["narrow"], ids, causal), 32))
    x = x + separable(h, c["taps"], c["out"], ids, causal)
    h = rms(p["mix_norm"], x)
    x = x + attention(p["attention"], h, h, visible, 2)
    x = x + attention(p["cross_attention"], rms(p["read_norm"], x), states, read, 2)
    return x + feed(p, x)


def bottleneck(p, x, visible, ids, causal, memory):
    h = inputs = rms(p["inner_norm"], x @ p["inner"]["kernel"])
    if "query_input" in p:
        inputs = rms(p["query_input_norm"], x @ p["query_input"]["kernel"])
    values = x if "query_input" in p else h
    h = rms(p["mix_norm"], h + attention(p["attention"], inputs, inputs, visible, 2, values))
    for mlp, norm in (("inner_mlps_0", "inner_mlp_norms_0"), ("mlp", "feed_norm")):
        h = rms(p[norm], h + relu(h @ p[mlp]["up"]["kernel"]) @ p[mlp]["down"]["kernel"])
    return rms(p["outer_norm"], x + h @ p["outer"]["kernel"])


CASES = [
    pytest.param("bottleneck(8,2)", bottleneck, marks=pytest.mark.slow),
    ("bottleneck(8,2,shared=False)", bottleneck),
    pytest.param("lite(5)", lite, marks=pytest.mark.slow),
    ("lite(5,dynamic)", lite),
    ("evolved_encoder", evolved_encoder),
    ("evolved_decoder", evolved_decoder),
]


@pytest.mark.parametrize(("block", "formula"), CASES)
def test_block_matches_its_formula_and_sees_no_later_token(block, formula):
    """With two segments, under both masks; later tokens change no bit of the outputs of earlier ones."""
    rng = np.random.default_rng(0)
    width = 6 if block == "evolved_decoder" else 0
    config = BlockConfig(
        dim=16, heads=2, block=block, mlp="relu", mlp_dim=24, position="none", norm="rms", memory_dim=width,
        norm_placement="post" if formula is bottleneck else "pre",
    )  # fmt: skip
    kind = block_kind(block)
    module = kind.make(kind.resolved(config), nn.initializers.normal(0.3), Spec("full"), NO_TENSOR_PARALLEL)
    x, memory = jnp.asarray(rng.standard_normal((2, LENGTH, 16)).astype(jnp.float32)), None
    ids = np.stack([np.arange(LENGTH) >= 5, np.arange(LENGTH) >= 9]).astype(np.int32)
    if width:
        segments = jnp.asarray([[0, 1, 0]] * 2, jnp.int32)
        memory = Memory(jnp.asarray(rng.standard_normal((2, 3, 6)).astype(jnp.float32)), segments)
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], (2, LENGTH))
    contexts = [Context(positions, jnp.asarray(ids), mask, memory=memory) for mask in (Causal(), Full())]
    shapes = nn.meta.unbox(jax.eval_shape(lambda: module.init(jax.random.key(0), x, contexts[0])))
    params = drawn(shapes, 0.3)

    def run(x):
        changed = x.at[:, 11:].set(7.0)
        return [
            module.apply(params, each, context)[0]
            for each, context in ((x, contexts[0]), (x, contexts[1]), (changed, contexts[0]))
        ]

    causal, full, changed = once(run, x)
    np.testing.assert_array_equal(causal[:, :11], changed[:, :11])
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["params"])
    for actual, is_causal in ((causal, True), (full, False)):
        visible = ids[:, :, None] == ids[:, None]
        visible = visible & np.tri(LENGTH, dtype=bool)[None] if is_causal else visible
        of_memory = None
        if memory is not None:
            of_memory = (
                np.asarray(memory.states, np.float64),
                ids[:, :, None] == np.asarray(memory.segment_ids)[:, None],
            )
        expected = formula(tree, np.asarray(x, np.float64), visible, ids, is_causal, of_memory)
        np.testing.assert_allclose(actual, expected, atol=2e-5, rtol=2e-5)


FIELDS = [
    {"block": "lite(4,dynamic)", "residual": "reversible"},
    {"form": "block(block=evolved_decoder),block(block=evolved_encoder)", "norm_placement": "post"},
    pytest.param({"block": "lite(3)"}, marks=pytest.mark.slow),
    pytest.param({"block": "bottleneck(8,2)", "norm_placement": "post"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_greedy_ids_equal_the_argmax_of_the_full_pass(fields):
    """Prompts are shorter and longer than the convolutions."""
    model = LM(dataclasses.replace(CONFIG, **fields))
    params = drawn_params(model, 0.3, {"table": 1.0})
    assert_greedy_ids(model, params, [np.arange(length) % 11 for length in (1, 2, 15)], 6)


@pytest.mark.slow
def test_greedy_targets_of_evolved_cells_equal_the_argmax_of_the_full_pass():
    """An encoder and a decoder whose cells attend to the encoder twice, with caches of its hidden states."""
    fields = {"block": "evolved_decoder", "encoder_form": "block(block=evolved_encoder)", "heads": 2, "kv_heads": 0}
    model, params = make(**fields, norm_placement="post")
    batch = make_batch()
    run = jax.jit(lambda batch: model.apply({"params": params}, batch, method="logits"))
    decoded = np.concatenate([*generate(model, params, batch, start_id=1, eos_id=2, tokens=7, temperature=0.0)], axis=1)
    tokens = np.full((4, 8), 1, np.int32)
    positions = np.tile(np.arange(8, dtype=np.int32), (4, 1))
    for length in range(7):
        target = {"target_tokens": tokens, "target_segment_ids": np.ones_like(tokens), "target_positions": positions}
        best = np.asarray(run(batch | target))[:, length].argmax(axis=-1)
        tokens[:, length + 1] = np.where(np.any(tokens[:, 1:] == 2, axis=1), 0, best)
    np.testing.assert_array_equal(decoded, tokens[:, 1 : 1 + decoded.shape[1]])


OF_BLOCKS = {"layers": 4, "dropout": 0.3}
SANDWICH = {"norm": "rms_zero_centered", "norm_placement": "sandwich", "embed_scale": True}
SANDWICH |= {"mixer": "full(soft_cap=0.5,scale=0.7)", "output": "full(soft_cap=1.5)"}
DIVIDED = Plan("zero3", tensor=2, pipeline=2)
LAYOUTS = [
    (OF_BLOCKS | {"block": "bottleneck(8,2)", "norm_placement": "post"}, DIVIDED),
    (OF_BLOCKS | {"block": "lite(5,dynamic)"}, DIVIDED),
    (OF_BLOCKS | {"block": "evolved_decoder"}, DIVIDED),
    (
        OF_BLOCKS | {"block": "evolved_encoder", "form": "block,block(block=lite)"},
        Plan("zero3", tensor=2, remat="full"),
    ),
    *((SANDWICH, plan) for plan in (Plan("zero3", tensor=2), Plan("3d"), Plan(sequence=2))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "plan"), LAYOUTS, ids=str)
def test_layouts_match_one_device(fields, plan):
    """Two steps of training."""
    model, make = dataclasses.replace(MODEL, **fields), initialised_state if fields is SANDWICH else None
    # With Adam's usual eps, a gradient near 0 moves a parameter by the learning rate, in a direction that rounding decides.
    single, parallel = (Run(trainer_of(*where, model, eps=1e-3), model, make=make) for where in (ONE, (plan, 8)))
    for seed in range(2):
        expected, actual = single.step(batch_of(seed)), parallel.step(batch_of(seed))
        assert actual == pytest.approx(expected, rel=1e-5)
        if seed == 0:
            assert_leaves_close(parallel.gradients(), single.gradients(), 1e-5)


COUNTED = ("transformer", "lite(5)", "lite(5,dynamic)", "evolved_encoder", "evolved_decoder")


@pytest.mark.parametrize(
    ("block", "stacks"),
    [(block, stacks) for block in COUNTED for stacks in ("lm", "seq2seq")]
    + [("bottleneck(8,3)", "lm"), ("bottleneck(8,1,shared=False)", "lm")],
)
def test_weights_of_layers_are_counted(block, stacks):
    placement = "post" if block.startswith("bottleneck") else "pre"
    config = dataclasses.replace(CONFIG, block=block, norm_placement=placement)
    if stacks == "seq2seq":
        sizes = {"vocab": 11, "dim": 16, "heads": 2, "layers": 2, "max_len": 8, "target_len": 8}
        config = Seq2SeqModelConfig(**sizes, block=block, encoder_form="block(block=evolved_encoder)")
        model = Seq2SeqModel(config)
    else:
        model = LM(config)
    shapes = nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), model.example_batch(1, 8)))["params"]
    kernels = [
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
        if path[-1].key == "kernel" and any(part.key == "layers" for part in path)
    ]
    assert sum(kernels) == config.non_embedding_parameters()


def test_default_sizes_of_lite_blocks_are_those_of_the_paper():
    """Each half of the features has N heads, and the feed-forward network as many columns as features."""
    (form,) = LMConfig(vocab=8, dim=32, heads=4, layers=2, block="lite").forms()
    assert (form.head_size, form.mlp_size) == (4, 32)


def test_unsupported_combinations_raise():
    for fields, message in (
        ({"block": "light"}, "model.block: unknown 'light'|did you mean 'lite'"),
        ({"block": "lite", "dim": 7, "head_dim": 4}, "model.dim=7"),
        ({"block": "lite", "heads": 16, "position": "none"}, "make dim a multiple of 32, or set model.head_dim"),
        ({"block": "lite", "mixer": "segment_memory(4)"}, "carries the states of all features"),
        ({"block": "evolved_decoder", "mixer": "routing(4)"}, "the mixer has statistics or buffers"),
        ({"block": "evolved_decoder", "heads": 8}, "needs to be a multiple of 4"),
        ({"block": "evolved_encoder", "dim": 15, "head_dim": 8}, "make it even"),
        ({"block": "evolved_encoder", "residual": "reversible"}, "reversible layers have two branches"),
        ({"block": "bottleneck(8)"}, "norms follow the additions in these Blocks: set model.norm_placement='post'"),
        ({"block": "evolved_encoder", "norm_placement": "sandwich"}, "set model.norm_placement to 'pre' or 'post'"),
        ({"block": "bottleneck(7)", "norm_placement": "post"}, "its width 7 is not a multiple of model.heads=2"),
        ({"block": "bottleneck(8)", "norm_placement": "post", "mixer": "segment_memory(4)"}, "carries the states"),
        ({"form": "block,block(block=evolved_decoder)", "residual": "reversible"}, "reversible layers have two"),
    ):
        raises(message, dataclasses.replace, CONFIG, **fields)


def test_convolutions_are_not_divided_by_sequence():
    for block, plan in (("evolved_encoder", Plan("sequence")), ("lite", Plan(sequence=2, exchange="heads"))):
        model = dataclasses.replace(CONFIG, block=block)
        raises("plan.sequence=1", make_trainer, LM(model), OptimizerConfig(), plan, steps=1)
