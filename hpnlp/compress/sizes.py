"""Sizes of compressed models from a config and a recipe, without weights; and those of a file, from its header."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from hpnlp.compress import container
from hpnlp.compress.files import file_content, read_outline, stored_bytes
from hpnlp.compress.recipe import Calibration, Stage
from hpnlp.compress.storage import huffman, packing
from hpnlp.ops.weight import parameter_count

ORIGINAL = "original"
# Bytes of a Huffman stream beyond its codes: code lengths of 256 symbols that zlib cannot shrink, and the last word.
_CODE_LENGTHS = 256 + 32


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
    outline, prunes = Calibration(_no_gradients, is_outline=True), False
    for stage in stages:
        configs: list[Any] = []

        def apply(weights: Any, stage: Stage = stage, config: Any = config, configs: list[Any] = configs) -> Any:
            new_config, result = stage.compressor(config, weights, outline)
            configs.append(new_config)
            return result

        shapes = jax.eval_shape(apply, shapes)
        config, prunes = configs[-1], prunes or stage.text.startswith("magnitude")
        yield _size(stage.text, shapes, step, prunes)


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
    blocks = {name: _block(leaf) for name, leaf in leaves.items()}
    has_codes = any(block.encoding not in ("raw", "packed(4)") for block in blocks.values())
    return Size(
        stage,
        parameter_count(shapes),
        stored_bytes(leaves),
        container.planned_size(blocks, header),
        is_bound=has_codes or prunes,
    )


def _block(leaf: Any) -> container.PlannedBlock:
    """The block of an array in the encoding that `files.encoding_of` chooses, with the largest size that it may have."""
    name = np.dtype(leaf.dtype).name
    if name in ("int4", "uint4"):
        return container.PlannedBlock(name, leaf.shape, "packed(4)", 16 + packing.packed_size(leaf.size, 4), 16)
    if name in ("int8", "uint8"):
        # Codes of a limited alphabet have at most 8 bits on average; each lane's length is stored in at most 2 bytes, and the
        # last look-ups of lanes are padded. Codes that are zeros mostly are two streams, which are smaller together.
        lanes = -(-leaf.size // huffman.STEPS)
        stream = huffman.HEADER_SIZE + _CODE_LENGTHS + leaf.size + 3 * lanes
        return container.PlannedBlock(name, leaf.shape, "huffman", 256 + stream, 256)
    return container.PlannedBlock(name, leaf.shape, "raw", leaf.size * np.dtype(leaf.dtype).itemsize)
