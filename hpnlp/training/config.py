"""Configuration of a run: one frozen dataclass, and its forms as a ConfigDict that flags override and as config.json."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from hpnlp import tasks
from hpnlp.compress.distilling.distill_config import DistillConfig
from hpnlp.parallel.plan import Plan
from hpnlp.spec import did_you_mean, shortened
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.optimizers import averages
from hpnlp.types import InputError, check_options, option

# Largest values of integer fields outside of `model`, which checks its own. Random keys hold 32 bits of a seed; steps,
# positions and token ids are counted in int32.
LARGEST = 2**31 - 1
LIMITS = {
    "train.steps": 10**9,
    "train.seed": 2**32 - 1,
    "train.sample": 100_000,
    "data.seq_len": 2**28,
    "data.heldout_bytes": 2**63 - 1,
}
# Key of config.json for the number of fields that were written. A file with fewer fields has been damaged, while fields that a
# later version has added are not counted and take their defaults.
COUNT = "fields"


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length, evaluation, checkpoints and outputs of a run."""

    steps: int = option(1000, "Number of optimizer steps, up to 10^9.", least=1)
    seed: int = option(0, "Seed of parameters, data order and dropout, up to 2^32 - 1.", least=0)
    init_from: str = option(
        "",
        "A run's workdir (its best checkpoint is used) or a directory in the Hugging Face layout, whose "
        'parameters and tokenizer training starts from, "" for none; of another task, those of its body. The optimizer and the '
        "data start anew, and a run that has saved a checkpoint resumes from that.",
    )
    weights: str = option(
        "",
        "An entry of WEIGHT_TRAININGS, by which kernels are quantized, pruned or dropped in every step: quantized(8), ternary, "
        'binary, magnitude(0.1), movement(0.1), soft_movement(), masked, shared, low_rank(0.5), weight_drop(0.5); "" for none.',
    )
    log_every: int = option(20, "Steps between fetching and writing metrics.", least=1)
    eval_every: int = option(
        0, "Steps between evaluations on held-out examples, the last step included; 0 for one at the end.", least=0
    )
    eval_batches: int = option(16, "Batches of an evaluation, 0 for all; the one at the end takes all.", least=0)
    eval_stride: int = option(
        0,
        "Number of tokens at the end of each evaluated sequence that are scored, the tokens before them being "
        "context, 0 for all tokens.",
        least=0,
    )
    checkpoint_every: int = option(200, "Steps between checkpoints, 0 for one at the end only.", least=0)
    keep: int = option(2, "Number of newest checkpoints to keep, beside the best one.", least=1)
    patience: int = option(
        0, "Evaluations without an improvement after which the run stops, 0 for no early stopping.", least=0
    )
    min_delta: float = option(
        0.0,
        "Least change of the task's held-out metric (of a language model, the loss in nats per token) that counts as an "
        "improvement.",
        least=0,
    )
    profile: str = option("", 'First and last step of a profiler trace, as in "10:15", "" for none.')
    debug_nans: bool = option(False, "Stop at the operation that makes a NaN.")
    writers: str = option(
        "",
        'Further metric writers, as in "tensorboard,wandb", where wandb(PROJECT) names the project.',
    )
    baselines: bool = option(
        True,
        "Measure other methods on the same data for comparison: compressors beside the training of a language model, linear "
        "models at the end of other tasks.",
    )
    sample: int = option(200, "Bytes of generated text in the report of a language model, 0 for none.", least=0)

    def __post_init__(self) -> None:
        check_options(self, "train")
        if self.patience and not self.eval_every:
            raise InputError(f"train.patience={self.patience} counts evaluations: set train.eval_every as well")
        if self.profile_range()[1] > self.steps:
            raise InputError(
                f"train.profile={self.profile!r} goes beyond train.steps={self.steps}: trace earlier steps"
            )

    def profile_range(self) -> tuple[int, int]:
        """First and last step of the profiler trace.

        Returns:
          The steps; (0, 0) for no trace.

        Raises:
          InputError: `profile` is not a range of steps.
        """
        if not self.profile:
            return 0, 0
        first, _, last = self.profile.partition(":")
        if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
            raise InputError(f'train.profile={self.profile!r}: expected "first:last", steps from 1, as in "10:15"')
        return int(first), int(last)


@dataclasses.dataclass(frozen=True)
class Config:
    """Configuration of a run.

    Attributes:
      model: The model, a `model_config` of the task; None for its defaults.
      data: Data and batches, a `data_config` of the task; None for its defaults.
      optimizer: Optimizer and learning rate.
      train: Length, evaluation, checkpoints and outputs.
      plan: Layout over devices, rematerialisation and offloading.
      distill: A teacher whose outputs the model learns.
      task: The task, an entry of TASKS.
    """

    model: Any = None
    data: Any = None
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    plan: Plan = Plan()
    distill: DistillConfig = DistillConfig()
    task: str = option("lm", "The task, an entry of TASKS, which determines the fields of the sections model and data.")

    def __post_init__(self) -> None:
        types = section_types(self.task)
        for name in ("model", "data"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, types[name]())
            elif type(getattr(self, name)) is not types[name]:
                raise InputError(
                    f"{name} is a {type(getattr(self, name)).__name__}: task={self.task!r} expects {types[name].__name__}"
                )
        if self.data.seq_len < self.train.eval_stride:
            raise InputError(
                f"train.eval_stride={self.train.eval_stride} is more than data.seq_len={self.data.seq_len}: choose 0 for "
                "all tokens of a sequence, or at most data.seq_len"
            )
        if self.train.init_from and self.distill.init != "none":
            raise InputError(
                f"train.init_from={self.train.init_from} and distill.init={self.distill.init!r} both name parameters to start "
                "from: leave out one of the two"
            )
        self._check_weights()
        for name, value in flat(self).items():
            numbers = value if isinstance(value, tuple) else (value,)
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                raise InputError(f"{name}={value}: expected a finite number")
            limit = LIMITS.get(name, LARGEST)
            if any(isinstance(number, int) and number > limit for number in numbers):
                raise InputError(f"{name}={shortened(value, 40)}: expected at most {limit}")
        average = averages.find(self.optimizer.average)
        if average is not None and average.reads_evaluations and not self.train.eval_every:
            raise InputError(
                f"optimizer.average={self.optimizer.average!r} begins with an evaluation: set train.eval_every as well"
            )
        tokens = self.data.batch_size * self.data.seq_len
        if tokens > LARGEST:
            raise InputError(
                f"data.batch_size={self.data.batch_size} sequences of data.seq_len={self.data.seq_len} are {tokens:,} tokens: "
                f"expected at most {LARGEST:,}, lower one of the two fields"
            )

    def _check_weights(self) -> None:
        """Raises InputError if `train.weights` does not fit the weights that a run starts from, or averages."""
        name = self.train.weights.partition("(")[0].strip()
        if name in ("masked", "shared") and not (self.train.init_from or self.distill.init != "none"):
            raise InputError(
                f"train.weights={self.train.weights!r} keeps zeros and equal numbers of the weights that a run starts from, "
                "and random ones have none: set train.init_from"
            )
        for field, value in (("ema", self.optimizer.ema), ("average", self.optimizer.average)):
            if value and name in ("l1", "group_lasso"):
                raise InputError(
                    f"optimizer.{field}={value!r} with train.weights={self.train.weights!r}: averages over steps of weights "
                    "that became 0 are not 0, and it is averages that a run keeps: leave out one of the two"
                )


def section_types(task: str) -> dict[str, Any]:
    """Types of the fields of a Config.

    Args:
      task: Name of the task.

    Returns:
      Name of a section -> its dataclass; and "task" -> str.

    Raises:
      InputError: There is no such task.
    """
    entry = tasks.find(task)
    return {**typing.get_type_hints(Config), "model": entry.model_config, "data": entry.data_config}


def default(task: str = "lm") -> ConfigDict:
    """Default values of all fields.

    Args:
      task: Name of the task, which determines the fields of the sections model and data.

    Returns:
      A locked ConfigDict with a section per part: setting an unknown field or a value of a wrong type raises.

    Raises:
      InputError: There is no such task.
    """
    return to_values(Config(task=task))


def to_values(config: Config) -> ConfigDict:
    """The values of a config, as flags override them and `resolve` reads them.

    Returns:
      A locked ConfigDict with a section per part: setting an unknown field or a value of a wrong type raises.
    """
    return _to_dict(config).lock()


def for_task(values: ConfigDict, task: str) -> ConfigDict:
    """A config with the sections of another task, in which fields of the same name keep their values.

    Args:
      values: A config as `default` returns it, with fields set.
      task: Name of the other task.

    Returns:
      The config.

    Raises:
      InputError: There is no such task, or it lacks a field that is set.
    """
    result, of_task, before = default(task), section_types(task), flat(Config(task=str(values.task)))
    for name, value in _flat(values.to_dict()).items():
        section, _, field = name.partition(".")
        if name == "task" or value == before[name]:
            continue
        if field not in _field_types(of_task[section]):
            raise InputError(
                f"task={task}: the config sets {name}={value!r}, which this task does not have: write an experiment that "
                f"begins with default({task!r})"
            )
        result.update_from_flattened_dict({name: value})
    return result


def _to_dict(value: Any) -> ConfigDict:
    """ConfigDict of a dataclass; fields that are None get a placeholder of their type."""
    types = _field_types(type(value))
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
    """Typed config of plain values.

    Args:
      values: Section -> field -> value: a ConfigDict, or the content of a config.json. Absent fields have their defaults.

    Returns:
      The config.

    Raises:
      InputError: A field is unknown, has a value of a wrong type, or is out of range.
    """
    values = values.to_dict() if isinstance(values, ConfigDict) else values
    task = values.get("task", Config.task) if isinstance(values, Mapping) else Config.task
    return _from_dict(Config, section_types(_typed(str, task, "task")), values, "")


def _from_dict(dataclass: Callable[..., Any], types: Mapping[str, Any], values: object, prefix: str) -> Any:
    """An instance of `dataclass` with fields of these types; `prefix` is its section's name with a dot, for error messages."""
    if not isinstance(values, Mapping):
        raise InputError(f"config field {prefix.rstrip('.')} is {values!r}: expected a section with {', '.join(types)}")
    fields = {}
    for name, value in values.items():
        if name not in types:
            raise InputError(f"unknown config field {prefix}{name}: {did_you_mean(name, types)}")
        if dataclasses.is_dataclass(types[name]):
            fields[name] = _from_dict(types[name], _field_types(types[name]), value, f"{prefix}{name}.")
        else:
            fields[name] = _typed(types[name], value, prefix + name)
    return dataclass(**fields)


def _field_types(dataclass: type) -> dict[str, Any]:
    """Types of the fields of a dataclass, without class variables."""
    types = typing.get_type_hints(dataclass)
    return {field.name: types[field.name] for field in dataclasses.fields(dataclass)}


def _typed(type_hint: Any, value: Any, name: str) -> Any:
    """Checks a value against the type of the field `name`. Converts integers for float fields and lists for tuple fields."""
    allowed = typing.get_args(type_hint) if isinstance(type_hint, type(int | None)) else (type_hint,)
    for kind in allowed:
        if typing.get_origin(kind) is tuple and isinstance(value, list | tuple):
            return tuple(_typed(typing.get_args(kind)[0], item, name) for item in value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            # An integer over the largest float becomes infinity, which Config refuses with the field's name.
            return float(value) if abs(value) < 2**1023 else math.inf
        if isinstance(kind, type) and type(value) is kind:
            return value
    expected = " or ".join((typing.get_origin(kind) or kind).__name__ for kind in allowed)
    raise InputError(
        f"config field {name}={shortened(value, 40)} is of type {type(value).__name__}: expected {expected}"
    )


def to_json(config: Config) -> str:
    """Text of config.json.

    Returns:
      JSON with a section per part, and the number of fields under COUNT.
    """
    return json.dumps(dataclasses.asdict(config) | {COUNT: len(flat(config))}, indent=1) + "\n"


def from_json(text: str) -> Config:
    """Config of a config.json.

    Fields that were added after the version that wrote the file take their defaults. Files of early versions have no COUNT, and
    any absent field takes its default.

    Args:
      text: The text of the file.

    Returns:
      The config.

    Raises:
      InputError: The text is not JSON, a field does not fit, or a field that was written is absent.
    """
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        raise InputError(f"config.json is not valid JSON ({error}): restore it, or choose another workdir") from error
    written = values.pop(COUNT, 0)
    if isinstance(train := values.get("train"), dict) and type(seed := train.get("seed")) is int:
        train["seed"] = seed & 0xFFFFFFFF  # earlier versions accepted longer seeds; JAX used the last 32 bits
    config = resolve(values)
    present = _flat(values)
    if not isinstance(written, int) or len(present) < written:
        missing = ", ".join(name for name in flat(config) if name not in present)
        raise InputError(
            f"config.json was written with {written} fields and holds {len(present)}: restore {missing or COUNT}, or choose "
            "another workdir"
        )
    return config


def differences(old: Config, new: Config) -> list[str]:
    """Fields in which two configs differ.

    Args:
      old: A config.
      new: Another config.

    Returns:
      A text `section.field: old value -> new value` for each of these fields.
    """
    before, after = flat(old), flat(new)
    if old.task != new.task:  # configs of different tasks have different fields
        return [f"task: {old.task!r} -> {new.task!r}"]
    return [f"{name}: {before[name]!r} -> {after[name]!r}" for name in after if before[name] != after[name]]


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """A config with other values of some fields.

    Args:
      config: The config.
      changes: "section.field" -> value, for fields that exist.

    Returns:
      The config.

    Raises:
      InputError: A value is out of range.
    """
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section, _, field = name.partition(".")
        by_section.setdefault(section, {})[field] = value
    sections = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in by_section.items()}
    return dataclasses.replace(config, **sections)


def flat(config: Config) -> dict[str, Any]:
    """All fields of a config.

    Returns:
      `section.field` -> value; and "task" -> its name.
    """
    return _flat(dataclasses.asdict(config))


def _flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """`section.field` -> value; fields without a section have their own names."""
    result = {}
    for section, fields in sections.items():
        named = {f"{section}.{name}": value for name, value in fields.items()} if isinstance(fields, Mapping) else None
        result |= {section: fields} if named is None else named
    return result
