"""Sequence to sequence: loss, layouts, decoding and errors. See also test_seq2seq_oracle.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.decode import GREEDY
from hpnlp.models.decoding.beam_search import BeamOptions
from hpnlp.models.decoding.decoding_weights import separate_stacks
from hpnlp.models.seq2seq import Seq2SeqModel, Seq2SeqModelConfig
from hpnlp.models.seq2seq_decode import generate, search
from hpnlp.models.variables import axes_and_shapes, collections, join, split
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from tests.contracts import ONCE, once
from tests.drawn import drawn_params
from tests.messages import raises

SIZES = {"dim": 16, "heads": 4, "kv_heads": 2, "layers": 2, "vocab": 24, "max_len": 12, "target_len": 8, "mlp_dim": 24}
BART = {"norm": "layer", "mlp": "gelu", "position": "learned", "norm_placement": "post", "embed_norm": True}
BART |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
SOURCE_LENGTHS, TARGET_LENGTHS = (12, 5, 1, 7), (3, 8, 1, 5)


def make(scale=0.4, **fields):
    """A small model with random parameters."""
    model = Seq2SeqModel(Seq2SeqModelConfig(**SIZES | fields))
    return model, drawn_params(model, scale)


def make_batch(count=4, vocab=24, source=12, target=8):
    rng = np.random.default_rng(1)
    batch = {}
    for prefix, width, lengths in (("", source, SOURCE_LENGTHS), ("target_", target, TARGET_LENGTHS)):
        filled = np.arange(width)[None] < np.resize(lengths, count)[:, None]
        batch |= {
            f"{prefix}tokens": (rng.integers(3, vocab, (count, width)) * filled).astype(np.int32),
            f"{prefix}segment_ids": filled.astype(np.int32),
            f"{prefix}positions": (np.arange(width)[None] * filled).astype(np.int32),
        }
    weights = batch["target_segment_ids"].astype(np.float32)
    labels = rng.integers(3, vocab, (count, target)).astype(np.int32)
    return batch | {"target_labels": labels, "target_weights": weights}


@pytest.mark.parametrize("fields", [{}, BART | {"share_embeddings": False, "tied": False}], ids=["shared", "separate"])
def test_loss_is_that_of_the_logits(fields):
    """Loss, accuracy and exact match are recomputed from the logits, in numpy."""
    model, params = make(**fields)
    batch = make_batch()

    def run(params, batch):
        out = model.apply({"params": params}, batch, method="loss")
        return out, model.apply({"params": params}, batch, method="logits")

    _, logits = once(run, params, batch)
    best = np.asarray(logits).argmax(axis=-1)
    weights, real = batch["target_weights"], batch["target_weights"] > 0
    # Labels of the first target are the most probable ones.
    batch["target_labels"][0] = best[0]
    out, logits = once(run, params, batch)
    log_probs = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), batch["target_labels"][..., None], 2)[..., 0]
    np.testing.assert_allclose(out.sum, -(log_probs * weights).sum(), rtol=1e-5)
    right = (best == batch["target_labels"]) & real
    assert [*map(float, out.aux["accuracy"])] == [right.sum(), weights.sum()]
    expected = np.all(right | ~real, axis=1)
    assert [*map(float, out.aux["exact_match"])] == [expected.sum(), 4] and expected[0]
    assert ("embed" in params) == model.config.share_embeddings
    assert ("embed" in params["encoder"]) != model.config.share_embeddings


def test_separate_layers_of_both_stacks_have_equal_logits():
    """The buffers of their routers too, which decide the experts of a token."""
    model, params = make(mlp="bias_balanced(4)")
    draw = np.random.default_rng(0)
    shapes = split(axes_and_shapes(model)[1])[1]
    buffers = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), shapes)
    assert sorted(buffers) == ["decoder", "encoder"]
    weights = jax.tree.map(np.asarray, join(params, buffers))
    separate = separate_stacks(weights, model.config)
    layers = separate["encoder"]["layers"]
    assert isinstance(layers, tuple) and np.shares_memory(
        jax.tree.leaves(layers[1])[0], jax.tree.leaves(weights["encoder"]["layers"])[0]
    )

    def logits(weights, batch):
        return model.apply(collections(weights), batch, method="logits")

    expected, actual = (once(logits, each, make_batch()) for each in (weights, separate))
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    other = join(params, jax.tree.map(np.negative, buffers))
    assert np.abs(once(logits, other, make_batch()) - expected).max() > 1e-3  # buffers have an effect


def test_padding_of_sources_and_later_targets_do_not_count():
    model, params = make()
    batch = make_batch()
    changed = dict(batch)
    changed["tokens"] = np.where(batch["segment_ids"] == 0, 7, batch["tokens"])
    changed["target_tokens"] = np.concatenate(
        [batch["target_tokens"][:, :4], 23 - batch["target_tokens"][:, 4:]], axis=1
    )
    run = jax.jit(lambda batch: model.apply({"params": params}, batch, method="logits"), compiler_options=ONCE)
    counts = batch["target_weights"][:, :4] > 0
    np.testing.assert_array_equal(np.asarray(run(batch))[:, :4][counts], np.asarray(run(changed))[:, :4][counts])
    changed["tokens"] = np.concatenate([23 - batch["tokens"][:, :1], batch["tokens"][:, 1:]], axis=1)
    assert np.all(np.any(run(batch)[:, :1] != run(changed)[:, :1], axis=-1))


def test_exact_match_is_that_of_greedy_decoding():
    """Greedy decoding with caches reproduces labels that are the most probable ones, and the model says so."""
    model, params = make(**BART)
    batch = make_batch()
    run = jax.jit(lambda b: model.apply({"params": params}, b, method="logits"), compiler_options=ONCE)
    decoded = np.concatenate([*generate(model, params, batch, start_id=1, eos_id=2, tokens=7, sampling=GREEDY)], axis=1)
    tokens = np.full((4, 8), 1, np.int32)
    for length in range(7):
        best = np.asarray(run(batch | _target_of(tokens)))[:, length].argmax(axis=-1)
        ended = np.any(tokens[:, 1:] == 2, axis=1)
        tokens[:, length + 1] = np.where(ended, 0, best)
    np.testing.assert_array_equal(decoded, tokens[:, 1 : 1 + decoded.shape[1]])


def _target_of(tokens):
    ones = np.ones_like(tokens)
    positions = np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1))
    return {"target_tokens": tokens, "target_segment_ids": ones, "target_positions": positions}


def test_widest_beam_search_finds_the_best_sequence():
    """A search as wide as the vocabulary finds the best of all sequences of two ids, with its score."""
    model, params = make(vocab=6, layers=1)
    batch = make_batch(vocab=6)
    widest = BeamOptions(width=6, early_stopping="never")
    beams = search(model, params, batch, start_id=1, eos_id=2, tokens=2, beams=widest)
    logits = jax.jit(lambda b: model.apply({"params": params}, b, method="logits"), compiler_options=ONCE)

    def log_probs(second):
        tokens = np.tile(np.array([[1, second]], np.int32), (4, 1))
        return np.asarray(jax.nn.log_softmax(logits(batch | _target_of(tokens))))

    scores = {(2, 0): log_probs(0)[:, 0, 2]}
    for first in (i for i in range(6) if i != 2):
        after = log_probs(first)
        scores |= {(first, second): (after[:, 0, first] + after[:, 1, second]) / 2 for second in range(6)}
    for row in range(4):
        ranked = sorted(scores, key=lambda ids: -scores[ids][row])[:3]
        assert [tuple(ids) for ids in np.asarray(beams.ids)[row, :3].tolist()] == ranked
        np.testing.assert_allclose(beams.scores[row, :3], [scores[ids][row] for ids in ranked], rtol=1e-5)
    for row, ids in zip(np.asarray(beams.ids)[:, 0].tolist(), beams.lists(2), strict=True):
        assert ids == row[: [*row, 2].index(2)]
    assert beams.lists([2, 5]) == [ids[: [*ids, 5].index(5)] for ids in beams.lists(2)]


def test_weights_of_both_stacks_are_counted():
    model, params = make(encoder_layers=3, encoder_form="block(mlp_dim=40)")
    kernels = [leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "kernel"]
    assert model.config.non_embedding_parameters() == sum(kernels)
    assert model.config.sizes()["mlp"][0] == 8 and model.config.sizes()["layers"][0] == 1


@pytest.mark.slow
def test_rows_are_those_of_sources_and_targets():
    batch = jax.tree.map(jnp.asarray, make_batch())
    for shared in (True, False):
        model, params = make(share_embeddings=shared, tied=False, output="sampled(3,uniform)")
        rngs = {"dropout": jax.random.key(0), "output": jax.random.key(1)}
        rows = model.apply({"params": params}, batch, rngs=rngs, method="rows")
        source, target = (set(np.asarray(batch[name]).flat) for name in ("tokens", "target_tokens"))
        found = {path: set(np.asarray(ids).tolist()) for path, ids in rows.items()}
        head = found.pop(("decoder", "head"))
        assert head >= {int(i) for i in batch["target_labels"][batch["target_weights"] > 0]}
        tables = {("encoder", "embed", "table"): source, ("decoder", "embed", "table"): target}
        assert found == ({("embed", "table"): source | target} if shared else tables)


def test_invalid_configs_raise():
    for fields, message in (
        ({"encoder_mixer": "conv"}, "model.encoder_mixer='conv': conv mixes with earlier tokens only"),
        ({"encoder_layers": -1}, "model.encoder_layers=-1: expected at least 0"),
        ({"encoder_mixer": "full,window(2,2)", "encoder_layers": 1}, "model.encoder_layers=1: name fewer"),
        ({"encoder_form": "block(heads=3)"}, "model.encoder_form"),
        ({"memory_dim": 8}, "model.memory_dim=8: the decoder attends to the encoder's hidden states, of model.dim=16"),
        ({"residual": "reversible"}, "reversible layers have two branches: set model.residual='plain'"),
    ):
        raises(message, Seq2SeqModelConfig, **SIZES | fields)


def test_plans_that_do_not_fit_raise():
    def trainer(plan, **fields):
        make_trainer(make(**fields)[0], OptimizerConfig(), plan, steps=1)

    raises("the memory is not divided: set plan.sequence=1", lambda: trainer(Plan("sequence")))
    raises("the model has several stacks", lambda: trainer(Plan(offload_parameters=True)))
    raises("the common divisor of layers of encoder and decoder=1", lambda: trainer(Plan(pipeline=2), encoder_layers=3))


def test_invalid_searches_raise():
    model, params = make(**BART)
    for options, message in (
        ({"tokens": 0}, "tokens=0: expected at least 1"),
        ({"tokens": 9}, "tokens=9: with the prompts these exceed the model's 8 learned positions: set tokens"),
        ({"eos_id": 24}, r"eos_id=\[24\]: expected ids of the model's 24"),
        ({"start_id": 24}, "prompts: expected ids of the model's 24"),
    ):
        raises(message, search, model, params, make_batch(), **{"start_id": 1, "eos_id": 2, "tokens": 4} | options)
    for options, message in (
        ({"width": 0}, "width=0: expected 1 to 1024"),
        ({"length_penalty": float("nan")}, "length_penalty=nan: expected a finite number"),
        ({"early_stopping": "soon"}, "early_stopping='soon': expected True, False or 'never'"),
    ):
        raises(message, BeamOptions, **options)
