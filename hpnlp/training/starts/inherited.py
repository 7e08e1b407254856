"""Fields of a config that a run takes from the model that it starts from (`train.init_from`)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from hpnlp import tasks
from hpnlp.models.shared.body import Start
from hpnlp.training.config_file import load_config
from hpnlp.training.files.contents import has_begun
from hpnlp.training.starts import bodies, upcycling, warm_start
from hpnlp.training.starts.architecture import architecture
from hpnlp.types import InputError

OF_DATA = ("classes", "negative_texts")  # fields of a model that its data set where they are 0


def inherited_fields(values: ConfigDict, is_set: Container[str], workdir: str | Path = "") -> dict[str, Any]:
    """Fields of a config that are those of the model that the run starts from.

    These are the tokenizer and, of a source of the same task, the fields of the model that decide what it computes; of another
    task, those of the body. If the source cannot be read any more, a run that has begun keeps the fields that it has.

    Args:
      values: A config as `config.default` returns it, with fields set, and `train.init_from`.
      is_set: Names of fields that stay as they are, "section.field": those that the user has set.
      workdir: Directory of the run; "" for none.

    Returns:
      "section.field" -> value, of the fields that change; none if the source does not exist.

    Raises:
      InputError: The source cannot be read, and the run has not begun.
    """
    current: Any = values
    directory = Path(current.train.init_from)
    config = tasks.find(str(values.task)).model_config
    try:
        fields = dict(_of_source(config, current, warm_start.find(directory)))
    except InputError:
        fields = _of_begun(config, current, workdir)
        if not fields and directory.is_dir():
            raise
    before = {name: current[section][field] for name in fields for section, field in [name.split(".")]}
    return {name: value for name, value in fields.items() if name not in is_set and value != before[name]}


def _of_source(config: Any, values: Any, source: warm_start.Source) -> Iterator[tuple[str, Any]]:
    """`(field, value)` of the tokenizer and of the model of a source."""
    is_same = values.task == source.task
    starts = (Start(),) if is_same else bodies.find_starts(config, source.model)
    if not starts:  # an error of `warm_start.check_task`
        return
    yield "data.tokenizer", source.spec if values.data.tokenizer == source.spec else source.tokenizer_field
    stacks = {"": source.model} if is_same else source.model.stacks()
    known = {field.name for field in dataclasses.fields(config)}
    for start in starts:
        if (stack := stacks.get(start.source)) is None:
            continue
        kept = upcycling.FIELDS[::2] if _keeps_experts(values, start, stack) else ()
        for name in _names(stack, start, is_same):
            field = start.fields.get(name, name)
            if field in known and name not in kept:
                yield f"model.{field}", _value(stack, name, source, values.model[field])


def _names(stack: Any, start: Start, is_same: bool) -> list[str]:
    """Fields of a stack that the run's model must have too."""
    free = OF_DATA if is_same else stack.head_fields
    names = [name for name in architecture(stack) if name not in free]
    if not is_same:
        names += ["pooling"] * start.pooling + ["token_types"] * bool(stack.token_types)
    return names + ["max_len"] * bool(stack.fixed_length() and "max_len" not in names)


def _value(stack: Any, name: str, source: warm_start.Source, current: object) -> Any:
    """The value of a field; 0 for a table of as many rows as the tokenizer has ids, unless the current value is that number."""
    value = getattr(stack, name)
    return 0 if name == "vocab" and value == source.tokenizer.vocab_size != current else value


def _keeps_experts(values: Any, start: Start, stack: Any) -> bool:
    """Whether a config has experts that start as copies of the MLPs of a stack."""
    if not stack.is_single_stack:
        return False
    experts = {name: values.model[start.fields.get(name, name)] for name in upcycling.FIELDS[::2]}
    with contextlib.suppress(InputError):  # forms that the stack has too few layers for
        return bool(upcycling.upcycled_layers(dataclasses.replace(stack, **experts), stack))
    return False


def _of_begun(config: Any, values: Any, workdir: str | Path) -> dict[str, Any]:
    """Fields of a run that has begun, all that a source may have set."""
    if not workdir or not has_begun(workdir):
        return {}
    saved = load_config(workdir, is_checked=False)
    if saved.task != values.task or saved.train.init_from != values.train.init_from:
        return {}
    names = [field.name for field in dataclasses.fields(config) if field.name in architecture(saved.model)]
    return {
        **{f"model.{name}": getattr(saved.model, name) for name in names},
        "data.tokenizer": saved.data.tokenizer,
    }
