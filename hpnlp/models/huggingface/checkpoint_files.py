"""Reads the files of a checkpoint in the Hugging Face layout: JSON objects and safetensors."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp.types import InputError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open safetensors file.

    Attributes:
      path: Path of the file.
      file: The open file.
      name: Name of the tensor in the file.
    """

    path: Path
    file: Any
    name: str

    def read(self) -> np.ndarray:
        """Reads the tensor.

        Returns:
          Its value as float32; float16 and bfloat16 are widened.
        """
        with raises_input_errors(self.path, "download it again"):
            return self.file.get_tensor(self.name).astype(np.float32, copy=False)

    def header(self) -> tuple[tuple[int, ...], str]:
        """Reads the file's header alone.

        Returns:
          The shape, and the dtype as safetensors names it.
        """
        view = self.file.get_slice(self.name)
        return tuple(view.get_shape()), view.get_dtype()


def open_tensors(directory: Path, base: str, stack: contextlib.ExitStack) -> dict[str, StoredTensor]:
    """Opens the safetensors files of a checkpoint.

    Args:
      directory: Directory of the checkpoint.
      base: First part of the names of all tensors but the head; added if a checkpoint leaves it out.
      stack: Closes the files.

    Returns:
      Full name -> tensor.

    Raises:
      InputError: A file is missing or damaged.
    """
    safetensors = import_safetensors()
    tensors: dict[str, StoredTensor] = {}
    for path in _weight_files(directory):
        with raises_input_errors(path, "download it again"):
            file = stack.enter_context(safetensors.safe_open(path, framework="np"))
        tensors |= {name: StoredTensor(path, file, name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    if not any(name.startswith(base) for name in tensors):
        tensors = {name if name.startswith("lm_head.") else base + name: tensor for name, tensor in tensors.items()}
    return tensors


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint."""
    if (directory / WEIGHTS).exists():
        return [directory / WEIGHTS]
    if (directory / INDEX).exists():
        index = read_json(directory / INDEX)
        names = index["weight_map"].values() if isinstance(index.get("weight_map"), dict) else []
        if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise InputError(
                f"{directory / INDEX}: expected a weight_map of tensors to files in its directory; download it again"
            )
        return [directory / name for name in sorted(set(names))]
    if any(directory.glob("pytorch_model*.bin*")):
        raise InputError(
            f"{directory} holds only pytorch_model.bin, a pickle, which can run code when it is read: if you trust it, load it "
            "with transformers; save_pretrained writes safetensors"
        )
    raise InputError(f"{directory} holds no {WEIGHTS}: download it too")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
      path: Path of the file.

    Returns:
      The object.

    Raises:
      InputError: The file is missing, damaged, or holds another value.
    """
    value = _json_value(path)
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}: expected an object; download it again")
    return value


def read_json_list(path: Path) -> list[Any]:
    """Reads a JSON array.

    Args:
      path: Path of the file.

    Returns:
      The array.

    Raises:
      InputError: The file is missing, damaged, or holds another value.
    """
    value = _json_value(path)
    if not isinstance(value, list):
        raise InputError(f"{path} holds a JSON {type(value).__name__}: expected an array; download it again")
    return value


def _json_value(path: Path) -> Any:
    """The value of a JSON file."""
    if path.is_fifo():  # a pipe may have no end
        raise InputError(f"{path} is not a regular file: download it again")
    with raises_input_errors(path, "download it again", ValueError, RecursionError):
        return json.loads(path.read_text("utf-8"))


def write_json(path: Path, value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Writes a JSON object or array.

    Args:
      path: Path of the file.
      value: The object or array.
    """
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def import_safetensors(module: str = "") -> Any:
    """Imports safetensors, which is an extra, only where it is needed.

    Args:
      module: Name of a module in the package; "" for the package itself.

    Returns:
      The module.

    Raises:
      InputError: The package is missing.
    """
    try:
        return importlib.import_module(f"safetensors.{module}" if module else "safetensors")
    except ImportError as error:
        raise InputError("Hugging Face checkpoints need the package safetensors: pip install safetensors") from error


@contextlib.contextmanager
def raises_input_errors(path: Path, fix: str, *damage: type[Exception]) -> Iterator[None]:
    """Converts errors of reading or writing a file to InputErrors.

    Args:
      path: Path of the file.
      fix: Advice that ends the message.
      *damage: Further exceptions that mean a damaged file, besides OSError and those of safetensors.

    Yields:
      None.

    Raises:
      InputError: One of these errors was raised in the context.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist: {fix}") from error
    except (OSError, *damage, import_safetensors().SafetensorError) as error:
        raise InputError(f"{path}: {error}; {fix}") from error
