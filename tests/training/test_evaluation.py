"""Evaluation: sums over batches, and scores that count as an improvement."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.tasks import TASKS
from hpnlp.training import evaluation, loop
from hpnlp.training.config import Config
from hpnlp.training.step import Trainer


def test_sums_of_earlier_batches_do_not_stay_on_the_devices(monkeypatch):
    shape, counts = (3, 5, 7), []

    def evaluate_next(params, batch, carry):
        counts.append(sum(x.shape == shape for x in jax.live_arrays()))
        return {"confusion": (jnp.full(shape, batch["x"][0], jnp.float32), jnp.float32(1))}, carry

    monkeypatch.setattr(evaluation, "on_devices", lambda trainer, batch, config, omitted: batch)
    trainer = object.__new__(Trainer)
    object.__setattr__(trainer, "evaluate_next", evaluate_next)
    object.__setattr__(trainer, "initial_carry", lambda: None)
    object.__setattr__(trainer, "training_arrays", ())
    batches = [{"x": np.array([number])} for number in range(9)]
    calls = []
    sums = evaluation._sums(trainer, None, batches, Config(), lambda *call: calls.append(call), "scoring")
    total, weight = sums["confusion"]
    assert calls == [("scoring", number, 9) for number in range(9)]
    assert (total == 36).all() and weight == 9 and total.dtype == "float64"
    assert max(counts) <= 2


@pytest.mark.parametrize(
    ("task", "best", "scores", "expected"),
    [
        ("classification", 0.5, {"accuracy": 0.6, "loss": 1.0}, True),
        ("classification", 0.5, {"accuracy": 0.4, "loss": 0.1}, False),
        ("classification", 0.5, {"accuracy": 0.6, "loss": math.inf}, False),
        ("classification", None, {"accuracy": 0.6, "loss": math.nan}, False),
        ("lm", 0.5, {"loss": 0.4}, True),
        ("lm", 0.5, {"loss": 0.6}, False),
        ("lm", None, {"loss": 0.6}, True),
    ],
)
def test_scores_improve_in_the_direction_of_the_metric(task, best, scores, expected):
    run = object.__new__(loop._Run)
    run.task, run.config, run.progress = TASKS[task], Config(), {"best": best, "bad_evals": 0}
    assert run._is_better(scores) == expected
