"""Which impl `auto` takes, and what is said of the others."""

import pytest

from hpnlp.ops.attention.dispatch import PLATFORMS, asked, choose, explain
from hpnlp.types import InputError

ALL = {name: [] for name in PLATFORMS}


@pytest.mark.parametrize(
    ("platform", "beyond", "taken"),
    [
        ("cpu", ALL, "xla"),
        ("gpu", ALL, "cudnn"),
        ("tpu", ALL, "splash"),
        ("gpu", ALL | {"cudnn": ["mask Window(left=1, right=1)"]}, "xla"),
        ("tpu", ALL | {"splash": ["dtype float16"]}, "xla"),
        ("gpu", {"xla": [], "reference": []}, "xla"),
    ],
)
def test_the_first_that_can_is_taken(platform, beyond, taken):
    assert choose(platform, beyond) == taken
    lines = explain(platform, beyond).splitlines()
    assert [line.split()[0] for line in lines] == [name for name in PLATFORMS if name in beyond]
    assert [line.split()[0] for line in lines if line.endswith("  taken")] == [taken]


def test_why_the_others_are_out():
    told = explain("gpu", ALL | {"cudnn": ["dtype float32", "return_lse"], "splash": ["positions"]})
    assert told.splitlines() == [
        "splash     needs a TPU, this is a GPU; does not honour positions",
        "cudnn      does not honour dtype float32, return_lse",
        "pallas     not yet measured on a card: only by its name",
        "xla        taken",
        "reference  dense, and slow: only by its name",
    ]


def test_none_that_can():
    with pytest.raises(InputError, match="cudnn needs a GPU, this is a CPU; xla does not honour bias"):
        choose("cpu", {"cudnn": [], "xla": ["bias"], "reference": []})


def test_what_is_asked():
    assert asked({"a": None, "b": False, "c": 0.0, "d": 0.1, "e": (), "f": True}) == {"d", "e", "f"}
