"""Files that sentence-transformers puts beside a checkpoint: modules, pooling and the length at which texts are cut.

A directory has a module per entry of modules.json: the Transformer, Pooling, and Normalize, whose own directory may be absent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpnlp.models.huggingface.checkpoint_files import read_json, read_json_list, write_json
from hpnlp.models.huggingface.families import FAMILIES
from hpnlp.models.pairs.dual_encoder import DualEncoderConfig
from hpnlp.types import InputError

MODULES, POOLING, SETTINGS = "modules.json", "1_Pooling", "config_sentence_transformers.json"
# Name of pooling in sentence-transformers -> the key that stands for it in older versions.
_MODES = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
# Name of pooling in sentence-transformers -> entry of POOLINGS.
_POOLINGS = {"cls": "first", "mean": "mean", "max": "max"}


def is_sentence_encoder(directory: Path) -> bool:
    """Whether sentence-transformers has written a directory.

    Args:
      directory: Directory of a checkpoint.

    Returns:
      True if there is a modules.json.
    """
    return os.path.lexists(directory / MODULES)


def read_config(directory: Path) -> dict[str, Any]:
    """Reads config.json.

    Args:
      directory: Directory of a checkpoint.

    Returns:
      Its content. Of a sentence encoder, `architectures` names the model without a head, whatever the file names: some
      encoders were fine-tuned from a model with a head.

    Raises:
      InputError: The file is missing or damaged.
    """
    raw = read_json(directory / "config.json")
    towers = [
        family for family in FAMILIES.values() if family.omits_base and family.model_type == raw.get("model_type")
    ]
    if towers and is_sentence_encoder(directory):
        raw["architectures"] = [towers[0].architecture]
    return raw


def pooling(directory: Path) -> str:
    """Reads how a sentence encoder makes one vector of a text.

    Args:
      directory: Directory of the checkpoint.

    Returns:
      An entry of POOLINGS; "mean", as in sentence-transformers, without a modules.json.

    Raises:
      InputError: A file is damaged, or asks for modules or options that a dual encoder lacks.
    """
    modules = _modules(directory)
    if "Pooling" not in modules:
        return "mean"
    path = directory / modules["Pooling"] / "config.json"
    raw = read_json(path)
    modes = raw.get("pooling_mode", [mode for mode, key in _MODES.items() if raw.get(key)])
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _POOLINGS:
        listed = f"pooling_mode={raw['pooling_mode']!r:.80}" if "pooling_mode" in raw else _legacy(raw)
        raise InputError(
            f"{path}: {listed} is not supported: choose a model with one of the modes {', '.join(_POOLINGS)}"
        )
    if raw.get("include_prompt", True) is not True:
        raise InputError(
            f"{path}: include_prompt={raw['include_prompt']!r} is not supported: all tokens of a text are pooled; choose a "
            "model with include_prompt=true"
        )
    return _POOLINGS[modes[0]]


def _legacy(raw: Mapping[str, Any]) -> str:
    """The keys of older versions that ask for pooling, for an error."""
    asked = [f"{key}={raw[key]!r}" for key in raw if key.startswith("pooling_mode_") and raw[key]]
    return " and ".join(asked) or "no pooling_mode"


def _modules(directory: Path) -> dict[str, str]:
    """Class -> directory of each module; empty without a modules.json."""
    path = directory / MODULES
    if not is_sentence_encoder(directory):
        return {}
    names: dict[str, str] = {}
    for module in read_json_list(path):
        match module:
            case {"type": str(kind), "path": str(place)}:
                names[kind.rpartition(".")[2]] = place
            case _:
                raise InputError(f"{path}: {module!r:.80} has no type and path: download the file again")
    known = ["Transformer", "Pooling", "Normalize"]
    if list(names) != known[: len(names)] or len(names) < 2 or names["Transformer"]:
        shown = ", ".join(f"{name} in {place!r}" for name, place in names.items())
        raise InputError(
            f"{path}: the modules {shown or 'none'} are not supported: choose a model of a Transformer in '', Pooling and "
            "Normalize, in this order"
        )
    return names


def max_length(directory: Path, most: int) -> int:
    """Reads the largest number of tokens of a text.

    Args:
      directory: Directory of the checkpoint.
      most: Number of positions of the model.

    Returns:
      max_seq_length of the file that sentence-transformers reads, else model_max_length of the tokenizer, at most `most`.
      The truncation in tokenizer.json does not count.

    Raises:
      InputError: A file is damaged, or lower-cases texts, which is the work of the tokenizer.
    """
    paths = [*sorted(directory.glob("sentence_*_config.json")), directory / "tokenizer_config.json"]
    for path, key in zip(paths, ["max_seq_length"] * (len(paths) - 1) + ["model_max_length"], strict=True):
        raw = read_json(path) if path.exists() else {}
        if raw.get("do_lower_case") and key == "max_seq_length":
            raise InputError(
                f"{path}: do_lower_case=true is not supported: set it to false, and lower-case texts by the normalizer of "
                "tokenizer.json"
            )
        length = raw.get(key)
        if length is None:
            continue
        if type(length) not in (int, float) or length < 3:
            raise InputError(f"{path}: {key} is {length!r}: expected a number of tokens, such as 256: mend it")
        return int(min(length, most))  # an absent limit is written as 1e30
    return most


def remarks(directory: Path) -> list[str]:
    """Describes differences between the vectors of a dual encoder and those of sentence-transformers.

    Args:
      directory: Directory of the checkpoint.

    Returns:
      One line per difference.
    """
    modules, lines = _modules(directory), []
    if not modules:
        lines.append(f"there is no {MODULES}, which names the pooling: vectors are the mean of the hidden states")
    elif "Normalize" not in modules:
        lines.append("vectors have length 1, and those of sentence-transformers keep theirs: cosines are equal")
    settings = read_json(directory / SETTINGS) if (directory / SETTINGS).exists() else {}
    prompts, name = settings.get("prompts"), settings.get("default_prompt_name")
    if isinstance(prompts, dict) and prompts.get(name):
        lines.append(f"sentence-transformers begins each text with {prompts[name]!r}: put it before your texts")
    return lines


def write(directory: Path, config: DualEncoderConfig, seq_len: int) -> None:
    """Writes the files by which sentence-transformers loads a checkpoint.

    Args:
      directory: Directory of the checkpoint.
      config: The model, which `check` has passed.
      seq_len: Largest number of tokens of a text.
    """
    (directory / POOLING).mkdir()
    mode = {mode for mode, name in _POOLINGS.items() if name == config.pooling}
    keys = {key: name in mode for name, key in _MODES.items()}
    write_json(directory / POOLING / "config.json", {"word_embedding_dimension": config.dim, **keys})
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": seq_len, "do_lower_case": False})
    places = {"Transformer": "", "Pooling": POOLING, "Normalize": "2_Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": place, "type": f"sentence_transformers.models.{name}"}
        for index, (name, place) in enumerate(places.items())
    ]
    write_json(directory / MODULES, modules)


def check(config: DualEncoderConfig) -> None:
    """Checks that sentence-transformers has the pooling of a model.

    Args:
      config: The model.

    Raises:
      InputError: It has not.
    """
    if config.pooling not in _POOLINGS.values():
        raise InputError(
            f"model.pooling={config.pooling!r} has no counterpart in sentence-transformers: train with "
            f"--model.pooling={' or '.join(_POOLINGS.values())}"
        )
