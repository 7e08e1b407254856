"""Help on config fields, and the names that they may hold."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any


def tables() -> dict[str, Iterable[str]]:
    """Config fields that hold names of table entries.

    Returns:
      Field, as in `model.mixer`, -> the names that it may hold.
    """
    from hpnlp.data import tokenizers
    from hpnlp.models import backbone
    from hpnlp.nn import attention, block, layers, mixers, output
    from hpnlp.parallel import plan, remat
    from hpnlp.training import metrics, optim

    return {
        "model.mixer": mixers.MIXERS,
        "model.output": output.OUTPUTS,
        "model.mlp": layers.MLPS,
        "model.norm": layers.NORMS,
        "model.norm_placement": block.NORM_PLACEMENTS,
        "model.rope_scaling": attention.ROPE_SCALINGS,
        "model.residual": backbone.RESIDUALS,
        "model.dtype": backbone.DTYPES,
        "data.tokenizer": [*tokenizers.TOKENIZERS, "a path"],
        "optimizer.name": optim.OPTIMIZERS,
        "optimizer.schedule": optim.SCHEDULES,
        "optimizer.scaling": optim.SCALINGS,
        "plan.name": plan.PLANS,
        "plan.remat": remat.REMAT,
        "plan.exchange": plan.EXCHANGES,
        "train.writers": metrics.WRITERS,
    }


def described() -> Iterator[tuple[str, str, list[tuple[str, Any, str]]]]:
    """Sections of the config.

    Yields:
      Name of a section, its summary, and (field, default, help) of each of its fields; the help lists the names that the field
      may hold.
    """
    from hpnlp.training import config

    names = tables()
    for title, section in vars(config.Config()).items():
        rows = []
        for field in dataclasses.fields(section):
            entries = names.get(f"{title}.{field.name}")
            text = field.metadata["help"] + (f" Names: {', '.join(entries)}." if entries else "")
            rows.append((field.name, getattr(section, field.name), text))
        yield title, (inspect.getdoc(type(section)) or "").partition("\n")[0], rows


def listed() -> str:
    """Every config field with its default, its help and its names, for --help.

    Returns:
      The text.
    """
    lines = ["", "Config fields and their defaults (an experiment file sets its own):"]
    for title, summary, rows in described():
        lines += ["", f"{title}: {summary}", ""]
        for name, default, text in rows:
            lines.append(f"  --config.{title}.{name}={default!r}")
            lines += textwrap.wrap(text, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"
