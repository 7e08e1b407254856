"""Sizes of compressed models from a config and a recipe, without weights; and those of a file, from its header."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from hpnlp.compress.container import EncodedArray, planned_size
from hpnlp.compress.files import file_content, read_outline, stored_bytes
from hpnlp.compress.recipe import Calibration, Stage
from hpnlp.compress.storage import deflate, packing
from hpnlp.compress.storage.array_encodings import Encoding
from hpnlp.ops.weight import parameter_count

ORIGINAL = "original"


@dataclasses.dataclass(frozen=True)
class Size:
    """Size of a model after a stage of a recipe.

    Attributes:
      stage: Spec of the stage; ORIGINAL for the model before.
      parameters: Numbers of the model: weights, factors, codes and scales.
      memory_bytes: Bytes of the arrays; integers of 4 bits count half a byte.
      disk_bytes: Bytes of the file of `hpnlp compress`.
      is_bound: Some arrays have codes whose length depends on their values, and `disk_bytes` is an upper bound. Otherwise it
        is exact, unless an array has many zeros: the file then holds its non-zeros only.
    """

    stage: str
    parameters: int
    memory_bytes: int
    disk_bytes: int
    is_bound: bool


def planned_sizes(config: Any, shapes: Any, stages: Sequence[Stage], step: int = 0) -> Iterator[Size]:
    """Sizes of a model after each stage of a recipe. Weights are neither needed nor allocated.

    Args:
      config: Config of the model.
      shapes: Its weights, or shapes of them.
      stages: Result of `recipe.parse_recipe`.
      step: Step of the run, which the file holds.

    Yields:
      The sizes, first those of the original.

    Raises:
      InputError: A stage does not fit the model, or its result has sizes that depend on the weights.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    yield _size(ORIGINAL, shapes, step, prunes=False)
    prunes = False
    for stage in stages:
        config, shapes = planned_weights(config, shapes, stage)
        prunes = prunes or stage.text.startswith("magnitude")
        yield _size(stage.text, shapes, step, prunes)


def planned_weights(config: Any, shapes: Any, stage: Stage) -> tuple[Any, Any]:
    """The model after a stage, without weights.

    Args:
      config: Config of the model.
      shapes: Shapes of its weights.
      stage: The stage.

    Returns:
      The config and the shapes of the weights after it.

    Raises:
      InputError: As `planned_sizes`.
    """
    outline, configs = Calibration(_no_gradients, is_outline=True), []

    def apply(weights: Any) -> Any:
        new_config, result = stage.compress(config, weights, outline)
        configs.append(new_config)
        return result

    shapes = jax.eval_shape(apply, shapes)
    return configs[-1], shapes


def file_sizes(path: str | os.PathLike[str], stage: str) -> Size:
    """Sizes of a model in a file of `files.write_weights`, of which only the header is read.

    Args:
      path: The file.
      stage: Name of the result's stage.

    Returns:
      The sizes.

    Raises:
      InputError: There is no such file, or its header is damaged.
    """
    shapes = read_outline(path)
    return Size(stage, parameter_count(shapes), stored_bytes(shapes), os.path.getsize(path), is_bound=False)


def _no_gradients(config: Any, weights: Any) -> Any:
    raise AssertionError("gradients are not needed for an outline")


def _size(stage: str, shapes: Any, step: int, prunes: bool) -> Size:
    """Sizes of weights of these shapes, whose floating-point numbers may be zero if `prunes`."""
    leaves, header = file_content(shapes, {"step": step})
    arrays = {name: _encoded(leaf) for name, leaf in leaves.items()}
    has_codes = any(array.encoding.kind == "huffman" for array in arrays.values())
    return Size(
        stage,
        parameter_count(shapes),
        stored_bytes(leaves),
        planned_size(arrays, header),
        is_bound=has_codes or prunes,
    )


def _encoded(leaf: Any) -> EncodedArray:
    """An array in the encoding that `files.encoding_of` chooses, with the largest parts that it may have."""
    dtype = np.dtype(leaf.dtype)
    if dtype.name in ("int4", "uint4"):
        encoding, parts = "packed(4)", {"values": 16, "codes": packing.packed_size(leaf.size, 4)}
    elif dtype.name in ("int8", "uint8"):
        # Codes that are zeros mostly are two streams, which are smaller together.
        blocks = range(-(-leaf.size // deflate.BLOCK))
        sizes = (deflate.largest_size(min(deflate.BLOCK, leaf.size - i * deflate.BLOCK)) for i in blocks)
        encoding, parts = "huffman", {"values": 256} | {f"codes/{i}": size for i, size in enumerate(sizes)}
    else:
        encoding, parts = "raw", {}
    tensors = {part: np.broadcast_to(np.uint8(0), size) for part, size in parts.items()}
    tensors = tensors or {"": np.broadcast_to(np.zeros((), dtype), leaf.shape)}
    return EncodedArray(Encoding.parse(encoding), dtype, leaf.shape, tensors, checksum=0)
