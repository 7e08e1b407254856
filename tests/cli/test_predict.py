"""`hpnlp predict` and `hpnlp.load`: inputs, outputs and errors. Predictions of all tasks: tests/tasks/test_contracts.py."""

import csv
import datetime
import io
import json
import random
import re
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hpnlp
from hpnlp.data.examples.kind import Kind
from hpnlp.data.examples.kinds import Pairs
from hpnlp.data.reading.fields import FieldError
from hpnlp.jobs import predictor
from hpnlp.tasks.classification import ClassificationTask
from hpnlp.tasks.labelled.examples import ExampleTask
from hpnlp.training import config as configs
from hpnlp.training import loop
from tests import tiny
from tests.messages import raises


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    directory = tmp_path_factory.mktemp("classifier")
    draw = random.Random(0)
    lines = []
    for number in range(60):
        words = draw.choices(tiny.WORDS[number % 2 * 9 :][:9], k=draw.randrange(1, 9))
        lines.append(json.dumps({"review": " ".join(words), "label": ("a,b", 'say "c"')[number % 2]}))
    (directory / "examples.jsonl").write_text("\n".join(lines))
    config = configs.default("classification")
    config.data.update(path=str(directory / "examples.jsonl"), tokenizer="bytes", seq_len=40, batch_size=8)
    config.data.text_field = "review"
    config.model.update(layers=1, dim=16, heads=2, mlp_dim=32, unroll=1)
    config.optimizer.update(warmup=0, learning_rate=3e-2)
    config.train.update(steps=40, eval_every=40)
    loop.train(configs.resolve(config), directory / "run")
    return directory / "run"


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    return tiny.copy_run(tmp_path_factory.mktemp("lm") / "run")


TEXTS = ["the quick fox", "old, copper\tkettles", 'a "dog"']


def test_texts_come_from_arguments_lines_and_records(run, classifier, tmp_path, monkeypatch):
    expected = hpnlp.load(classifier).predict(TEXTS)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n\n")
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"review": t, "stars": 3}) for t in TEXTS))
    with (tmp_path / "others.csv").open("w") as file:
        csv.writer(file).writerows([["n", "comment"], *enumerate(TEXTS)])
    stdin = types.SimpleNamespace(buffer=io.BytesIO("\ufeff{}\r\n{}\r\n{}".format(*TEXTS).encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    sources = {
        "arguments": TEXTS,
        "text": [f"--file={tmp_path / 'texts.txt'}"],
        "records": [f"--file={tmp_path / 'texts.jsonl'}"],
        "other names": [f"--file={tmp_path / 'others.csv'}", "--fields=comment"],
        "stdin": ["--file=-"],
    }
    for name, arguments in sources.items():
        outcome = run("predict", classifier, *arguments)
        rows = list(csv.DictReader(io.StringIO(outcome.out)))
        assert outcome.code == 0, (name, outcome)
        field = "comment" if name == "other names" else "review"
        assert [row[field] for row in rows] == TEXTS
        assert [row["label"] for row in rows] == [prediction.label for prediction in expected]
        probabilities = [float(row["probability"]) for row in rows]
        np.testing.assert_allclose(probabilities, [p.probability for p in expected], atol=2e-6)


def test_rows_are_attributable_to_records(run, classifier, tmp_path, monkeypatch):
    rows = [
        ["id", "review", "label", "n"],
        ["x1", "a fox", "good", "1"],
        ["x2", "", "bad", "2"],
        ["x3", "a dog", "", ""],
    ]
    with (tmp_path / "a.csv").open("w") as file:
        csv.writer(file, delimiter=";").writerows(rows)
    command = ("predict", classifier, f"--file={tmp_path / 'a.csv'}")
    outcome = run(*command, "--keep=id,label", "--skip_bad_lines")
    read = list(csv.DictReader(io.StringIO(outcome.out)))
    assert [(row["id"], row["label"], row["review"]) for row in read] == [("x1", "good", "a fox"), ("x3", "", "a dog")]
    assert list(read[0]) == ["id", "label", "review", "predicted_label", "probability"]
    assert "left out: 1 invalid: " in outcome.err and "a.csv, line 3\n" in outcome.err
    outcome = run(*command, "--keep=name")
    assert outcome.code == 2 and "no field 'name', the fields are 'id', 'review', " in outcome.err
    assert "pass --keep=NAME with one of them" in outcome.err and "check-data" not in outcome.err
    pq.write_table(pa.table({"review": ["a"], "day": [datetime.date(2020, 1, 2)]}), tmp_path / "b.parquet")
    outcome = run(*command[:2], f"--file={tmp_path / 'b.parquet'}", "--keep=day", "--format=jsonl")
    assert json.loads(outcome.out)["day"] == "2020-01-02"
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(b"a\n\nb\n \n")))
    outcome = run(*command[:2], "--file=-")
    assert outcome.out.count("\n") == 3
    assert outcome.err == "hpnlp: -: left out: 2 without text: line 2; line 4\n"


def test_texts_that_are_cut_are_counted(run, classifier):
    outcome = run("predict", classifier, "a" * 38, "b" * 39, "c", "d" * 90)
    assert outcome.err == "hpnlp: 2 of 4 texts were cut to data.seq_len=40 tokens\n"
    model = hpnlp.load(classifier)
    for function in (model.predict, model.encode):
        with pytest.warns(UserWarning, match="1 of 2 texts were cut to data.seq_len=40 tokens") as caught:
            function(["a", "b" * 39])
        assert caught[0].filename == __file__


def test_texts_without_tokens_are_left_out_with_their_places(run, classifier, tmp_path, monkeypatch):
    def join(self, ids, labels):
        if len(ids[0]) == 3:
            raise FieldError("has a text without tokens")
        return ids, labels

    monkeypatch.setattr(Kind, "join", join)
    (tmp_path / "a.txt").write_text("\none\ntwo\nthree\nfour\n")
    command = ("predict", classifier, f"--file={tmp_path / 'a.txt'}")
    outcome = run(*command)
    assert outcome.code == 2
    assert outcome.err.endswith(
        "a.txt, line 2 has a text without tokens: correct it, or leave it out by --skip_bad_lines\n"
    )
    outcome = run(*command, "--skip_bad_lines")
    assert [row["review"] for row in csv.DictReader(io.StringIO(outcome.out))] == ["three", "four"]
    for line in ("1 without text: line 1\n", f"2 invalid: {tmp_path / 'a.txt'}, line 2; {tmp_path}/a.txt, line 3\n"):
        assert f"left out: {line}" in outcome.err
    raises("text 1 has a text without tokens: correct it", lambda: hpnlp.load(classifier).predict(["four", "one"]))


def test_files_without_texts_give_a_header(run, classifier, tmp_path):
    for name, content in (("a.csv", ""), ("b.csv", "review\n"), ("c.txt", ""), ("d.jsonl", "")):
        (tmp_path / name).write_text(content)
        outcome = run("predict", classifier, f"--file={tmp_path / name}", "--top=2")
        assert (outcome.code, outcome.out) == (0, "review,label,probability,probabilities\n")
        assert outcome.err.endswith(f"hpnlp: {tmp_path / name}: no texts to predict from\n")


def test_json_lines_have_all_probabilities(run, classifier, tmp_path):
    outcome = run("predict", classifier, *TEXTS, f"--out={tmp_path / 'out.jsonl'}", "--top=0")
    assert outcome.out == f"{tmp_path / 'out.jsonl'}: 3 predictions\n" and outcome.err == ""
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for row, text in zip(rows, TEXTS, strict=True):
        assert row["review"] == text and set(row["probabilities"]) == {"a,b", 'say "c"'}
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert row["probabilities"][row["label"]] == row["probability"] == max(row["probabilities"].values())


def test_predictions_do_not_depend_on_the_batch(classifier):
    texts = [" ".join(tiny.WORDS[:n]) for n in (1, 6, 3, 2, 5)]
    model = hpnlp.load(str(classifier))
    together = [p.probabilities for p in model.predict(texts)]
    for prediction, text in zip(together, texts, strict=True):
        assert prediction == pytest.approx(model.predict([text], batch_size=1)[0].probabilities, abs=1e-6)
    vectors = model.encode(texts)
    assert vectors.shape == (5, 16) and vectors.dtype == np.float32
    np.testing.assert_allclose(vectors[3:4], model.encode(texts[3:4]), atol=1e-5)
    assert model.predict([]) == [] and len(model.encode([])) == 0


def test_padding_is_at_most_a_quarter_of_a_text():
    widths = [predictor.width_for(length, 2048) for length in range(1, 2000)]
    assert all(width >= length for length, width in enumerate(widths, 1)) and len(set(widths[:256])) == 24
    assert all(4 * (width - length) < length for length, width in enumerate(widths, 1) if length > 12)
    assert all(8 * (width - length) < length for length, width in enumerate(widths, 1) if length > 128)
    assert widths[18] == 20 and widths[129] == 144 and widths[256] == 288 and predictor.width_for(33, 34) == 34


def test_language_models_generate(language_model):
    model = hpnlp.load(language_model)
    texts = model.generate(["the", "a quick brown"], tokens=5, temperature=0)
    assert len(texts) == 2 and texts == [
        model.generate([p], tokens=5, temperature=0)[0] for p in ("the", "a quick brown")
    ]
    assert model.generate([]) == []


ERRORS = {
    "no run": ([], "expected a run: write hpnlp predict RUN"),
    "nothing to predict": (["RUN"], "expected texts after the run, or --file=FILE"),
    "texts and a file": (["RUN", "a", "--file=x"], "and not both"),
    "an empty text": (["RUN", "a", ""], "text 2 field 'review' is empty: correct it"),
    "a directory": (["RUN", "--file=DIR"], "is a directory: name one file"),
    "other columns": (["RUN", "--file=DIR/other.csv"], "no field 'review', the fields are 'text': pass --fields=NAME"),
    "a bad record": (["RUN", "--file=DIR/bad.jsonl"], "bad.jsonl, line 2.*--skip_bad_lines"),
    "not UTF-8": (["RUN", "--file=DIR/latin.txt"], r"line 1: not UTF-8 \(byte 0xe9 at 0\), to be converted by iconv"),
    "an unknown suffix": (["RUN", "a", "--out=DIR/x.txt"], "expected a file .csv or .jsonl"),
    "formats that differ": (["RUN", "a", "--out=DIR/x.csv", "--format=jsonl"], "the suffix names another format"),
    "a language model": (["LM", "a"], "task='lm' has no labels, targets or pairs to predict: use hpnlp generate"),
    "fields of texts": (["RUN", "a", "--fields=b"], "--fields=.* has no effect without a file of records"),
    "the input as output": (["RUN", "--file=DIR/other.csv", "--out=DIR/other.csv"], "is the file that is read"),
    "archive": (["RUN", "--file=DIR/packed.zip"], "packed.zip is compressed in a form that is not read: unpack it"),
}


def test_invalid_input_is_refused(run, classifier, language_model, tmp_path):
    (tmp_path / "other.csv").write_text("text\na\n")
    (tmp_path / "bad.jsonl").write_text('{"review": "a"}\n{"review": 3}\n{"review": ""}\n')
    (tmp_path / "wide.txt").write_bytes("a".encode("utf-16"))
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "packed.zip").write_bytes(b"PK")
    names = {"RUN": str(classifier), "LM": str(language_model)}
    for name, (arguments, message) in ERRORS.items():
        argv = [names.get(a, a).replace("DIR", str(tmp_path)) for a in arguments]
        outcome = run("predict", *argv)
        assert outcome.code == 2 and outcome.out == "", (name, outcome)
        assert outcome.err.count("\n") == 1, (name, outcome)
        assert re.search(message, outcome.err), (name, outcome.err)
    outcome = run("predict", classifier, f"--file={tmp_path / 'bad.jsonl'}", "--skip_bad_lines")
    assert outcome.code == 0 and "left out: 2 invalid: " in outcome.err


def test_lines_with_too_few_or_too_many_texts_raise(run, monkeypatch, classifier):
    monkeypatch.setattr(predictor.Predictor, "kind", Pairs("question", "answer"))
    for line, count in (("a", "one text"), ("a\tb\tc", "3 texts")):
        outcome = run("predict", classifier, line)
        assert outcome.code == 2
        assert f"{count}, and the run reads 2 (question, answer): put one tab" in outcome.err


def test_invalid_arguments_raise(classifier, language_model):
    model = hpnlp.load(classifier)
    raises("is one text: pass a list", model.predict, "a text")
    raises("text 1 field 'review' is a int", model.predict, ["a", 3])
    for text in ([], None, [[]]):
        raises("text 0 ", model.encode, [text])
        raises("text 0 ", model.predict, [text])
    assert model.encode([]).shape == (0, 16)
    raises("batch_size=0", model.predict, ["a"], batch_size=0)
    raises("generate continues prompts with runs of task='lm' or 'rnn_lm'", model.generate, ["a"])
    raises("is one prompt: pass a list of prompts", lambda: hpnlp.load(language_model).generate("a"))
    raises("task='lm' has no vectors of texts: use a run", lambda: hpnlp.load(language_model).encode(["a"]))


class Unfinished(ClassificationTask):
    """A task with the kind of its data, and without predictions."""

    name = "unfinished"
    predict = ExampleTask.predict


def test_a_task_without_predict_names_it(classifier):
    model = hpnlp.load(classifier)
    model._task = Unfinished()
    raises("Unfinished, task='unfinished', has an `input_kind` and no `predict`: define", model.predict, ["a"])


def test_float16_rounds_and_names_what_overflows(run, classifier, language_model):
    expected = hpnlp.load(classifier).predict(TEXTS)
    half = hpnlp.load(classifier, dtype="float16")
    for one, other in zip(half.predict(TEXTS), expected, strict=True):
        assert one != other and abs(one.probability - other.probability) < 5e-3
    large = hpnlp.load(classifier, dtype="float16")
    scale = large._trained.params["final_norm"]["scale"]
    large._trained.params["final_norm"]["scale"] = scale * 0 + 6e4  # in range, and its products are not
    raises("float16 overflows at 65,504.*use bfloat16 or float32", large.predict, TEXTS)
    writer = hpnlp.load(language_model, dtype="float16")
    scale = writer._trained.params["final_norm"]["scale"]
    writer._trained.params["final_norm"]["scale"] = scale * 0 + 6e4
    raises("float16 overflows at 65,504.*use bfloat16 or float32", writer.generate, ["the "], tokens=3)
    outcome = run("generate", language_model, "--prompt=the ", "--tokens=3", "--dtype=float16", "--temperature=0")
    assert outcome.code == 0
