"""Runs of models with buffers and a carry: they resume bit for bit, evaluate, generate and start other runs."""

import jax
import numpy as np
import pytest

from hpnlp.models.decode import GREEDY, Generation
from hpnlp.models.lm import LM
from hpnlp.models.variables import collections, split
from hpnlp.nn.mixers import MIXERS
from hpnlp.training import loop
from hpnlp.training.run_directory import load
from tests import tiny
from tests.centered_keys import centered_keys

CONFIG = {"model__mixer": "centered,segment_memory(20)", "data__order": "stream"}
CONFIG |= {"train__eval_every": 4, "train__eval_batches": 1}
CONFIG |= {"optimizer__ema": 0.9, "optimizer__aux": "keys_loss(0.1), hidden_loss(0.1)"}


@pytest.fixture(scope="module", autouse=True)
def mixers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MIXERS, "centered", centered_keys)
        yield


def train(workdir, **overrides):
    return loop.train(tiny.make(**CONFIG | overrides), workdir)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    return workdir, train(workdir)


def buffers_of(weights):
    return split(jax.device_get(weights))[1]["layers"]["0_centered"]["attention"]["mixer"]


@pytest.mark.slow
def test_loaded_run_generates_with_its_buffers(undisturbed):
    workdir, result = undisturbed
    run = load(workdir, step=12)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.params), jax.device_get(result.params))
    prompt = np.array([5, 3, 8, 2])
    generation = Generation(run.model, run.params, [prompt], tokens=4, sampling=GREEDY)
    (ids,) = np.concatenate(list(generation), axis=1)
    logits = jax.jit(lambda tokens: run.model.apply(collections(run.params), tokens, method=LM.logits))
    best = np.argmax(np.asarray(logits(np.array([*prompt, *ids], np.int32)[None]))[0], axis=-1)
    np.testing.assert_array_equal(ids, best[3:-1])


@pytest.mark.slow
def test_runs_start_from_a_run_with_its_buffers(undisturbed, tmp_path):
    source = load(undisturbed[0])
    result = train(tmp_path, train__init_from=str(undisturbed[0]))  # as many steps, so that the programs are the same
    start, end = buffers_of(source.params), buffers_of(result.params)
    np.testing.assert_array_equal(end["updates"], start["updates"] + 12)
