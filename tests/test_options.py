"""Ranges of fields: every entry of a table refuses the values beyond each bound that a field declares."""

import dataclasses
import math

import pytest

from hpnlp.compress.stages.numbers import CONVERSIONS
from hpnlp.compress.training.techniques import WEIGHT_TRAININGS
from hpnlp.nn.blocks import BLOCKS
from hpnlp.nn.feed_forward import FEED_FORWARDS
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.output import OUTPUTS
from hpnlp.types import REQUIRED, _is_within, _limited_fields, check_options, option
from tests.messages import raises

TABLES = (MIXERS, FEED_FORWARDS, OUTPUTS, BLOCKS, WEIGHT_TRAININGS, CONVERSIONS)
ENTRIES = {entry.__name__: entry for table in TABLES for entry in table.values() if isinstance(entry, type)}
REQUIRED_VALUES = {"hidden": 4, "keep": 0.5, "strength": 0.1, "rate": 0.5, "share": 0.5}


@dataclasses.dataclass(frozen=True)
class Entry:
    size: int = option(4, "Even size.", least=1, most=8, rule=("even", lambda size: size % 2 == 0))
    rate: float = option(0.5, "Rate.", above=0, below=1)
    cap: float | None = option(None, "Cap.", above=0)
    kind: str = option("a", "Kind.", among=("a", "b"))

    def __post_init__(self):
        check_options(self)


@dataclasses.dataclass(frozen=True)
class Smaller(Entry):
    size: int = 2


def test_messages_name_the_field_its_value_and_an_example():
    assert Entry(8, 0.1, 2.0, "b").cap == 2
    for values, message in (
        ({"size": 0}, "Entry.size=0: expected at least 1, at most 8, even, such as 4"),
        ({"size": 3}, "Entry.size=3: expected at least 1, at most 8, even, such as 4"),
        ({"rate": 1.0}, "Entry.rate=1.0: expected more than 0, less than 1, such as 0.5"),
        ({"rate": math.nan}, "Entry.rate=nan: expected a finite number, more than 0"),
        ({"cap": math.inf}, "Entry.cap=inf: expected a finite number, more than 0$"),
        ({"kind": "c"}, "Entry.kind='c': expected one of a, b$"),
    ):
        raises(message, Entry, **values)
    raises("Smaller.size=9: expected at least 1, at most 8, even, such as 2", Smaller, 9)


def beyond(default, limits):
    """Values outside of the bounds of a field, of the type of its default."""
    steps = {"least": -1, "most": 1, "above": 0, "below": 0}
    values = [limits[name] + step for name, step in steps.items() if name in limits]
    return [float(v) if isinstance(default, float) else v for v in values] + ["unknown"] * ("among" in limits)


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if _limited_fields(entry)])
def test_values_beyond_a_bound_raise(name):
    entry = ENTRIES[name]
    needed = [field.name for field in dataclasses.fields(entry) if field.default is REQUIRED]
    given = {name: value for name, value in REQUIRED_VALUES.items() if name in needed}
    for field, default, limits in _limited_fields(entry):
        for value in beyond(default, limits):
            raises(rf"{entry.__name__}.{field}={value!r}: expected", entry, **given | {field: value})
        for bound in ("least", "most"):
            if bound in limits:
                assert _is_within(limits[bound], {name: limit for name, limit in limits.items() if name != "rule"})
