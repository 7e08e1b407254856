"""Configs with which a run that has begun cannot go on."""

import pytest

from hpnlp.data import tokenizers
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training.config import default, resolve, with_changes
from hpnlp.training.config_file import write_config
from hpnlp.training.files.claim import claimed
from hpnlp.types import InputError

ACCEPTED = "choose another workdir, or pass --accept_changes to resume with the new config"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """`(directory, config)` of a run with a checkpoint."""
    directory = tmp_path_factory.mktemp("begun")
    values = default("classification")
    values.data.update(path="a.csv", seq_len=8, batch_size=2)
    values.model.update(layers=1, dim=8, heads=2, mlp_dim=8)
    config = resolve(values)
    write_config(directory, config)
    Vocabulary(tokenizers.build("bytes"), ("no", "yes")).save(directory)
    (directory / "checkpoints" / "5").mkdir(parents=True)
    return directory, config


def test_only_changes_that_can_be_accepted_propose_it(begun):
    for changes, message in (
        ({"data.label_field": "stars"}, "and a run that has begun keeps its classes: choose another workdir$"),
        ({"data.tokenizer": "words(9)"}, "and a run that has begun keeps its tokenizer: choose another workdir$"),
        ({"model.layers": 2}, "and its checkpoints do not fit this config .*: choose another workdir$"),
        ({"optimizer.name": "lion"}, "and its checkpoints do not fit this config .*: choose another workdir$"),
        ({"model.classes": 3}, "and this config has no model .model.classes=3, but .*: choose another workdir$"),
        ({"model.heads": 4}, rf".model.heads: 2 -> 4.: {ACCEPTED}$"),
        ({"optimizer.learning_rate": 0.5}, rf": {ACCEPTED}$"),
        ({"data.path": "b.csv", "train.steps": 9}, rf": {ACCEPTED}$"),
    ):
        directory, config = begun
        with (
            pytest.raises(InputError, match=f"was made by another config .*{message}"),
            claimed(directory, with_changes(config, changes), accept_changes=False),
        ):
            pass
