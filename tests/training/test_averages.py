"""Averages of parameters: means of a loop, the start by evaluations, runs that resume, and errors."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpnlp.training import loop
from hpnlp.training.config import default, resolve
from hpnlp.training.files.checkpoint import Checkpointer
from hpnlp.training.optim import OptimizerConfig, make_optimizer, make_schedule
from hpnlp.training.optimizers import averages
from hpnlp.training.optimizers.apply_updates import Update
from hpnlp.training.run_directory import load, make_model
from hpnlp.training.trainer import make_trainer
from tests import tiny
from tests.messages import raises

STEPS, STEPS_OF_RUN = 9, 10


def paths_of(spec, trigger=None, finite=()):
    """`(parameters after each step, averages after each step)` of SGD; step `trigger` follows the evaluation that starts."""
    config = OptimizerConfig("sgd", average=spec, learning_rate=0.1, schedule="constant", warmup=0, clip_norm=0.0)
    update = Update(config, make_optimizer(config, STEPS), False, 1, make_schedule(config, STEPS))
    params = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)}
    state, count = (params, update.optimizer.init(params), params), jnp.zeros((), jnp.int32)

    @jax.jit
    def one(state, grads, count, step, is_finite):
        new = averages.next_count(spec, count, step)
        norm = update.norm(grads, jnp.float32(1))
        state = update(state, grads, weight=jnp.float32(1), norm=norm, step=step, is_finite=is_finite, averaged=new)
        return state, jnp.where(is_finite, new, count)

    path, means = [np.asarray(params["kernel"])], [np.asarray(params["kernel"])]
    for step in range(STEPS):
        if step == trigger:
            count = jnp.ones((), jnp.int32)
        grads = {"kernel": jnp.asarray(np.random.default_rng(step).normal(size=(3, 4)), jnp.float32)}
        is_finite = jnp.array(step not in finite)
        state, count = one(state, grads, count, jnp.int32(step), is_finite)
        path.append(np.asarray(state[0]["kernel"]))
        means.append(np.asarray(state[2]["kernel"]))
    return np.stack(path), np.stack(means)


def test_uniform_averages_are_means_of_the_parameters_from_a_step_on():
    path, means = paths_of("uniform(start=3)")
    np.testing.assert_array_equal(means[:5], path[:5])  # the first mean is of one step
    for step in range(5, STEPS + 1):
        np.testing.assert_allclose(means[step], path[4 : step + 1].mean(axis=0), rtol=2e-6, atol=1e-7)


def test_averages_from_an_evaluation_on_are_means_with_its_parameters():
    path, means = paths_of("ntasgd(2)", trigger=4)
    np.testing.assert_array_equal(means[:5], path[:5])
    for step in range(5, STEPS + 1):
        np.testing.assert_allclose(means[step], path[4 : step + 1].mean(axis=0), rtol=2e-6, atol=1e-7)
    assert not np.allclose(means[-1], path[-1], atol=1e-3)


def test_steps_that_are_not_finite_are_not_averaged():
    path, means = paths_of("uniform", finite=(5,))
    np.testing.assert_array_equal(path[6], path[5])
    kept = np.delete(path, [0, 6], axis=0)
    np.testing.assert_allclose(means[-1], kept.mean(axis=0), rtol=2e-6, atol=1e-7)


def test_averages_match_optax():
    """optax's mean of a stream, as the mean of parameters after each step."""
    path, means = paths_of("uniform")
    transformation = optax.ema(1 - 1e-9, debias=True)
    state, mean = transformation.init(jnp.asarray(path[0])), None
    with jax.enable_x64(True):
        state = transformation.init(jnp.asarray(path[0], jnp.float64))
        for params in path[1:]:
            mean, state = transformation.update(jnp.asarray(params, jnp.float64), state)
    np.testing.assert_allclose(means[-1], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_updates_are_scaled_with_the_length_of_the_batch(name):
    config = OptimizerConfig(name, base_length=8, learning_rate=0.1, schedule="constant", warmup=0, weight_decay=0.5)
    update = Update(config, make_optimizer(config, STEPS), False, 1, make_schedule(config, STEPS))
    params, grads = ({"kernel": jnp.asarray(np.random.default_rng(i).normal(size=(3, 4)), jnp.float32)} for i in (0, 1))
    changes = []
    for length in (8, 6):
        factor = config.length_factor({"tokens": np.zeros((2, length)), "labels": np.zeros(2)})
        one = {"weight": jnp.float32(1), "norm": jnp.float32(1), "step": jnp.int32(0), "is_finite": None}
        new = update((params, update.optimizer.init(params), None), grads, **one, factor=factor)[0]
        changes.append(np.asarray(new["kernel"] - params["kernel"]))
    np.testing.assert_allclose(changes[1], 0.75 * changes[0], rtol=1e-5, atol=1e-7)
    assert OptimizerConfig(name).length_factor({"tokens": np.zeros((2, 6))}) == 1.0


@pytest.mark.parametrize("higher_is_better", [False, True])
def test_evaluations_start_the_average_as_the_authors_program_does(higher_is_better):
    """`len(best_val_loss) > nonmono and val_loss > min(best_val_loss[:-nonmono])`, salesforce/awd-lstm-lm, main.py."""
    draw, sign, started = np.random.default_rng(1), -1 if higher_is_better else 1, set()
    for case in range(60):
        count = 1 + case % 4
        losses = (np.linspace(2, 1, 12) + 0.15 * draw.normal(size=12)).tolist()
        expected = [index for index, loss in enumerate(losses) if index > count and loss > min(losses[:index][:-count])]
        average = averages.find(f"ntasgd({count})")
        scores = [sign * loss for loss in losses]
        actual = [
            index for index, score in enumerate(scores) if average.is_triggered(scores[:index], score, higher_is_better)
        ]
        assert actual == expected
        started |= {len(expected) > 0}
    assert started == {True, False}
    assert averages.find("ntasgd(1)").is_triggered([np.nan, 1.0, 1.1], 1.2, False)  # NaN is not the best score


def test_invalid_averages_raise():
    for fields, message in (
        ({"average": "ntasg(5)"}, "unknown optimizer.average 'ntasg'.*did you mean 'ntasgd'"),
        ({"average": "uniform", "ema": 0.9}, "are two averages: leave out one of the two"),
        ({"average": "uniform", "rows": True}, "optimizer.average=uniform with optimizer.rows=True.*leave out one"),
    ):
        raises(message, OptimizerConfig, **fields)


def test_an_average_that_evaluations_start_needs_evaluations():
    raises(r"optimizer.average='ntasgd\(5\)' begins", resolve, {"optimizer": {"average": "ntasgd(5)"}})


def recipe(**changes):
    config = default("rnn_lm")
    config.data.update(
        path=os.environ["HPNLP_TEST_TEXT"], order="stream", seq_len=12, batch_size=4, length_deviation=3.0
    )
    config.model.update(cells="lstm(8)", weight_drop=0.3, activation_penalty=1.0)
    config.optimizer.update(
        name="sgd", momentum=0.0, learning_rate=30.0, clip_norm=0.25, schedule="constant", warmup=0, weight_decay=0.0,
        average="ntasgd(1)", base_length=12,
    )  # fmt: skip
    config.plan.name = "single"
    config.train.update(
        steps=STEPS_OF_RUN, eval_every=2, eval_batches=2, checkpoint_every=0, log_every=1, sample=0, keep=1
    )
    config.update_from_flattened_dict(changes)
    return resolve(config)


@pytest.mark.slow
def test_a_run_of_the_recipe_resumes_and_evaluates_its_average(tmp_path, capsys, monkeypatch):
    """Interrupted after the average has begun; lengths, rates, average and best checkpoint are those of one run."""
    monkeypatch.setattr(averages.NonMonotonic, "is_triggered", lambda self, scores, *rest: len(scores) == 2)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = loop.train(recipe(), whole)
    assert "step 6: the average of the parameters begins" in capsys.readouterr().out
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["learning_rate"] for line in lines if "learning_rate" in line}
    tokens = {line["step"]: line["target_tokens"] for line in lines if "target_tokens" in line}
    assert set(rates.values()) == {22.5, 30.0}  # 9 and 12 tokens
    for step, rate in rates.items():  # 4 examples; some labels are of other documents
        length = 12 * rate / 30
        assert length == pytest.approx(round(length), abs=1e-4) and 4 * length - 4 <= tokens[step] <= 4 * length
    lengths = [round(12 * rates[step] / 30) for step in range(1, STEPS_OF_RUN + 1)]
    assert expected.tokens == 4 * sum(lengths)
    assert expected.timed_tokens == expected.tokens - 4 * sum(set(lengths))  # the first step of each length is compiled
    assert not np.allclose(*(np.asarray(jax.tree.leaves(tree)[0]) for tree in (expected.params, raw_params(whole))))

    tiny.interrupt(recipe(), parts, 8)
    result = loop.train(recipe(), parts)
    assert (parts / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert result.heldout == expected.heldout
    for actual, other in zip(jax.tree.leaves(result.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_array_equal(actual, other)
    last = load(parts, STEPS_OF_RUN).params
    np.testing.assert_array_equal(jax.tree.leaves(last)[0], jax.tree.leaves(expected.params)[0])


def raw_params(workdir):
    """The parameters of the last checkpoint, which are not averaged."""
    config = recipe()
    vocabulary = load(workdir).vocabulary
    trainer = make_trainer(make_model(config, vocabulary), config.optimizer, config.plan, steps=STEPS_OF_RUN)
    checkpoints = Checkpointer(workdir, read_only=True)
    state = checkpoints.restore(dataclasses.replace(trainer.state_shapes, carry=None), STEPS_OF_RUN)[0]
    checkpoints.close()
    return state.params
