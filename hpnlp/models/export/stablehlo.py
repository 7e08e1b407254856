"""StableHLO: a model as one file that JAX calls without hpnlp, in this version of JAX and for six months in later ones.

import jax
function = jax.export.deserialize(open("model.stablehlo", "rb").read())
logits = function.call(tokens)
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.export

from hpnlp.atomic_file import replaced
from hpnlp.models.export.functions import SYMBOLIC_ERRORS, ExportedFunction, arguments, input_shape, unsized_error
from hpnlp.types import InputError

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_MAX_BYTES = 2**31 - 2**20  # a flatbuffer holds at most 2 GiB


def write(function: ExportedFunction, path: Path, *, batch: int = 0, platforms: Sequence[str] = ()) -> None:
    """Writes a function and its weights.

    Args:
      function: The function.
      path: The file.
      batch: Sequences of a batch, B; 0 for any number.
      platforms: Entries of PLATFORMS on which the function can be called; () for the platform of this process. The kernels
        are those that this process chooses.

    Raises:
      InputError: The package flatbuffers is missing, a platform is unknown, the model computes with the number of sequences,
        or the file would have over 2 GB.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise InputError("StableHLO files need the package flatbuffers: pip install flatbuffers")
    for platform in platforms:
        if platform not in PLATFORMS:
            raise InputError(f"platform {platform!r}: expected one of {', '.join(PLATFORMS)}")
    try:
        exported = _export(function, batch, platforms)
    except InputError:
        raise
    except SYMBOLIC_ERRORS as error:
        if batch and function.length:
            raise
        # Raises an error that does not come from the symbolic sizes.
        _export(dataclasses.replace(function, length=function.length or function.longest or 16), batch or 1, platforms)
        raise unsized_error(function, batch, error) from error
    if len(exported.mlir_module_serialized) > _MAX_BYTES:
        raise InputError("the model has over 2 GB, which is the limit of the format: compress it first")
    content = bytes(exported.serialize())
    with replaced(path) as file:
        file.write(content)


def _export(function: ExportedFunction, batch: int, platforms: Sequence[str]) -> jax.export.Exported:
    """Exports the function for `batch` sequences, or for any number of them if `batch` is 0."""
    shapes = arguments(function, input_shape(function, batch))
    return jax.export.export(jax.jit(function.call), platforms=list(platforms) or None)(*shapes)
