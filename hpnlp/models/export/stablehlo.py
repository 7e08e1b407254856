"""StableHLO: a model as one file that JAX calls without hpnlp, in this version of JAX and for six months in later ones.

import jax
function = jax.export.deserialize(open("model.stablehlo", "rb").read())
logits = function.call(tokens)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from hpnlp.atomic_file import replaced
from hpnlp.models.export.functions import ExportedFunction
from hpnlp.types import InputError

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_MAX_BYTES = 2**31 - 2**20  # of a flatbuffer


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
    (size,) = jax.export.symbolic_shape("batch") if batch == 0 else (batch,)
    try:
        exported = _export(function, size, platforms)
    except (TypeError, ValueError, NotImplementedError, jax.errors.InconclusiveDimensionOperation) as error:
        if batch or isinstance(error, InputError):
            raise
        _export(function, 1, platforms)  # raises an error that does not come from the symbolic number of sequences
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"the model cannot be exported for any number of sequences ({reason}): name one, as batch=1"
        ) from error
    if len(exported.mlir_module_serialized) > _MAX_BYTES:
        raise InputError("the model has over 2 GB, which is the limit of the format: compress it first")
    content = bytes(exported.serialize())
    with replaced(path) as file:
        file.write(content)


def _export(function: ExportedFunction, size: Any, platforms: Sequence[str]) -> jax.export.Exported:
    """The exported function for `size` sequences, a number or a symbol."""
    shapes = [jax.ShapeDtypeStruct((size, function.length), jnp.int32) for _ in function.inputs]
    return jax.export.export(jax.jit(function.call), platforms=list(platforms) or None)(*shapes)
