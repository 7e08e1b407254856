"""Ranges of fields: every entry of a table, and every config, refuses the values beyond each range that a field declares."""

import dataclasses
import itertools
import math
import re

import pytest

from hpnlp.compress.distilling.distill_config import DistillConfig
from hpnlp.compress.recipe import COMPRESSORS
from hpnlp.compress.training.techniques import WEIGHT_TRAININGS
from hpnlp.data.examples.topics import POSITIVES
from hpnlp.models.classifiers.bag_memory import MEMORIES
from hpnlp.models.mixtures.continuous_cache import CacheConfig
from hpnlp.nn import convnet
from hpnlp.nn.blocks import BLOCKS
from hpnlp.nn.feed_forward import FEED_FORWARDS
from hpnlp.nn.image_norms import IMAGE_NORMS
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.mixers.exact import ExactMixer
from hpnlp.nn.output import OUTPUTS
from hpnlp.nn.text_encoders import ENCODERS
from hpnlp.ops.attention.masks.table import MASKS
from hpnlp.ops.embeddings.word2vec import WordBlock
from hpnlp.parallel.plan import Plan
from hpnlp.retrieval.suffix import Suffix
from hpnlp.tasks import TASKS
from hpnlp.training.config import TrainConfig
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.optimizers.averages import AVERAGES
from hpnlp.training.word2vec import Word2VecConfig
from hpnlp.types import REQUIRED, _is_within, _limited_fields, check_options, option
from tests.messages import raises

TABLES = (
    MIXERS, FEED_FORWARDS, OUTPUTS, BLOCKS, WEIGHT_TRAININGS, COMPRESSORS, MEMORIES, ENCODERS, IMAGE_NORMS, convnet.BLOCKS,
    AVERAGES, POSITIVES, {name: type(pattern.examples[0]) for name, pattern in MASKS.items()},
)  # fmt: skip
SECTIONS = {"optimizer": [OptimizerConfig], "train": [TrainConfig], "plan": [Plan], "distill": [DistillConfig]}
SECTIONS |= {name: [getattr(task, f"{name}_config") for task in TASKS.values()] for name in ("model", "data")}
OTHERS = (ExactMixer, CacheConfig, Suffix, Word2VecConfig, WordBlock)
# Class -> beginning of its messages.
ENTRIES = {entry: entry.__name__ for table in (*(table.values() for table in TABLES), OTHERS) for entry in table}
ENTRIES |= {config: section for section, configs in SECTIONS.items() for config in configs}
PART = {
    "keep": 1,
    "strength": 0.1,
    "rate": 0.5,
    "share": 0.5,
    "text": "stage",
}  # values of fields without defaults; 4 for others


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
    rate: float = option(0.1, "Low rate.")


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
    raises("Smaller.rate=1: expected more than 0, less than 1, such as 0.1", Smaller, rate=1)


def bounds_of(limits):
    return {name: limit for name, limit in limits.items() if name != "rule"}


def beyond(default, limits):
    """Values outside of each range of a field, of the type of its default; and NaN."""
    steps = {"least": -1, "most": 1, "above": 0, "below": 0}
    values = [limits[name] + step for name, step in steps.items() if name in limits]
    if "rule" in limits:
        numbers = (
            x
            for x in itertools.count(-1.0 if default is None else -1)
            if _is_within(x, bounds_of(limits)) and not limits["rule"][1](x)
        )
        values.append("unknown" if default is REQUIRED or isinstance(default, str) else next(numbers))
    values = [*map(float, values), math.nan] if isinstance(default, float) else values
    return values + ["unknown"] * ("among" in limits)


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if isinstance(entry, type) and _limited_fields(entry)])
def test_values_beyond_a_range_raise(entry):
    needed = [field.name for field in dataclasses.fields(entry) if field.default is REQUIRED]
    given = {name: PART.get(name, 4) for name in needed}
    for field, default, limits in _limited_fields(entry):
        for value in beyond(default, limits):
            message = re.escape(f"{ENTRIES[entry]}.{field}={value!r:.80}: expected ")
            raises(message, entry, **given | {field: value})
        for bound in ("least", "most"):
            if bound in limits:
                assert _is_within(limits[bound], bounds_of(limits))
