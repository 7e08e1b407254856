"""Losses of labels and grades of pairs: values, gradients under plans and with accumulation, and errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.pairs.dual_encoder import DualEncoder, DualEncoderConfig
from hpnlp.models.pairs.grad_cache import Encoded
from hpnlp.parallel.plan import Plan
from hpnlp.types import Model
from tests.contracts import once
from tests.messages import raises
from tests.models.test_dual_encoder import SIZES, B, distance, first_gradients, make, make_batch

SOFTMAX, COSINE = {"loss": "softmax", "classes": 3}, {"loss": "cosine"}
LABELS, GRADES = np.array([0, 2, 1, 1, 0, 2, 1, 0], np.int32), np.linspace(0, 1, B, dtype=np.float32)


def labelled_batch(model, **options):
    """The pairs of `make_batch` with the labels or grades that the model reads."""
    batch = make_batch(**options) | {"labels": LABELS, "grades": GRADES}
    return {name: batch[name] for name in model.batch_axes()}


def test_label_loss_reads_both_vectors_and_their_difference():
    """Against loops in float64, with vectors of any length; pairs of equal vectors have a gradient."""
    model, draw = DualEncoder(DualEncoderConfig(**SIZES | SOFTMAX)), np.random.default_rng(5)
    u, v = (3 * draw.normal(size=(B, 16)).astype(np.float32) for _ in range(2))
    v[1] = u[1]
    kernel, bias = draw.normal(size=(48, 3)).astype(np.float32), np.array([0.1, -0.2, 0.3], np.float32)
    batch = jax.tree.map(jnp.asarray, labelled_batch(model))

    def loss(vectors, classifier):
        out = model.apply({"params": {"classifier": classifier}}, Encoded(vectors), batch, method="compare")
        return out.sum, out

    gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (total, out), gradients = once(gradient, (u, v[:, None]), {"kernel": kernel, "bias": bias})
    expected, hits = 0.0, 0
    for i in range(B - 2):  # the last two are padding
        logits = np.concatenate([u[i], v[i], np.abs(u[i] - v[i])]).astype(np.float64) @ kernel + bias
        expected += np.log(np.exp(logits).sum()) - logits[LABELS[i]]
        hits += int(logits.argmax() == LABELS[i])
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert [float(x) for x in (out.weight, *out.aux["accuracy"])] == [B - 2, hits, B - 2]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients)) and np.abs(gradients[0][0][1]).max() > 0
    assert isinstance(model, Model) and model.is_normalized and not model.config.compares_examples


def test_vectors_have_length_1_except_in_the_label_loss():
    model, params = make(**SOFTMAX)
    batch, numbers = labelled_batch(model), np.arange(B, dtype=np.int32)
    of_cosine = DualEncoder(dataclasses.replace(model.config, loss="cosine", classes=0))

    def outputs(params):
        states = model.apply({"params": params}, batch, numbers, True, method="encode").vectors
        unit = of_cosine.apply({"params": params}, batch, numbers, True, method="encode").vectors
        evaluated = model.apply({"params": params}, batch, method="loss")
        scored = of_cosine.apply({"params": params}, batch | {"grades": GRADES}, method="loss")
        methods = [model.apply({"params": params}, batch, method=name) for name in ("logits", "embed")]
        return states, unit, methods, evaluated, scored

    states, unit, (logits, (first, second)), evaluated, scored = once(outputs, params)
    lengths = np.linalg.norm(states[0], axis=-1, keepdims=True)
    assert np.abs(lengths - 1).max() > 0.1
    np.testing.assert_allclose(states[0] / lengths, unit[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first, unit[0], rtol=1e-6)  # predictions are cosines whatever the loss
    is_pair, best = np.arange(B) < B - 2, np.asarray(logits).argmax(axis=-1)
    confusion = np.zeros((3, 3))
    np.add.at(confusion, (LABELS[is_pair], best[is_pair]), 1)
    np.testing.assert_array_equal(evaluated.aux["confusion"][0], confusion)
    cosines = (np.asarray(first, np.float64) * np.asarray(second)).sum(axis=-1)
    squares = np.square(cosines - GRADES)[is_pair]
    np.testing.assert_allclose((scored.sum, scored.weight), (squares.sum(), B - 2), rtol=1e-5)
    assert "accuracy" not in scored.aux and not of_cosine.is_normalized


@pytest.mark.parametrize("fields", [SOFTMAX, COSINE], ids=["softmax", "cosine"])
def test_plans_and_accumulation_have_the_gradients_of_one_device(fields):
    model, params = make(layers=0, shared=False, **fields)
    batch = labelled_batch(model, padding=3)
    expected, expected_metrics = first_gradients(model, params, Plan("single"), 1, 1, batch)
    gradients, metrics = first_gradients(model, params, Plan("zero3", tensor=2), 8, 2, batch)
    assert distance(gradients, expected) < 2e-6 and metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def test_label_loss_without_labels_raises():
    raises("model.loss='softmax' needs labels: set data.label_field", jax.eval_shape, lambda: make(loss="softmax"))
