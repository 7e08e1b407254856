"""Dual encoders that learn labels and grades of pairs: training, the classes of a run, scores and reports."""

import dataclasses
import json
import random

import jax
import numpy as np
import pytest
from scipy import stats

from hpnlp import planner
from hpnlp.cli import experiment
from hpnlp.jobs import evaluate_run
from hpnlp.parallel.plan import Plan
from hpnlp.planner import render
from hpnlp.tasks import TASKS
from hpnlp.tasks.predictions import TrainedModel
from hpnlp.tasks.reports.pair_report import PairReport
from hpnlp.tasks.reports.reporting import Outcome
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.training import config as configs
from hpnlp.training import loop, run_directory
from hpnlp.training.config import flat
from hpnlp.training.evaluation import Evaluation
from hpnlp.training.files import evaluation_record
from hpnlp.training.starts import warm_start
from tests import tiny
from tests.messages import raises

TASK = TASKS["dual_encoder"]
SOFTMAX = {"data.label_field": "label", "model.loss": "softmax"}
COSINE = {"data.label_field": "grade", "data.label_range": "0,4", "model.loss": "cosine"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Pairs of four words, of which 0 to 4 are common: the grade, and of which the label depends."""
    root, draw, lines = tmp_path_factory.mktemp("pairs"), random.Random(0), []
    for _ in range(300):
        words, common = draw.sample(tiny.WORDS[:12], k=8), draw.randrange(5)
        texts = {"text": " ".join(words[:4]), "pair": " ".join(words[4 - common : 8 - common])}
        lines.append(json.dumps({**texts, "label": "same" if common > 2 else "other", "grade": common}))
    (root / "pairs.jsonl").write_text("\n".join(lines))
    return root


def make(directory, changes):
    config = configs.default("dual_encoder")
    config.data.update(path=str(directory / "pairs.jsonl"), tokenizer="words(30)", seq_len=8, batch_size=32)
    config.data.cache = str(directory / "cache")
    config.model.update(layers=0, dim=16, position="none")
    config.optimizer.update(warmup=0, learning_rate=0.03)
    config.train.update(steps=40, checkpoint_every=0)
    config.plan.name = "single"
    config.update_from_flattened_dict(changes)
    return configs.resolve(config)


@pytest.fixture(scope="module")
def trained(directory):
    """`(workdir, result)` of a run with labels."""
    return directory / "labels", loop.train(make(directory, SOFTMAX), directory / "labels")


def losses(workdir):
    """Mean loss of the first and of the last five steps."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    of_steps = [line["loss"] for line in lines if "loss" in line]
    return np.mean(of_steps[:5]), np.mean(of_steps[-5:])


def test_labels_are_learned_and_kept(directory, trained):
    workdir, result = trained
    first, last = losses(workdir)
    assert last < 0.8 * first and result.heldout["accuracy"] > 0.7
    assert json.loads((workdir / "labels.json").read_text())["labels"] == ["other", "same"]
    run = run_directory.load(workdir)
    assert run.model.config.classes == 2 and run.params["classifier"]["kernel"].shape == (48, 2)
    dataset, other = result.dataset, directory / "other.jsonl"
    batch = next(TASK.heldout(run.config, dataset, limit=1))
    similarities = TASK.predict(TrainedModel(run.config, run.model, run.params, run.tokenizer), batch, [{}] * 3)
    assert all(-1 <= x.similarity <= 1.0001 for x in similarities)
    rows = [{"text": "the fox", "pair": "the fox", "label": label} for label in ("same", "unknown")]
    other.write_text("\n".join(map(json.dumps, rows)))
    raises("other.jsonl, line 2: has label", evaluate_run.evaluate_run, workdir, {"data.heldout_path": str(other)})
    finetune = experiment.read(f"experiments/lm/finetune.py:{workdir}", [])
    finetune.update_from_flattened_dict(COSINE)
    assert configs.resolve(finetune).model.classes == 0  # of the data, whatever the loss
    (workdir / "labels.json").rename(directory / "labels.json")
    raises("the run has no labels.json, which model.loss='softmax' needs: put back", run_directory.load, workdir)
    (directory / "labels.json").rename(workdir / "labels.json")


def test_grades_are_learned_from_vectors_that_were_trained_with_labels(directory, trained, capsys):
    """As in the paper: first inference, then similarity. The classifier stays behind."""
    workdir = directory / "grades"
    source = {"train.init_from": str(trained[0]), "data.tokenizer": str(trained[0] / "tokenizer.json")}
    result = loop.train(make(directory, COSINE | source | {"train.eval_every": 20}), workdir)
    assert "labels, step 40, without its head, with its tokenizer" in capsys.readouterr().out
    first, last = losses(workdir)
    assert last < 0.7 * first and set(result.heldout) == {"loss"} and "classifier" not in result.params
    assert not (workdir / "labels.json").exists() and result.baselines["mean_grade_loss"] > result.heldout["loss"]
    found, model = warm_start.find(workdir), run_directory.load(trained[0]).model.config
    assert found.check_model(model) == ""
    outcome = Outcome(make(directory, COSINE), result.dataset, result.model, result.params, {})
    numbers = TASK.report.section(outcome).numbers
    stored = result.dataset.stored["heldout"]
    batch = result.dataset.kind.batch(stored, range(stored.count), stored.count, result.dataset.tokenizer, 8)
    vectors = outcome.compiled("embed")(batch)
    cosines = np.asarray(vectors[0] * vectors[1]).sum(axis=1)
    for name, function in (("spearman", stats.spearmanr), ("pearson", stats.pearsonr)):
        expected = function(cosines, batch["grades"]).statistic
        assert numbers[f"heldout_{name}"] == pytest.approx(expected, abs=1e-5) and expected > 0.8
    outcome = dataclasses.replace(outcome, params=jax.tree.map(np.asarray, result.params))
    sums = {"loss": (1.0, 1.0)}
    evaluation_record.write(workdir, outcome, Evaluation(result.heldout, sums), step=40)  # as of a compressed model
    record = json.loads((workdir / "evaluation.json").read_text())
    assert record["heldout_spearman"] == pytest.approx(numbers["heldout_spearman"], abs=1e-6)


def test_losses_need_their_fields(directory):
    for changes, message in (
        ({"data.label_field": "label"}, "data.label_field='label' has no effect, because model.loss='contrastive'"),
        ({"model.loss": "softmax"}, "model.loss='softmax' needs pairs with labels: set data.label_field"),
        (COSINE | {"model.loss": "softmax"}, "model.loss='softmax' needs pairs with labels: leave out"),
        (SOFTMAX | {"model.loss": "cosine"}, "model.loss='cosine' needs pairs with grades: set data.label_field"),
        ({"model.loss": "cosine", "data.negative_fields": "worse"}, "data.negative_fields='worse' has no effect"),
        (SOFTMAX | {"model.classes": 4}, "model.classes=4, but the data have 3 labels: set it to 0"),
    ):
        raises(message, lambda c=changes: TASK.model(make(directory, c), Sizes(ids=30, classes=3)))


def test_single_pairs_and_batches_of_one_pair_are_enough(directory):
    for changes in (SOFTMAX, COSINE):
        config = make(directory, changes | {"data.batch_size": 1, "data.heldout_examples": 1})
        assert TASK.dataset(config.data, None).heldout_examples == 1
        assert not TASK.model(config, Sizes(ids=30, classes=2)).config.compares_examples


def test_plans_of_single_pairs_have_no_uncounted_communication(directory):
    costs = planner.costs(dataclasses.replace(make(directory, SOFTMAX), plan=Plan("data")), 8)
    assert costs.parameters > 0 and "not counted" not in render.table(costs, planner.DEVICES["h100"], "h100")


def test_reports_are_those_of_the_loss(directory):
    report = PairReport()
    for loss, metric in (("softmax", ("accuracy", True)), ("cosine", ("loss", False)), ("triplet", ("accuracy", True))):
        assert TASK.primary_metric({"model.loss": loss}) == metric
    written = {}
    for name, changes, scores in (
        ("a", SOFTMAX, {"loss": 1.0, "accuracy": 0.5, "macro_f1": 0.4}),
        ("b", COSINE, {"loss": 0.1}),
        ("c", COSINE, {"loss": 0.2}),
    ):
        config = make(directory, changes)
        dataset = TASK.dataset(config.data, None)
        numbers = report.numbers(dataset, scores, TASK.baseline(dataset).result())
        assert report.compared(flat(config)).keys() <= numbers.keys()
        written[name] = {**numbers, "config": flat(config), "scored_weight": 1.0}
    for name, value in (("b", 0.5), ("c", 0.75)):
        written[name] |= {"heldout_spearman": value, "heldout_pearson": value}
    ranking = report.rank(written)
    assert ranking.scores == {"b": 0.5, "c": 0.75} and ranking.higher_is_better
    assert ranking.unscored == {"a": "model.loss='softmax' has other scores than the runs above"}
