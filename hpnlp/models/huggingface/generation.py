"""Settings of `generate` in transformers: the ids that end a text, and settings that hpnlp does not apply."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpnlp.models.huggingface.checkpoint_files import read_json
from hpnlp.types import InputError

CONFIG, GENERATION = "config.json", "generation_config.json"

# Settings of generation_config.json that change a greedy continuation -> the value that, like null, changes nothing.
GREEDY_SETTINGS: Mapping[str, Any] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "guidance_scale": 1.0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
}


def generation_settings(directory: str | Path) -> dict[str, Any]:
    """Reads the settings of `generate` in transformers.

    Args:
      directory: Directory of the checkpoint.

    Returns:
      Content of generation_config.json; without that file, the ids of bos and eos in config.json.
    """
    path = _generation_file(directory)
    settings = read_json(path)
    if path.name == GENERATION:
        return settings
    return {name: settings[name] for name in ("bos_token_id", "eos_token_id") if settings.get(name) is not None}


def _generation_file(directory: str | Path) -> Path:
    """The file that holds the settings of `generate`."""
    path = Path(directory) / GENERATION
    return path if os.path.lexists(path) else Path(directory) / CONFIG


def eos_ids(directory: str | Path) -> tuple[int, ...]:
    """Reads the ids at which `generate` of transformers ends a text.

    Args:
      directory: Directory of the checkpoint.

    Returns:
      The ids; () if the checkpoint names none.

    Raises:
      InputError: The file is damaged, or eos_token_id is neither an id nor a list of ids.
    """
    value = generation_settings(directory).get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int for i in ids):
        raise InputError(
            f"{_generation_file(directory)}: eos_token_id is {value!r}: expected an id or a list of ids: mend it, or take "
            "the file from where the weights came from"
        )
    return tuple(ids)


def generation_remarks(directory: str | Path) -> list[str]:
    """Describes settings of generation_config.json that change greedy continuations in transformers but not in hpnlp.

    Args:
      directory: Directory of the checkpoint.

    Returns:
      At most one line, which lists the settings.
    """
    settings = generation_settings(directory)
    ignored = [
        f"{name}={settings[name]!r}"
        for name, neutral in GREEDY_SETTINGS.items()
        if settings.get(name) is not None and settings[name] != neutral
    ]
    return [f"{GENERATION} sets {', '.join(ignored)}, which hpnlp generate does not apply"] if ignored else []
