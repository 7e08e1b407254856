"""Warm start: training from the parameters and tokenizer of `train.init_from`, with a new optimizer and new data."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from hpnlp import tasks
from hpnlp.compress.distilling.distillation import Extras
from hpnlp.compress.weight_training import with_own
from hpnlp.compress.weights_file import has_weights
from hpnlp.data import tokenizers
from hpnlp.data.tokenizers import tokenizer_digest
from hpnlp.models import variables
from hpnlp.models.huggingface import convert
from hpnlp.ops.weight import dense_tree
from hpnlp.parallel.plan import Plan
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training import run_directory as runs
from hpnlp.training.config import Config
from hpnlp.training.config_file import load_config
from hpnlp.training.files.checksum import first_difference, shape_text
from hpnlp.training.files.contents import Contents, contents_of
from hpnlp.training.optimizers.state_shardings import place
from hpnlp.training.starts import bodies, upcycling
from hpnlp.training.starts.architecture import differing_fields
from hpnlp.training.trainer import Trainer
from hpnlp.types import InputError, Tokenizer


@dataclasses.dataclass(frozen=True)
class StartSource:
    """A model that training may start from.

    Attributes:
      directory: A run directory, or a directory in the Hugging Face layout.
      task: Name of the task that the parameters were trained for.
      model: The model's config, with the sizes that depend on tokenizer and data filled in.
      vocabulary: The vocabulary that the parameters were trained with.
      spec: The run's `data.tokenizer`; "" for the Hugging Face layout.
      is_run: True for a run directory.
    """

    directory: Path
    task: str
    model: Any
    vocabulary: Vocabulary
    spec: str
    is_run: bool

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the parameters were trained with."""
        return self.vocabulary.tokenizer

    def vocabulary_for(self, task: str) -> Vocabulary:
        """The vocabulary of a run that starts from this model.

        Args:
          task: Name of the run's task.

        Returns:
          The tokenizer, and the labels if the run is of the same task.
        """
        return self.vocabulary.for_other_data() if task == self.task else Vocabulary(self.tokenizer)

    @property
    def remarks(self) -> list[str]:
        """Differences between this model and the one that transformers loads from a Hugging Face directory, as sentences."""
        return [] if self.is_run else convert.remarks(self.directory)

    @property
    def tokenizer_field(self) -> str:
        """The value of `data.tokenizer` that names this tokenizer."""
        return self.tokenizer.spec or str(self.directory / "tokenizer.json")

    def check_model(self, model: Any, accept_changes: bool = False, task: str = "") -> str:
        """Checks that a model that starts from this one computes the same.

        Args:
          model: The model's config, with the sizes that depend on the data filled in.
          accept_changes: Allow differences; `load_params` still refuses parameters of other shapes.
          task: Name of the run's task, if it may differ from the source's: only the fields of bodies are then compared.

        Returns:
          The differences that were accepted, as text; "" for none.

        Raises:
          InputError: The models differ; the message names every field that does, and the flags that make them equal.
        """
        if task not in ("", self.task):
            pairs = bodies.find_pairs(model, self.model, self.directory)
            return bodies.check(pairs, model, self.directory, accept_changes)
        names, scaled = [field.name for field in dataclasses.fields(model)], ""
        if layers := upcycling.upcycled_layers(model, self.model):
            scaled = upcycling.check(model, self.model, layers, accept_changes)
            names = [name for name in names if name not in upcycling.FIELDS]
        differing = differing_fields(model, self.model, names)
        values = {name: (getattr(model, name), getattr(self.model, name)) for name in differing}
        differences = "; ".join(
            f"model.{name} is {ours!r}, in the source {theirs!r}" for name, (ours, theirs) in values.items()
        )
        flags = [shlex.quote(f"--model.{name}={theirs}") for name, (_, theirs) in values.items()]
        if differences and not accept_changes:
            raise InputError(
                f"train.init_from={self.directory} has another model ({differences}): set {' '.join(flags)}; fields "
                "that no flag sets, hpnlp train takes from there; with --accept_changes, parameters of the same shapes are "
                "used in spite of the differences"
            )
        return "; ".join(filter(None, (differences, scaled)))

    def load_params(
        self,
        trainer: Trainer,
        plan: Plan,
        task: str = "",
        key: jax.Array | None = None,
        model: Any = None,
    ) -> tuple[Any, str]:
        """Reads the parameters: those of the best checkpoint of a run, or of a Hugging Face directory.

        Args:
          trainer: Trainer of a model that `check_model` has passed; gives shapes and shardings.
          plan: The trainer's plan.
          task: Name of the run's task, if it may differ from the source's: only bodies are then copied (`models.shared.body`).
            Parameters of a loss that the source lacks, see `DualEncoderConfig.loss_params`, are initialised in any case.
          key: Key of the initialisation.
          model: Config of the trainer's model, for a source of another task, or of MLPs that experts may start from.

        Returns:
          The weights, for `Trainer.init`, and a phrase on their origin.

        Raises:
          InputError: The parameters cannot be read, or have other shapes than the model's.
        """
        if self.is_run:
            # Offloaded parameters come to the devices first; `Trainer.init` moves them to the host.
            plan = dataclasses.replace(plan, offload_optimizer=False, offload_parameters=False)
            run = runs.load(self.directory, plan=plan)
            params, origin = dense_tree(run.params), f"{self.directory}, step {run.step}"
        else:
            params, origin = convert.read(self.directory)[1], f"{self.directory}, a Hugging Face checkpoint"
        shapes = trainer.state_shapes
        pairs = [] if task in ("", self.task) else bodies.find_pairs(model, self.model, self.directory)
        layers = [] if pairs else upcycling.upcycled_layers(model, self.model)
        expected = shapes.params
        if self.is_run or pairs or layers or variables.BUFFERS in params:
            expected = variables.join(shapes.params, shapes.buffers)
        if of_data := self.model.data_buffers:
            params = _with_buffers_of_data(params, trainer, of_data, key)
        replaced = []
        if pairs:
            params, phrase = bodies.with_bodies(_initial(trainer, key), params, pairs)
            origin += f" ({phrase})"
        elif layers:
            params = upcycling.upcycled(params, _initial(trainer, key), model, self.model, layers)
            origin += f", whose MLPs became experts in {len(layers)} layers"
        else:
            of_loss = self.model.loss_params
            if replaced := [name for name in of_loss if (name in params) != (name in expected)]:
                params = _with_new_head(params, trainer, replaced, key)
                origin += ", with a new head" if any(name in expected for name in replaced) else ", without its head"
        extras = Extras.from_weights(expected)
        params = extras.added(with_own(params, expected))
        _check_shapes(params, expected, self)
        is_file = not self.is_run or has_weights(self.directory)  # arrays of a file are on one device
        if is_file or "weights" in expected or replaced or pairs or layers or extras != Extras():
            params = jax.tree.map(place, expected, params)
        return params, f"{origin}, with its tokenizer"


def find(directory: str | Path) -> StartSource:
    """Reads the config and the tokenizer of a run or a Hugging Face directory, but not its parameters.

    Returns:
      The source.

    Raises:
      InputError: The directory is neither, or a file of it is absent.
    """
    path = Path(directory)
    if not path.is_dir():
        raise InputError(
            f"train.init_from={directory} is not a directory: name a run's workdir, or a directory with config.json, "
            "model.safetensors and tokenizer.json"
        )
    if contents_of(path) is Contents.CHECKPOINT:
        return StartSource(
            path,
            convert.family_in(path).task,
            convert.load_config(path),
            Vocabulary(tokenizers.load(str(path)), convert.labels(path)),
            "",
            is_run=False,
        )
    config = load_config(path)
    vocabulary = runs.load_vocabulary(path, config)
    model: Any = runs.make_model(config, vocabulary)
    return StartSource(path, config.task, model.config, vocabulary, config.data.tokenizer, is_run=True)


def check_tokenizer(field: str, source: StartSource) -> None:
    """Checks that a run uses the tokenizer of its source.

    Args:
      field: Value of `data.tokenizer`. The spec of a tokenizer that is trained on text, such as "words(40)", counts as the
        source's tokenizer if the source's run has the same spec.
      source: The model that training starts from.

    Raises:
      InputError: The tokenizers differ.
    """
    if tokenizers.is_trained(field):
        is_same = field == source.spec
    else:
        is_same = tokenizer_digest(tokenizers.build(field)) == tokenizer_digest(source.tokenizer)
    if not is_same:
        raise InputError(
            f"data.tokenizer={field!r} is not the tokenizer that the parameters of {source.directory} were trained with: set "
            f"--data.tokenizer={source.tokenizer_field}"
        )


def check_converted(config: Config, workdir: Path) -> None:
    """Checks that a run may start from the converted model in its directory.

    Args:
      config: Config of the run.
      workdir: Its directory, which holds a converted model.

    Raises:
      InputError: `train.init_from` names another model, or the tokenizers differ.
    """
    init_from = config.train.init_from
    if init_from and os.path.realpath(init_from) != os.path.realpath(workdir):
        raise InputError(
            f"{workdir} holds a converted model, which training begins with, and train.init_from={init_from} names another: "
            "leave train.init_from out, or choose another workdir"
        )
    check_tokenizer(config.data.tokenizer, find(workdir))


def find_first(config: Config) -> StartSource:
    """The model that a run starts from: `find` of `train.init_from`, checked against the run's task and tokenizer.

    Args:
      config: Config of the run.

    Returns:
      The model.

    Raises:
      InputError: As of `find`, or the run cannot start from a model of this task, tokenizer or length.
    """
    source = find(config.train.init_from)
    check_task(config.task, source)
    check_tokenizer(config.data.tokenizer, source)
    check_length(config, source)
    return source


def check_task(task: str, source: StartSource) -> None:
    """Checks that a run is of the task of its source, or that its model may start from the source's body.

    Args:
      task: Name of the run's task.
      source: The model that training starts from.

    Raises:
      InputError: Neither is the case.
    """
    config = tasks.find(task).model_config
    if task == source.task or bodies.find_starts(config, source.model):
        return
    configs = {name: other.model_config for name, other in tasks.TASKS.items()}
    fitting = [name for name, c in configs.items() if c.body in config.starts]
    others = f", or a body of task={' or '.join(map(repr, fitting))}" if fitting else ""
    raise InputError(
        f"train.init_from={source.directory} holds a model of task={source.task!r}, and this config has task={task!r}, whose "
        f"model has no stack that could start from such layers: name a run of the same task{others}"
    )


def check_length(config: Config, source: StartSource) -> None:
    """Checks that the sequences of a run are not longer than the positions of its source.

    Args:
      config: Config of the run.
      source: The model that training starts from.

    Raises:
      InputError: Positions are learned, and sequences are longer; or a mixer of the source mixes sequences of another length.
    """
    model, length = source.model, config.data.seq_len
    if not model.stacks():
        return
    if fixed := model.fixed_length():
        if length != fixed:
            raise InputError(
                f"train.init_from={source.directory} mixes sequences of {fixed} tokens, and data.seq_len={length}: set "
                f"--data.seq_len={fixed}"
            )
    elif model.position == "learned" and length > model.max_len:
        raise InputError(
            f"train.init_from={source.directory} has {model.max_len} learned positions, and data.seq_len={length}: set "
            f"--data.seq_len={model.max_len} or less, or name a source of that length, or one with model.position='rope'"
        )


def _initial(trainer: Trainer, key: jax.Array | None) -> Any:
    """Initial weights."""
    initial = trainer.init(key)
    return variables.join(initial.params, initial.buffers)


def _with_buffers_of_data(params: Any, trainer: Trainer, names: Sequence[str], key: jax.Array | None) -> Any:
    """Replaces the buffers that belong to the source's data by their initial values."""
    of_source, buffers = variables.split(params)
    kept = {name: tree for name, tree in (buffers or {}).items() if name not in names}
    initial = trainer.init(key).buffers or {}
    return variables.join(of_source, {**kept, **{name: initial[name] for name in names if name in initial}})


def _with_new_head(params: Any, trainer: Trainer, replaced: Sequence[str], key: jax.Array | None) -> Any:
    """Takes parameters that both models have from the source, unless they are replaced, and initial values for all others."""
    first = _initial(trainer, key)
    kept = {name: tree for name, tree in params.items() if name in first and name not in replaced}
    return {**first, **kept}


def _check_shapes(params: Any, expected: Any, source: StartSource) -> None:
    """Raises InputError unless the parameters of the source have the expected names and shapes."""
    if difference := first_difference(expected, params, shape_text):
        name, of_model, of_source = difference
        raise InputError(
            f"train.init_from={source.directory} does not fit this model: params{name} is {of_source} in the source, expected "
            f"{of_model}: set the model's fields to the source's"
        )
