"""Conversion between Hugging Face checkpoints (config.json and model.safetensors) and language models or encoders.

`families.py` holds the names of sizes and tensors in each model family. Only safetensors is read: the older pytorch_model.bin
is a pickle, which can run code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from hpnlp.data.reading.files import Progress, ignore_progress
from hpnlp.errors import plural
from hpnlp.models import variables
from hpnlp.models.backbone import DTYPES
from hpnlp.models.huggingface import sentence_files
from hpnlp.models.huggingface.checkpoint_files import (
    INDEX,
    WEIGHTS,
    StoredTensor,
    import_safetensors,
    open_tensors,
    raises_input_errors,
    read_json,
    write_json,
)
from hpnlp.models.huggingface.families import FAMILIES, class_names, config_fields, config_json, find_family
from hpnlp.models.huggingface.family import Family, ModelConfig, TextSettings
from hpnlp.models.huggingface.rope_scaling import rope_remarks
from hpnlp.models.pairs.dual_encoder import DualEncoderConfig
from hpnlp.models.variables import BUFFERS
from hpnlp.spec import lookup
from hpnlp.types import InputError

CONFIG = "config.json"

# Last part of a parameter's path -> last part of the tensor's name.
LEAVES = {"/kernel": "weight", "/scale": "weight", "/table": "weight", "/bias": "bias"}

# The tasks of the models that are converted.
TASKS = tuple(dict.fromkeys(family.task for family in FAMILIES.values()))

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint and the parameters that it holds, concatenated on the last axis.

    Attributes:
      name: Name in the checkpoint.
      shape: Shape in the checkpoint.
      paths: Paths of the parameters.
      index: Index in the stacked parameters: of the layer, and of the expert; () for parameters outside the layers.
      transposed: True if the checkpoint stores the transpose.
    """

    name: str
    shape: tuple[int, ...]
    paths: tuple[str, ...]
    index: tuple[int, ...]
    transposed: bool

    def write_params(self, value: np.ndarray, params: Mapping[str, np.ndarray]) -> None:
        """Writes the value of the tensor into the parameters.

        Args:
          value: The checkpoint's value.
          params: Path -> array, which is changed.
        """
        value = value.T if self.transposed else value
        start = 0
        for path in self.paths:
            target = params[path][self.index]
            stop = start + target.shape[-1]
            target[...] = value[..., start:stop]
            start = stop

    def read_params(self, params: Mapping[str, np.ndarray], dtype: DTypeLike) -> np.ndarray:
        """Makes the value of the tensor from the parameters.

        Args:
          params: Path -> array.
          dtype: Dtype of the result of a parameter; buffers stay float32.

        Returns:
          The checkpoint's value, contiguous, because safetensors writes buffers in the order of memory.
        """
        arrays = [params[path][self.index] for path in self.paths]
        value = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)
        is_buffer = self.paths[0].startswith(f"{BUFFERS}/")
        return np.ascontiguousarray(value.T if self.transposed else value, np.float32 if is_buffer else dtype)


def load_config(directory: str | Path, dtype: str = "float32") -> ModelConfig:
    """Reads the config of a model from config.json alone.

    Args:
      directory: Directory of the checkpoint.
      dtype: Entry of DTYPES in which the model is to compute.

    Returns:
      The config of an LM, an Encoder or a DualEncoder.

    Raises:
      InputError: The file is missing or damaged, or describes a model that these do not compute.
    """
    directory = Path(directory)
    lookup(DTYPES, dtype, "dtype")
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory: download the checkpoint, and name the directory it is in")
    source = str(directory / CONFIG)
    raw = sentence_files.read_config(directory)
    family, fields = find_family(raw, source), config_fields(raw, source)
    if family.config is DualEncoderConfig:
        fields["pooling"] = sentence_files.pooling(directory)
    try:
        return family.config(**fields, dtype=dtype)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def load(
    directory: str | Path, dtype: str = "float32", progress: Progress = ignore_progress
) -> tuple[ModelConfig, dict[str, Any]]:
    """Reads the model of a directory that `save_pretrained` of transformers has written.

    Args:
      directory: Directory with config.json and the safetensors files.
      dtype: Entry of DTYPES in which the model is to compute.
      progress: Called with bytes of parameters in float32.

    Returns:
      The config, with `dtype`, and the weights (`models.variables`) of the model as float32 arrays on the default device, which
      compiled functions take as arguments or close over. Of models without buffers, these are the parameters.

    Raises:
      InputError: See `read`.
    """
    config, params = read(directory, dtype, progress)
    return config, jax.tree.map(jnp.asarray, params)


def read(
    directory: str | Path, dtype: str = "float32", progress: Progress = ignore_progress
) -> tuple[ModelConfig, dict[str, Any]]:
    """Reads a model as `load` does, into the host's memory, for parameters that are then divided among devices.

    Arguments: see `load`.

    Returns:
      The config, and the weights as float32 numpy arrays. Compiled functions cannot index these, and copy them to the device
      in each call.

    Raises:
      InputError: A file is missing or damaged, tensors do not match config.json, a tensor is not finite in float32 or in
          `dtype`, or config.json describes a model that neither LM, Encoder nor DualEncoder computes.

    Cost: memory for the parameters in float32 and one tensor of the checkpoint.
    """
    directory, config = Path(directory), load_config(directory, dtype)
    family = family_in(directory)
    shapes = _shapes(family, config)
    expected = {tensor.name: tensor for tensor in _tensors(family, config, shapes)}
    with contextlib.ExitStack() as stack:
        stored = _open(directory, family, stack)
        _check_headers(expected, stored, family, config.tied, directory)
        params = {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
        done, total = 0, sum(array.nbytes for array in params.values())
        for name, tensor in ((name, expected[name]) for name in stored if name in expected):  # file by file
            progress("reading weights", done, total)
            value = stored[name].read()
            done += value.nbytes
            _check_finite(value, f"{directory}: {name}", dtype, "download it again, or take another checkpoint")
            tensor.write_params(value, params)
        for name in family.copies.keys() & stored.keys() - expected.keys():
            if not np.array_equal(stored[name].read(), params[family.copies[name]]):
                raise InputError(
                    f"{directory}: {name} differs from {family.copies[name]}, which it should equal: set tie_word_embeddings "
                    "to false in config.json"
                )
    return config, unflatten_dict(params, sep="/")


def family_in(directory: str | Path) -> Family:
    """The family of a checkpoint.

    Args:
      directory: Directory of the checkpoint.

    Returns:
      An entry of FAMILIES.

    Raises:
      InputError: config.json is missing or damaged, or of no known family.
    """
    return find_family(sentence_files.read_config(Path(directory)), str(Path(directory) / CONFIG))


def labels(directory: str | Path) -> tuple[str, ...] | None:
    """Names of the classes of a checkpoint.

    Args:
      directory: Directory of the checkpoint.

    Returns:
      The names in the order of their ids; None for a model without classes.

    Raises:
      InputError: config.json is damaged.
    """
    path = Path(directory) / CONFIG
    return tuple(class_names(read_json(path), str(path))) if family_in(directory).has_labels else None


def remarks(directory: str | Path) -> list[str]:
    """Describes differences between the model of `load` and the one of transformers.

    Args:
      directory: Directory of the checkpoint.

    Returns:
      One line per difference.
    """
    family, raw = family_in(directory), read_json(Path(directory) / CONFIG)
    of_sentences = sentence_files.remarks(Path(directory)) if family.omits_base else []
    return [*rope_remarks(raw), *family.remarks(raw), *of_sentences]


def save(
    config: ModelConfig,
    params: Mapping[str, Any],
    directory: str | Path,
    *,
    dtype: str = "float32",
    texts: TextSettings = TextSettings(),  # noqa: B008  (frozen)
    shard_bytes: int = 5 * 2**30,
    progress: Progress = ignore_progress,
) -> None:
    """Writes a directory that `from_pretrained` of transformers reads: config.json and model.safetensors.

    A dual encoder also gets the files that sentence-transformers reads.

    Args:
      config: The model.
      params: Weights of the model, numpy or jax arrays.
      directory: Created if it is missing; must not hold a checkpoint.
      dtype: Entry of DTYPES in which the tensors are stored.
      texts: Special ids, labels and the length of texts.
      shard_bytes: A larger model is split into files of at most this size, or of one tensor.
      progress: Called with bytes of tensors.

    Raises:
      InputError: No family has such a model, `params` do not match `config` or are not finite in `dtype`, the directory holds
          a checkpoint, or writing fails.

    Cost: memory for the tensors of one file.
    """
    import_safetensors("numpy")
    directory = Path(directory)
    raw, flat = config_json(config, texts.labels), {path: np.asarray(leaf) for path, leaf in _flatten(params).items()}
    family = find_family(raw, CONFIG)
    if family.pads_before_positions and texts.pad_id is not None:
        if texts.pad_id in (texts.bos_id, texts.eos_id):
            raise InputError(
                f"the tokenizer pads with the id {texts.pad_id}, which is also that of bos or eos, and {family.model_type} "
                "gives padding no position: add a pad_token of its own to the tokenizer"
            )
        config, flat = _with_rows_before_positions(family, config, flat, texts.pad_id + 1)
        raw = config_json(config, texts.labels)
    raw |= {"dtype": dtype, "bos_token_id": texts.bos_id, "eos_token_id": texts.eos_id}
    raw |= {} if texts.pad_id is None else {"pad_token_id": texts.pad_id}
    stored = np.dtype(lookup(DTYPES, dtype, "dtype"))
    shapes = _shapes(family, config)
    differing = dict(shapes.items() ^ {path: tuple(leaf.shape) for path, leaf in flat.items()}.items())
    if differing:
        raise InputError(
            f"params are not of config: {', '.join(sorted(differing))} differ; pass the config that made them"
        )
    tensors = list(_tensors(family, config, shapes))
    if family.omits_base:
        sentence_files.check(cast(DualEncoderConfig, config))
        tensors = [dataclasses.replace(tensor, name=tensor.name.removeprefix(family.base)) for tensor in tensors]
    _check_all_finite(tensors, flat, dtype)
    with raises_input_errors(directory, "free some space, or name a directory that can be written"):
        directory.mkdir(parents=True, exist_ok=True)
        for path in (directory / CONFIG, *directory.glob("*.safetensors")):
            if path.exists():
                raise InputError(f"{path} exists: name an empty directory")
        _write_tensors(_split(tensors, stored.itemsize, shard_bytes), flat, stored, directory, progress)
        if family.omits_base:
            sentence_files.write(directory, cast(DualEncoderConfig, config), texts.seq_len or config.max_len)
        write_json(directory / CONFIG, raw)  # last, so that a directory with config.json is complete


def _with_rows_before_positions(
    family: Family, config: ModelConfig, params: Mapping[str, Any], rows: int
) -> tuple[ModelConfig, dict[str, Any]]:
    """The same model with another number of rows of the table of positions that belong to no position, which are 0."""
    path = next(f"{paths[0]}/table" for paths in family.modules.values() if paths[0].endswith("positions"))
    table = np.asarray(params[path])[config.position_offset :]
    table = np.concatenate([np.zeros((rows, table.shape[1]), table.dtype), table])
    return dataclasses.replace(config, position_offset=rows), {**params, path: table}


def _write_tensors(
    shards: list[list[Tensor]], params: Mapping[str, Any], dtype: np.dtype, directory: Path, progress: Progress
) -> None:
    """Writes one safetensors file per shard, and an index if there are several."""
    index: dict[str, str] = {}
    sizes = [sum(math.prod(tensor.shape) for tensor in shard) * dtype.itemsize for shard in shards]
    for number, shard in enumerate(shards, start=1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        progress("writing weights", sum(sizes[: number - 1]), sum(sizes))
        values = {tensor.name: tensor.read_params(params, dtype) for tensor in shard}
        import_safetensors("numpy").save_file(values, directory / name, metadata={"format": "pt"})
        (directory / name).chmod(_default_mode())  # safetensors makes files that only their owner can read
        index |= dict.fromkeys(values, name)
    if len(shards) > 1:
        write_json(directory / INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": index})


def _default_mode() -> int:
    """The mode of new files, which the umask of the process decides."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def check_readable(directory: str | Path) -> None:
    """Reads config.json and the header of each safetensors file, which contains the file's size.

    Args:
      directory: Directory of the checkpoint.

    Raises:
      InputError: A file cannot be read.
    """
    directory = Path(directory)
    with contextlib.ExitStack() as stack:
        load_config(directory)
        _open(directory, family_in(directory), stack)


def _open(directory: Path, family: Family, stack: contextlib.ExitStack) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, by the names that newer checkpoints of the family have."""
    stored = open_tensors(directory, family.base, stack)
    for old, new in family.renamed.items():
        stored = {name.replace(old, new) if name.endswith(old) else name: tensor for name, tensor in stored.items()}
    return stored


def _shapes(family: Family, config: ModelConfig) -> Shapes:
    """Path -> shape of the weights of a model; allocates nothing."""

    def init() -> Any:
        model = family.model(config)
        initial = model.init(jax.random.key(0), model.example_batch(1, 1))
        return variables.join(initial["params"], initial.get(BUFFERS))

    return {path: tuple(leaf.shape) for path, leaf in _flatten(jax.eval_shape(init)).items()}


def _flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    """Path -> array of the parameters."""
    return flatten_dict(nn.meta.unbox(dict(params)), sep="/")


def _tensors(family: Family, config: ModelConfig, shapes: Shapes) -> Iterator[Tensor]:
    """The tensors of a checkpoint that hold parameters of these shapes."""
    for stored_module, modules in family.modules.items():
        for leaf, suffix in LEAVES.items():
            paths = tuple(module + leaf for module in modules)
            transposed = family.transposed and leaf == "/kernel"
            yield from _stored(f"{stored_module}.{suffix}", paths, transposed, config, shapes)
    for name, path in family.tensors.items():
        yield from _stored(name, (path,), name in family.flipped, config, shapes)


def _stored(
    name: str, paths: tuple[str, ...], transposed: bool, config: ModelConfig, shapes: Shapes
) -> Iterator[Tensor]:
    """The tensors of a name, which has `{}` for the layer and for the expert, of layers that have the parameters."""
    for layer_name, layer_paths, index in _layers(name, paths, config):
        if layer_paths[0] not in shapes:
            continue
        places = {layer_name: index}
        if "{}" in layer_name:
            places = {layer_name.format(e): (*index, e) for e in range(shapes[layer_paths[0]][1])}
        sizes = [shapes[path][len(next(iter(places.values()))) :] for path in layer_paths]
        shape = (*sizes[0][:-1], sum(size[-1] for size in sizes))
        for full_name, place in places.items():
            yield Tensor(full_name, shape[::-1] if transposed else shape, layer_paths, place, transposed)


def _layers(
    name: str, paths: tuple[str, ...], config: ModelConfig
) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    """`(name, paths, index on the first axis)` in each layer, or once for a name without `{}`."""
    if "{}" not in name:
        yield name, paths, ()
        return
    order = config.stack_order()
    for layer in range(config.layers):
        stack, place = order.place(layer)
        folder = "layers/" if len(order.stack_names) == 1 else f"layers/{stack}/"
        yield name.replace("{}", str(layer), 1), tuple(path.replace("layers/", folder, 1) for path in paths), (place,)


def _check_headers(
    expected: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], family: Family, tied: bool, directory: Path
) -> None:
    """Raises InputError unless names, shapes and dtypes of the stored tensors are those expected; reads headers alone."""
    missing = [name for name in expected if name not in stored]
    if missing:
        raise InputError(
            f"{directory} lacks {len(missing)} {plural(len(missing), 'tensor')} that config.json requires, "
            f"{missing[0]} first: take both from one checkpoint"
        )
    known = expected.keys() | (family.copies.keys() if tied else ())
    surplus = [name for name in stored if name not in known and not re.search(family.ignored, name)]
    if surplus:
        raise InputError(
            f"{directory} holds {len(surplus)} {plural(len(surplus), 'tensor')} that the model of config.json lacks, "
            f"{surplus[0]} first: take both from one checkpoint"
        )
    for name, tensor in expected.items():
        shape, dtype = stored[name].header()
        if shape != tensor.shape:
            raise InputError(
                f"{directory}: {name} has shape {shape}, but config.json makes it {tensor.shape}: mend that file"
            )
        if dtype not in ("F32", "F16", "BF16"):
            raise InputError(
                f"{directory}: {name} is stored as {dtype}: expected F32, F16 or BF16; save it as one of these"
            )


def _check_all_finite(tensors: list[Tensor], flat: Mapping[str, Any], dtype: str) -> None:
    """Raises InputError for the first tensor that is not finite, or not finite after conversion to `dtype`."""
    with np.errstate(over="ignore"):
        finite = {path: np.isfinite(np.asarray(leaf).astype(DTYPES[dtype])).all() for path, leaf in flat.items()}
    for tensor in tensors:
        if not all(finite[path] for path in tensor.paths):
            name = f"{tensor.name} (of params {', '.join(tensor.paths)})"
            _check_finite(
                tensor.read_params(flat, np.float32), name, dtype, "training diverged, take an earlier checkpoint"
            )


def _check_finite(value: np.ndarray, name: str, dtype: str, fix: str) -> None:
    """Raises InputError unless the float32 `value` is finite, also after conversion to `dtype`."""
    count = int(value.size - np.isfinite(value).sum())
    if count:
        raise InputError(f"{name} holds NaN or infinity, {count} of {value.size} numbers: {fix}")
    with np.errstate(over="ignore"):
        fits = dtype == "float32" or np.isfinite(value.astype(DTYPES[dtype])).all()
    if not fits:
        wider = "bfloat16 or float32" if dtype == "float16" else "float32"
        raise InputError(f"{name} holds {np.abs(value).max():.4g}, which is infinite in {dtype}: choose dtype {wider}")


def _split(tensors: list[Tensor], itemsize: int, limit: int) -> list[list[Tensor]]:
    """Splits tensors in order into groups of at most `limit` bytes, or of a single larger tensor."""
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        nbytes = math.prod(tensor.shape) * itemsize
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += nbytes
    return shards
