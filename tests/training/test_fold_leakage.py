"""Runs that are scored on a fold that the model they start or learn from was trained on."""

import dataclasses
import json

import pytest

from hpnlp.data.examples import ClassificationConfig
from hpnlp.jobs import fold_leakage
from hpnlp.training.config import Config
from hpnlp.training.files.contents import Contents
from tests.messages import raises


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Checks a run that learns from a teacher, by the fields of the data of both."""
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name, "label": "x"}) + "\n")

    def config(fields):
        paths = {key: ",".join(str(tmp_path / name) for name in fields.pop(key).split(",")) for key in ("path", "heldout_path")
                 if key in fields}  # fmt: skip
        return Config(task="classification", data=ClassificationConfig(**paths, **fields))

    def check(run, teacher):
        monkeypatch.setattr(fold_leakage, "contents_of", lambda path: Contents.RUN)
        monkeypatch.setattr(fold_leakage, "load_config", lambda path: config(teacher))
        ours = config(run)
        fold_leakage.check_start(
            dataclasses.replace(ours, distill=dataclasses.replace(ours.distill, teacher="runs/teacher"))
        )

    return check


FOLD = {"path": "a.jsonl", "folds": 3, "fold": 1}


def test_teachers_that_were_trained_on_held_out_examples_raise(start):
    for run, teacher, message in (
        ({**FOLD, "fold": 2}, FOLD, "part 1 of 3 of data.path=.* and this run part 2 of 3, so that"),
        (FOLD, {"path": "a.jsonl"}, "holds out a fraction of"),
        ({**FOLD, "path": "a.jsonl,b.jsonl"}, FOLD, "part 1 of 3 of data.path='.*b.jsonl', so that"),
        ({**FOLD, "group_field": "text"}, FOLD, "part 1 of 3 by data.group_field='text', so that"),
    ):
        raises(message, start, dict(run), dict(teacher))


def test_teachers_of_the_same_part_and_of_other_data_are_accepted(start):
    start(dict(FOLD), dict(FOLD))
    start({**FOLD, "path": "b.jsonl"}, dict(FOLD))
    start(
        {"path": "a.jsonl,b.jsonl"}, {"path": "a.jsonl"}
    )  # fractions are of hashes, which do not depend on other files
    start({"path": "a.jsonl", "heldout_path": "b.jsonl"}, dict(FOLD))
