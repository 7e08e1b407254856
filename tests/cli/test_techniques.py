"""`hpnlp techniques`: distinct entries of known fields and parts, those that a run can have, and their bounds."""

import pytest

from hpnlp.advise import Goal, Needs, Technique, techniques
from hpnlp.advise.techniques import described
from hpnlp.compress.recipe import COMPRESSORS, parse_recipe
from hpnlp.cost.parts import PARTS
from hpnlp.cost.traced_time import TracedTime
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.output import OUTPUTS
from hpnlp.spec import parse_one
from hpnlp.training import loop
from hpnlp.training.optim import OPTIMIZERS
from tests import tiny


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    loop.train(tiny.make(train__steps=1), directory)
    return directory


def test_every_entry_of_the_tables_is_a_technique():
    listed = techniques()
    names = [t.name for t in listed]
    assert len(set(names)) == len(names)
    assert all(set(t.shortens) <= set(PARTS) and t.goals and set(t.goals) <= set(Goal) for t in listed)
    recipes = {parse_one(t.name, "recipe").name for t in listed if t.is_recipe}
    assert recipes == set(COMPRESSORS) and all(parse_recipe(t.name) for t in listed if t.is_recipe)
    for field, table in (("model.mixer", MIXERS), ("model.output", OUTPUTS), ("optimizer.name", OPTIMIZERS)):
        values = {parse_one(t.changes[field], field).name for t in listed if field in t.changes}
        assert values == set(table)


def test_every_technique_is_described_in_a_sentence():
    listed = {t.name: described(t) for t in techniques()}
    assert not [
        name for name, text in listed.items() if not (text.endswith(".") and text[0].isupper() and "`" not in text)
    ]
    assert listed["model.mixer=linformer(128)"] == "Attention to compressed keys and values."
    assert listed["model.output=sampled(1024)"] == "Sampled softmax."
    own = Technique("data.seq_len=4", "Own", (Goal.LATENCY,), Needs.NOTHING, changes={"data.seq_len": 4})
    assert described(own) == ""


def test_a_bound_is_that_of_all_parts_together():
    traced = TracedTime(
        {"mixing": 2.0, "projections": 3.0}, {"mixing": 1.0, "projections": 2.0, "mixing+projections": 2.0}, 5.0
    )
    by_name = {t.name: t for t in techniques()}
    assert by_name["model.mixer=linear"].bound(traced) == 2 and by_name["heads(0.5)"].bound(traced) == 2
    assert by_name["int8"].bound(traced) is None and by_name["int8"].needs is Needs.NOTHING


def test_a_run_gets_what_fits_it_with_reasons_for_the_rest(run, trained):
    outcome = run("techniques", str(trained), "--goal=latency", "--reasons")
    assert outcome.code == 0 and "hpnlp profile" in outcome.out, outcome
    assert (
        "- model.mixer=full: the run has it" in outcome.out and "fnet lets tokens depend on later ones" in outcome.out
    )
    assert "- experts(0.5): " in outcome.out and "the model's layers have no experts" in outcome.out
    head = outcome.out.partition("do not fit this run")[0]
    assert "int8" in head and "moba" in head and "experts(0.5)" not in head and "adamw8bit" not in head
    assert run("profile", str(trained), "--calls=2", "--program=loss").code == 0
    assert "times faster at most" in run("techniques", str(trained), "--goal=latency").out
    everything = run("techniques")
    assert everything.code == 0 and "## Another output layer" in everything.out and "experts(0.5)" in everything.out
    (trained / "profile_loss.json").write_text("{}")
    damaged = run("techniques", str(trained), "--goal=latency")
    assert damaged.code == 2 and "profile_loss.json is damaged: profile the run again" in damaged.err
