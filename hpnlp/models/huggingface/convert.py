"""Hugging Face checkpoints to a language model and back: config.json and model.safetensors.

What families call their sizes and tensors stands in `families.py`. Only safetensors is read: the older
pytorch_model.bin is a pickle, which runs code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from hpnlp.models.huggingface import families
from hpnlp.models.huggingface.families import FAMILIES, Family, config_json, fields_of
from hpnlp.models.lm import DTYPES, LM, LMConfig, example_batch
from hpnlp.spec import lookup
from hpnlp.types import InputError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"

# Settings of generation_config.json that change the most probable text -> the value that changes nothing, beside null.
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

# Leaf of ours -> its suffix in a checkpoint. The head is a leaf itself, without a module.
LEAVES = {"/kernel": "weight", "/scale": "weight", "/table": "weight", "": "weight", "/bias": "bias"}

# Buffers that older checkpoints carry along: causal masks and rotary frequencies.
BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint: the parameters at `paths` (of one layer where `layer` is given) side by side."""

    name: str
    shape: tuple[int, ...]
    paths: tuple[str, ...]
    layer: int | None
    transposed: bool

    def read(self, value: np.ndarray, params: Mapping[str, np.ndarray]) -> None:
        """Writes the checkpoint's `value` into the parameters."""
        value = value.T if self.transposed else value
        start = 0
        for path in self.paths:
            target = params[path] if self.layer is None else params[path][self.layer]
            stop = start + target.shape[-1]
            target[...] = value[..., start:stop]
            start = stop

    def write(self, params: Mapping[str, Any], dtype: Any) -> np.ndarray:
        """The checkpoint's value, contiguous, because safetensors writes buffers as they lie in memory."""
        parts = [np.asarray(params[path] if self.layer is None else params[path][self.layer]) for path in self.paths]
        value = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        return np.ascontiguousarray(value.T if self.transposed else value, dtype)


def load_config(directory: str | Path, dtype: str = "float32") -> LMConfig:
    """The config of a directory's model, from config.json alone. Arguments and errors are those of `load`."""
    directory = Path(directory)
    lookup(DTYPES, dtype, "dtype")
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory: download the checkpoint, and name the directory it is in")
    source = str(directory / "config.json")
    fields = fields_of(_read_json(directory / "config.json"), source)
    try:
        return LMConfig(**fields, dtype=dtype)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def load(directory: str | Path, dtype: str = "float32") -> tuple[LMConfig, dict[str, Any]]:
    """The model of a directory that transformers' `save_pretrained` wrote: `(config, float32 numpy parameters)`.

    float16 and bfloat16 are widened. Memory: the parameters in float32 and one tensor of the checkpoint.

    Args:
        directory: config.json and the safetensors files.
        dtype: an entry of DTYPES, what the model is to compute in.

    Returns:
        The config, with `dtype`, and the parameters as `LM.init` makes them.

    Raises:
        InputError: Files are missing or damaged, tensors do not fit config.json, a tensor holds NaN or infinity or would
            in `dtype`, or config.json asks for something that LM does not compute.
    """
    directory, config = Path(directory), load_config(directory, dtype)
    family = FAMILIES[_read_json(directory / "config.json")["model_type"]]
    shapes = _shapes(config)
    expected = {tensor.name: tensor for tensor in _tensors(family, shapes)}
    with contextlib.ExitStack() as stack:
        found = _open(directory, family, stack)
        _check(expected, found, config, directory)
        params = {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
        for name, tensor in expected.items():
            value = found[name].get()
            _check_finite(value, f"{directory}: {name}", dtype, "download it again, or take another checkpoint")
            tensor.read(value, params)
        head = found.get("lm_head.weight") if config.tied else None
        if head is not None and not np.array_equal(head.get(), params["embed/table"]):
            raise InputError(
                f"{directory}: lm_head.weight differs from the embedding that it should equal: "
                "set tie_word_embeddings to false in config.json"
            )
    return config, unflatten_dict(params, sep="/")


def model_type(directory: str | Path) -> str:
    """The model_type in the config.json of a directory that `save` wrote."""
    return _read_json(Path(directory) / "config.json")["model_type"]


def remarks(directory: str | Path) -> list[str]:
    """Differences between the model that `load` makes of a directory and transformers', one line each."""
    return families.remarks(_read_json(Path(directory) / "config.json"))


def generation_settings(directory: str | Path) -> dict[str, Any]:
    """Settings of transformers' `generate`: generation_config.json, or where there is none the ids of config.json."""
    path = _generation_file(directory)
    settings = _read_json(path)
    if path.name == GENERATION:
        return settings
    return {name: settings[name] for name in ("bos_token_id", "eos_token_id") if settings.get(name) is not None}


def _generation_file(directory: str | Path) -> Path:
    path = Path(directory) / GENERATION
    return path if os.path.lexists(path) else Path(directory) / "config.json"


def eos_ids(directory: str | Path) -> tuple[int, ...]:
    """The ids at which transformers' `generate` ends a text, () where a directory names none.

    Raises:
        InputError: the file is damaged, or eos_token_id is neither an id nor a list of ids.
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
    """Settings of generation_config.json that change the text of transformers' `generate` and not that of `hpnlp generate`."""
    settings = generation_settings(directory)
    ignored = [
        f"{name}={settings[name]!r}"
        for name, idle in GREEDY_SETTINGS.items()
        if settings.get(name) is not None and settings[name] != idle
    ]
    return [f"{GENERATION} sets {', '.join(ignored)}, which hpnlp generate does not apply"] if ignored else []


def save(
    config: LMConfig,
    params: Mapping[str, Any],
    directory: str | Path,
    *,
    dtype: str = "float32",
    bos_id: int | None = None,
    eos_id: int | None = None,
    shard_bytes: int = 5 * 2**30,
) -> None:
    """Writes a directory that transformers' `from_pretrained` reads: config.json and model.safetensors.

    Memory: one file beside the parameters.

    Args:
        config: the model's.
        params: as `LM.init` makes them; numpy or jax arrays.
        directory: made where it is missing; must not hold a checkpoint.
        dtype: an entry of DTYPES, what the tensors are stored in.
        bos_id, eos_id: the tokenizer's, for transformers' `generate`.
        shard_bytes: a larger model is split into files of this size, as transformers does.

    Raises:
        InputError: No family has such a model, params are not config's or are not finite in dtype, the directory already
            holds a checkpoint, or writing fails.
    """
    numpy_format = _safetensors("numpy")
    directory = Path(directory)
    raw = config_json(config) | {"dtype": dtype, "bos_token_id": bos_id, "eos_token_id": eos_id}
    stored = np.dtype(lookup(DTYPES, dtype, "dtype"))
    flat = _flatten(params)
    shapes = _shapes(config)
    wrong = dict(shapes.items() ^ {path: tuple(leaf.shape) for path, leaf in flat.items()}.items())
    if wrong:
        raise InputError(f"params are not of config: {', '.join(sorted(wrong))} differ; pass the config that made them")
    tensors = list(_tensors(FAMILIES[raw["model_type"]], shapes))
    _check_all_finite(tensors, flat, dtype)
    shards = _split(tensors, stored.itemsize, shard_bytes)
    with _one_line(directory, "free some space, or name a directory that can be written"):
        directory.mkdir(parents=True, exist_ok=True)
        for path in (directory / "config.json", *directory.glob("*.safetensors")):
            if path.exists():
                raise InputError(f"{path} exists: name an empty directory")
        index: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            name = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            values = {tensor.name: tensor.write(flat, stored) for tensor in shard}
            numpy_format.save_file(values, directory / name, metadata={"format": "pt"})
            index |= dict.fromkeys(values, name)
        if len(shards) > 1:
            total = sum(math.prod(tensor.shape) for shard in shards for tensor in shard) * stored.itemsize
            _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
        _write_json(directory / "config.json", raw)


def check_readable(directory: str | Path) -> None:
    """Reads back config.json and the header of each file of weights, which states the file's size.

    Raises:
        InputError: One of them cannot be read.
    """
    directory = Path(directory)
    with contextlib.ExitStack() as stack:
        load_config(directory)
        _open(directory, FAMILIES[_read_json(directory / "config.json")["model_type"]], stack)


def _shapes(config: LMConfig) -> Shapes:
    """Path of each parameter of LM(config) -> its shape; allocates nothing."""
    init = lambda: LM(config).init(jax.random.key(0), example_batch(1, 1))["params"]  # noqa: E731
    return {path: tuple(leaf.shape) for path, leaf in _flatten(jax.eval_shape(init)).items()}


def _flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    return flatten_dict(nn.meta.unbox(dict(params)), sep="/")


def _tensors(family: Family, shapes: Shapes) -> Iterator[Tensor]:
    """The tensors of a checkpoint that hold the parameters of these shapes."""
    for theirs, ours in family.modules.items():
        for leaf, suffix in LEAVES.items():
            paths = tuple(module + leaf for module in ours)
            if paths[0] not in shapes:
                continue
            stacked = "{}" in theirs
            parts = [shapes[path][stacked:] for path in paths]
            shape = (*parts[0][:-1], sum(part[-1] for part in parts))
            transposed = family.transposed and leaf == "/kernel"
            for layer in range(shapes[paths[0]][0]) if stacked else [None]:
                name = f"{theirs.format(layer)}.{suffix}"
                yield Tensor(name, shape[::-1] if transposed else shape, paths, layer, transposed)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in an open safetensors file, under the name that it has there."""

    path: Path
    file: Any
    name: str

    def get(self) -> np.ndarray:
        with _one_line(self.path, "download it again"):
            return self.file.get_tensor(self.name).astype(np.float32, copy=False)

    def describe(self) -> tuple[tuple[int, ...], str]:
        """`(shape, dtype)`, from the file's header."""
        view = self.file.get_slice(self.name)
        return tuple(view.get_shape()), view.get_dtype()


def _open(directory: Path, family: Family, stack: contextlib.ExitStack) -> dict[str, Stored]:
    """Every tensor of the checkpoint under its full name; the files stay open as long as `stack`."""
    safetensors = _safetensors()
    found: dict[str, Stored] = {}
    for path in _weight_files(directory):
        with _one_line(path, "download it again"):
            file = stack.enter_context(safetensors.safe_open(path, framework="np"))
        found |= {name: Stored(path, file, name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    if not any(name.startswith(family.base) for name in found):
        found = {name if name.startswith("lm_head.") else family.base + name: value for name, value in found.items()}
    return found


def _weight_files(directory: Path) -> list[Path]:
    if (directory / WEIGHTS).exists():
        return [directory / WEIGHTS]
    if (directory / INDEX).exists():
        index = _read_json(directory / INDEX)
        names = index["weight_map"].values() if isinstance(index.get("weight_map"), dict) else []
        if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise InputError(
                f"{directory / INDEX}: expected a weight_map of tensors to files beside it; download it again"
            )
        return [directory / name for name in sorted(set(names))]
    if any(directory.glob("pytorch_model*.bin*")):
        raise InputError(
            f"{directory} holds only pytorch_model.bin, a pickle, which can run code when it is read: "
            "load it with transformers where you trust it, and save_pretrained writes safetensors"
        )
    raise InputError(f"{directory} holds no {WEIGHTS}: download it too")


def _check(expected: Mapping[str, Tensor], found: Mapping[str, Stored], config: LMConfig, directory: Path) -> None:
    """Raises InputError unless the tensors found are those expected, from the files' headers alone."""
    missing = [name for name in expected if name not in found]
    if missing:
        raise InputError(
            f"{directory} lacks {len(missing)} tensor{'s' * (len(missing) > 1)} that config.json asks for, "
            f"{missing[0]} first: take both from one checkpoint"
        )
    surplus = [name for name in found if name not in expected and not BUFFERS.search(name)]
    if config.tied and "lm_head.weight" in surplus:
        surplus.remove("lm_head.weight")
    if surplus:
        raise InputError(
            f"{directory} holds {len(surplus)} tensor{'s' * (len(surplus) > 1)} that the model of config.json lacks, "
            f"{surplus[0]} first: take both from one checkpoint"
        )
    for name, tensor in expected.items():
        shape, dtype = found[name].describe()
        if shape != tensor.shape:
            raise InputError(
                f"{directory}: {name} has shape {shape}, but config.json makes it {tensor.shape}: mend that file"
            )
        if dtype not in ("F32", "F16", "BF16"):
            raise InputError(
                f"{directory}: {name} is stored as {dtype}: expected F32, F16 or BF16; save it as one of these"
            )


def _check_all_finite(tensors: list[Tensor], flat: Mapping[str, Any], dtype: str) -> None:
    """Raises InputError with the first tensor that holds NaN or infinity, or would once it is stored as `dtype`."""
    with np.errstate(over="ignore"):
        finite = {path: np.isfinite(np.asarray(leaf).astype(DTYPES[dtype])).all() for path, leaf in flat.items()}
    for tensor in tensors:
        if not all(finite[path] for path in tensor.paths):
            name = f"{tensor.name} (of params {', '.join(tensor.paths)})"
            _check_finite(tensor.write(flat, np.float32), name, dtype, "training diverged, take an earlier checkpoint")


def _check_finite(value: np.ndarray, name: str, dtype: str, mend: str) -> None:
    """Raises InputError where the float32 `value` is not finite, or is not once it is narrowed to `dtype`."""
    count = int(value.size - np.isfinite(value).sum())
    if count:
        raise InputError(f"{name} holds NaN or infinity, {count} of {value.size} numbers: {mend}")
    with np.errstate(over="ignore"):
        fits = dtype == "float32" or np.isfinite(value.astype(DTYPES[dtype])).all()
    if not fits:
        wider = "bfloat16 or float32" if dtype == "float16" else "float32"
        raise InputError(f"{name} holds {np.abs(value).max():.4g}, which is infinite in {dtype}: choose dtype {wider}")


def _split(tensors: list[Tensor], itemsize: int, limit: int) -> list[list[Tensor]]:
    """The tensors in order, in groups of at most `limit` bytes where a single one is not larger."""
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


def _read_json(path: Path) -> dict[str, Any]:
    if path.is_fifo():  # which may have no end
        raise InputError(f"{path} is not a regular file: download it again")
    with _one_line(path, "download it again", ValueError, RecursionError):
        value = json.loads(path.read_text("utf-8"))
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}: expected an object; download it again")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def _safetensors(module: str = "") -> Any:
    """The package or one of its modules; it comes with an extra, so it is imported where it is needed."""
    try:
        return importlib.import_module(f"safetensors.{module}" if module else "safetensors")
    except ImportError as error:
        raise InputError("Hugging Face checkpoints need the package safetensors: pip install safetensors") from error


@contextlib.contextmanager
def _one_line(path: Path, mend: str, *damage: type[Exception]) -> Iterator[None]:
    """What goes wrong with a file, as an InputError. damage: exceptions that mean a damaged file, beside safetensors'."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist: {mend}") from error
    except (OSError, *damage, _safetensors().SafetensorError) as error:
        raise InputError(f"{path}: {error}; {mend}") from error
