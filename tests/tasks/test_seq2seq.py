"""Sequence to sequence: sizes of the model, scores, the report's verdict, and configs that do not fit."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from hpnlp.tasks import TASKS
from hpnlp.tasks.reports.reporting import Outcome
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.training import config as configs
from hpnlp.types import InputError

TASK = TASKS["seq2seq"]
CONFIG = configs.resolve({"task": "seq2seq", "model": {"dim": 8, "heads": 2}, "data": {"seq_len": 8, "target_len": 12}})


def test_sizes_of_the_model_are_those_of_the_data():
    model = TASK.model(CONFIG, Sizes(20))
    assert (model.config.vocab, model.config.max_len, model.config.target_len) == (20, 8, 12)
    assert model.config.encoder().max_len == 8 and model.config.decoder().max_len == 12
    shapes = {name: x.shape for name, x in model.example_batch(2, 8).items()}
    assert shapes.keys() == model.batch_axes().keys()
    assert shapes["tokens"] == (2, 8) and shapes["target_weights"] == (2, 12)


def test_models_that_do_not_fit_raise():
    for section, changes, message in (
        ("model", {"vocab": 5}, "model.vocab=5 is less than the tokenizer's 20"),
        ("model", {"position": "learned", "max_len": 4}, "data.seq_len=8 is longer than model.max_len=4"),
        ("model", {"position": "learned", "target_len": 4}, "data.target_len=12 is longer than model.target_len=4"),
        ("train", {"eval_stride": 4}, "train.eval_stride=4 is for language models"),
    ):
        changed = dataclasses.replace(getattr(CONFIG, section), **changes)
        with pytest.raises(InputError, match=message):
            TASK.model(dataclasses.replace(CONFIG, **{section: changed}), Sizes(20))


def test_scores_are_means():
    sums = {"loss": (6.0, 4.0), "accuracy": (3.0, 4.0), "exact_match": (1.0, 2.0)}
    sums = {name: tuple(map(np.float64, pair)) for name, pair in sums.items()}
    scores = TASK.scores(CONFIG, None, sums, is_complete=True, gives_probabilities=True)
    assert scores == {"loss": 1.5, "accuracy": 0.75, "exact_match": 0.5}


def report_of(**changes):
    numbers = {"heldout_exact_match": 0.5, "heldout_loss": 1.0, "heldout_accuracy": 0.75}
    return numbers | {"heldout_examples": 1200, "heldout_digest": "one"} | changes


def test_reports_of_mixers_without_a_cache_show_no_decoded_texts():
    config = SimpleNamespace(decodes=False)
    outcome = Outcome(CONFIG, None, SimpleNamespace(config=config), {"params": {}}, {})
    assert TASK.report.section(outcome).text == ""


def test_runs_are_ranked_by_exact_match():
    reports = {"a": report_of(), "b": report_of(heldout_exact_match=0.75), "c": report_of(heldout_digest="other")}
    ranking = TASK.report.rank(reports)
    assert ranking.scores == {"a": 0.5, "b": 0.75} and ranking.higher_is_better and ranking.unscored.keys() == {"c"}
