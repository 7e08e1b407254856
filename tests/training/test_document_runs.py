"""Runs of task realm on other data than their own: numbers of documents, and the index of a run that starts from another."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from hpnlp.jobs import evaluate_run
from hpnlp.models.variables import BUFFERS
from hpnlp.training import config as configs
from hpnlp.training import loop, run_directory
from tests.tasks.test_contracts import realm


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("documents")
    config = realm(directory)
    path = Path(config.data.path)  # one record for each document, so that those of held-out records come last
    path.write_text("\n".join(path.read_text().splitlines()[::3]))
    loop.train(config, directory / "run")
    return directory / "run", config


def test_an_evaluation_numbers_documents_as_the_run_does(trained, tmp_path):
    """With a file of its own, records that were held out are on the other side, and documents come in another order."""
    run, config = trained
    lines = Path(config.data.path).read_text().splitlines()[::-4]
    (tmp_path / "few.jsonl").write_text("\n".join(lines))
    changed = {"data.heldout_path": str(tmp_path / "few.jsonl")}
    every, fewer = (evaluate_run.evaluate_run(run, changes) for changes in ({}, changed))
    documents = run_directory.load(run).vocabulary.documents
    for evaluation in (every, fewer):
        dataset = evaluation.outcome.dataset
        for batch in dataset.heldout(batch_size=8):
            for row in np.flatnonzero(batch["weights"].sum(axis=1)):
                number, answer = batch["gold"][row], batch["labels"][row, 0]
                assert answer in documents.tokens[number][: documents.lengths[number]]
                hidden = set(batch["targets"][row]) | {0}  # of key and value, the key is left
                key = {token for place, token in enumerate(batch["tokens"][row][:3]) if place not in hidden}
                assert key <= set(documents.tokens[number])
    assert fewer.outcome.dataset.stored["heldout"].count == len(lines) == 7


def test_an_evaluation_on_unknown_documents_raises(trained, tmp_path):
    run, _ = trained
    record = {"text": "a new text", "answer": "new", "document": "a document that nobody knows"}
    (tmp_path / "new.jsonl").write_text(json.dumps(record))
    with pytest.raises(
        run_directory.InputError, match="1 of 1 documents of held-out records are none of the 28 that the run"
    ):
        evaluate_run.evaluate_run(run, {"data.heldout_path": str(tmp_path / "new.jsonl")})


def test_a_run_that_starts_from_another_makes_its_own_index(trained, tmp_path):
    run, config = trained
    lines = Path(config.data.path).read_text().splitlines()[::-1][2:]
    (tmp_path / "examples.jsonl").write_text("\n".join(lines))
    changes = {"data.path": str(tmp_path / "examples.jsonl"), "train.init_from": str(run), "model.refresh": "never"}
    changed = configs.with_changes(config, changes | {"train.steps": 1, "optimizer.learning_rate": 1e-9})
    result = loop.train(changed, tmp_path / "run")
    assert (tmp_path / "run" / "documents.npz").exists()
    index = run_directory.load(tmp_path / "run").params[BUFFERS]["index"]
    assert len(index) == 26 and float(jax.numpy.linalg.norm(index, axis=1).min()) > 0.99
    assert result.heldout["loss"] > 0
