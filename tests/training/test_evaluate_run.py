"""Evaluation of a run with a longer memory than that of its training."""

import re

import pytest

from hpnlp.jobs.evaluate_run import evaluate_run
from hpnlp.training import loop
from tests import tiny
from tests.messages import raises

pytestmark = pytest.mark.slow


def test_a_run_is_evaluated_with_another_memory(tmp_path):
    config = tiny.make(
        model__mixer="transformer_xl(6)", data__order="stream", train__steps=4, train__eval_every=4, train__sample=0
    )
    loop.train(config, tmp_path)
    own, other = (
        evaluate_run(tmp_path, {"model.mixer": mixer}) for mixer in ("transformer_xl(6)", "transformer_xl(40)")
    )
    assert own.sums["loss"][1] == other.sums["loss"][1] and own.sums["loss"][0] != other.sums["loss"][0]
    again = evaluate_run(tmp_path, {})
    assert again.scores == own.scores
    # The loss of one stream does not depend on where its sequences are cut, as far as the memory reaches.
    longer = evaluate_run(tmp_path, {"data.seq_len": 32})
    assert longer.sums["loss"][0] / longer.sums["loss"][1] == pytest.approx(
        own.sums["loss"][0] / own.sums["loss"][1], rel=0.1
    )
    for changes, message in (
        ({"model.mixer": "full"}, "with model.mixer=full, params.* is nothing in the model and .* in the run: change"),
        ({"model.mixr": "full"}, "no field 'model.mixr': did you mean 'model.mixer'"),
        ({"modl.mixer": "full"}, "no field 'modl.mixer'"),
        (
            {"data.heldout": 0.5},
            "data.heldout=0.5 would not be the run .* can change model.mixer, model.dtype, data.seq_len",
        ),
    ):
        raises(re.compile(message, re.DOTALL), evaluate_run, tmp_path, changes)


def test_a_run_is_evaluated_in_another_dtype(tmp_path):
    loop.train(tiny.make(train__steps=2), tmp_path)
    exact = evaluate_run(tmp_path, {}).scores["loss"]
    for dtype in ("bfloat16", "float16"):
        loss = evaluate_run(tmp_path, {"model.dtype": dtype}).scores["loss"]
        assert loss != exact and loss == pytest.approx(exact, rel=2e-2)
    raises("unknown model.dtype 'float17': did you mean 'float16'", evaluate_run, tmp_path, {"model.dtype": "float17"})
