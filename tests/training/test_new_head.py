"""Runs that start from the encoder of another task, with a new head."""

import json

import jax
import numpy as np
import pytest

from hpnlp.training import config as configs
from hpnlp.training import loop
from hpnlp.training.run_directory import load
from hpnlp.types import InputError
from tests import tiny

SIZES = {"layers": 1, "dim": 16, "heads": 2, "mlp_dim": 32, "position": "learned"}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    values = configs.for_task(tiny.get_config(), "masked_lm")
    values.data.tokenizer = "bytes"
    values.model.update(max_len=16, **SIZES)
    values.train.update(steps=2)
    workdir = tmp_path_factory.mktemp("new_head") / "masked"
    loop.train(configs.resolve(values), workdir)
    return workdir


def classifier(directory, source, **model):
    lines = [json.dumps({"text": text, "label": text}) for text in ("ab", "ba") * 20]
    (directory / "examples.jsonl").write_text("\n".join(lines))
    values = configs.default("classification")
    values.data.update(path=str(directory / "examples.jsonl"), tokenizer="bytes", seq_len=16, batch_size=8, heldout=0.2)
    values.data.linear_baselines = False
    values.model.update(max_len=16, **{**SIZES, "vocab": 265, **model})  # with the id of hidden tokens
    values.optimizer.update(warmup=0, learning_rate=0.0)
    values.plan.name = "single"
    values.train.update(steps=1, init_from=str(source))
    return configs.resolve(values)


@pytest.mark.slow
def test_layers_go_on_and_the_head_is_new(pretrained, tmp_path, capsys):
    loop.train(classifier(tmp_path, pretrained), tmp_path / "run")
    assert f"starting from {pretrained}, step 2, with a new head" in capsys.readouterr().out
    before, after = (load(directory).params for directory in (pretrained, tmp_path / "run"))
    for name in ("embed", "positions", "layers", "final_norm"):
        for mine, theirs in zip(jax.tree.leaves(after[name]), jax.tree.leaves(before[name]), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert after["head"].shape == (2, 16)


@pytest.mark.slow
def test_other_layers_raise(pretrained, tmp_path):
    with pytest.raises(InputError, match=r"model\.dim is 8, in the source 16"):
        loop.train(classifier(tmp_path, pretrained, dim=8), tmp_path / "run")
