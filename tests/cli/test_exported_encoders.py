"""Encoders for other programs: transformers and exported directories give the ids and predictions of `hpnlp predict`."""

import json
import random
import subprocess
import sys
import warnings

import flax.linen as nn
import jax
import numpy as np
import pytest

import hpnlp
from hpnlp.compress.files import read_weights, write_weights
from hpnlp.compress.recipe import compress, parse_recipe
from hpnlp.compress.weights_file import WEIGHTS_FILE
from hpnlp.data import tokenizers
from hpnlp.data.examples import save_labels
from hpnlp.data.examples.kinds.unlabelled import Unlabelled
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training import config as configs
from hpnlp.training.files.contents import Contents, contents_of
from hpnlp.training.run_directory import load, make_model
from tests import tiny
from tests.models.huggingface.test_encoders import BERT, HEADS, MODELS

WORDS = [*tiny.WORDS, "<bos>", "</s>", "<pad>", "x,y", "Don't", "naïve", "12.5", "(a)"]
LABELS = ("noun", "other", "verb")
pytestmark = pytest.mark.filterwarnings("ignore:.* texts were cut")  # several are, by both programs alike


def make_run(directory, name, task, tokenizer, pair):
    """A run of an untrained encoder with random parameters."""
    draw = random.Random(0)
    records = []
    for number in range(80):
        words = draw.choices(WORDS, k=draw.choice([1, 2, 5, 9]))
        text = " ".join(words)
        record = {"text": text, "label": LABELS[number % 3], "pair": " ".join(draw.choices(WORDS, k=3))}
        records.append(record | {"words": words, "labels": [LABELS[number % 3]] * len(words)})
    (directory / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    fields, of_task = MODELS[name]
    values = BERT | HEADS[task] | fields | of_task.get(task, {})
    built = tokenizers.build(tokenizer, [json.dumps(record).encode() for record in records])
    config = configs.default(task)
    config.data.update(path=str(directory / "data.jsonl"), seq_len=32, heldout=0.9, tokenizer=tokenizer)
    if pair:
        config.data.pair_field = "pair"
        values = values | {"token_types": max(2, values["token_types"]) if values["token_types"] > 1 else 0}
        values = values | ({"token_types": 1} if name == "roberta" else {})
    values.pop("max_len")
    config.model.update(values | {"vocab": 0, "classes": 0})
    resolved = configs.resolve(config)
    labels = LABELS if task != "masked_lm" else None
    vocabulary = Vocabulary(built, labels)
    model = make_model(resolved, vocabulary)
    shapes = jax.eval_shape(lambda: nn.meta.unbox(model.init(jax.random.key(0), model.example_batch(1, 2))["params"]))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
    run = directory / "run"
    run.mkdir()
    write_weights(run / WEIGHTS_FILE, params, {"step": 1})
    tokenizers.save_whole(built, str(run))
    if labels:
        save_labels(labels, str(run))
    (run / "config.json").write_text(configs.to_json(resolved))
    return run, records


CASES = [
    ("bert", "classification", "bytes", True),
    ("bert", "tagging", "bpe(300)", False),
    ("bert", "masked_lm", "words(400)", False),
    ("roberta", "classification", "words(400, by=whitespace)", False),
    ("roberta", "tagging", "bytes", False),
    ("roberta", "masked_lm", "bpe(300)", False),
    ("distilbert", "classification", "bpe(300)", True),
    ("distilbert", "tagging", "words(400, by=whitespace)", False),
    ("distilbert", "masked_lm", "bytes", False),
    ("mobilebert", "classification", "bytes", True),
    ("mobilebert", "tagging", "bytes", False),
]


SERVED = [
    ("bert", "classification", "bytes", True, "onnx", ""),
    ("distilbert", "tagging", "bpe(300)", False, "onnx", ""),
    ("bert", "classification", "words(400)", False, "stablehlo", ""),
    ("bert", "tagging", "words(400, by=whitespace)", False, "onnx", "int8"),
]


@pytest.mark.oracle
@pytest.mark.usefixtures("symbolic_sizes")
@pytest.mark.parametrize(("name", "task", "tokenizer", "pair", "form", "recipe"), SERVED)
def test_exported_directories_are_served_without_hpnlp(name, task, tokenizer, pair, form, recipe, run, tmp_path):
    pytest.importorskip("onnxruntime")
    directory, records = make_run(tmp_path, name, task, tokenizer, pair)
    if recipe:
        params, metadata = read_weights(directory / WEIGHTS_FILE)
        model_config = load(directory).model.config
        *_, (_, _, params) = compress(model_config, params, parse_recipe(recipe))
        write_weights(directory / WEIGHTS_FILE, params, metadata)
    target = tmp_path / "served"
    for _ in range(2):  # an export replaces an earlier one, and one that was killed
        (target / ".export-killed").mkdir(parents=True)
        outcome = run("export", directory, f"--to={target}", f"--format={form}")
        assert outcome.code == 0 and "held-out texts" in outcome.out and "int32 [B, T]" in outcome.out, outcome
        assert ("each text alone: " in outcome.out and "other texts of its batch" in outcome.out) == bool(recipe), (
            outcome
        )
    assert contents_of(target) is Contents.EXPORTED
    assert not [path.name for path in target.iterdir() if path.name.startswith(".")]
    assert not recipe or (target / "model.onnx").stat().st_size < 60_000
    texts = [record["text"] for record in records[:20]]
    lines = [f"{record['text']}\t{record['pair']}" if pair else record["text"] for record in records[:20]]
    check = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); assert 'hpnlp' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", check.replace("sys.argv[1]", repr(str(target / "predict.py")))],
        input="\n".join(lines), capture_output=True, text=True, cwd=tmp_path, timeout=200, check=True,
    )  # fmt: skip
    actual = [json.loads(line)["prediction"] for line in done.stdout.splitlines()]
    here = hpnlp.load(directory)
    if task == "classification":
        examples = [(r["text"], r["pair"]) for r in records[:20]] if pair else texts
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            predictions = here.predict(examples)
        assert [str(each.message).partition(" to ")[0] in done.stderr for each in caught] == [True] * pair
        for prediction, expected in zip(actual, predictions, strict=True):
            assert prediction["label"] == expected.label
            assert prediction["probability"] == pytest.approx(expected.probability, abs=1e-3)
    else:
        for prediction, expected in zip(actual, here.predict([text.split() for text in texts]), strict=True):
            assert [tag["word"] for tag in prediction] == list(expected.words)
            differing = sum(tag["label"] != label for tag, label in zip(prediction, expected.labels, strict=True))
            assert differing <= (1 if recipe else 0)
    outcome = run("export", directory, f"--to={directory}")
    assert outcome.code == 2 and "holds a compressed model: name another directory" in outcome.err


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "task", "tokenizer", "pair"), CASES)
def test_transformers_gives_the_predictions_of_the_run(name, task, tokenizer, pair, run, tmp_path):
    transformers = pytest.importorskip("transformers")
    import torch

    directory, records = make_run(tmp_path, name, task, tokenizer, pair)
    outcome = run("convert", f"--from={directory}", f"--to={tmp_path / 'hf'}")
    assert outcome.code == 0, outcome
    assert ("ids and labels of 64 held-out texts are those of the run" in outcome.out) == (task != "masked_lm"), outcome
    there = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    family = {"classification": "SequenceClassification", "tagging": "TokenClassification", "masked_lm": "MaskedLM"}
    torch_model = getattr(transformers, f"AutoModelFor{family[task]}").from_pretrained(tmp_path / "hf")
    here = hpnlp.load(directory)
    assert torch_model.config.pad_token_id == there.pad_token_id == here.run.tokenizer.pad_id
    texts = [record["text"] for record in records[:64]]
    pairs = [record["pair"] for record in records[:64]] if pair else None
    inputs = there(texts, pairs, padding=True, truncation=True, return_tensors="pt")
    assert inputs["input_ids"].shape[1] <= 32
    with torch.no_grad():
        logits = torch_model(**inputs).logits.numpy()
    if task == "classification":
        examples = list(zip(texts, pairs, strict=True)) if pair else texts
        for row, prediction in zip(logits, here.predict(examples), strict=True):
            expected = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            actual = [prediction.probabilities[label] for label in LABELS]
            np.testing.assert_allclose(actual, expected, atol=2e-4)
            assert prediction.label == LABELS[row.argmax()]
    elif task == "tagging":
        tags = transformers.pipeline("token-classification", model=torch_model, tokenizer=there, ignore_labels=[])
        for text, prediction in zip(texts[:16], here.predict([t.split() for t in texts[:16]]), strict=True):
            batch = here.kind.batch(
                Unlabelled(here.kind, here.run.tokenizer, [{"words_field": text.split()}]),
                [0],
                1,
                here.run.tokenizer,
                32,
            )
            by_token = {entity["index"]: entity["entity"] for entity in tags(text)}
            expected = [by_token[token] for token in np.flatnonzero(batch["weights"][0])]
            assert list(prediction.labels) == expected, text
    else:
        assert there.mask_token_id == here.run.vocabulary.sizes.masked_ids - 1
        fill = transformers.pipeline("fill-mask", model=torch_model, tokenizer=there)
        assert len(fill(f"the {there.mask_token} fox", top_k=2)) == 2
