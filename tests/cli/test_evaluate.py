"""`hpnlp evaluate`: scores of a run as it was trained, and with other held-out text and another window."""

import json
import math

import pytest

from hpnlp import report
from hpnlp.training import loop
from tests import tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("evaluated") / "run"
    config = tiny.make(train__steps=1, model__mixer="window(4,0)")
    report.write(workdir, config, loop.train(config, workdir), "--config=tests/tiny.py")
    return workdir


def test_scores_are_those_of_the_report_or_of_the_changed_config(run, trained, tmp_path):
    def scores(*argv):
        outcome = run("evaluate", trained, *argv)
        assert (outcome.code, outcome.err) == (0, ""), outcome
        title, *lines = outcome.out.splitlines()
        assert lines[0].split()[0] == "loss"
        return title, {name: float(value) for name, value in (line.split() for line in lines)}

    title, own = scores()
    assert title == f"{trained}, step 1"
    written = json.loads((trained / "report.json").read_text())
    perplexity = own.pop("perplexity")
    assert own == {name: pytest.approx(written[f"heldout_{name}"], abs=6e-5) for name in own}
    assert perplexity == pytest.approx(math.exp(written["heldout_loss"]), rel=1e-4)
    (tmp_path / "other.txt").write_text("zebra " * 50)
    fields = {"model.mixer": "window(9,0)", "data.batch_size": 4, "data.heldout_path": tmp_path / "other.txt"}
    title, other = scores(*(f"--config.{name}={value}" for name, value in fields.items()), "--batches=2", "--step=1")
    assert title == f"{trained}, step 1" + "".join(f", {name}={value}" for name, value in fields.items())
    assert other["loss"] != own["loss"]
