"""Attention matrices and losses by context: the matrices are those of the model, and the losses those of evaluations."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp import tasks
from hpnlp.data.reading.files import ignore_progress
from hpnlp.jobs.inspect.attention import Measures, attention_matrices, choose_windows, inspect_attention, skipped_layers
from hpnlp.jobs.inspect.positions import context_lengths, context_losses
from hpnlp.model_interfaces.model_parallel import NO_TENSOR_PARALLEL
from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.stacks.layer_forms import build_mixer
from hpnlp.models.stacks.layer_stack import make_blocks
from hpnlp.nn.attention import Context
from hpnlp.nn.mixers.exact import ExactMixer
from hpnlp.parallel.plan import Plan
from hpnlp.tasks.reports.reporting import Outcome
from hpnlp.training.evaluation import evaluate
from hpnlp.training.trainer import make_trainer
from tests import tiny
from tests.messages import raises
from tests.tiny import text  # noqa: F401  (fixture of every test here)

T = 24
SIZES = {"dim": 16, "heads": 4, "mlp_dim": 16, "vocab": 40, "unroll": 1, "max_len": T}


def outcome_of(**fields):
    model = LM(LMConfig(**{**SIZES, **fields}))
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), model.example_batch(1, 8)))["params"]
    params = jax.tree.map(lambda x: 3 * x, params)  # attention that is far from even
    return Outcome(None, None, model, params, {})


def window(segments=(0,), padding=0):
    """A window of random words whose documents begin at these tokens, with padding at the end."""
    index = np.arange(T)
    ids = np.searchsorted(segments, index, side="right").astype(np.int32)
    ids[T - padding :] = 0
    starts = np.asarray(segments)[np.maximum(ids, 1) - 1]
    tokens = np.random.default_rng(0).integers(0, 40, T)
    arrays = {"tokens": tokens, "labels": tokens, "segment_ids": ids, "positions": index - starts, "weights": ids > 0}
    dtypes = {"weights": np.float32}
    return {name: x.astype(dtypes.get(name, np.int32))[None] for name, x in arrays.items()}


@pytest.mark.parametrize(
    "fields",
    [
        {"mixer": "full", "kv_heads": 2},
        {"mixer": "window(3, soft_cap=2.0),strided(4, heads=4)", "layers": 2},
        {"mixer": "bigbird(4, 1, 1, 1, scale=0.7)", "position": "learned"},
    ],
    ids=["grouped", "taken_in_turn", "absolute"],
)
def test_matrices_times_values_are_what_the_mixers_return(fields):
    """The inputs and results of each mixer are caught within Attention; the matrices come from what the layers report."""
    outcome = outcome_of(**{"layers": 1, **fields})
    config, batch = outcome.model.config, window(segments=(0, 9), padding=3)
    taps = outcome.compiled("loss", True, ("attention", "embedding", "hidden"))(batch).taps
    caught = []

    def catch(call, arguments, options, context):
        result = call(*arguments, **options)
        if isinstance(context.module, ExactMixer) and context.method_name == "__call__":
            caught.append((arguments[0].v, result.o))
        return result

    context = Context(jnp.asarray(batch["positions"]), jnp.asarray(batch["segment_ids"]), config.mask)
    blocks, x = make_blocks(config.forms(), config.layers, NO_TENSOR_PARALLEL), taps["embedding"]
    stacks = config.stack_order().by_stack({"params": outcome.params["layers"]})
    for layer in range(config.layers):
        with nn.intercept_methods(catch):
            x, _, _ = blocks[layer].apply(config.stack_order().layer(stacks, layer), x, context)
        arrays = config.stack_order().layer(taps["layers"], layer)
        scale = np.abs(arrays["hidden"]).max()  # the sums that cancel have rounding errors of the large numbers
        np.testing.assert_allclose(x, arrays["hidden"], rtol=1e-4, atol=1e-6 * scale)
        matrices, visible = attention_matrices(config, layer, arrays, batch)
        assert matrices.shape == (4, T - 3, T - 3)
        np.testing.assert_allclose(matrices.sum(axis=-1), 1, rtol=1e-5)
        assert not matrices[~visible].any()
        values, o = (np.asarray(x)[0, : T - 3] for x in caught[layer])
        values = np.repeat(values, 4 // values.shape[1], axis=1)
        np.testing.assert_allclose(np.einsum("nts,snh->tnh", matrices, values), o, rtol=1e-4, atol=1e-5)


def test_measures_of_known_matrices():
    eye, even = np.eye(8), np.tril(np.ones((8, 8))) / np.arange(1, 9)[:, None]
    copies = np.tile(np.eye(8)[3], (8, 1))  # all rows attend to token 3: of rank 1
    measures = Measures.of(np.stack([eye, even, copies]))
    assert measures.rank[0].tolist()[::2] == [8, 1]
    assert measures.leading[0, ::2] == pytest.approx([0.25, 1])
    assert measures.distance[0] == pytest.approx([0, np.mean(np.arange(8) / 2), np.mean([3, 2, 1, 0, 1, 2, 3, 4])])
    assert measures.entropy[0] == pytest.approx([0, np.mean(np.log(np.arange(1, 9))), 0])
    assert measures.curve[0, 0] == pytest.approx(np.linspace(0, 1, 101))
    singular = np.sqrt(np.linalg.eigvalsh(even @ even.T)[::-1])  # by another way
    assert measures.leading[0, 1] == pytest.approx(singular[:2].sum() / singular.sum())
    two = Measures.joined([measures, measures])
    assert two.rank.shape == (2, 3) and two.by_head("curve").shape == (3, 101)


def test_distance_is_bounded_by_the_window_and_even_attention_is_that_of_the_mask():
    outcome = outcome_of(mixer="window(3,0),full", layers=2)
    near, far = inspect_attention(outcome, [window(), window(segments=(0, 4))], [0, 1])
    assert (near.measures.distance <= 3).all() and near.mixer == "window(3, 0)"
    assert (near.measures.entropy <= np.log(4) + 1e-6).all()
    assert far.uniform.distance[0] == pytest.approx(np.mean(np.arange(T) / 2))
    assert near.uniform.entropy[0] == pytest.approx(np.mean(np.log([1, 2, 3, *[4] * (T - 3)])))
    assert (far.measures.entropy <= far.uniform.entropy + 1e-6).all()
    assert (far.measures.distance[1] <= T - 5).all()  # within the longer document
    zeroed = jax.tree.map(jnp.zeros_like, outcome.params)  # all scores are equal
    (same,) = inspect_attention(dataclasses.replace(outcome, params=zeroed), [window()], [1])
    for field in dataclasses.fields(Measures):
        actual, even = (getattr(side, field.name) for side in (same.measures, same.uniform))
        assert actual == pytest.approx(np.broadcast_to(even, actual.shape), rel=1e-4)


def test_windows_of_one_document_are_preferred():
    windows = [window(segments=(0, 5)), window(padding=4), window(), window(segments=(0, 3, 6)), window()]
    chosen = choose_windows([{name: np.concatenate([w[name] for w in windows]) for name in windows[0]}], 3)
    assert [(int(w["segment_ids"].max()), int((w["segment_ids"] > 0).sum())) for w in chosen] == [
        (1, T),
        (1, T),
        (1, T - 4),
    ]
    assert len(choose_windows([windows[0]], 3)) == 1


def test_mixers_without_matrices_are_skipped_with_the_reason():
    config = LMConfig(**{**SIZES, "layers": 3, "mixer": "gated_delta*2,full"})
    reasons = skipped_layers(config, range(3))
    assert reasons.keys() == {0, 1} and reasons[0].startswith("gated_delta does not multiply values by a softmax")
    assert isinstance(build_mixer(config.forms()[2]), ExactMixer)


@pytest.mark.parametrize(
    "fields", [{}, {"model__mixer": "transformer_xl(8)", "data__order": "stream"}], ids=["lm", "carry"]
)
def test_losses_by_context_average_to_the_loss_of_the_evaluation(fields):
    config = tiny.make(**fields)
    task = tasks.find("lm")
    dataset = task.dataset(config.data, None)
    model = tasks.make_model(config, task.vocabulary(dataset).sizes)
    trainer = make_trainer(model, config.optimizer, Plan("single"), steps=1, batch_size=config.data.batch_size)
    params = trainer.init(jax.random.key(0)).params
    losses = context_losses(model, params, task.heldout(config, dataset, limit=None), ignore_progress)
    expected = evaluate(trainer, params, dataset, config)
    assert losses.loss == pytest.approx(expected.scores["loss"], rel=1e-5)
    total = sum(item.loss * item.weight for item in losses.bins) / sum(item.weight for item in losses.bins)
    assert total == pytest.approx(losses.loss)
    assert [(item.first, item.last) for item in losses.bins] == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15)]
    assert sum(item.weight for item in losses.bins) == expected.sums["loss"][1]
    assert all(item.error > 0 for item in losses.bins)


def test_text_without_labels_raises():
    outcome, batch = outcome_of(layers=1), window()
    empty = {**batch, "weights": np.zeros_like(batch["weights"])}
    raises("no held-out token has a label", context_losses, outcome.model, outcome.params, [empty], ignore_progress)
    assert choose_windows([empty, window(padding=T - 1)], 2) == []


def test_context_begins_with_each_document():
    segments = np.array([[1, 1, 1, 2, 2, 3, 0, 0], [4, 4, 4, 4, 4, 4, 4, 4]])
    assert context_lengths(segments).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], [*range(8)]]
