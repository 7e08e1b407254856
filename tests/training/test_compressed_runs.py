"""Run directories with compressed weights: loaded, evaluated and refused with an error."""

import dataclasses
import shutil

import numpy as np
import pytest

from hpnlp import report
from hpnlp.compress.files import write_weights
from hpnlp.compress.matrices import is_table, map_matrices
from hpnlp.compress.weights_file import WEIGHTS_FILE
from hpnlp.jobs.evaluate_run import evaluate_run
from hpnlp.ops.weights import dense_tree, quantize
from hpnlp.training import loop
from hpnlp.training.run_directory import load
from tests import tiny
from tests.messages import raises

SMALL = {"model__layers": 1}


@pytest.mark.slow
def test_compressed_weights_are_loaded_and_evaluated(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    loop.train(tiny.make(**SMALL, train__steps=2, train__sample=0), source)
    run = load(source)
    small = map_matrices(lambda path, w: quantize(w, by_row=is_table(path)), run.params)
    target.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(source / name, target / name)
    write_weights(target / WEIGHTS_FILE, small, {"step": run.step})
    loaded = load(target)
    assert loaded.step == run.step
    table = dense_tree(loaded.params)["embed"]["table"]
    np.testing.assert_allclose(table, run.params["embed"]["table"], atol=0.01)
    scores = [evaluate_run(directory, {}, 1).scores["loss"] for directory in (source, target)]
    assert scores[0] != scores[1]
    np.testing.assert_allclose(*scores, rtol=0.01)
    raises("holds a compressed model and no checkpoints", load, target, step=1)
    write_weights(target / WEIGHTS_FILE, small)
    raises("does not have the step of its run", load, target)


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
