"""Projection networks for other programs: exported directories hash words on their own, and predict as the run."""

import json
import random
import subprocess
import sys
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

import hpnlp
from hpnlp.compress.files import write_weights
from hpnlp.compress.recipe import compress, parse_recipe
from hpnlp.compress.weights_file import WEIGHTS_FILE
from hpnlp.data import tokenizers
from hpnlp.data.examples import save_labels
from hpnlp.tasks.predictions import LabelPrediction
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training import config as configs
from hpnlp.training.files.contents import Contents, contents_of
from hpnlp.training.run_directory import make_model
from tests import tiny

pytestmark = pytest.mark.filterwarnings("ignore:.* texts were cut")  # several are, by both programs alike

WORDS = [*tiny.WORDS, "naïve", "größe", "日本語", "🙂", "a-word-of-more-than-sixteen-bytes-größe"]
LABELS = ("one", "three", "two")


def make_run(directory, encoder, recipe):
    """A run of an untrained model with random parameters."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.choice([1, 2, 5, 9]))) for _ in range(60)]
    records = [{"text": text, "label": LABELS[number % 3]} for number, text in enumerate(texts)]
    (directory / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    config: Any = configs.default("hashed_classification")
    config.data.update(path=str(directory / "data.jsonl"), seq_len=8, heldout=0.9)
    config.model.update(encoder=encoder, projection=128, bottleneck=16)
    resolved = configs.resolve(config)
    vocabulary = Vocabulary(tokenizers.build(config.data.tokenizer), LABELS)
    model = make_model(resolved, vocabulary)
    shapes = jax.eval_shape(lambda: nn.meta.unbox(model.init(jax.random.key(0), model.example_batch(1, 2))["params"]))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
    if recipe:
        *_, (_, _, params) = compress(model.config, params, parse_recipe(recipe))
    run = directory / "run"
    run.mkdir()
    write_weights(run / WEIGHTS_FILE, params, {"step": 1})
    tokenizers.save_whole(vocabulary.tokenizer, str(run))
    save_labels(LABELS, str(run))
    (run / "config.json").write_text(configs.to_json(resolved))
    return run, texts


@pytest.mark.oracle
@pytest.mark.usefixtures("symbolic_sizes")
@pytest.mark.parametrize(
    ("encoder", "form", "recipe"),
    [
        ("prado(bigram=8, skip1bigram=4)", "onnx", ""),
        ("prado(bigram=8, skip1bigram=4)", "stablehlo", "int8"),
        ("pqrnn(4)", "stablehlo", ""),
    ],
)
def test_exported_directories_hash_words_as_the_run(encoder, form, recipe, run, tmp_path):
    pytest.importorskip("onnxruntime")
    directory, texts = make_run(tmp_path, encoder, recipe)
    target = tmp_path / "served"
    outcome = run("export", directory, f"--to={target}", f"--format={form}")
    assert outcome.code == 0 and "held-out texts are those of the run" in outcome.out, outcome
    assert contents_of(target) is Contents.EXPORTED and (target / "word_hashes.py").exists()
    check = "import runpy, sys; runpy.run_path({!r}, run_name='__main__'); "
    check += "assert not {{'hpnlp', 'tokenizers'}} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", check.format(str(target / "predict.py"))],
        input="\n".join(texts), capture_output=True, text=True, cwd=tmp_path, timeout=200, check=True,
    )  # fmt: skip
    actual = [json.loads(line)["prediction"] for line in done.stdout.splitlines()]
    for prediction, expected in zip(actual, hpnlp.load(directory).predict(texts), strict=True):
        assert isinstance(expected, LabelPrediction)
        assert prediction["label"] == expected.label
        assert prediction["probability"] == pytest.approx(expected.probability, abs=1e-5)


@pytest.mark.oracle
def test_recurrent_encoders_are_not_written_as_onnx(run, tmp_path):
    pytest.importorskip("onnx")
    directory, _ = make_run(tmp_path, "pqrnn(4)", "")
    outcome = run("export", directory, f"--to={tmp_path / 'served'}", "--format=onnx")
    assert outcome.code == 2 and "use the format stablehlo" in outcome.err, outcome
