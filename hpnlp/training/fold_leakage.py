"""Checks that folds of cross-validation are scored on data that no member of an ensemble was trained on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hpnlp.data import sources
from hpnlp.data.config import DataConfig
from hpnlp.data.examples import ExampleConfig, generated
from hpnlp.data.examples.rows import FORMATS
from hpnlp.training.config import Config
from hpnlp.types import InputError

FIELDS = ("data.folds", "data.fold")


def check(members: Sequence[tuple[str, Config]], changes: Mapping[str, Any]) -> None:
    """Checks the data of an evaluation against the training data of its members.

    Args:
      members: Directory and config of each run.
      changes: Fields of the evaluation, such as "data.heldout_path".

    Raises:
      InputError: A part that one member holds out is training data of another, or `data.heldout_path` names files that runs
        with parts were trained on.
    """
    in_parts = [(name, config.data) for name, config in members if isinstance(config.data, DataConfig | ExampleConfig)]
    if not any(data.folds for _, data in in_parts):
        return
    if path := changes.get("data.heldout_path"):
        for name, data in in_parts:
            _check_files(name, data, path)
        return
    first, of_first = in_parts[0]
    for name, data in in_parts[1:]:
        if data.path == of_first.path and (data.folds, data.fold) != (of_first.folds, of_first.fold):
            raise InputError(
                f"{first} holds out {_part(of_first)} of data.path={data.path!r} and {name} {_part(data)}: each was trained on "
                "what the other holds out, so that their scores together would be too good: score each by itself, or pass "
                "--data.heldout_path=PATH with other data, which neither was trained on"
            )


def _part(data: DataConfig | ExampleConfig) -> str:
    """The held-out data of a config, for messages."""
    return f"part {data.fold} of {data.folds}" if data.folds else "a fraction"


def _check_files(name: str, data: DataConfig | ExampleConfig, path: str) -> None:
    """Raises InputError if files of a path were divided into parts for a run, most of which it was trained on."""
    if not data.folds or (isinstance(data, ExampleConfig) and generated.is_generated(data.path)):
        return
    readable = (FORMATS,) if isinstance(data, ExampleConfig) else ()
    trained, scored = (
        {os.path.realpath(file.path) for source in sources.find(paths, field, *readable) for file in source.files}
        for paths, field in ((data.path, "data.path"), (path, "data.heldout_path"))
    )
    if both := sorted(trained & scored):
        raise InputError(
            f"data.heldout_path={path!r}: {both[0]} is one of the files of data.path={data.path!r}, on parts of which {name} was "
            "trained: name other files"
        )
