"""`hpnlp profile`: parts of a step and of a forward pass that sum to the measured time, and its files."""

import json

import pytest

from hpnlp.cost.parts import PARTS
from hpnlp.jobs.profile import profile_run
from hpnlp.training import loop
from tests import tiny
from tests.messages import raises


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    loop.train(tiny.make(train__steps=1), directory)
    return directory


@pytest.mark.parametrize("program", ["training", "loss"])
def test_parts_and_the_rest_sum_to_the_time_of_a_call(run, trained, program):
    ablations = 1 if program == "training" else 0
    flags = f"--program={program}", "--calls=2", "--batch_size=4", f"--ablations={ablations}"
    outcome = run("profile", str(trained), *flags)
    assert outcome.code == 0 and "not attributed" in outcome.out, outcome
    assert ("saved without it" in outcome.out) == bool(ablations)
    profile = json.loads((trained / f"profile_{program}.json").read_text())
    traced = profile["traced"]
    named = [name for name in traced["seconds"] if name in PARTS]
    assert list(profile["ablated"]) == sorted(named, key=lambda name: -traced["seconds"][name])[:ablations]
    assert all(0 < ratio["median"] < 2 for ratio in profile["ablated"].values())
    assert sum(traced["seconds"].values()) + traced["idle"] == pytest.approx(traced["idle"] / (1 - profile["coverage"]))
    assert ("optimizer" in traced["seconds"]) == (program == "training") and "mixing" in traced["seconds"]
    assert sum(traced["together"].values()) == pytest.approx(sum(traced["seconds"].values()))
    assert profile["shape"] == [4, 16] and (trained / f"profile_{program}.png").stat().st_size > 1000


def test_an_unknown_program_raises(trained):
    raises(
        "program='x': expected training or loss",
        profile_run.profile_run,
        trained,
        None,
        profile_run.ProfileSettings("x"),
    )
