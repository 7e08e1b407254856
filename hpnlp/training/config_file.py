"""`config.json` of a run directory."""

from __future__ import annotations

from pathlib import Path

from hpnlp.atomic_file import replace_bytes
from hpnlp.errors import InputError
from hpnlp.training import config as configs
from hpnlp.training.config import Config
from hpnlp.training.files.contents import (
    check_run,
    has_checkpoints,
)
from hpnlp.training.starts import architecture


def load_config(workdir: str | Path, is_checked: bool = True) -> Config:
    """Reads the config of a run.

    Args:
      workdir: The run directory.
      is_checked: The fields of the model must be those that the run's parameters were trained with.

    Returns:
      The config.

    Raises:
      InputError: The directory holds no run, a config.json that cannot be read, or one with other fields of the model.
    """
    check_run(workdir)
    path = Path(workdir) / "config.json"
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        kind = "checkpoints" if has_checkpoints(workdir) else "metrics.jsonl"
        raise InputError(
            f"{workdir} has {kind} and no config.json: restore it, the run cannot be read without it"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"cannot read {path} ({reason}): restore it, or name another workdir") from error
    try:
        config = configs.from_json(text)
    except InputError as error:
        raise InputError(f"{workdir}: {error}") from None
    if is_checked:
        architecture.check(Path(workdir), config.model)
    return config


def write_config(workdir: Path, config: Config) -> None:
    """Writes config.json, and the record of the fields that decide what the parameters beside it compute, atomically.

    Args:
      workdir: The run directory.
      config: The config.
    """
    architecture.write(workdir, config.model)
    replace_bytes(workdir / "config.json", configs.to_json(config).encode())
