"""Runs with a teacher: they resume, load as plain models, start from its layers, store its logits, and report it."""

import dataclasses
import json
import shutil
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from hpnlp import planner, report
from hpnlp.compress.distilling.distill_config import DistillConfig
from hpnlp.compress.distilling.distillation import OWN
from hpnlp.jobs.evaluate_run import evaluate_run
from hpnlp.tasks.classification import ClassifierConfig
from hpnlp.training import config as configs
from hpnlp.training import loop
from hpnlp.training.run_directory import load
from hpnlp.training.starts.teacher import Teacher
from hpnlp.training.starts.teacher_outputs import Store, sequence_keys
from hpnlp.types import InputError
from tests import tiny
from tests.messages import raises
from tests.training.test_loop import Crash, catch_trainer, crash


def make(teacher, **overrides):
    return tiny.make(train__steps=4, train__log_every=1, distill__teacher=str(teacher), **overrides)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "teacher"
    loop.train(tiny.make(train__steps=3, model__layers=3), directory)
    return directory


def metrics(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_runs_with_a_teacher_resume_bit_for_bit_and_load_as_plain_models(teacher, tmp_path, monkeypatch):
    config = make(teacher, distill__losses="tinybert,labels(0.1)", optimizer__ema=0.9)

    expected = loop.train(config, tmp_path / "undisturbed")
    tiny.interrupt(config, tmp_path / "run", 2)
    result = loop.train(config, tmp_path / "run")
    lines = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("run", "undisturbed")]
    assert lines[0] == lines[1] and b"distill_hidden" in lines[0]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(result.params), jax.device_get(expected.params))
    assert OWN in result.params and not list((tmp_path / "run" / "checkpoints").rglob("*frozen*"))

    loaded = load(tmp_path / "run", step=4)
    assert loaded.config.distill == DistillConfig() and set(loaded.params) == {"embed", "final_norm", "layers"}
    np.testing.assert_array_equal(loaded.params["embed"]["table"], result.params["embed"]["table"])
    text = report.write(tmp_path / "run", config, result)
    assert text["teacher_loss"] == (result.teacher or {})["loss"] == pytest.approx(text["teacher_loss"])
    written = (tmp_path / "run" / "report.md").read_text()
    assert f"teacher {teacher}, held-out loss" in written and "student / teacher, loss" in written
    assert "train the same student without its teacher" in written and "--distill.teacher=" in written
    assert planner.costs(config, 1).memory["frozen"] > 0

    (tmp_path / "run" / "teacher.json").write_text("{")
    raises(r"cannot read .*teacher.json .* put back the file", load, tmp_path / "run")


@pytest.mark.slow
def test_students_start_from_layers_of_their_teacher(teacher, tmp_path, monkeypatch):
    config = make(teacher, distill__init="alternate", distill__losses="hinton,hidden(projection=linear)")
    still = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=1),
        optimizer=dataclasses.replace(config.optimizer, learning_rate=0.0, weight_decay=0.0),
    )
    loop.train(still, tmp_path / "run")
    own, of_teacher = (load(directory).params for directory in (tmp_path / "run", teacher))
    jax.tree.map(np.testing.assert_array_equal, own["layers"], jax.tree.map(lambda x: x[:2], of_teacher["layers"]))
    np.testing.assert_array_equal(own["embed"]["table"], of_teacher["embed"]["table"])
    started = make(teacher, train__init_from=str(tmp_path / "run"), distill__losses="hidden(projection=linear)")
    with monkeypatch.context() as patch, pytest.raises(Crash):
        catch_trainer(patch, crash)
        loop.train(started, tmp_path / "further")
    with pytest.raises(InputError, match=r"distill.init='alternate': params.* of the student are float32\[2, 48, 16\]"):
        loop.train(make(teacher, distill__init="alternate", model__mlp_dim=48), tmp_path / "wide")
    with pytest.raises(InputError, match="the student has 4 layers, the teacher 3"):
        loop.train(make(teacher, distill__init="bottom", model__layers=4), tmp_path / "deep")
    no_layers = types.SimpleNamespace(config=ClassifierConfig(layers=0))
    unlayered = types.SimpleNamespace(model=no_layers)
    raises("not both models have one stack of layers: set", Teacher.first_weights, unlayered, "bottom", no_layers)
    raises("both name parameters to start from", make, teacher, distill__init="bottom", train__init_from="x")


@pytest.mark.slow
def test_stored_logits_give_the_same_losses(teacher, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    direct, stored = (make(teacher, distill__cache=text) for text in ("", str(cache)))
    loop.train(direct, tmp_path / "direct")
    loop.train(stored, tmp_path / "stored")
    with monkeypatch.context() as patch:  # the second run reads all logits
        patch.setattr(Store, "write", lambda *args: pytest.fail("the teacher ran again"))
        loop.train(stored, tmp_path / "again")
    values = [metrics(tmp_path / name) for name in ("direct", "stored", "again")]
    assert values[1] == values[2]
    for expected, found in zip(*values[:2], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert found["distill_logits"] == pytest.approx(expected["distill_logits"], rel=1e-2)
    loop.train(make(teacher, distill__cache=str(cache), distill__cache_top_k=5), tmp_path / "some")
    assert len({path.name for path in cache.iterdir()}) == 2
    path = next(cache.glob("*/*.values.npy"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=r"is damaged .* delete .*, and run again"):
        for name in list(cache.iterdir()):
            digest, count, _ = name.name.split("-")
            store = Store(cache, digest, int(count))
            for key in store._places:
                store.read(key)


def test_keys_depend_on_all_inputs_of_the_teacher():
    batch = {"tokens": np.arange(6).reshape(2, 3), "segment_ids": np.ones((2, 3), int), "labels": np.zeros(2)}
    keys = sequence_keys(batch)
    assert len(set(keys)) == 2 and sequence_keys({**batch, "labels": np.ones(2)}) == keys
    assert not set(keys) & set(sequence_keys({**batch, "segment_ids": np.zeros((2, 3), int)}))


@pytest.mark.slow
def test_teachers_that_do_not_fit_raise(teacher, tmp_path):
    def fails(message, **overrides):
        raises(message, lambda: loop.train(make(overrides.pop("teacher", teacher), **overrides), tmp_path / "run"))

    fails("distill.teacher=.*none is not a directory", teacher=tmp_path / "none")
    (tmp_path / "empty").mkdir()
    fails("holds no run", teacher=tmp_path / "empty")
    shutil.copytree(teacher, tmp_path / "untrained", ignore=shutil.ignore_patterns("checkpoints"))
    fails("distill.teacher=.*untrained: .*no checkpoint", teacher=tmp_path / "untrained")
    fails(
        r"another tokenizer than data.tokenizer='words\(40\)': set --data.tokenizer=bytes", data__tokenizer="words(40)"
    )
    fails("predicts 2.. classes, the student 300: set model.vocab=", model__vocab=300)
    fails("carries state from batch to batch", model__mixer="segment_memory(8)", data__order="stream")
    values = configs.for_task(tiny.get_config(), "masked_lm")
    values.distill.teacher = str(teacher)
    raises("is a model of task='lm', and this config", lambda: loop.train(configs.resolve(values), tmp_path / "run"))


def labelled(directory, names):
    lines = [
        json.dumps({"text": f"{tiny.WORDS[n % 8]} {tiny.WORDS[n % 5]}", "label": names[n % len(names)]})
        for n in range(60)
    ]
    path = directory / f"{'-'.join(names)}.jsonl"
    path.write_text("\n".join(lines))
    config = configs.default("classification")
    config.data.update(path=str(path), tokenizer="bytes", seq_len=24, batch_size=8, heldout=0.2)
    config.data.linear_baselines = False
    config.model.update(layers=2, dim=16, heads=2, mlp_dim=32, unroll=1)
    config.optimizer.update(warmup=0, learning_rate=1e-2)
    config.train.steps = 2
    return config


@pytest.mark.slow
def test_classifiers_are_distilled_by_teachers_with_the_same_labels(tmp_path):
    loop.train(configs.resolve(labelled(tmp_path, ["green", "red"])), tmp_path / "teacher")
    student = labelled(tmp_path, ["green", "red"])
    student.model.layers = 1
    student.distill.update(teacher=str(tmp_path / "teacher"), losses="hinton,cosine(),attention()")
    result = loop.train(configs.resolve(student), tmp_path / "student")
    assert {"accuracy", "macro_f1"} <= (result.teacher or {}).keys() and load(
        tmp_path / "student"
    ).model.config.layers == 1
    other = labelled(tmp_path, ["blue", "red"])
    other.distill.teacher = str(tmp_path / "teacher")
    raises("trained on the same labels", lambda: loop.train(configs.resolve(other), tmp_path / "other"))


def without_labels(config, count, directory):
    """The config with the records from `count` on without labels, and the first ones, with labels, held out."""
    lines = [json.loads(line) for line in Path(config.data.path).read_text("utf-8").splitlines()]
    path, heldout = directory / f"{count}.jsonl", directory / "heldout.jsonl"
    path.write_text(
        "\n".join(json.dumps(line if i < count else {"text": line["text"]}) for i, line in enumerate(lines))
    )
    heldout.write_text("\n".join(json.dumps(line) for line in lines[:20]))
    config.data.update(path=str(path), heldout_path=str(heldout), unlabelled=True)
    return config


@pytest.mark.slow
def test_classifiers_learn_from_a_teacher_without_labels(tmp_path, capsys):
    names = ["green", "red"]
    loop.train(configs.resolve(labelled(tmp_path, names)), tmp_path / "teacher")
    for count in (0, 30):
        student = without_labels(labelled(tmp_path, names), count, tmp_path)
        student.distill.teacher = str(tmp_path / "teacher")
        config = configs.resolve(student)
        result = loop.train(config, tmp_path / f"run{count}")
        assert f"60 examples to train on ({60 - count} without a label)" in capsys.readouterr().out
        run = load(tmp_path / f"run{count}")
        assert run.vocabulary.labels == ("green", "red") and run.config.data.unlabelled
        lines = metrics(tmp_path / f"run{count}")
        assert not any("accuracy" in line for line in lines if "heldout_accuracy" not in line)
        written = report.write(tmp_path / f"run{count}", config, result)
        assert written["heldout_examples"] == 20 and (written["majority_accuracy"] is None) == (count == 0)
        text = (tmp_path / f"run{count}" / "report.md").read_text()
        assert "--distill.teacher= --data.unlabelled=False --data.skip_bad_lines=True" in text
        assert evaluate_run(tmp_path / f"run{count}", {}).scores["accuracy"] == written["heldout_accuracy"]
    stored = dataclasses.replace(config.distill, cache=str(tmp_path / "cache"))
    loop.train(dataclasses.replace(config, distill=stored), tmp_path / "stored")
    for line, expected in zip(metrics(tmp_path / "stored"), lines, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-3)


@pytest.mark.slow
def test_teachers_of_data_without_labels_must_have_their_labels(tmp_path):
    loop.train(configs.resolve(labelled(tmp_path, ["green", "red"])), tmp_path / "teacher")
    student = without_labels(labelled(tmp_path, ["blue", "red"]), 30, tmp_path)
    raises("data.unlabelled=True, and no teacher", lambda: loop.train(configs.resolve(student), tmp_path / "run"))
    student.distill.teacher = str(tmp_path / "teacher")
    raises("has label 'blue', .* the classes are those", lambda: loop.train(configs.resolve(student), tmp_path / "run"))
    student.data.tokenizer = "words(40)"
    raises(r"data.tokenizer='words\(40\)' is not", lambda: loop.train(configs.resolve(student), tmp_path / "run"))
