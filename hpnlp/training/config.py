"""One configuration: the dataclasses of every part, as a locked ConfigDict that flags override, and back."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from hpnlp.data.stream import DataConfig
from hpnlp.models.lm import LM, LMConfig
from hpnlp.parallel.plan import Plan
from hpnlp.spec import did_you_mean, shortened
from hpnlp.training.optim import OptimizerConfig
from hpnlp.types import InputError, WordStats

# The largest value of whole-number fields outside `model`, which has its own; other fields may be up to LARGEST. Random keys
# hold 32 bits of a seed, and steps, positions and token ids are counted in int32.
LARGEST = 2**31 - 1
LIMITS = {
    "train.steps": 10**9,
    "train.seed": 2**32 - 1,
    "train.sample": 100_000,
    "data.seq_len": 2**28,
    "data.heldout_bytes": 2**63 - 1,
}
# The key of config.json that holds how many fields were written: a file that lacks some of them was damaged, while fields that
# a later version has added are not counted and take their defaults.
COUNT = "fields"


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long a run lasts, and what it writes on the way.

    steps: optimizer steps, up to 10^9. seed: of parameters, data order and dropout, up to 2^32 - 1. init_from: a run's workdir
    (its best checkpoint is taken) or a directory in the Hugging Face layout, whose parameters and tokenizer training begins
    with, "" for none; the optimizer and the data begin anew, and a run that has saved a checkpoint goes on from that.
    log_every: steps after which metrics are fetched and written. eval_every: steps after which held-out text is scored, 0 only
    at the end: eval_batches of it, 0 all; of each row the last eval_stride tokens, 0 all, with those before as context.
    checkpoint_every: steps after which a checkpoint is saved, 0 only at the end; `keep` of them stay, beside the best.
    patience: stop after that many evaluations without an improvement of `min_delta` nats a token, 0 never. profile: "10:15"
    traces steps 10 to 15.
    debug_nans: stop at the operation that makes a NaN. writers: further metric writers, as in "tensorboard,wandb",
    where wandb(PROJECT) names the project. sample: bytes of text that the report shows, 0 for none.
    """

    steps: int = 1000
    seed: int = 0
    init_from: str = ""
    log_every: int = 20
    eval_every: int = 0
    eval_batches: int = 16
    eval_stride: int = 0
    checkpoint_every: int = 200
    keep: int = 2
    patience: int = 0
    min_delta: float = 0.0
    profile: str = ""
    debug_nans: bool = False
    writers: str = ""
    sample: int = 200

    def __post_init__(self) -> None:
        least = {"steps": 1, "log_every": 1, "keep": 1} | dict.fromkeys(
            (
                "seed",
                "eval_every",
                "eval_batches",
                "eval_stride",
                "checkpoint_every",
                "patience",
                "min_delta",
                "sample",
            ),
            0,
        )
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise InputError(f"train.{name}={getattr(self, name)}: expected at least {bound}")
        if self.patience and not self.eval_every:
            raise InputError(f"train.patience={self.patience} counts evaluations: set train.eval_every as well")
        if self.profile_range()[1] > self.steps:
            raise InputError(
                f"train.profile={self.profile!r} goes beyond train.steps={self.steps}: trace earlier steps"
            )

    def profile_range(self) -> tuple[int, int]:
        """First and last step of the trace; (0, 0) for none."""
        if not self.profile:
            return 0, 0
        first, _, last = self.profile.partition(":")
        if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
            raise InputError(f'train.profile={self.profile!r}: expected "first:last", steps from 1, as in "10:15"')
        return int(first), int(last)


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    model: LMConfig = LMConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    plan: Plan = Plan()

    def __post_init__(self) -> None:
        if self.data.seq_len < self.train.eval_stride:
            raise InputError(
                f"train.eval_stride={self.train.eval_stride} is more than data.seq_len={self.data.seq_len}: choose 0 for "
                "whole rows, or at most that"
            )
        for name, value in flat(self).items():
            numbers = value if isinstance(value, tuple) else (value,)
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                raise InputError(f"{name}={value}: expected a finite number")
            limit = LIMITS.get(name, LARGEST)
            if any(isinstance(number, int) and number > limit for number in numbers):
                raise InputError(f"{name}={shortened(value, 40)}: expected at most {limit}")
        tokens = self.data.batch_size * self.data.seq_len
        if tokens > LARGEST:
            raise InputError(
                f"data.batch_size={self.data.batch_size} rows of data.seq_len={self.data.seq_len} are {tokens:,} tokens: "
                f"expected at most {LARGEST:,} in a batch, so lower one of them"
            )


def model_of(config: Config, ids: int, stats: WordStats | None) -> LM:
    """The model of a config for a tokenizer of so many ids, used as `stats` says.

    Raises InputError where these are more than the model has, or rows are longer than its positions reach.
    """
    model = config.model
    if model.vocab and model.vocab < ids:
        raise InputError(
            f"model.vocab={model.vocab} is less than the tokenizer's {ids}: set it to 0, or to at least that"
        )
    max_len = model.max_len or config.data.seq_len
    if model.position == "learned" and config.data.seq_len > max_len:
        raise InputError(
            f"data.seq_len={config.data.seq_len} is longer than model.max_len={max_len} learned positions: change one"
        )
    vocab = model.vocab or ids
    return LM(dataclasses.replace(model, vocab=vocab, max_len=max_len), stats and stats.padded(vocab))


def default() -> ConfigDict:
    """Every field with its default, locked: an unknown field or a wrong type raises, naming the nearest."""
    return _to_dict(Config()).lock()


def _to_dict(value: Any) -> ConfigDict:
    types = typing.get_type_hints(type(value))
    result = ConfigDict()
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            result[field.name] = _to_dict(item)
        elif item is None:
            result[field.name] = config_dict.placeholder(typing.get_args(types[field.name])[0])
        else:
            result[field.name] = item
    return result


def resolve(values: ConfigDict | Mapping[str, Any]) -> Config:
    """The Config that a ConfigDict, or a config.json as read, stands for; raises InputError on what does not fit."""
    values = values.to_dict() if isinstance(values, ConfigDict) else values
    return _from_dict(Config, values, "")


def _from_dict(kind: Any, values: Any, prefix: str) -> Any:
    types = typing.get_type_hints(kind)
    if not isinstance(values, Mapping):
        raise InputError(f"config field {prefix.rstrip('.')} is {values!r}: expected a section with {', '.join(types)}")
    fields = {}
    for name, value in values.items():
        if name not in types:
            raise InputError(f"unknown config field {prefix}{name}: {did_you_mean(name, types)}")
        if dataclasses.is_dataclass(types[name]):
            fields[name] = _from_dict(types[name], value, f"{prefix}{name}.")
        else:
            fields[name] = _typed(types[name], value, prefix + name)
    return kind(**fields)


def _typed(kind: Any, value: Any, name: str) -> Any:
    allowed = typing.get_args(kind) if isinstance(kind, type(int | None)) else (kind,)
    for one in allowed:
        if typing.get_origin(one) is tuple and isinstance(value, list | tuple):
            return tuple(_typed(typing.get_args(one)[0], item, name) for item in value)
        if one is float and isinstance(value, int) and not isinstance(value, bool):
            # A whole number over the largest float becomes infinity, which the Config refuses by the field's name.
            return float(value) if abs(value) < 2**1023 else math.inf
        if isinstance(one, type) and type(value) is one:
            return value
    expected = " or ".join(getattr(one, "__name__", str(one)) for one in allowed)
    raise InputError(
        f"config field {name}={shortened(value, 40)} is of type {type(value).__name__}: expected {expected}"
    )


def to_json(config: Config) -> str:
    """The text of config.json: every section, and how many fields there are."""
    return json.dumps(dataclasses.asdict(config) | {COUNT: len(flat(config))}, indent=1) + "\n"


def from_json(text: str) -> Config:
    """The Config of a config.json.

    Fields that a version after the file's own has added take their defaults, and so do those of files that do not say how many
    fields they were written with.

    Raises:
        InputError: the text is not JSON, holds a field that does not fit, or lacks one that was written.
    """
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        raise InputError(f"config.json is not valid JSON ({error}): restore it, or choose another workdir") from error
    written = values.pop(COUNT, 0)
    if isinstance(train := values.get("train"), dict) and type(seed := train.get("seed")) is int:
        train["seed"] = seed & 0xFFFFFFFF  # earlier versions accepted longer seeds, of which JAX took the last 32 bits
    config = resolve(values)
    present = {f"{section}.{name}" for section, fields in values.items() for name in fields}
    if not isinstance(written, int) or len(present) < written:
        missing = ", ".join(name for name in flat(config) if name not in present)
        raise InputError(
            f"config.json was written with {written} fields and holds {len(present)}: restore {missing or COUNT}, or choose "
            "another workdir"
        )
    return config


def differences(old: Config, new: Config) -> list[str]:
    """`field: old -> new` for every field that differs."""
    before, after = flat(old), flat(new)
    return [f"{name}: {before[name]!r} -> {after[name]!r}" for name in after if before[name] != after[name]]


def flat(config: Config) -> dict[str, Any]:
    """`section.field` -> value."""
    sections = dataclasses.asdict(config)
    return {f"{section}.{name}": value for section, fields in sections.items() for name, value in fields.items()}
