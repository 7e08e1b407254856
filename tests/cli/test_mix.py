"""`hpnlp mix`: scores of a run with neighbours from its training text, and runs that do not fit."""

import functools
import json
import os
import random
import shutil

import jax
import numpy as np
import pytest

from hpnlp import report
from hpnlp.compress.files import write_weights
from hpnlp.compress.matrices import is_table, map_matrices
from hpnlp.compress.weights_file import WEIGHTS_FILE
from hpnlp.jobs.retrieval.mixed_text import MixedModel
from hpnlp.models.mixtures.bit_gate import BitGate
from hpnlp.models.variables import collections
from hpnlp.ops.softmax.bit_paths import path_log_odds
from hpnlp.ops.weights import quantize
from hpnlp.training import loop, run_directory
from tests import tiny
from tests.cli.test_encode import save_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return tiny.copy_run(tmp_path_factory.mktemp("mixed") / "run")


def test_model_index_and_both_are_scored(run, trained):
    outcome = run("mix", trained, "--store=suffix(longest=6,words=1,k=8)", "--gate_tokens=2000", "--epochs=3")
    assert outcome.code == 0, outcome.err
    record = json.loads((trained / "mixture.json").read_text())
    rows = {(row["name"], row["text"]): row["bits"] for row in record["rows"]}
    assert len(rows) == 6 and record["step"] == 2
    written = json.loads((trained / "report.json").read_text())
    assert rows["model", "static"] == pytest.approx(written["heldout_bits_per_byte"], rel=1e-4)
    assert rows["model and index", "static"] < 0.8 * rows["model", "static"]  # words of a list, in any order
    assert rows["model, dynamic, and index", "adaptive"] < 0.8 * rows["model, dynamic", "adaptive"]
    table = (trained / "mixture.md").read_text()
    assert table in outcome.out and "| xz -9e alone |" in table and "| index, adaptive |" in table
    assert (trained / "mixture.png").read_bytes()[:4] == b"\x89PNG"
    with np.load(trained / "gate.npz") as gate:
        assert "params/Dense_0/kernel" in gate.files


def test_text_is_continued_with_the_mixture(run, trained):
    """In the order of the tests: the run has a gate. Words of the text follow, which a model of two steps does not know."""
    outcome = run("mix", trained, "--prompt=the ", "--tokens=60", "--temperature=0")
    assert outcome.code == 0, outcome.err
    words = outcome.out.split()[1:-1]
    assert outcome.out.startswith("the ") and sum(word in tiny.WORDS for word in words) > 0.7 * len(words) > 2
    sampled = [run("mix", trained, "--prompt=the ", "--tokens=9", f"--seed={seed}").out for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_distributions_of_the_mixture_are_normalised_and_those_that_are_scored(trained):
    model = MixedModel.load(trained)
    ids, network = np.arange(97, 113).astype(np.int32), BitGate(model.run.model.config.vocab)
    for end in (1, 5, 16):
        log_probs = model.log_probs(ids[:end])
        assert np.exp(log_probs.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)
    alone = run_directory.load(trained)
    near, batch = model.index.neighbours(ids.astype(np.int64)), alone.model.example_batch(1, 16)
    batch = {**batch, "tokens": ids[None], "segment_ids": np.ones((1, 16), np.int32), "positions": np.arange(16)[None]}
    h, _ = jax.jit(lambda x: alone.model.apply(x, batch, True, method="token_states"))(collections(alone.params))
    logits = jax.jit(functools.partial(alone.model.apply, method="next_logits"))(collections(alone.params), h[:, -1])
    for token in (101, 32, 0, 257):
        odds = path_log_odds(jax.nn.log_softmax(logits), np.array([token]))
        nll = network.apply(model.gate, odds, near.tokens, near.count, np.array([token]), method="nll")
        assert -float(nll[0]) == pytest.approx(float(log_probs[token]), rel=1e-4)


def test_neighbours_of_hidden_states_are_mixed_in(run, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    build = ("index", "build", trained, f"--out={tmp_path}/store", "--keys=3000", "--tuning_tokens=400", "--k=8")
    assert run(*build).code == 0
    flags = ("--store=suffix(longest=3,words=0,k=2)", "--gate_tokens=600", f"--datastore={tmp_path}/store")
    outcome = run("mix", tmp_path / "run", *flags)
    assert outcome.code == 2 and "changes the hidden states that it holds: add --nodynamic" in outcome.err, outcome.err
    outcome = run("mix", tmp_path / "run", "--nodynamic", "--epochs=1", *flags)
    assert outcome.code == 0, outcome.err
    rows = {
        (row["name"], row["text"]): row["bits"]
        for row in json.loads((tmp_path / "run" / "mixture.json").read_text())["rows"]
    }
    alone = json.loads((trained / "mixture.json").read_text())["rows"][0]
    assert rows["model", "static"] < 0.9 * alone["bits"]
    model = MixedModel.load(tmp_path / "run")
    assert np.exp(model.log_probs(np.arange(97, 102)).astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)
    (tmp_path / "run" / "mixture.json").unlink()  # a command that was killed there: the gate names all that it needs
    text = run("mix", tmp_path / "run", "--prompt=the ", "--tokens=9", "--temperature=0")
    assert text.code == 0 and text.out.startswith("the "), text.err
    outcome = run("mix", tmp_path / "run", "--nodynamic", "--seed=1", *flags)
    assert outcome.code == 2 and "which would find themselves: build it with the same --seed" in outcome.err


def test_mixtures_that_are_not_there_are_named(run, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    outcome = run("mix", tmp_path / "run", "--prompt=a", "--epochs=1")
    assert outcome.code == 2 and "--epochs=1 has no effect with --prompt" in outcome.err
    outcome = run("mix", tmp_path / "run", "--tokens=3")
    assert outcome.code == 2 and "--tokens=3 has no effect without --prompt" in outcome.err
    (tmp_path / "run" / "gate.npz").write_bytes(b"?")
    assert "is damaged, or of an earlier version: run hpnlp mix" in run("mix", tmp_path / "run", "--prompt=a").err
    (tmp_path / "run" / "gate.npz").unlink()
    assert "has no gate to mix with: run hpnlp mix" in run("mix", tmp_path / "run", "--prompt=a").err


def test_invalid_flags_raise(run, trained):
    for flag, message in (
        ("--store=suffix(shortest=9,longest=9,words=0)", "no context has such a length"),
        ("--store=knn", "unknown store 'knn'"),
        ("--gate_tokens=0", "flag --gate_tokens=0"),
    ):
        outcome = run("mix", trained, flag)
        assert outcome.code == 2 and message in outcome.err, outcome.err


FEW = ("--store=suffix(longest=3,words=0,k=2)", "--gate_tokens=500", "--epochs=1", "--nodynamic")


def test_prompts_are_read_and_not_scored(run, tmp_path):
    draw = random.Random(0)
    records = [{name: " ".join(draw.choices(tiny.WORDS, k=30)) for name in ("prompt", "text")} for _ in range(40)]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = {"data__path": str(tmp_path / "records.jsonl"), "data__prompt_field": "prompt", "data__heldout": 0.1}
    config, workdir = tiny.make(train__steps=1, data__seq_len=512, model__max_len=512, **data), tmp_path / "run"
    report.write(workdir, config, loop.train(config, workdir), "--config=tests/tiny.py")
    outcome = run("mix", workdir, *FEW)
    assert outcome.code == 0, outcome.err
    rows = json.loads((workdir / "mixture.json").read_text())["rows"]
    written = json.loads((workdir / "report.json").read_text())
    assert rows[0]["bits"] == pytest.approx(written["heldout_bits_per_byte"], rel=1e-4)


def test_compressors_of_other_text_are_left_out(run, tmp_path):
    shutil.copytree(os.environ["HPNLP_TEST_TEXT"], tmp_path / "text")
    config, workdir = tiny.make(train__steps=2, data__path=str(tmp_path / "text")), tmp_path / "run"
    report.write(workdir, config, loop.train(config, workdir), "--config=tests/tiny.py")
    for path in (tmp_path / "text").iterdir():
        path.write_bytes(path.read_bytes()[::-1])
    outcome = run("mix", workdir, *FEW)
    assert outcome.code == 0, outcome.err
    assert "xz" not in (workdir / "mixture.md").read_text()


def test_runs_that_cannot_be_mixed_are_refused(run, trained, tmp_path):
    source = run_directory.load(trained)
    quantized = map_matrices(lambda path, w: quantize(w, by_row=is_table(path)), source.params)
    patterns = shutil.ignore_patterns("checkpoints", "metrics.jsonl")
    write_weights(shutil.copytree(trained, tmp_path / "int8", ignore=patterns) / WEIGHTS_FILE, quantized, {"step": 2})
    outcome = run("mix", tmp_path / "int8")
    assert outcome.code == 2 and "has quantized weights: add --nodynamic" in outcome.err, outcome.err
    data = {"order": "stream", "path": os.environ["HPNLP_TEST_TEXT"]}
    save_run(tmp_path / "memory", "lm", data=data, mixer="transformer_xl(16)")
    outcome = run("mix", tmp_path / "memory")
    assert outcome.code == 2 and "carries states from batch to batch" in outcome.err, outcome.err
