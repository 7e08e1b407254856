"""The encoder: losses, metrics, isolation and errors. See also test_encoder_oracle.py and test_encoder_layouts.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.variables import logical_axes
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.mixers.exact import ExactMixer
from hpnlp.ops.attention import Full
from hpnlp.parallel.plan import Plan
from hpnlp.types import MixerTraits, Model
from tests.contracts import assert_close, once
from tests.drawn import drawn_params
from tests.messages import raises

B, T = 3, 9
KEY = jax.random.key(1)
SIZES = {"dim": 16, "heads": 2, "layers": 1, "vocab": 24, "max_len": T, "mlp_dim": 24}
BERT = {"norm": "layer", "norm_placement": "post", "embed_norm": True, "position": "learned", "mlp": "gelu_exact"}
BERT |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "token_types": 2}
# Every head, with the others as variants of the same model.
SEQUENCES = BERT | {"pooling": "first", "transform": "tanh", "classes": 5}
TAGS = {"classes": 4}
WORDS = BERT | {"transform": "gelu_norm", "tied": True}
MOBILE = WORDS | {"block": "bottleneck(8,2)", "norm": "affine", "transform": "relu_norm", "mlp": "relu"}
MOBILE |= {"embed_dim": 6, "trigram": True, "position_offset": 2}


def make(**fields):
    """A small model and random parameters."""
    model = Encoder(EncoderConfig(**SIZES | fields))
    return model, drawn_params(model, 0.5)


def make_batch(config, batch=B, length=T, seed=1):
    """Texts of several lengths, with weights of which one is 0."""
    rng = np.random.default_rng(seed)
    real = np.arange(length)[None] < rng.integers(2, length + 1, (batch, 1))
    shape = (batch, length) if config.pooling == "none" else (batch,)
    values = {
        "tokens": rng.integers(0, config.vocab, (batch, length)),
        "segment_ids": real,
        "positions": np.tile(np.arange(length), (batch, 1)),
        "labels": rng.integers(0, config.outputs()[0], shape),
    }
    if config.token_types and config.pooling != "none":
        values["token_types"] = rng.integers(0, config.token_types, (batch, length))
    weights = np.where(rng.permutation(np.prod(shape)) == 0, 0, rng.uniform(0.5, 2, np.prod(shape))).reshape(shape)
    weights = weights * real if len(shape) == 2 else weights
    arrays = {name: x.astype(np.int32) for name, x in values.items()} | {"weights": weights.astype(np.float32)}
    return jax.tree.map(jnp.asarray, arrays)


def apply(model, params, batch, method, *args):
    return model.apply({"params": params}, batch, *args, method=method)


@pytest.mark.parametrize("fields", [SEQUENCES, TAGS, WORDS, MOBILE], ids=["sequences", "tags", "words", "mobile"])
def test_loss_and_accuracy_follow_from_logits(fields):
    """Padding and other sequences of the batch have no effect; a token's logits depend on later and on earlier tokens."""
    model, params = make(**fields)
    batch = jax.device_get(make_batch(model.config))
    padding, following = batch["segment_ids"] == 0, (batch["tokens"] + 1) % 24
    other = batch | {"tokens": np.where(padding, following, batch["tokens"])}
    other = {name: x[[0, 1, 1, *range(3, B)]] if name != "segment_ids" else x for name, x in other.items()}
    changed = batch | {"tokens": batch["tokens"].copy()}
    changed["tokens"][0, 1] = following[0, 1]
    batches = jax.tree.map(jnp.asarray, (batch, other, changed))

    def run(params):
        logits = [apply(model, params, x, "logits") for x in batches]
        return apply(model, params, batches[0], "loss"), logits

    out, (logits, other, changed) = jax.device_get(once(run, params))
    weights, labels = np.asarray(batch["weights"]), np.asarray(batch["labels"])
    assert logits.shape == (*labels.shape, model.config.outputs()[0]) and logits.dtype == jnp.float32
    nll = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), labels[..., None], axis=-1)[..., 0]
    hits = np.asarray(logits).argmax(axis=-1) == labels
    np.testing.assert_allclose(out.sum, (weights * nll).sum(), rtol=1e-5)
    np.testing.assert_allclose(out.weight, weights.sum(), rtol=1e-6)
    assert_close(out.aux["accuracy"], (jnp.float32((weights * hits).sum()), jnp.float32(weights.sum())))
    keep = ~padding[:2] if labels.ndim == 2 else np.ones(2, bool)
    assert_close(logits[:2][keep], other[:2][keep])
    if labels.ndim == 2:
        length = int((~padding)[0].sum())
        assert (np.abs(changed - logits)[0, :length] > 0).any(axis=-1).all()


def test_label_smoothing_and_dropout_are_for_training():
    """The training loss is the smoothed one; the reported loss and accuracy are not changed."""
    model, params = make(**SEQUENCES)
    other = Encoder(dataclasses.replace(model.config, output="full(use_bias=True,label_smoothing=0.2)"))
    batch = make_batch(model.config)

    def run(params, key):
        losses = [apply(m, params, batch, "loss") for m in (model, other)]
        training = other.apply({"params": params}, batch, False, rngs={"dropout": key, "output": key}, method="loss")
        return *losses, training, apply(model, params, batch, "logits")

    reported, unsmoothed, training, logits = once(run, params, jax.random.key(0))
    assert_close(reported, unsmoothed)
    log_probs, labels = np.asarray(jax.nn.log_softmax(logits)), np.asarray(batch["labels"])
    losses = -0.8 * log_probs[np.arange(B), labels] - 0.2 * log_probs.mean(axis=1)
    np.testing.assert_allclose(training.sum, (np.asarray(batch["weights"]) * losses).sum(), rtol=1e-5)
    assert_close(training.aux["accuracy"], reported.aux["accuracy"])


@pytest.mark.parametrize("classes", [0, 4])
def test_states_are_dropped_before_a_classifier_only(classes):
    """The final norm makes all states 1, whatever the layers drop."""
    model, params = make(classes=classes, dropout=0.5, norm="layer")
    params["final_norm"] = {"scale": jnp.zeros(16), "bias": jnp.ones(16)}
    batch = make_batch(model.config)

    def losses(params, key):
        rngs = {"dropout": key, "output": key}
        return [model.apply({"params": params}, batch, *args, rngs=rngs, method="loss").sum for args in ((), (False,))]

    reported, training = once(losses, params, jax.random.key(0))
    assert (reported != training) == bool(classes)


def test_without_layers_the_order_of_tokens_has_no_effect():
    model, params = make(**SEQUENCES | {"layers": 0, "position": "none", "pooling": "mean"})
    assert "layers" not in params and not model.config.is_single_stack
    batch = make_batch(model.config)
    batch = batch | {"segment_ids": jnp.ones_like(batch["segment_ids"])}
    turned = batch | {"tokens": batch["tokens"][:, ::-1], "token_types": batch["token_types"][:, ::-1]}
    grads = jax.grad(lambda params, batch: apply(model, params, batch, "loss").sum)
    assert_close(*once(lambda params: [grads(params, x) for x in (batch, turned)], params))
    raises("model.layers=0 does not divide into plan.pipeline=2", lambda: Plan(pipeline=2).layout(model.config.sizes()))


def test_encoders_are_models():
    model, params = make(**SEQUENCES)
    assert isinstance(model, Model) and model.is_normalized
    batch, axes = model.example_batch(2, T), model.batch_axes()
    assert {name: x.ndim for name, x in batch.items()} == {name: len(names) for name, names in axes.items()}
    assert axes["labels"] == ("batch",) and axes["token_types"] == ("batch", "length")
    assert make(**TAGS)[0].batch_axes()["labels"] == ("batch", "length")
    names = logical_axes(model)
    assert names["head"] == ("labels", "embed") and names["output"]["bias"] == ("labels",)
    for leaf, axis_names in zip(
        jax.tree.leaves(params), jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple)), strict=True
    ):
        assert leaf.ndim == len(axis_names)
    assert "final_norm" not in params and {"embed_norm", "token_types", "transform"} < params.keys()


def test_rows_of_tables():
    model, params = make(output="sampled(3)")
    batch = make_batch(model.config)
    rows = once(lambda p, key: model.apply({"params": p}, batch, rngs={"output": key}, method="rows"), params, KEY)
    assert rows.keys() == {("embed", "table"), ("head",)}
    raises("set model.tied=False", lambda: apply(*make(**WORDS), make_batch(EncoderConfig(**SIZES | WORDS)), "rows"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixer": "conv"}, "model.mixer='conv': conv mixes with earlier tokens only"),
        ({"mixer": "full,leaks", "layers": 2}, "leaks mixes padding with the text"),
        ({"mlp": "expert_choice(4)"}, "model.mlp='expert_choice.4.' mixes documents that share a sequence"),
        ({"form": "block,block(mlp='base(4)')", "layers": 2}, "model.mlp='base.4.' mixes documents .*: choose"),
        ({"classes": 3, "tied": True}, "model.classes=3: set model.tied=False"),
        ({"pooling": "mean"}, "a label of a sequence is no word: set model.classes"),
        ({"output": "hierarchical(balanced)", "tied": True}, "no table of words by id .*: set model.tied=False"),
        ({"output": "full(label_smoothing=1.0)"}, "label_smoothing=1.0: expected at least 0, less than 1"),
        ({"embed_dim": 17, "tied": True}, "model.embed_dim=17: the output layer shares at most model.dim=16"),
        ({"embed_dim": 4, "embed_scale": True}, "model.embed_scale=True scales embeddings"),
        ({"position_offset": 2}, "model.position_offset=2 has no effect, because model.position='rope' has no table"),
        ({"classes": 3, "output": "hierarchical"}, "needs the words' counts"),
    ],
    ids=str,
)
def test_invalid_configs_raise(fields, message, monkeypatch):
    class Leaks(ExactMixer):
        traits = MixerTraits(excludes_padding=False)

    monkeypatch.setitem(MIXERS, "leaks", lambda **extra: Leaks(Full(), **extra))
    raises(message, make, **fields)


def test_experts_that_choose_among_the_tokens_of_a_sequence_serve_encoders_of_one_text_per_sequence():
    assert EncoderConfig(**SIZES, mlp="expert_choice(4)", pooling="mean", classes=3).networks()[0].expert_count == 4


def test_tokens_have_type_0_where_batches_have_no_token_types():
    model, params = make(**SEQUENCES)
    batch = make_batch(model.config) | {"token_types": jnp.zeros((B, T), jnp.int32)}
    single = {name: x for name, x in batch.items() if name != "token_types"}
    losses = once(lambda p: [apply(model, p, inputs, "loss").sum for inputs in (batch, single)], params)
    assert losses[0] == losses[1]
    assert "token_types" not in make(**TAGS | {"token_types": 2})[0].batch_axes()
