"""Ranges of fields: every entry of a table refuses the values beyond each bound that a field declares."""

import dataclasses
import math

import pytest

from hpnlp.nn.mixers import MIXERS
from hpnlp.types import check_options, option
from tests.messages import raises

ENTRIES = {name: entry for name, entry in MIXERS.items() if isinstance(entry, type)}


@dataclasses.dataclass(frozen=True)
class Entry:
    size: int = option(4, "Even size.", least=1, most=8, rule=("even", lambda size: size % 2 == 0))
    rate: float = option(0.5, "Rate.", above=0, below=1)
    cap: float | None = option(None, "Cap.", above=0)
    kind: str = option("a", "Kind.", among=("a", "b"))

    def __post_init__(self):
        check_options(self)


def test_messages_name_the_field_its_value_and_an_example():
    assert Entry(8, 0.1, 2.0, "b").cap == 2
    for values, message in (
        ({"size": 0}, "Entry.size=0: expected at least 1, at most 8, even, such as 4"),
        ({"size": 3}, "Entry.size=3: expected at least 1, at most 8, even, such as 4"),
        ({"rate": 1.0}, "Entry.rate=1.0: expected more than 0, less than 1, such as 0.5"),
        ({"rate": math.nan}, "Entry.rate=nan: expected more than 0"),
        ({"cap": math.inf}, "Entry.cap=inf: expected more than 0$"),
        ({"kind": "c"}, "Entry.kind='c': expected one of a, b$"),
    ):
        raises(message, Entry, **values)


def beyond(limits):
    """Values outside of the bounds of a field."""
    steps = {"least": -1, "most": 1, "above": 0, "below": 0}
    return [limits[name] + step for name, step in steps.items() if name in limits] + ["unknown"] * ("among" in limits)


@pytest.mark.parametrize("name", ENTRIES)
def test_values_beyond_a_bound_raise(name):
    entry = ENTRIES[name]
    for field in dataclasses.fields(entry):
        for value in beyond(field.metadata):
            raises(rf"{entry.__name__}.{field.name}={value!r}: expected", entry, **{field.name: value})
