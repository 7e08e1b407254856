"""Runs of several seeds as one program: each equals the run of its seed alone, and runs that cannot be so."""

import json

import jax
import numpy as np
import pytest

from hpnlp.cli import train as command
from hpnlp.training import loop, seeds
from hpnlp.training.run_directory import load
from hpnlp.training.seeds import train_seeds
from hpnlp.types import InputError
from tests import tiny


@pytest.mark.slow
def test_members_equal_runs_of_their_seeds(tmp_path):
    """With dropout and clipping, which differ between members; `loop.train` only adds the scores.

    By SGD: Adam would divide gradients that are 0 but for rounding by their size.
    """
    fields = {"train__steps": 4, "train__log_every": 1, "model__dropout": 0.2, "optimizer__clip_norm": 0.5}
    fields |= {"optimizer__name": "sgd", "optimizer__learning_rate": 0.3}
    paths = train_seeds(tiny.make(**fields), [3, 1], tmp_path)
    assert [path.name for path in paths] == ["seed_3", "seed_1"]
    for path, seed in zip(paths, (3, 1), strict=True):
        config = tiny.make(**fields, train__seed=seed)
        alone = loop.train(config, tmp_path / f"alone_{seed}")
        for actual, expected in zip(jax.tree.leaves(load(path).params), jax.tree.leaves(alone.params), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-6)
        lines, others = (
            [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
            for where in (path, tmp_path / f"alone_{seed}")
        )
        assert [line["step"] for line in lines] == [1, 2, 3, 4]
        np.testing.assert_allclose([x["loss"] for x in lines], [x["loss"] for x in others], rtol=1e-5)
        again = loop.train(config, path)
        assert again.step == 4 and again.heldout["loss"] == pytest.approx(alone.heldout["loss"], rel=1e-4)
    assert load(paths[0]).config.train.seed == 3
    with pytest.raises(InputError, match="seed_3 holds a run: remove it, or choose another directory"):
        train_seeds(tiny.make(**fields), [3], tmp_path)


@pytest.mark.parametrize(
    ("numbers", "fields", "message"),
    [
        ([], {}, r"seeds=\[\]: expected different numbers of at least 0, at least one"),
        ([1, 1], {}, r"seeds=\[1, 1\]: expected different numbers"),
        ([-1], {}, r"seeds=\[-1\]: expected different numbers of at least 0"),
        (
            [0],
            {"train__patience": 2, "train__eval_every": 1},
            "train.patience=2: seeds .* have the same steps.*leave it",
        ),
        ([0], {"optimizer__average": "ntasgd(2)", "train__eval_every": 1}, r"optimizer.average='ntasgd\(2\)': seeds"),
        (
            [0],
            {"train__writers": "tensorboard"},
            "train.writers='tensorboard': seeds .* write metrics.jsonl only: leave it",
        ),
        ([0], {"train__debug_nans": True}, "train.debug_nans=True: seeds"),
        ([0], {"optimizer__accumulate": 3}, "data.batch_size=8 does not split into 1 device's"),
    ],
)
def test_invalid_arguments_raise(tmp_path, numbers, fields, message):
    with pytest.raises(InputError, match=message):
        train_seeds(tiny.make(**fields), numbers, tmp_path)


def test_members_stop_where_runs_of_their_seeds_would():
    """Not at single steps that are skipped, such as the last one, nor at those that lower a loss scale."""
    skipped, scale = np.array([0.0, 1.0]), np.array([1.0, 2.0**15])
    failures = np.array([0, loop.MAX_NONFINITE_STEPS - 2])
    failures = seeds._count_failures(failures, {"skipped": skipped}, [3, 1], True)
    np.testing.assert_array_equal(failures, [0, loop.MAX_NONFINITE_STEPS - 1])
    for line in ({"skipped": skipped, "loss_scale": scale}, {"skipped": 0 * skipped}):
        np.testing.assert_array_equal(seeds._count_failures(failures, line, [3, 1], True), [0, 0])
    for before, skips in ((failures, True), (0 * failures, False)):
        with pytest.raises(InputError, match="the loss of seed 1 or its gradient is not finite: lower"):
            seeds._count_failures(before, {"skipped": skipped}, [3, 1], skips)


def test_seeds_that_are_no_numbers_raise():
    with pytest.raises(InputError, match="--seeds=0,x: 'x' is no whole number: write --seeds=0,1,2"):
        command._numbers(["0", "x"])
