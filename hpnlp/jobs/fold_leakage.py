"""Checks that folds of cross-validation are scored on data that no model behind the scores was trained on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpnlp.data.config import DataConfig
from hpnlp.data.examples import ExampleConfig, generated
from hpnlp.data.reading import sources
from hpnlp.data.reading.rows import FORMATS
from hpnlp.training.config import Config
from hpnlp.training.config_file import load_config
from hpnlp.training.files.contents import Contents, contents_of
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
        if _is_other_part(data, of_first):
            raise InputError(
                f"{first} holds out {_part(of_first)} of data.path={data.path!r} and {name} {_part(data)}: each was trained on "
                "what the other holds out, so that their scores together would be too good: score each by itself, or pass "
                "--data.heldout_path=PATH with other data, which neither was trained on"
            )


def check_start(config: Config) -> None:
    """Checks that a run does not start or learn from a model that was trained on what the run holds out.

    Args:
      config: Config of the run.

    Raises:
      InputError: `train.init_from` or `distill.teacher` is a run on the same data that holds out another part.
    """
    if not isinstance(config.data, DataConfig | ExampleConfig):
        return
    for field, name in (("train.init_from", config.train.init_from), ("distill.teacher", config.distill.teacher)):
        if not name or contents_of(Path(name)) not in (Contents.RUN, Contents.COMPRESSED):
            continue
        try:
            other = load_config(Path(name)).data
        except InputError:  # reported where the model is read
            continue
        is_split = not config.data.heldout_path  # else the run is scored on other files
        if is_split and isinstance(other, DataConfig | ExampleConfig) and _is_other_part(other, config.data):
            raise InputError(
                f"{field}={name} holds out {_part(other)} of data.path={other.path!r} and this run {_part(config.data)}"
                f"{_difference(config.data, other)}, so that it would be scored on what that model was trained on: name a "
                "model of the same part, or of other data"
            )


def _is_other_part(data: DataConfig | ExampleConfig, other: DataConfig | ExampleConfig) -> bool:
    """Whether two configs hold out different parts of data that both have, of which one is divided into folds.

    Further files change the parts, so that those of equal numbers differ.
    """
    if not (data.folds or other.folds) or _split(data) == _split(other):
        return False
    return data.path == other.path or bool(_files(data, data.path) & _files(other, other.path))


def _split(data: DataConfig | ExampleConfig) -> tuple[Any, ...]:
    """The fields that decide on the held-out part."""
    return data.path, data.folds, data.fold, data.group_field


def _files(data: DataConfig | ExampleConfig, path: str) -> set[str]:
    """The files of a path; none if they are generated or not there."""
    holds_examples = isinstance(data, ExampleConfig)
    readable = (FORMATS,) if holds_examples else ()
    try:
        if holds_examples and generated.is_generated(path):
            return set()
        return {
            os.path.realpath(file.path)
            for source in sources.find(path, "data.path", *readable)
            for file in source.files
        }
    except InputError:  # reported where the data are read
        return set()


def _part(data: DataConfig | ExampleConfig) -> str:
    """The held-out data of a config, for messages."""
    return f"part {data.fold} of {data.folds}" if data.folds else "a fraction"


def _difference(data: DataConfig | ExampleConfig, other: DataConfig | ExampleConfig) -> str:
    """The fields beside the part in which the split of `data` differs from that of another config, for messages."""
    path = f" of data.path={data.path!r}" * (data.path != other.path)
    return path + f" by data.group_field={_split(data)[-1]!r}" * (_split(data)[-1] != _split(other)[-1])


def _check_files(name: str, data: DataConfig | ExampleConfig, path: str) -> None:
    """Raises InputError if files of a path were divided into parts for a run, most of which it was trained on."""
    if not data.folds:
        return
    trained, scored = _files(data, data.path), _files(data, path)
    if both := sorted(trained & scored):
        raise InputError(
            f"data.heldout_path={path!r}: {both[0]} is one of the files of data.path={data.path!r}, on parts of which {name} "
            "was trained: name other files"
        )
