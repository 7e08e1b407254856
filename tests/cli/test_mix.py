"""`hpnlp mix`: scores of a run with neighbours from its training text, and runs that do not fit."""

import json

import numpy as np
import pytest

from hpnlp import report
from hpnlp.training import loop
from tests import tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("mixed") / "run"
    config = tiny.make(train__steps=2)
    report.write(workdir, config, loop.train(config, workdir), "--config=tests/tiny.py")
    return workdir


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


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--store=suffix(k=0)", "k from 1 to 1024"),
        ("--store=knn", "unknown store 'knn'"),
        ("--gate_tokens=0", "flag --gate_tokens=0"),
        ("--epochs=0", "flag --epochs=0"),
    ],
)
def test_invalid_flags_raise(run, trained, flag, message):
    outcome = run("mix", trained, flag)
    assert outcome.code == 2 and message in outcome.err, outcome.err
