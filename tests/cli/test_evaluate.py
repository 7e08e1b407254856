"""`hpnlp evaluate`: scores of a run as it was trained, and with other held-out text and another window."""

import dataclasses
import json
import math
import re
import shutil

import pytest

from hpnlp import report
from hpnlp.compress.files import write_weights
from hpnlp.compress.weights_file import WEIGHTS_FILE
from hpnlp.parallel.plan import Plan
from hpnlp.report.entries import read_entry
from hpnlp.training import loop
from hpnlp.training.evaluation import evaluate
from hpnlp.training.run_directory import load
from tests import tiny
from tests.tasks.test_contracts import EXAMPLES


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("evaluated") / "run"
    config = tiny.make(train__steps=1, model__mixer="window(4,0)")
    report.write(workdir, config, loop.train(config, workdir), "--config=tests/tiny.py")
    return workdir


def test_scores_are_those_of_the_report_or_of_the_changed_config(run, trained, tmp_path):
    def scores(*argv):
        outcome = run("evaluate", trained, *argv)
        assert (outcome.code, outcome.err) == (0, ""), outcome
        title, *lines = outcome.out.splitlines()
        assert lines[0].split()[0] == "loss"
        return title, {name: float(value) for name, value in (line.split() for line in lines)}

    title, own = scores()
    assert title == f"{trained}, step 1"
    written = json.loads((trained / "report.json").read_text())
    perplexity = own.pop("perplexity")
    assert own == {name: pytest.approx(written[f"heldout_{name}"], abs=6e-5) for name in own}
    assert perplexity == pytest.approx(math.exp(written["heldout_loss"]), rel=1e-4)
    (tmp_path / "other.txt").write_text("zebra " * 50)
    fields = {"model.mixer": "window(9,0)", "data.batch_size": 4, "data.heldout_path": tmp_path / "other.txt"}
    title, other = scores(*(f"--config.{name}={value}" for name, value in fields.items()), "--batches=2", "--step=1")
    assert title == f"{trained}, step 1" + "".join(f", {name}={value}" for name, value in fields.items())
    assert other["loss"] != own["loss"]


def test_evaluation_without_a_report_is_kept_for_comparisons(run, trained, tmp_path):
    before = sorted(trained.rglob("*"))
    assert "written" not in run("evaluate", trained, "--batches=1").out and sorted(trained.rglob("*")) == before
    copy = shutil.copytree(trained, tmp_path / "copy")
    for name in ("report.json", "scores.npz"):
        (copy / name).unlink()
    assert "written" not in run("evaluate", copy).out  # a training that has not finished
    write_weights(copy / WEIGHTS_FILE, load(trained).params, {"step": 1})
    shutil.rmtree(copy / "checkpoints")
    assert run("evaluate", copy).out.endswith(f"written: {copy}/evaluation.json, which hpnlp compare reads\n")
    written = json.loads((trained / "report.json").read_text())
    kept = json.loads((copy / "evaluation.json").read_text())
    assert kept["heldout_loss"] == pytest.approx(written["heldout_loss"], rel=1e-6)
    names = ("config", "heldout_digest", "heldout_text_digest", "parameters", "scored_step", "scored_weight")
    assert {name: kept[name] for name in names} == {name: written[name] for name in names}
    first, second = read_entry(trained), read_entry(copy)
    assert (second.unscored, second.stored_bytes) == ("", (copy / WEIGHTS_FILE).stat().st_size)
    assert first.stored_bytes > 0 and first.training_seconds is not None and second.training_seconds is None
    assert second.examples.paired_error(first.examples, "loss") == pytest.approx(0.0, abs=1e-6)
    outcome = run("compare", trained, copy, f"--out={tmp_path}/c.png")
    assert "no difference, +0.0000 (" in outcome.out, outcome


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """`(directory, report)` of a run of classes red, green and blue that leaves out bad lines.

    All evaluations have the same accuracy, and the loss rises: the first checkpoint is the best.
    """
    directory = tmp_path_factory.mktemp("classifier")
    config = EXAMPLES["classification"](directory)
    train = dataclasses.replace(config.train, steps=6, eval_every=2)
    data = dataclasses.replace(config.data, skip_bad_lines=True)
    config = dataclasses.replace(config, train=train, data=data, plan=Plan("single"))
    losses = iter([1.0, 2.0, 3.0])

    def tied(*args):
        evaluation = evaluate(*args)
        if args[4] is not None:  # the limit of an evaluation during training
            evaluation.scores.update(accuracy=0.5, loss=next(losses))
        return evaluation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "evaluate", tied)
        result = loop.train(config, directory / "run")
    return directory, report.write(directory / "run", config, result)


def test_tied_metric_is_scored_at_the_step_that_commands_load(run, classifier):
    directory, written = classifier
    assert (written["steps"], written["scored_step"]) == (6, 2)
    assert "| scored checkpoint, which commands load | step 2 |" in (directory / "run" / "report.md").read_text()
    title, *lines = run("evaluate", directory / "run").out.splitlines()
    assert title == f"{directory / 'run'}, step 2"
    scores = dict(line.split() for line in lines)
    assert f"{written['heldout_loss']:.4f}" == scores["loss"]
    assert (scores["examples"], scores["challenge_examples"]) == (str(written["heldout_examples"]), "9")


def test_labels_that_the_run_does_not_have_raise(run, classifier, tmp_path):
    for flags, message in (
        (
            [],
            "others.jsonl': 3 of 5 held-out examples (60 %) have a label that is no class of the run ('mixed', .*others.jsonl, "
            "line 2, ...): correct the labels, remove these examples, or pass --data.skip_bad_lines=True to score the others",
        ),
        (
            ["--data.skip_bad_lines=False"],
            "others.jsonl, line 2: has label 'mixed', of which there is no class: .*, or pass data.skip_bad_lines=True .*"
            "init_from\n$",
        ),
    ):
        argv = ["evaluate", classifier[0] / "run", f"--data.heldout_path={labelled(tmp_path)}", *flags]
        outcome = run(*argv)
        assert outcome.code == 2 and not outcome.out
        assert re.search(message.replace("(", "\\(").replace(")", "\\)"), outcome.err), outcome.err


def test_examples_that_are_not_scored_are_counted(run, classifier, tmp_path):
    path = labelled(tmp_path, {"text": "", "label": "red"})
    argv = [f"--data.heldout_path={path}", "--data.skip_bad_lines=True"]
    outcome = run("evaluate", classifier[0] / "run", *argv)
    *scores, unknown, left_out = outcome.out.splitlines()
    assert ["examples", "2"] in [line.split() for line in scores]
    assert unknown.startswith(
        "not scored: 3 of 5 held-out examples (60 %) have a label that is no class of the run ('mixed'"
    )
    assert left_out.startswith("left out of held-out examples: 1 invalid (")


def labelled(directory, *more):
    """A file with two examples of the classes of `classifier`, three of another one, and more records."""
    path = directory / "others.jsonl"
    labels = ["red", "mixed", "mixed", "mixed", "blue"]
    rows = [*({"text": "a word", "label": label} for label in labels), *more]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
