"""Files of class names."""

import json

from hpnlp.data.examples import load_labels, save_labels
from tests.messages import raises


def test_saved_labels_are_read_back(tmp_path):
    names = ("b", "a", "ü\n", "class of two words")
    save_labels(names, str(tmp_path))
    assert load_labels(str(tmp_path)) == load_labels(str(tmp_path / "labels.json")) == names
    assert [path.name for path in tmp_path.iterdir()] == ["labels.json"]


def test_damaged_files_raise(tmp_path):
    for content, message in (
        (None, "cannot read the classes .*: No such file"),
        ("{", "is no labels.json: it is not JSON"),
        (json.dumps({"version": 1, "labels": ["a", "a"]}), "not a list of different strings"),
        (json.dumps({"version": 2, "labels": ["a"]}), "has format version 2, expected 1: update hpnlp"),
    ):
        if content is not None:
            (tmp_path / "labels.json").write_text(content)
        raises(message, load_labels, str(tmp_path))
