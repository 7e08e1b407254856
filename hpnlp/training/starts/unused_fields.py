"""Config fields that are set and have no effect, because of other fields.

Commands check the config of a new run, and not that of a run that is resumed or read, which earlier versions may have made.
Values that say what happens anyway, such as `train.sample=0` in a task that generates no text, are valid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np

from hpnlp import tasks
from hpnlp.data.reading import sources
from hpnlp.models.stacks.layer_forms import projections
from hpnlp.tasks.field_rules import Rule, below_length
from hpnlp.training import optim
from hpnlp.training.config import Config, flat
from hpnlp.training.optimizers import averages, loss_scale
from hpnlp.types import InputError

# Values that agree with the absence of an effect.
NEUTRAL: dict[str, Any] = {"train.eval_batches": 0, "train.sample": 0, "data.heldout": 0.0, "plan.zero": 0}
SCHEDULE_STEPS = 10  # at the last of them, a schedule that reads `final` depends on it
OPTIMIZER_ARGUMENTS = ("weight_decay", "b1", "b2", "eps", "momentum", "adam_learning_rate")
LAYER_FIELDS = ("heads", "kv_heads", "head_dim", "mixer", "block", "form", "mlp", "mlp_dim", "mlp_bias", "unroll")
ROPE_FIELDS = ("model.rope_theta", "model.rope_scaling")


def check(config: Config, names: Container[str] | None = None) -> None:
    """Checks that fields that differ from their defaults have an effect.

    Args:
      config: Config of a new run.
      names: The fields that the user has set, None for all; of others, such as those of an experiment of which the user
        changes some, `remarks` returns lines.

    Raises:
      InputError: A field has no effect, with the reason and the fix.
    """
    for name, line in _unused(config, _rules(config)):
        if names is None or name in names:
            raise InputError(line)


def remarks(config: Config) -> list[str]:
    """Fields without an effect, and a warm-up that fills the run.

    Args:
      config: Config of a run, also of one that was begun before `check` knew a rule.

    Returns:
      A line for each of them.
    """
    lines = [line for rules in (_rules(config), COMMON) for _, line in _unused(config, rules)]
    if config.optimizer.warmup >= config.train.steps:
        lines.append(
            f"optimizer.warmup={config.optimizer.warmup} lasts to the end of train.steps={config.train.steps}: the learning "
            "rate rises in every step; lower optimizer.warmup to change that"
        )
    return lines


def _rules(config: Config) -> tuple[Rule, ...]:
    return RULES + tasks.find(config.task).unused_fields


def _unused(config: Config, rules: tuple[Rule, ...]) -> Iterator[tuple[str, str]]:
    """`(name, message)` of each field that is set without an effect, with the reason."""
    values, defaults = flat(config), flat(Config(task=config.task))
    for names, find_reason in rules:
        is_set = [name for name in names if name in values and values[name] not in (defaults[name], NEUTRAL.get(name))]
        if is_set and (reason := find_reason(config)):
            yield from ((name, f"{name}={values[name]!r} has no effect, because {reason}") for name in is_set)


def _no_evaluations(config: Config) -> str:
    if config.train.eval_every:
        return ""
    return "train.eval_every=0 evaluates at the end only, on all held-out examples: set train.eval_every as well"


def _too_few_evaluations(config: Config) -> str:
    steps, every, patience = config.train.steps, config.train.eval_every, config.train.patience
    evaluations = (steps - 1) // every if every else 0
    if evaluations > patience:  # the first one is the best so far
        return ""
    return (
        f"a run is stopped after {patience + 1} evaluations at the earliest, and train.eval_every={every} makes {evaluations} "
        f"before the end, train.steps={steps}: lower one of the two, or raise train.steps"
    )


def _no_sample(config: Config) -> str:
    if tasks.find(config.task).report.samples_text:
        return ""
    return f"task={config.task!r} generates no text: leave it out"


def _no_teacher(config: Config) -> str:
    return "" if config.distill.teacher else "there is no teacher: set distill.teacher as well"


def _no_scaling(config: Config) -> str:
    if config.optimizer.base_batch:
        return ""
    return "optimizer.base_batch=0 scales no learning rate: set optimizer.base_batch as well"


def _no_average(config: Config) -> str:
    average, steps, every = averages.find(config.optimizer.average), config.train.steps, config.train.eval_every
    evaluations = (steps - 1) // every if every else 0
    if average is None or average.may_begin(steps, evaluations):
        return ""
    return (
        f"the average does not begin in train.steps={steps}, with {evaluations} evaluations before the end: begin it earlier, "
        "or raise train.steps"
    )


def _skipped_anyway(config: Config) -> str:
    if loss_scale.initial(config.optimizer.loss_scale, config.model.dtype) is None:
        return ""
    return "steps that are not finite lower the loss scale, and are always skipped: leave it out, or set loss_scale=0"


def _other_optimizer(name: str) -> Callable[[Config], str]:
    """The rule of a field that some optimizers do not read."""

    def find_reason(config: Config) -> str:
        if name in read_fields(config.optimizer):
            return ""
        readers = [other for other in optim.OPTIMIZERS if name in read_fields(_with_name(config.optimizer, other))]
        return (
            f"optimizer.name={config.optimizer.name!r} does not read it: leave it out, or choose {', '.join(readers)}"
        )

    return find_reason


def _with_name(config: optim.OptimizerConfig, name: str) -> optim.OptimizerConfig:
    return dataclasses.replace(config, name=name, rows=False)


def read_fields(config: optim.OptimizerConfig) -> set[str]:
    """Fields of a config that its optimizer reads.

    Args:
      config: The optimizer, an entry of OPTIMIZERS.

    Returns:
      Names of the fields.
    """
    read: set[str] = set()

    class Recorded(optim.OptimizerConfig):
        """A config that records the names of the fields that are read."""

        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    recorded = Recorded(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    read.clear()
    optim.OPTIMIZERS[config.name](recorded, lambda step: 1.0)
    return read


def _constant_end(config: Config) -> str:
    peak = dataclasses.replace(config.optimizer, learning_rate=1.0, warmup=0, base_batch=0)
    schedules = [optim.make_schedule(dataclasses.replace(peak, final=final), SCHEDULE_STEPS) for final in (0.0, 1.0)]
    ends = [np.asarray(schedule(SCHEDULE_STEPS)).item() for schedule in schedules]
    if ends[0] != ends[1]:
        return ""
    return f"optimizer.schedule={config.optimizer.schedule!r} has an end of its own: leave it out, or choose another schedule"


def _heldout_path(config: Config) -> str:
    data = config.data
    if data.heldout_path:
        return f"all of data.heldout_path={data.heldout_path!r} is held out: leave out one of the two"
    if tasks.find(config.task).has_own_heldout(data):
        return f"data.path={data.path!r} has held-out examples of its own: leave it out"
    return ""


def _folds(config: Config) -> str:
    folds = flat(config).get("data.folds", 0)
    return f"one of data.folds={folds} equal parts is held out: leave it out" if folds else ""


def _no_records(config: Config) -> str:
    data = config.data
    if tasks.find(config.task).reads_examples:
        return ""
    paths = {"data.path": data.path, "data.heldout_path": data.heldout_path}
    read = [source for field, path in paths.items() if path for source in sources.find(path, field)]
    if any(file.kind not in ("text", "tokens") for source in read for file in source.files):
        return ""
    return (
        f"data.path={data.path!r} has no files of records (JSONL, JSON, Parquet): leave it out, or name the files of records "
        "with their extensions"
    )


def _one_source(config: Config) -> str:
    if "," in config.data.path:
        return ""
    return f"data.path={config.data.path!r} is one source: leave it out, or name several sources, separated by commas"


def _no_rope(config: Config) -> str:
    if any(form.position == "rope" for form in config.model.all_forms()):
        return ""
    if not config.model.layers:
        return "model.layers=0 leaves no layers: leave it out"
    return f"model.position={config.model.position!r} has no RoPE: leave it out, or set model.position='rope'"


def _no_rotated_heads(config: Config) -> str:
    forms = config.model.all_forms()
    if not forms or any(p.rope for form in forms if form.position == "rope" for p in projections(form).values()):
        return ""
    return f"model.mixer={config.model.mixer!r} has no heads that RoPE rotates"


def _no_projections(config: Config) -> str:
    forms = config.model.all_forms()
    if not forms or any(projections(form) or form.memory_dim for form in forms):
        return ""
    return f"model.mixer={config.model.mixer!r} has no heads"


def _no_layers(config: Config) -> str:
    return "" if config.model.layers else "model.layers=0 leaves no layers"


def _no_length_limit(config: Config) -> str:
    return below_length(config, "max_len", "seq_len")


def _recorded_only(config: Config) -> str:
    model, tokens = config.model, config.data.seq_len
    if model.position == "learned" or model.max_len <= tokens or model.fixed_length():
        return ""
    return (
        f"model.position={model.position!r} has no longest sequence; a converted checkpoint records it: leave it out for "
        f"data.seq_len={tokens}"
    )


def _no_axis(axis: str, work: str) -> Callable[[Config], str]:
    """The rule of a field of the plan that a mesh axis needs."""

    def find_reason(config: Config) -> str:
        if config.plan.requested_sizes()[axis] != 1:
            return ""
        return f"it is about {work} over plan.{axis}, which is 1: leave it out, or set plan.{axis} (-1 for all devices)"

    return find_reason


# Rules of all tasks; `Task.unused_fields` has those of one.
RULES: tuple[Rule, ...] = (
    (("train.min_delta", "train.eval_batches"), _no_evaluations),
    (("train.patience",), _too_few_evaluations),
    (("train.sample",), _no_sample),
    (("optimizer.scaling",), _no_scaling),
    (("optimizer.average",), _no_average),
    (("optimizer.skip_nonfinite",), _skipped_anyway),
    *(((f"optimizer.{name}",), _other_optimizer(name)) for name in OPTIMIZER_ARGUMENTS),
    (("optimizer.final",), _constant_end),
    (("data.heldout", "data.heldout_examples", "data.group_field"), _heldout_path),
    (("data.heldout",), _folds),
    (("data.text_field", "data.prompt_field"), _no_records),
    (("data.weights",), _one_source),
    (ROPE_FIELDS, _no_rope),
    (("model.max_len",), _no_length_limit),
    (("plan.zero",), _no_axis("fsdp", "the training state that is divided")),
    (("plan.exchange",), _no_axis("sequence", "sequences that are divided")),
)
# As RULES, for fields that members of a sweep have in common: they are printed only.
COMMON: tuple[Rule, ...] = (
    (("distill.losses",), _no_teacher),
    (("model.max_len",), _recorded_only),
    (ROPE_FIELDS, _no_rotated_heads),
    (("model.heads", "model.kv_heads", "model.head_dim"), _no_projections),
    (tuple(f"model.{name}" for name in LAYER_FIELDS), _no_layers),
)
