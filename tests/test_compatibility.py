"""The table of settings that do not work together."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

from hpnlp import compatibility
from hpnlp.compatibility import RULES, SETTINGS, Facts, check, table
from hpnlp.models.lm import LMConfig
from hpnlp.models.rnn import RNNConfig
from hpnlp.types import InputError, MixerTraits

SEQUENCE, TENSOR, PIPELINE = ({"devices": {axis: 2}} for axis in ("length", "heads", "layers"))
OFFLOADED = "--plan.offload_parameters=True"
RING = {**SEQUENCE, "exchange": "ring"}
# Rule -> facts of the model, and those of a plan or an optimizer that do not work with it.
PAIRS = {
    "mixers and networks that read later tokens, language models": (
        {"traits": [("full", MixerTraits(causal=False))]},
        {"predicts_next": True},
    ),
    "mixers and networks that read one direction, padding or other documents, encoders": (
        {"networks": [("mlp", MixerTraits(isolates_segments=False))]},
        {"encodes": True, "labels_tokens": True},
    ),
    "models without stacked layers, divided sequences or layers": (
        {"undivided": {"layers": ("no stages", "")}},
        PIPELINE,
    ),
    "mixers with a carry, divided sequences or layers": ({"has_carry": True}, PIPELINE),
    "mixers without heads, divided sequences": ({"mixers": [SimpleNamespace(needs={})]}, SEQUENCE),
    "masks of single heads, divided heads or sequences": ({"masks": [SimpleNamespace(heads=2)]}, TENSOR),
    "mixers that add up over heads, divided heads": ({"mixers": [SimpleNamespace(divides_heads=False)]}, TENSOR),
    "mixers without partial results, a ring": ({"mixers": [SimpleNamespace(traits=MixerTraits(draws=True))]}, RING),
    "attention dropout, a ring": ({"dropout": 0.1}, RING),
    "numbers of heads, an exchange of tokens for heads": ({"heads": (4, 1)}, {**SEQUENCE, "exchange": "heads"}),
    "routers with a capacity, divided sequences": ({"networks": [("mlp", MixerTraits(causal=False))]}, SEQUENCE),
    "joint norms of queries and keys, divided heads": ({"joint_qk_norm": True}, TENSOR),
    "memory, divided sequences": ({"has_memory": True}, SEQUENCE),
    "reversible layers, stages that gather parameters": ({"residual": "reversible"}, {**PIPELINE, "rounds": 2}),
    "row-sparse training, offloaded optimizer state": ({"rows": True}, {"offload_optimizer": True}),
    "trained weights, parts of matrices": ({"changes_weights": True}, {"zero": 2}),
    "offloaded parameters, several layers at once": ({"optimizer": "adafactor"}, {"offload_parameters": True}),
    "models without recomputed layers, rematerialisation": ({"not_recomputed": "no layers"}, {"remat": "full"}),
    "reversible layers, rematerialisation": ({"residual": "reversible"}, {"remat": "full"}),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_refuses_its_pair_and_not_one_side_of_it(name):
    of_model, of_plan = PAIRS[name]
    message = RULES[name](Facts(**of_model, **of_plan))
    assert message and RULES[name](Facts(**of_model)) == RULES[name](Facts(**of_plan)) == ""
    assert ": set " in message or ": choose " in message or ": leave " in message or ": change " in message


def test_the_first_rule_that_applies_raises():
    check(Facts())
    with pytest.raises(InputError, match="plan.remat='full': reversible layers keep nothing"):
        check(Facts(residual="reversible", remat="full"))


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (LMConfig(), []),
        (LMConfig(dropout=0.1), ["--plan.sequence=2"]),
        (LMConfig(residual="reversible"), ["--plan.pipeline=2 --plan.rounds=2", "--plan.remat=full", OFFLOADED]),
        (
            LMConfig(block="evolved_decoder", dim=64, heads=4),
            ["--plan.sequence=2", "--plan.sequence=2 --plan.exchange=heads"],
        ),
        (RNNConfig(), [name for name in SETTINGS if re.search("sequence|pipeline|remat|offload_param", name)]),
    ],
)
def test_table_lists_what_a_model_does_not_work_with(config, refused):
    lines = dict(line.split("  ", 1) for line in table(config.facts()).splitlines())
    assert lines.keys() == SETTINGS.keys()
    works = [name for name, text in lines.items() if text.strip() == "works"]
    assert set(works) == SETTINGS.keys() - set(refused)


def test_facts_of_layouts_are_names_of_fields():
    names = {field.name for field in dataclasses.fields(Facts)}
    assert all(changes.keys() <= names for changes in compatibility.SETTINGS.values())
