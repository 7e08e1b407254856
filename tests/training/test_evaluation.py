"""Evaluation: sums over batches, and scores that count as an improvement."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.training import evaluation
from hpnlp.training.config import Config
from hpnlp.training.files.best import ScoreOrder
from hpnlp.training.files.example_scores import Collector
from hpnlp.training.trainer import Trainer

ACCURACY = ScoreOrder("accuracy", higher_is_better=True)


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
    collector = Collector()
    sums = evaluation._sums(trainer, None, batches, Config(), lambda *call: calls.append(call), "scoring", collector)
    total, weight = sums["confusion"]
    assert calls == [("scoring", number, 9) for number in range(9)]
    assert (total == 36).all() and weight == 9 and total.dtype == "float64"
    assert max(counts) <= 2


def test_scores_improve_in_the_direction_of_the_metric():
    for order, best, scores, least, expected in (
        (ACCURACY, (0.5, 1.0), (0.6, 2.0), 0.0, 1),
        (ACCURACY, (0.5, 1.0), (0.4, 0.1), 0.0, -1),
        (ACCURACY, (0.5, 1.0), (0.6, math.inf), 0.0, -1),
        (ACCURACY, None, (0.6, math.nan), 0.0, -1),
        (ACCURACY, (0.5, 1.0), (0.6, 1.0), 0.2, -1),
        (ACCURACY, (0.5, 1.0), (0.5, 0.9), 0.0, 1),
        (ACCURACY, (0.5, 1.0), (0.5, 0.9), 0.2, 0),
        (ACCURACY, (0.5, 1.0), (0.5, 1.0), 0.0, 0),
        (ACCURACY, (0.5, 1.0), (0.5, 1.1), 0.0, -1),
        (ScoreOrder(), (0.5,), (0.4,), 0.0, 1),
        (ScoreOrder(), (0.5,), (0.5,), 0.0, 0),
        (ScoreOrder(), (0.5,), (0.6,), 0.0, -1),
        (ScoreOrder(), None, (0.6,), 0.0, 1),
    ):
        new, old = (
            values and order.stored(dict(zip(("accuracy", "loss")[-len(values) :], values, strict=True)))
            for values in (scores, best)
        )
        assert order.compare(new, old, least) == expected
