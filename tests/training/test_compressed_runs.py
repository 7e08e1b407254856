"""Run directories with compressed weights: loaded, evaluated and refused with an error."""

import dataclasses
import shutil

import numpy as np
import pytest

from hpnlp import report
from hpnlp.compress.files import write_weights
from hpnlp.compress.weights_file import WEIGHTS_FILE
from hpnlp.jobs.evaluate_run import evaluate_run
from hpnlp.training import loop
from hpnlp.training.run_directory import load
from tests import tiny
from tests.messages import raises

SMALL = {"model__layers": 1}


@pytest.mark.slow
def test_compressed_weights_without_the_step_of_their_run_raise(tmp_path):
    """tests/cli/test_compress.py loads and evaluates compressed runs."""
    run = tiny.copy_run(tmp_path / "run")
    write_weights(run / WEIGHTS_FILE, load(run).params)
    shutil.rmtree(run / "checkpoints")
    raises("does not have the step of its run", load, run)


@pytest.mark.slow
def test_runs_with_other_weights_load_as_plain_models_and_their_zeros_stay(tmp_path):
    config = tiny.make(**SMALL, train__weights="movement(0.5)", train__steps=4, train__sample=8)
    result = loop.train(config, tmp_path / "pruned")
    report.write(tmp_path / "pruned", config, result, "")  # with a sample of its text
    scores = evaluate_run(tmp_path / "pruned", {}).scores
    assert scores["loss"] == pytest.approx(result.heldout["loss"], rel=1e-5)
    run = load(tmp_path / "pruned")
    assert run.config.train.weights == "" and "weights" not in run.params
    start = str(tmp_path / "pruned")
    loop.train(
        tiny.make(**SMALL, train__weights="masked", train__steps=1, train__sample=0, train__init_from=start),
        tmp_path / "more",
    )
    before, after = (load(tmp_path / name).params["layers"]["mlp"]["up"]["kernel"] for name in ("pruned", "more"))
    assert 0.4 < np.mean(before == 0) < 0.6
    np.testing.assert_array_equal(before == 0, after == 0)
    assert np.any(before != after)
    loop.train(
        dataclasses.replace(config, train=dataclasses.replace(config.train, init_from=start)), tmp_path / "third"
    )
