"""The fields of a model's config that decide what its parameters compute, and the record of them beside the parameters.

Parameters fit any config that gives them the same shapes: with `model.heads` changed from 2 to 4, a model computes something
else without an error. A run directory therefore holds the fields that its parameters belong to, in RECORD.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpnlp.atomic_file import replace_bytes
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.models.shared.body import ConfigOfModel

RECORD = "model.json"
# Fields of a model's config that may differ from the source's: they do not change what the parameters compute. The class of a
# config may name others as `free_fields`.
FREE = ("dtype", "dropout", "unroll")


def architecture(config: ConfigOfModel) -> dict[str, Any]:
    """Fields that decide what a model computes; values that are written in several ways are resolved to one.

    Args:
      config: Config of a model.

    Returns:
      Name of a field -> its value.
    """
    return config.canonical(_decisive(config))


def differing_fields(config: ConfigOfModel, source: ConfigOfModel, names: Iterable[str]) -> list[str]:
    """Compares the fields of two configs that decide what a model computes.

    Args:
      config: Config of a model.
      source: Config of another one of its class.
      names: The fields to compare.

    Returns:
      Names of those in which `config` computes something else than `source`.
    """
    ours, theirs = architecture(config), architecture(source)
    # Fields that are 0 in both configs are derived from other fields, and these are named.
    return [
        name
        for name in names
        if name in theirs and ours.get(name) != theirs[name] and getattr(config, name) != getattr(source, name)
    ]


def write(workdir: Path, config: ConfigOfModel) -> None:
    """Writes RECORD.

    Args:
      workdir: The directory of the parameters.
      config: Config of their model.
    """
    replace_bytes(workdir / RECORD, (json.dumps(_decisive(config), indent=1) + "\n").encode())


def check(workdir: Path, config: ConfigOfModel) -> None:
    """Checks that parameters are used with the fields that they were trained with.

    Args:
      workdir: The directory of the parameters. Fields that its RECORD lacks are not checked: the version that wrote it did not
        have them. Early versions wrote no RECORD.
      config: Config of their model, as config.json has it.

    Raises:
      InputError: A field differs, or RECORD cannot be read.
    """
    path = workdir / RECORD
    try:
        saved = json.loads(path.read_text("utf-8"))
        if not isinstance(saved, dict):
            raise ValueError(f"it holds a {type(saved).__name__}")
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputError(
            f"cannot read {path} ({reason}), the record of the model's fields: restore it, "
            "or remove it to use config.json without a check"
        ) from error
    if differing := _differing(config, saved):
        current, trained = (
            ", ".join(f"model.{name}={values[name]!r}" for name in differing) for values in (_decisive(config), saved)
        )
        raise InputError(
            f"{workdir / 'config.json'} has {current}, and its parameters were trained with {trained}: set that back, or "
            f"remove {path} if they shall compute something else"
        )


def _decisive(config: Any) -> dict[str, Any]:
    free = (*FREE, *config.free_fields)
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in free}


def _differing(config: Any, saved: Mapping[str, Any]) -> list[str]:
    """Names of the fields in which `config` computes something else than the saved fields."""
    values = _decisive(config)
    differing = [name for name in values if name in saved and saved[name] != values[name]]
    if not differing:
        return []
    try:
        old = architecture(dataclasses.replace(config, **{name: saved[name] for name in differing}))
    except (InputError, TypeError, ValueError):  # values that this version does not know
        return differing
    new = architecture(config)
    return [name for name in differing if new.get(name) != old.get(name)]
