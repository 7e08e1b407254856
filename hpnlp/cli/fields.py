"""Help on config fields, and the names that they may hold."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from hpnlp.training.config import Config


def tables() -> dict[str, Iterable[str]]:
    """Config fields that hold names of table entries.

    Returns:
      Field, as in `model.mixer`, -> the names that it may hold. Not every task has all of the fields.
    """
    from hpnlp import tasks
    from hpnlp.compress.distilling import distill_config, distillation_terms
    from hpnlp.data import tokenizers
    from hpnlp.models import backbone
    from hpnlp.nn import (
        attention,
        block,
        blocks,
        convnet,
        feed_forward,
        image_norms,
        layers,
        mixers,
        output,
        pooling,
        text_encoders,
    )
    from hpnlp.parallel import plan
    from hpnlp.parallel.memory import remat
    from hpnlp.training import optim
    from hpnlp.training.files import metrics

    return {
        "task": tasks.TASKS,
        "model.mixer": mixers.MIXERS,
        "model.block": blocks.BLOCKS,
        "model.output": output.OUTPUTS,
        "model.mlp": feed_forward.FEED_FORWARDS,
        "model.norm": layers.NORMS,
        "model.norm_placement": block.NORM_PLACEMENTS,
        "model.pooling": pooling.POOLINGS,
        "model.rope_scaling": attention.ROPE_SCALINGS,
        "model.blocks": convnet.BLOCKS,
        "model.image_norm": image_norms.IMAGE_NORMS,
        "model.residual": backbone.RESIDUALS,
        "model.encoder": text_encoders.ENCODERS,
        "model.dtype": backbone.DTYPES,
        "data.tokenizer": [*tokenizers.TOKENIZERS, "a path"],
        "optimizer.name": optim.OPTIMIZERS,
        "optimizer.schedule": optim.SCHEDULES,
        "optimizer.scaling": optim.SCALINGS,
        "plan.name": plan.PLANS,
        "plan.remat": remat.REMAT,
        "plan.exchange": plan.EXCHANGES,
        "train.writers": metrics.WRITERS,
        "distill.losses": {**distillation_terms.DISTILLATION_LOSSES, **distillation_terms.RECIPES},
        "distill.init": distill_config.INITS,
    }


Rows = list[tuple[str, Any, str]]


def described(values: Config) -> Iterator[tuple[str, str, Rows]]:
    """Sections of a config.

    Args:
      values: The config.

    Yields:
      Name of a section, its summary, and (field, value, help) of each of its fields; the help lists the names that the field
      may hold. The first section has no name, and holds the fields without a section.
    """
    names = tables()
    sections = {title: section for title, section in vars(values).items() if dataclasses.is_dataclass(section)}
    yield (
        "",
        _summary(values),
        _rows("", values, [f for f in dataclasses.fields(values) if f.name not in sections], names),
    )
    for title, section in sections.items():
        yield title, _summary(section), _rows(f"{title}.", section, dataclasses.fields(section), names)


def _summary(section: object) -> str:
    return (inspect.getdoc(type(section)) or "").partition("\n")[0]


def _rows(prefix: str, section: object, fields: Iterable[Any], names: Mapping[str, Iterable[str]]) -> Rows:
    """`(field, default, help)` of fields, whose names in `names` begin with `prefix`."""
    rows = []
    for field in fields:
        entries = names.get(prefix + field.name)
        text = field.metadata["help"] + (f" Names: {', '.join(entries)}." if entries else "")
        rows.append((field.name, getattr(section, field.name), text))
    return rows


def listed(values: ConfigDict, experiment: str) -> str:
    """Every config field with its value, its help and its names, for --help.

    Args:
      values: Values of a config.
      experiment: Name or file of its experiment; "" for the defaults of a task.

    Returns:
      The text.
    """
    from hpnlp.training import config

    source = f"in --config={experiment}" if experiment else f"with --task={values.task} (an experiment sets its own)"
    lines = ["", f"Config fields and their defaults {source}:"]
    for title, summary, rows in described(config.resolve(values)):
        lines += ["", f"{title}: {summary}" if title else summary, ""]
        for name, default, text in rows:
            lines.append(f"  --{title + '.' * bool(title)}{name}={default!r}")
            lines += textwrap.wrap(text, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"
