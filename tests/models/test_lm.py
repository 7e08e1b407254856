"""The language model: logits against a reference, causality, caches, dropout, parameters. See also test_convert_oracle.py."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.backbone import RESIDUALS
from hpnlp.models.decode import Generation
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.models.variables import logical_axes
from hpnlp.nn.attention import Context
from hpnlp.ops.attention.masks.base import Full
from hpnlp.ops.attention.masks.patterns import Causal
from hpnlp.types import WordStats
from tests.contracts import ONCE
from tests.drawn import drawn_params
from tests.messages import raises
from tests.mixer_cases.exact import EXACT

SMALL = {"dim": 16, "heads": 4, "layers": 2, "vocab": 24, "max_len": 16, "mlp_dim": 24, "unroll": 1}
GPT = {"norm": "layer", "position": "learned", "mlp": "gelu", "qkv_bias": True, "out_bias": True, "mlp_bias": True}
RICH = {"kv_heads": 2, "head_dim": 6, "qk_norm": True, "qkv_bias": True, "tied": False}
REVERSIBLE = {"residual": "reversible"}
BERT = GPT | {"norm_placement": "post", "embed_norm": True}
GEMMA = {"norm": "rms_zero_centered", "norm_placement": "sandwich", "embed_scale": True, "output": "full(soft_cap=3)"}
GEMMA |= {"mixer": "full(soft_cap=0.5,scale=0.7)", "layers": 1}

# Every mixer, each in one layer.
MIXED = {"mixer": ",".join(EXACT), "layers": len(EXACT)}
RINGS = {"mixer": "window(2,0),longformer(4,1)"}


def make(**fields):
    """A small model and random parameters: a stream of order 1 with smaller branches, norms' scales near 1."""
    model = LM(LMConfig(**SMALL | fields))
    return model, drawn_params(model, 0.2, {"table": 1.0})


def make_batch(rows, length, vocab=SMALL["vocab"], seed=1):
    tokens = np.random.default_rng(seed).integers(0, vocab, (rows, length + 1)).astype(np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "segment_ids": np.ones((rows, length), np.int32),
        "weights": np.ones((rows, length), np.float32),
    }
    return jax.tree.map(jnp.asarray, batch)


def loss_of(model, params, batch):
    return model.apply({"params": params}, batch, method=LM.loss).sum


def run(function, *args):
    return jax.jit(function, compiler_options=ONCE)(*args)


def logits_of(model, params, tokens):
    return run(lambda p, t: model.apply({"params": p}, t, method=LM.logits), params, tokens)


def assert_greedy_ids(model, params, prompts, tokens):
    """Ids that are generated token by token, with caches, are the argmax of the logits of the full pass."""
    new = np.concatenate(list(Generation(model, params, prompts, tokens=tokens, temperature=0.0)), axis=1)
    rows = [np.concatenate([prompt, ids]) for prompt, ids in zip(prompts, new, strict=True)]
    padded = jnp.asarray([np.pad(row, (0, max(map(len, rows)) - len(row))) for row in rows], jnp.int32)
    best = np.asarray(run(lambda p: model.apply({"params": p}, padded, method="logits"), params).argmax(-1))
    for row, prompt, expected in zip(rows, prompts, best, strict=True):
        np.testing.assert_array_equal(row[len(prompt) :], expected[len(prompt) - 1 : len(row) - 1])


# The reference: one sequence, numpy, float64.


def numpy_logits(config, params, tokens, patterns=(Full(),), output_cap=None):  # noqa: B008  (frozen)
    """Llama, GPT-2 and Gemma 2 as in their papers, head by head. patterns: masks of the layers of one period."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    length, heads, kv_heads, size = len(tokens), config.heads, config.kv_head_count, config.head_size

    mixer = config.mixers()[0]

    def capped(x, cap):
        return x if cap is None else cap * np.tanh(x / cap)

    def norm(p, x):
        x = x - x.mean(-1, keepdims=True) if "bias" in p else x
        scale = p["scale"] + (config.norm == "rms_zero_centered")
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale + p.get("bias", 0.0)

    def dense(p, x):
        return x @ p["kernel"] + p.get("bias", 0.0)

    def rope(x):
        """RoPE by complex numbers: feature i is the real part, feature i + H/2 the imaginary one."""
        speed = config.rope_theta ** (-np.arange(size // 2) / (size // 2))
        rotated = (x[:, : size // 2] + 1j * x[:, size // 2 :]) * np.exp(1j * np.arange(length)[:, None] * speed)
        return np.concatenate([rotated.real, rotated.imag], axis=-1)

    def attention(p, x, pattern):
        q, k, v = (dense(p[name], x).reshape(length, -1, size) for name in "qkv")
        if config.qk_norm or config.joint_qk_norm:
            shape = (length, -1) if config.joint_qk_norm else (length, -1, size)
            q, k = (norm(p[f"{n}_norm"], x.reshape(shape)).reshape(x.shape) for n, x in (("q", q), ("k", k)))
        outs = []
        for head in range(heads):
            group = head * kv_heads // heads
            head_q, head_k = (rope(y) if config.position == "rope" else y for y in (q[:, head], k[:, group]))
            visible = np.tri(length) * np.broadcast_to(pattern.to_dense(length), (heads, length, length))[head]
            scores = head_q @ head_k.T * (getattr(mixer, "scale", None) or size**-0.5)
            weights = np.exp(capped(scores, getattr(mixer, "soft_cap", None))) * visible
            outs.append(weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30) @ v[:, group])
        return dense(p["out"], np.concatenate(outs, axis=-1))

    def mlp(p, x):
        up = dense(p["up"], x)
        if config.mlp == "swiglu":
            gate = dense(p["gate"], x)
            return dense(p["down"], gate / (1 + np.exp(-gate)) * up)
        inner = np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)
        return dense(p["down"], 0.5 * up * (1 + np.tanh(inner)))

    x = params["embed"]["table"][tokens] * (config.dim**0.5 if config.embed_scale else 1.0)
    if config.position == "learned":
        x = x + params["positions"]["table"][:length]
    if config.embed_norm:
        x = norm(params["embed_norm"], x)
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(config.layers)]
    run = numpy_post_norm if config.norm_placement == "post" else numpy_pre_norm
    x = run(config, layers, x, norm, attention, mlp, patterns)
    x = norm(params["final_norm"], x) if config.norm_placement != "post" else x
    return capped(x @ (params["embed"]["table"] if config.tied else params["head"]).T, output_cap)


def numpy_post_norm(config, layers, x, norm, attention, mlp, patterns):
    """Layers that normalise the stream after each addition."""
    for layer, p in enumerate(layers):
        x = norm(p["mix_norm"], x + attention(p["attention"], x, patterns[layer % len(patterns)]))
        x = norm(p["feed_norm"], x + mlp(p["mlp"], x))
    return x


def numpy_pre_norm(config, layers, x, norm, attention, mlp, patterns):
    """Layers whose branches read normalised streams: one stream, or two, whose mean is returned."""
    streams = [x] * (2 if config.residual == "reversible" else 1)
    for layer, p in enumerate(layers):
        pattern = patterns[layer % len(patterns)]
        y = attention(p["attention"], norm(p["mix_norm"], streams[-1]), pattern)
        streams[0] = streams[0] + (norm(p["mix_result_norm"], y) if "mix_result_norm" in p else y)
        y = mlp(p["mlp"], norm(p["feed_norm"], streams[0]))
        streams[-1] = streams[-1] + (norm(p["feed_result_norm"], y) if "feed_result_norm" in p else y)
    return np.mean(streams, axis=0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        RICH,
        GPT,
        {"position": "none", "mlp": "gelu", "kv_heads": 1, "joint_qk_norm": True},
        REVERSIBLE | RICH,
        BERT,
        GEMMA,
    ],
    ids=["llama", "rich", "gpt", "nope", "reversible", "bert", "gemma"],
)
def test_logits_match_reference(fields):
    model, params = make(**fields)
    tokens = make_batch(2, 11)["tokens"]
    ours = logits_of(model, params, tokens)
    assert ours.dtype == jnp.float32
    cap = 3.0 if "soft_cap" in model.config.output else None
    for row, ids in zip(ours, tokens, strict=True):
        expected = numpy_logits(model.config, params, ids, output_cap=cap)
        np.testing.assert_allclose(row, expected, atol=1e-5, rtol=1e-5)


# Visibility.


@pytest.mark.parametrize(
    "fields",
    [RICH, pytest.param(GPT, marks=pytest.mark.slow), pytest.param(MIXED, marks=pytest.mark.slow)],
    ids=["rope", "learned", "mixed"],
)
def test_packed_rows_equal_separate_rows(fields):
    """Hidden states and loss of a document do not depend on the documents that it is packed with."""
    model, params = make(**fields)
    lengths, width = {1: 5, 2: 7, 3: 1}, 14
    documents = {number: jax.device_get(make_batch(1, n, seed=number)) for number, n in lengths.items()}

    def row(numbers, seed):
        """Documents side by side, and padding of weight 0 with other tokens."""
        padding = jax.device_get(make_batch(1, width - sum(lengths[number] for number in numbers), seed=seed))
        padding |= {"segment_ids": 0 * padding["segment_ids"], "weights": 0 * padding["weights"]}
        pieces = [
            documents[number] | {"segment_ids": number + 0 * documents[number]["positions"]} for number in numbers
        ]
        return {name: np.concatenate([part[name] for part in [*pieces, padding]], axis=1) for name in padding}

    def stack(orders, seed):
        rows = [row(order, seed + i) for i, order in enumerate(orders)]
        return {name: jnp.asarray(np.concatenate([row[name] for row in rows])) for name in rows[0]}

    def states(params, batch):
        context = Context(batch["positions"], batch["segment_ids"], Causal())
        return model.apply({"params": params}, batch["tokens"], context, method=LM.hidden)[0], loss_of(
            model, params, batch
        )

    packed, separate = stack([(1, 2, 3), (3, 1, 2), (2, 3, 1)], seed=50), stack([(1,), (2,), (3,)], seed=60)
    states = jax.jit(states, compiler_options=ONCE)
    (packed_h, packed_loss), (separate_h, separate_loss) = states(params, packed), states(params, separate)
    np.testing.assert_allclose(packed_loss, 3 * separate_loss, rtol=1e-6)
    for number in documents:
        alone = np.asarray(separate_h)[separate["segment_ids"] == number]
        for h, segments in zip(np.asarray(packed_h), packed["segment_ids"], strict=True):
            np.testing.assert_allclose(h[segments == number], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        BERT,
        RINGS,
        pytest.param(REVERSIBLE | RICH, marks=pytest.mark.slow),
        GEMMA | {"mixer": "window(3,0,soft_cap=0.5,scale=0.7)"},
    ],
    ids=["bert", "rings", "reversible", "gemma"],
)
def test_prefill_and_extend_equal_the_full_pass(fields):
    """Prompts of different lengths, whose padding holds tokens that must not count."""
    model, params = make(**fields)
    variables = {"params": params}
    lengths, width, capacity = np.array([3, 7, 1, 6], np.int32), 7, 12
    tokens = np.asarray(make_batch(4, capacity)["tokens"])
    full = run(lambda t: model.apply(variables, t, _plain(t), method=LM.hidden)[0], jnp.asarray(tokens))
    rows = np.arange(len(lengths))

    def prefill(t, n):
        return model.apply(variables, t, n, capacity, method=LM.prefill)

    h, caches = run(prefill, jnp.asarray(tokens[:, :width]), jnp.asarray(lengths))
    np.testing.assert_allclose(h, full[rows, lengths - 1], atol=1e-5, rtol=1e-4)

    extend = jax.jit(lambda t, p, c: model.apply(variables, t, p, c, method=LM.extend), compiler_options=ONCE)
    for count in (1, 1, 1, 2):  # token by token, then two at once
        places = lengths[:, None] + np.arange(count, dtype=np.int32)[None]
        h, caches = extend(jnp.asarray(tokens[rows[:, None], places]), jnp.asarray(places), caches)
        np.testing.assert_allclose(h, full[rows[:, None], places], atol=1e-5, rtol=1e-4)
        lengths = lengths + count


def _plain(tokens):
    return Context(jnp.asarray(np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1))), None, Causal())


# Changes that must not affect the result.


@pytest.fixture(scope="module")
def plain():
    """`(parameters, batch, loss, gradients)` of three layers, unrolled, without rematerialisation."""
    model, params = make(layers=3, kv_heads=2, unroll=0)
    batch = make_batch(2, 9)
    return params, batch, *run(jax.value_and_grad(lambda p: loss_of(model, p, batch)), params)


@pytest.mark.parametrize("remat", [pytest.param("dots", marks=pytest.mark.slow), "names(mixed, hidden)", "offload"])
def test_loss_and_gradients_do_not_depend_on_the_loop(remat, plain):
    params, batch, loss, grads = plain
    model = LM(LMConfig(**SMALL | {"layers": 3, "kv_heads": 2, "unroll": 2}), remat=remat)
    actual, actual_grads = run(jax.value_and_grad(lambda p: loss_of(model, p, batch)), params)
    np.testing.assert_allclose(actual, loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5), actual_grads, grads)


@pytest.mark.parametrize(
    ("dtype", "residual"), [pytest.param("bfloat16", "plain", marks=pytest.mark.slow), ("float16", "reversible")]
)
def test_16_bit_activations_match_float32(dtype, residual, plain):
    """Loss and gradients are in float32 and near those of float32 activations: relative errors of complete arrays."""
    params, batch, loss, grads = plain
    model = LM(LMConfig(**SMALL | {"layers": 3, "kv_heads": 2, "residual": residual}))
    if residual != "plain":
        loss, grads = run(jax.value_and_grad(lambda p: loss_of(model, p, batch)), params)
    model = LM(dataclasses.replace(model.config, dtype=dtype))
    tokens, tolerance = batch["tokens"], 4 * float(jnp.finfo(dtype).eps)

    def hidden(p):
        return model.apply({"params": p}, tokens, _plain(tokens), method=LM.hidden)[0]

    assert jax.eval_shape(hidden, params).dtype == jnp.dtype(dtype)
    actual, actual_grads = run(jax.value_and_grad(lambda p: loss_of(model, p, batch)), params)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, loss, rtol=tolerance / 10)

    def near(a, b):
        assert a.dtype == jnp.float32
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)

    jax.tree.map(near, actual_grads, grads)


# Dropout.


@pytest.mark.parametrize("residual", RESIDUALS)
def test_dropout_differs_between_layers_and_branches(residual):
    """Branches return only biases, powers of 2, so that the sum shows which of them survived for every feature."""
    fields = {"dropout": 0.5, "out_bias": True, "mlp_bias": True, "norm_eps": 1e-12, "dim": 64}
    model, params = make(**fields, residual=residual)
    params = jax.tree.map(jnp.zeros_like, params)
    layers = params["layers"]
    layers["attention"]["out"]["bias"] += jnp.array([[1.0], [4.0]])
    layers["mlp"]["down"]["bias"] += jnp.array([[2.0], [8.0]])
    params["final_norm"]["scale"] += 1.0
    tokens = make_batch(2, 8)["tokens"]
    ids = jnp.arange(tokens.size, dtype=jnp.int32).reshape(tokens.shape)
    context = dataclasses.replace(_plain(tokens), deterministic=False, ids=ids)

    @functools.partial(jax.jit, compiler_options=ONCE)
    def hidden(key):
        return model.apply({"params": params}, tokens, context, rngs={"dropout": key}, method=LM.hidden)[0]

    h = hidden(jax.random.key(0))
    sums = np.asarray(h / h.max(axis=-1, keepdims=True)) * 15.0  # in 64 features, all four survive somewhere
    codes = np.rint(sums).astype(int)
    np.testing.assert_allclose(sums, codes, atol=1e-4)
    survived = (codes[..., None] >> np.arange(4)) & 1
    agreement = np.array([[np.mean(survived[..., a] == survived[..., b]) for a in range(4)] for b in range(4)])
    np.testing.assert_allclose(agreement, 0.5 + 0.5 * np.eye(4), atol=0.1)

    np.testing.assert_array_equal(h, hidden(jax.random.key(0)))
    assert np.any(h != hidden(jax.random.key(1)))


def test_dropout_has_no_effect_in_evaluation():
    model, params = make()
    dropping = LM(dataclasses.replace(model.config, dropout=0.5))
    tokens = make_batch(1, 5)["tokens"]
    np.testing.assert_array_equal(logits_of(model, params, tokens), logits_of(dropping, params, tokens))


# Parameters.


@pytest.fixture(scope="module")
def initial():
    """A model and its initial parameters, still boxed with the names of their axes."""
    model = LM(LMConfig(**SMALL | {"dim": 64, "layers": 3, "mlp_dim": 96, "kv_heads": 2, "mlp_bias": True}))
    init = jax.jit(lambda key: model.init(key, example_batch(1, 2))["params"], compiler_options=ONCE)
    return model, init(jax.random.key(0))


def test_initial_parameters_have_expected_shapes_and_scales(initial):
    model, boxed = initial
    params = jax.device_get(nn.meta.unbox(boxed))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["layers"]):
        assert leaf.shape[0] == 3 and leaf.dtype == jnp.float32
        if path[-1].key == "kernel":
            assert np.all(leaf[0] != leaf[1]) and np.all(leaf[1] != leaf[2])
            # Projections that write to the residual stream are smaller by the root of their number.
            writes = path[-2].key in ("out", "down")
            expected = leaf.shape[1] ** -0.5 / (np.sqrt(2 * 3) if writes else 1.0)
            np.testing.assert_allclose(leaf.std(), expected, rtol=0.05)
    assert params["layers"]["attention"]["k"]["kernel"].shape == (3, 64, 2 * 16)
    assert "head" not in params


@pytest.mark.parametrize("fields", [{}, {"kv_heads": 1, "head_dim": 10}, {"mlp": "gelu", "qk_norm": True}])
def test_non_embedding_parameters_counts_matrices(fields):
    model, params = make(**fields)
    kernels = [leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "kernel"]
    assert model.config.non_embedding_parameters() == sum(kernels)


def test_invalid_config_raises():
    for fields, message in (
        ({"dtype": "bf16"}, "unknown model.dtype 'bf16': did you mean 'bfloat16'"),
        (REVERSIBLE | {"norm_placement": "post"}, "'post': a norm of the residual stream has no inverse: set"),
        ({"heads": 3}, "model.dim=16 is not a multiple of model.heads=3"),
        ({"kv_heads": 3}, "model.kv_heads=3 does not divide model.heads=4"),
        ({"head_dim": 5}, "head dimension is 5: make it even"),
        ({"qk_norm": True, "joint_qk_norm": True}, "queries and keys have one norm: set one to False"),
        ({"mlp": "swigl"}, "unknown model.mlp 'swigl': did you mean 'swiglu'"),
        ({"norm": "layernorm"}, "unknown model.norm 'layernorm': did you mean 'layer'"),
        ({"mixer": "ful"}, "unknown mixer 'ful': did you mean 'full'"),
        ({"mixer": "full(0.1)"}, r"mixer 'full' takes .*soft_cap=None, scale=None.: too many positional"),
        ({"mixer": "window(4,0)*2,full"}, r"model.mixer='window.4,0.*2,full' repeats after 3 layers"),
        ({"output": "soft"}, "unknown output layer 'soft'"),
        ({"rope_scaling": "linear"}, "RoPE scaling 'linear' takes"),
    ):
        raises(message, make, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output": "hierarchical(balanced)"}, "no table of words by id .*: set model.tied=False"),
        (
            {"output": "hierarchical", "tied": False},
            "needs the words' counts, which data.tokenizer=words.*tree=balanced",
        ),
        ({"output": "class(by=mass)", "tied": False}, "needs the words' counts"),
        ({"output": "class(by=similar)", "tied": False}, "needs to know which words are similar"),
        ({"output": "class(by=weight)", "tied": False}, "unknown partition 'weight'"),
        ({"output": "adaptive((8,30))", "tied": False}, "under the vocabulary of 24"),
        ({"output": "adaptive((8,4))", "tied": False}, "expected rising numbers"),
        ({"output": "binary_hybrid(24)", "tied": False}, "frequent=24: expected 0 to 23"),
        ({"output": "binary", "tied": False, "vocab": 1}, "a vocabulary of one word has no bits"),
        ({"output": "sampled(25)"}, "25 unique samples of 24 words"),
        ({"output": "sampled(4,zipf)"}, "unknown sampler 'zipf'"),
        ({"output": "sampled(4,unigram)"}, "needs the words' counts"),
        ({"output": "nce(4,unique=True)"}, "samples that may repeat"),
        ({"output": "margin(9,8)"}, "hardest=9 of samples=8: lower hardest, or raise samples"),
        ({"output": "margin(samples=2,hardest=5)", "vocab": 3}, "hardest=5 of samples=2: lower hardest"),
        ({"output": "margin(samples=0)", "vocab": 1}, "vocabulary of one word has no negatives: choose another"),
    ],
    ids=str,
)
def test_invalid_output_layers_raise(fields, message):
    model, batch = LM(LMConfig(**SMALL | {"layers": 1} | fields)), example_batch(1, 4)

    def loss(key):
        params = nn.meta.unbox(model.init(key, batch))
        return model.apply(params, batch, False, rngs={"output": key, "dropout": key}, method="loss")

    raises(message, jax.eval_shape, loss, jax.random.key(0))


def test_insufficient_word_statistics_raise():
    """Statistics of a tokenizer that an earlier version trained, or of fewer words."""
    for output in ("class(by=similar)", "hierarchical(similar)"):
        for stats, message in (
            (WordStats(np.arange(24), None), "needs to know which words are similar.*choose that, or .*train it again"),
            (
                WordStats(np.arange(6), np.arange(6)),
                r"stats are of 6 words, the vocabulary has 24: pass stats.padded\(24\)",
            ),
        ):
            model = LM(LMConfig(**SMALL | {"output": output, "tied": False}), stats)
            raises(message, jax.eval_shape, model.init, jax.random.key(0), make_batch(2, 5))


@pytest.mark.parametrize(
    "output",
    [
        pytest.param("nce(4,partition=learned)", marks=pytest.mark.slow),
        "adaptive(div_value=2)",
        pytest.param("class(by=mass)", marks=pytest.mark.slow),
        "hierarchical",
        pytest.param("vmf", marks=pytest.mark.slow),
    ],
)
def test_parameters_of_output_layers_have_names_and_gradients(output):
    """Every parameter has a name for each axis, and a gradient."""
    model = LM(LMConfig(**SMALL | {"layers": 1, "output": output, "tied": False}), WordStats(np.arange(24, 0, -1)))
    batch = make_batch(2, 5)
    params, axes = drawn_params(model, 0.2), logical_axes(model)
    for (path, leaf), names in zip(
        jax.tree_util.tree_leaves_with_path(params),
        jax.tree.leaves(axes, is_leaf=lambda x: x is None or isinstance(x, tuple)),
        strict=True,
    ):
        assert len(names or ()) == leaf.ndim, jax.tree_util.keystr(path)

    def total(params, key):
        return model.apply({"params": params}, batch, False, rngs={"output": key}, method="loss").sum

    grads = jax.device_get(run(jax.grad(total), params, jax.random.key(1)))
    still = [jax.tree_util.keystr(path) for path, g in jax.tree_util.tree_leaves_with_path(grads) if not np.any(g)]
    assert still == (["['head']"] if output == "vmf" else [])  # the target embeddings are not trained
