"""Help on config fields, read from the docstrings of their dataclasses, and the names that they may hold."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable
from typing import Any

# The beginning of a sentence that explains fields: "name:" or "name, name:".
_LABEL = re.compile(r"(?:^|(?<=[.;] ))(\w+(?:, \w+)*): ")


def explanations(section: Any) -> tuple[str, dict[str, str]]:
    """Reads the docstrings of a dataclass and of the dataclasses that it extends.

    Returns:
        The sentences before the first explanation, and name -> explanation in the order of the text.
    """
    summary, found = "", {}
    for kind in reversed([kind for kind in type(section).__mro__ if dataclasses.is_dataclass(kind)]):
        parts = _LABEL.split(" ".join((inspect.getdoc(kind) or "").split()))
        summary = parts[0].strip()
        for names, text in zip(parts[1::2], parts[2::2], strict=True):
            found |= dict.fromkeys(names.split(", "), text.strip().rstrip(";."))
    return summary, found


def help_of(section: Any) -> dict[str, str]:
    """Field -> its explanation, or "see" the field whose explanation mentions it; "" where there is neither."""
    found = explanations(section)[1]

    def one(name: str) -> str:
        mentions = (f"see {other}" for other, text in found.items() if re.search(rf"\b{name}\b", text))
        return found.get(name) or next(mentions, "")

    return {field.name: one(field.name) for field in dataclasses.fields(section)}


def tables() -> dict[str, Iterable[str]]:
    """Config field -> the names that it may hold."""
    from hpnlp.data import tokenizers
    from hpnlp.models import lm
    from hpnlp.nn import attention, layers
    from hpnlp.parallel import plan, remat
    from hpnlp.training import metrics, optim

    return {
        "model.mixer": lm.MIXERS,
        "model.output": lm.OUTPUTS,
        "model.mlp": layers.MLPS,
        "model.norm": layers.NORMS,
        "model.rope_scaling": attention.ROPE_SCALINGS,
        "model.residual": lm.RESIDUALS,
        "model.dtype": lm.DTYPES,
        "data.tokenizer": [*tokenizers.TOKENIZERS, "a path"],
        "optimizer.name": optim.OPTIMIZERS,
        "optimizer.schedule": optim.SCHEDULES,
        "optimizer.scaling": optim.SCALINGS,
        "plan.name": plan.PLANS,
        "plan.remat": remat.REMAT,
        "plan.exchange": plan.EXCHANGES,
        "train.writers": metrics.WRITERS,
    }


def listed() -> str:
    """Every config field with its default, its explanation and its names, for --help."""
    from hpnlp.training import config

    names = tables()
    lines = ["", "Config fields and their defaults (an experiment file sets its own):"]
    for title, section in vars(config.Config()).items():
        lines += ["", f"{title}: {explanations(section)[0]}", ""]
        for field, text in help_of(section).items():
            lines.append(f"  --config.{title}.{field}={getattr(section, field)!r}")
            entries = names.get(f"{title}.{field}")
            told = [text, f"Names: {', '.join(entries)}"] if entries else [text]
            lines += textwrap.wrap(". ".join(told) + ".", 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"
