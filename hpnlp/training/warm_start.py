"""Warm start: parameters and tokenizer from the model that `train.init_from` names, with a fresh optimizer and data."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from hpnlp.data import tokenizers
from hpnlp.data.stream import tokenizer_digest
from hpnlp.models.huggingface import convert, families
from hpnlp.models.lm import LMConfig
from hpnlp.nn.attention import alternation
from hpnlp.parallel.plan import Plan
from hpnlp.training import run_directory as runs
from hpnlp.training.step import Trainer
from hpnlp.types import InputError, Tokenizer

# Fields of LMConfig that a new run may choose: the parameters mean the same under any value.
FREE = ("dtype", "dropout", "unroll")


@dataclasses.dataclass(frozen=True)
class Source:
    """A model that training may begin with.

    Attributes:
        directory: a run's workdir, or a directory in the Hugging Face layout.
        model: the model's config, with the sizes that a tokenizer and data decide filled in.
        tokenizer: what its ids mean.
        spec: the run's `data.tokenizer`; "" in the Hugging Face layout.
        is_run: whether the directory is a run's.
    """

    directory: Path
    model: LMConfig
    tokenizer: Tokenizer
    spec: str
    is_run: bool

    @property
    def remarks(self) -> list[str]:
        """Differences between this model and the one that transformers makes of a Hugging Face directory, a line each."""
        return [] if self.is_run else convert.remarks(self.directory)

    @property
    def tokenizer_field(self) -> str:
        """The value of `data.tokenizer` that names this tokenizer."""
        is_bytes = isinstance(self.tokenizer, tokenizers.ByteTokenizer)
        return "bytes" if is_bytes else str(self.directory / "tokenizer.json")


def find(directory: str | Path) -> Source:
    """Reads the config and the tokenizer of a run or a Hugging Face directory; its parameters stay on the disk.

    Raises:
        InputError: the directory is neither, or lacks a part.
    """
    path = Path(directory)
    source = path / "config.json"
    if not path.is_dir():
        raise InputError(
            f"train.init_from={directory} is not a directory: name a run's workdir, or a directory with config.json, "
            "model.safetensors and tokenizer.json"
        )
    raw = _read(source)
    if "model_type" in raw:
        fields = families.fields_of(raw, str(source))
        try:
            model = LMConfig(**fields)
        except InputError as error:
            raise InputError(f"{source}: {error}") from None
        return Source(path, model, tokenizers.load(str(path)), "", is_run=False)
    config, tokenizer = runs.load_config(path), runs.saved_tokenizer(path)
    if tokenizer is None:
        raise InputError(
            f"train.init_from={directory} has no tokenizer.json: put back the one that the run was trained with"
        )
    return Source(path, runs.make_model(config, tokenizer).config, tokenizer, config.data.tokenizer, is_run=True)


def _read(path: Path) -> Mapping[str, Any]:
    """The object in a config.json, or {} where a run's reader has more to say about what is wrong with the file."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def check_tokenizer(field: str, source: Source) -> None:
    """Raises InputError unless `data.tokenizer` names the tokenizer of `source`.

    Args:
        field: the value of `data.tokenizer`. A vocabulary that would be made from text is taken to be the source's where the
            source's run names it alike.
        source: whose ids the parameters know.
    """
    if tokenizers.is_trained(field):
        is_same = field == source.spec
    else:
        is_same = tokenizer_digest(tokenizers.build(field)) == tokenizer_digest(source.tokenizer)
    if not is_same:
        raise InputError(
            f"data.tokenizer={field!r} is not the tokenizer that the parameters of {source.directory} were trained with: set "
            f"--config.data.tokenizer={source.tokenizer_field}"
        )


def check_own(init_from: str, workdir: Path) -> None:
    """Raises InputError where `train.init_from` names another model than the converted one that `workdir` holds."""
    if init_from and os.path.realpath(init_from) != os.path.realpath(workdir):
        raise InputError(
            f"{workdir} holds a converted model, which training begins with, and train.init_from={init_from} names another: "
            "leave train.init_from out, or choose another workdir"
        )


def check_model(model: LMConfig, source: Source, accept_changes: bool = False) -> str:
    """Compares what `model` computes with what the model of `source` does.

    Args:
        model: with sizes filled in, as `config.model_of` does.
        source: whose parameters the model is to begin with.
        accept_changes: allow differences; `load_params` still refuses parameters of other shapes.

    Returns:
        The differences that were accepted, "" for none.

    Raises:
        InputError: the models differ; the message names every field that does.
    """
    ours, theirs = _architecture(model), _architecture(source.model)
    told, fix = [], []
    for name in (field.name for field in dataclasses.fields(LMConfig)):
        here, there = getattr(model, name), getattr(source.model, name)
        # Sizes that are 0 on both sides follow from others, which are named.
        if name in theirs and ours.get(name) != theirs[name] and here != there:
            told.append(f"model.{name} is {here!r}, there {there!r}")
            fix.append(shlex.quote(f"--config.model.{name}={there}"))
    differences = "; ".join(told)
    if differences and not accept_changes:
        raise InputError(
            f"train.init_from={source.directory} has another model ({differences}): set {' '.join(fix)}, or take the model "
            f"from there, as experiments/lm/finetune.py:{source.directory} does; with --accept_changes, parameters of the same "
            "shapes are taken all the same"
        )
    return differences


def _architecture(config: LMConfig) -> dict[str, Any]:
    """The fields that decide which parameters there are and what is computed with them, in one spelling."""
    values = {name: value for name, value in dataclasses.asdict(config).items() if name not in FREE}
    values |= {"kv_heads": config.kv_head_count, "head_dim": config.head_size, "mlp_dim": config.mlp_size}
    values["mixer"] = alternation(config.mixer)
    unused = [] if config.position == "learned" else ["max_len"]
    unused += [] if config.position == "rope" else ["rope_theta", "rope_scaling"]
    return {name: value for name, value in values.items() if name not in unused}


def load_params(source: Source, trainer: Trainer, plan: Plan) -> tuple[Any, str]:
    """Reads the parameters of `source`, laid out as `trainer` has its own.

    Args:
        source: a run, of which the best checkpoint is taken, or a Hugging Face directory.
        trainer: of a model that `check_model` has passed.
        plan: the trainer's.

    Returns:
        The parameters, for `Trainer.init`, and a phrase that says where they are from.

    Raises:
        InputError: the parameters cannot be read, or have other shapes than the model's.
    """
    if source.is_run:
        # What rests on the host there comes to the devices first; `Trainer.init` puts it back.
        run = runs.load(
            source.directory, plan=dataclasses.replace(plan, offload_optimizer=False, offload_parameters=False)
        )
        found, phrase = run.params, f"{source.directory}, step {run.step}"
    else:
        found, phrase = convert.load(source.directory)[1], f"{source.directory}, a Hugging Face checkpoint"
    expected = trainer.state_shapes.params
    shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(expected)}
    theirs = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(found)}
    for name in [*shapes, *theirs]:
        if shapes.get(name) != theirs.get(name):
            raise InputError(
                f"train.init_from={source.directory} does not fit this model: the shape of params{name} is "
                f"{theirs.get(name, 'not given')} there, and {shapes.get(name, 'none')} here: give the model its config"
            )
    if not source.is_run:
        found = jax.tree.map(_put, expected, found)
    return found, f"{phrase}, with its tokenizer"


def _put(shape: Any, value: Any) -> jax.Array:
    sharding = NamedSharding(shape.sharding.mesh, shape.sharding.spec)  # in the devices' memory
    return jax.make_array_from_callback(shape.shape, sharding, lambda index: value[index])
