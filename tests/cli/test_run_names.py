"""Names of runs on the command line, and ensembles of runs, of checkpoints and of the best of a directory."""

import json
import os

import pytest

from hpnlp import report
from hpnlp.cli import run_names
from hpnlp.training import loop
from hpnlp.training.config import default, resolve
from tests.messages import raises


def test_names_stand_for_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (5, 10, 100):
        os.makedirs(f"run/checkpoints/{step}")
    os.makedirs("odd@7")
    assert run_names.expand(["run"]) == [("run", None)] and run_names.expand(["run"], 5) == [("run", 5)]
    assert run_names.expand(["run@10", "odd@7", "odd@7@5"], 3) == [("run", 10), ("odd@7", 3), ("odd@7", 5)]
    assert run_names.expand(["run@last2"]) == [("run", 10), ("run", 100)]
    scores = {"a": 3.0, "b": 1.0, "c": None, "d": 2.0}
    for name in scores:
        os.makedirs(f"sweep/{name}")
        with open(f"sweep/{name}/report.json", "w") as file:
            file.write("{}")
    digests = dict.fromkeys(scores, "x")

    def read_report(path):
        name = path.name
        return {"config": {"task": "lm"}, "heldout_loss": scores[name], "heldout_digest": digests[name]}

    monkeypatch.setattr(report, "read_report", read_report)
    assert run_names.expand(["sweep@best2"]) == [("sweep/b", None), ("sweep/d", None)]
    for name, message in (
        ("run@last4", "run@last4: the run has 3 checkpoints: name at most these, and keep more of them by train.keep"),
        ("run@last0", "run@last0: the run has 3 checkpoints"),
        ("none@last1", "none@last1: the run has 0 checkpoints"),
        ("sweep@best4", "sweep@best4: the directory holds 3 finished runs with a score: name at most these"),
    ):
        raises(message, run_names.expand, [name])
    digests["d"] = "y"
    raises("sweep/a and sweep/d have different held-out examples, so that their", run_names.expand, ["sweep@best2"])


def test_best_members_of_a_cross_validation_are_runs_of_all_folds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scores = {"a,fold=1": 1.0, "a,fold=2": 4.0, "b,fold=1": 2.0, "b,fold=2": 2.0, "c,fold=1": 0.5}
    for name in scores:
        os.makedirs(f"sweep/{name}")
        with open(f"sweep/{name}/report.json", "w") as file:
            file.write("{}")

    def read_report(path):
        member, fold = path.name[0], int(path.name[-1])
        config = {"task": "lm", "model.mixer": member, "data.folds": 2, "data.fold": fold}
        return {"config": config, "heldout_loss": scores[path.name], "heldout_digest": digests.get(path.name, fold)}

    digests = {}
    monkeypatch.setattr(report, "read_report", read_report)
    assert run_names.expand(["sweep@best1"]) == [("sweep/b,fold=1", None), ("sweep/b,fold=2", None)]
    assert [name for name, _ in run_names.expand(["sweep@best2"])][2:] == ["sweep/a,fold=1", "sweep/a,fold=2"]
    raises("sweep@best3: the directory holds 2 members with a score of each of 2", run_names.expand, ["sweep@best3"])
    digests["b,fold=2"] = "other"
    raises("sweep/a,fold=2 and sweep/b,fold=2 have different held-out examples", run_names.expand, ["sweep@best1"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs with one tokenizer, and one with another."""
    root = tmp_path_factory.mktemp("ensembles")
    of_words = {"data.tokenizer": "words(30)", "train.steps": 1}
    for name, changes in (("a", {}), ("b", {"train.seed": 1}), ("others/words", of_words)):
        config = default("rnn_lm")
        config.data.update(path=os.environ["HPNLP_TEST_TEXT"], order="stream", seq_len=16, batch_size=4)
        config.model.update(cells="lstm(8)")
        config.plan.name = "single"
        config.optimizer.update(warmup=0, learning_rate=0.03)
        config.train.update(steps=3, checkpoint_every=1, keep=3, sample=0)
        config.update_from_flattened_dict(changes)
        config = resolve(config)
        result = loop.train(config, root / name)
        if name != "others/words":
            report.write(root / name, config, result)
    return root


@pytest.mark.slow
def test_ensembles_are_evaluated_and_continue_prompts(run, trained):
    def loss(*argv):
        outcome = run("evaluate", *argv)
        assert (outcome.code, outcome.err) == (0, ""), outcome
        title, first, *_ = outcome.out.splitlines()
        name, value = first.split()
        assert name == "loss"
        return title, float(value)

    a, b = trained / "a", trained / "b"
    singles = [loss(f"{a}@{step}")[1] for step in (1, 2, 3)]
    title, together = loss(f"{a}@last3")
    assert title == "; ".join(f"{a}, step {step}" for step in (1, 2, 3)) and together < sum(singles) / 3
    title, best = loss(f"{trained}@best2")
    written = {name: json.loads((trained / name / "report.json").read_text())["heldout_loss"] for name in ("a", "b")}
    pair_title, pair = loss(a, b)
    assert best == pytest.approx(pair, abs=1e-4) and sorted(title.split("; ")) == pair_title.split("; ")
    assert pair < sum(written.values()) / 2 and pair_title == f"{a}, step 3; {b}, step 3"
    assert loss(f"{a}@3", "--cache=continuous(20, 0.1, 0.0)")[1] == pytest.approx(singles[2], abs=1e-4)
    assert loss(f"{a}@3", "--cache=continuous(200, 0.1, 0.2)")[1] != pytest.approx(singles[2], abs=1e-4)
    texts = [
        run("generate", *members, "--prompt=the ", "--tokens=12", "--temperature=0").out
        for members in ([a], [f"--workdir={a},{b}"], [a, b])
    ]
    assert texts[1] == texts[2] and all(text.startswith("the ") for text in texts)
    for argv, message in (
        ((a, trained / "others" / "words"), "words has another tokenizer than .*name runs of one vocabulary"),
        ((a, b, "--cache=continuous(9)"), "a cache is for one run of task='lm' or 'rnn_lm'"),
        ((a, f"{a}@3"), "a, step 3, is named twice: an ensemble averages different runs or checkpoints: leave it out"),
        ((), "no run: write hpnlp evaluate RUN"),
    ):
        outcome = run("evaluate", *argv)
        assert outcome.code and message.split(".*")[-1] in outcome.err
