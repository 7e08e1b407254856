"""Warm start: training from the parameters and tokenizer of `train.init_from`, with a new optimizer and new data."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from hpnlp import tasks
from hpnlp.compress.distillation import Extras
from hpnlp.compress.files import has_weights
from hpnlp.compress.weight_training import with_own
from hpnlp.data import tokenizers
from hpnlp.data.tokenizers import tokenizer_digest
from hpnlp.models import variables
from hpnlp.models.backbone import BackboneConfig
from hpnlp.models.huggingface import convert
from hpnlp.ops.weight import dense_tree
from hpnlp.parallel.plan import Plan
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training import distributed, upcycling
from hpnlp.training import run_directory as runs
from hpnlp.training.architecture import architecture
from hpnlp.training.checkpoint import Checkpointer
from hpnlp.training.checksum import first_difference, shape_of
from hpnlp.training.config import Config
from hpnlp.training.contents import Contents, contents_of
from hpnlp.training.state_shardings import place
from hpnlp.training.step import Trainer
from hpnlp.types import InputError, Tokenizer


@dataclasses.dataclass(frozen=True)
class Source:
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

    @property
    def remarks(self) -> list[str]:
        """Differences between this model and the one that transformers loads from a Hugging Face directory, as sentences."""
        return [] if self.is_run else convert.remarks(self.directory)

    @property
    def tokenizer_field(self) -> str:
        """The value of `data.tokenizer` that names this tokenizer."""
        is_bytes = isinstance(self.tokenizer, tokenizers.ByteTokenizer)
        return "bytes" if is_bytes else str(self.directory / "tokenizer.json")


def find(directory: str | Path) -> Source:
    """Reads the config and the tokenizer of a run or a Hugging Face directory, but not its parameters.

    Args:
      directory: The directory.

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
        return Source(
            path,
            convert.family_in(path).task,
            convert.load_config(path),
            Vocabulary(tokenizers.load(str(path)), convert.labels(path)),
            "",
            is_run=False,
        )
    config = runs.load_config(path)
    vocabulary = runs.load_vocabulary(path, config)
    model: Any = runs.make_model(config, vocabulary)
    return Source(path, config.task, model.config, vocabulary, config.data.tokenizer, is_run=True)


def check_tokenizer(field: str, source: Source) -> None:
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


def check_converted(init_from: str, workdir: Path) -> None:
    """Checks that `train.init_from` names no other model than the converted model in the run directory.

    Args:
      init_from: Value of `train.init_from`, "" for none.
      workdir: A run directory that holds a converted model.

    Raises:
      InputError: `init_from` names another model.
    """
    if init_from and os.path.realpath(init_from) != os.path.realpath(workdir):
        raise InputError(
            f"{workdir} holds a converted model, which training begins with, and train.init_from={init_from} names another: "
            "leave train.init_from out, or choose another workdir"
        )


def find_first(config: Config, workdir: Path) -> Source | None:
    """The model that a run starts from: `find` of `train.init_from`, checked against the run's task and tokenizer.

    Args:
      config: Config of the run.
      workdir: The run directory.

    Returns:
      The model; None without `train.init_from`, or if the run continues from a checkpoint of its own.

    Raises:
      InputError: As of `find`, or the model is of another task or tokenizer.
    """
    if not config.train.init_from or distributed.lead_value(Checkpointer.exist(workdir)):
        return None
    source = find(config.train.init_from)
    check_task(config.task, source)
    check_tokenizer(config.data.tokenizer, source)
    return source


def check_task(task: str, source: Source) -> None:
    """Checks that a run is of the task of its source, or that the models of both share an encoder or towers.

    Args:
      task: Name of the run's task.
      source: The model that training starts from.

    Raises:
      InputError: The tasks differ, and their models are not of one kind.
    """
    if task != source.task and not _shares_backbone(task, source) and not _shares_stacks(task, source):
        raise InputError(
            f"train.init_from={source.directory} holds a model of task={source.task!r}, and this config has task={task!r}: "
            "name a run of the same task"
        )


def _shares_backbone(task: str, source: Source) -> bool:
    """Whether the model of a task is the source's but for the head."""
    fields = [getattr(tasks.find(name).model_config, "head_fields", ()) for name in (task, source.task)]
    return bool(fields[0]) and fields[0] == fields[1]


def _shares_stacks(task: str, source: Source) -> bool:
    """Whether stacks of the model of a task go on from those of the source's."""
    config = tasks.find(task).model_config
    return issubclass(config, BackboneConfig) and source.task in config.first_stacks


def _copied_stacks(model: Any, source: Source) -> dict[str, str]:
    """Names of the stacks of a model that go on from those of a source of another task, and their names there; mostly none.

    Raises InputError unless the model has all stacks of the source.
    """
    if not isinstance(model, BackboneConfig) or source.task not in model.first_stacks:
        return {}
    ours: Any = model
    names = {name: theirs for name, theirs in model.first_stacks[source.task].items() if name in ours.stacks()}
    if set(names.values()) != set(_stacks(source.model)):
        raise InputError(
            f"train.init_from={source.directory} has model.shared={source.model.shared}, and this model "
            f"model.shared={ours.shared}: set --model.shared={source.model.shared}"
        )
    return names


def _stacks(model: Any) -> dict[str, Any]:
    """Configs of the stacks of a model by their names; "" for a model that is one stack."""
    return {"": model} if model.is_single_stack else model.stacks()


def check_model(model: Any, source: Source, accept_changes: bool = False, task: str = "") -> str:
    """Checks that a model computes the same as its source's model.

    Args:
      model: The model's config, with the sizes that depend on the data filled in.
      source: The model that training starts from.
      accept_changes: Allow differences; `load_params` still refuses parameters of other shapes.
      task: Name of the run's task, if it may differ from the source's: fields of the head may then differ.

    Returns:
      The differences that were accepted, as text; "" for none.

    Raises:
      InputError: The models differ; the message names every field that does, and the flags that make them equal.
    """
    if stacks := _copied_stacks(model, source):
        of_model, of_source = model.stacks(), _stacks(source.model)
        checked = [
            # The head of a whole model is no part of its layers.
            check_model(
                of_model[name],
                dataclasses.replace(source, model=of_source[theirs]),
                accept_changes,
                "" if theirs else task,
            )
            for name, theirs in stacks.items()
        ]
        return "; ".join(dict.fromkeys(filter(None, checked)))
    ours, theirs = architecture(model), architecture(source.model)
    differing, flags = [], []
    free = model.head_fields if task not in ("", source.task) else ()
    scaled = ""
    if layers := upcycling.upcycled_layers(model, source.model):
        scaled = upcycling.check(model, source.model, layers, accept_changes)
        free = (*free, *upcycling.FIELDS)
    for name in (field.name for field in dataclasses.fields(model) if field.name not in free):
        value, of_source = getattr(model, name), getattr(source.model, name)
        # Fields that are 0 in both configs are derived from other fields, and these are named.
        if name in theirs and ours.get(name) != theirs[name] and value != of_source:
            differing.append(f"model.{name} is {value!r}, in the source {of_source!r}")
            flags.append(shlex.quote(f"--model.{name}={of_source}"))
    differences = "; ".join(differing)
    if differences and not accept_changes:
        raise InputError(
            f"train.init_from={source.directory} has another model ({differences}): set {' '.join(flags)}, or copy the model "
            f"from there, as --config=lm/finetune:{source.directory} does; with --accept_changes, parameters of the same "
            "shapes are used in spite of the differences"
        )
    return "; ".join(filter(None, (differences, scaled)))


def load_params(
    source: Source, trainer: Trainer, plan: Plan, task: str = "", key: jax.Array | None = None, model: Any = None
) -> tuple[Any, str]:
    """Reads the parameters of a source.

    Args:
      source: A run, of which the best checkpoint is read, or a Hugging Face directory.
      trainer: Trainer of a model that `check_model` has passed; gives shapes and shardings.
      plan: The trainer's plan.
      task: Name of the run's task, if it may differ from the source's: parameters of the head are then initialised. Those of
        a loss that the source lacks, see `DualEncoderConfig.loss_params`, are initialised in any case.
      key: Key of the initialisation.
      model: Config of the trainer's model, if its experts may start from MLPs of the source: the routers are then initialised.

    Returns:
      The weights, for `Trainer.init`, and a phrase on their origin.

    Raises:
      InputError: The parameters cannot be read, or have other shapes than the model's.
    """
    if source.is_run:
        # Offloaded parameters come to the devices first; `Trainer.init` moves them to the host.
        plan = dataclasses.replace(plan, offload_optimizer=False, offload_parameters=False)
        run = runs.load(source.directory, plan=plan)
        params, origin = dense_tree(run.params), f"{source.directory}, step {run.step}"
    else:
        params, origin = convert.read(source.directory)[1], f"{source.directory}, a Hugging Face checkpoint"
    shapes = trainer.state_shapes
    if layers := upcycling.upcycled_layers(model, source.model):
        initial = trainer.init(key)
        first = variables.join(initial.params, initial.buffers)
        params = upcycling.upcycled(params, first, model, source.model, layers)
        origin += f", whose MLPs became experts in {len(layers)} layers"
    expected = shapes.params
    stacks = _copied_stacks(model, source)
    if source.is_run or stacks or variables.BUFFERS in params:
        expected = variables.join(shapes.params, shapes.buffers)
    if of_data := _data_buffers(source.model):
        params = _with_buffers_of_data(params, trainer, of_data, key)
    extras = Extras.of_shapes(expected)
    if stacks:
        replaced = []
        params, phrase = _with_stacks(params, trainer, stacks, key, model, source.model)
        origin += phrase
    elif task not in ("", source.task):
        replaced = [*source.model.head_params, variables.BUFFERS]
    else:
        of_loss = getattr(source.model, "loss_params", ())
        replaced = [name for name in of_loss if (name in params) != (name in expected)]
    if has_new_head := bool(replaced):
        params = _with_new_head(params, trainer, replaced, key)
        has_head = task not in ("", source.task) or any(name in expected for name in replaced)
        origin += ", with a new head" if has_head else ", without its head"
    params = extras.added(with_own(params, expected))
    _check_shapes(params, expected, source)
    is_file = not source.is_run or has_weights(source.directory)  # whose arrays are on one device
    if is_file or "weights" in expected or has_new_head or stacks or layers or extras != Extras():
        params = jax.tree.map(place, expected, params)
    return params, f"{origin}, with its tokenizer"


def _data_buffers(model: Any) -> Sequence[str]:
    """Names of the buffers that belong to the data of a run."""
    return model.data_buffers if isinstance(model, BackboneConfig) else ()


def _with_buffers_of_data(params: Any, trainer: Trainer, names: Sequence[str], key: jax.Array | None) -> Any:
    """Weights of the source, with initial values of the buffers that belong to its data."""
    of_source, buffers = variables.split(params)
    kept = {name: tree for name, tree in (buffers or {}).items() if name not in names}
    initial = trainer.init(key).buffers or {}
    return variables.join(of_source, {**kept, **{name: initial[name] for name in names if name in initial}})


def _with_new_head(params: Any, trainer: Trainer, replaced: Sequence[str], key: jax.Array | None) -> Any:
    """Weights of the source that the model has too, without those that are replaced, and initial values of all others."""
    initial = trainer.init(key)
    first = variables.join(initial.params, initial.buffers)
    kept = {name: tree for name, tree in params.items() if name in first and name not in replaced}
    return {**first, **kept}


def _with_stacks(
    params: Any, trainer: Trainer, stacks: Mapping[str, str], key: jax.Array | None, model: Any, of_source: Any
) -> tuple[Any, str]:
    """Initial weights, with the parameters of the source in the stacks that go on from it; and a phrase on these stacks."""
    initial = trainer.init(key)
    weights = variables.join(initial.params, initial.buffers)
    if set(stacks.values()) != {""}:
        copied = {name: params[theirs] for name, theirs in stacks.items()}
        return {**weights, **copied}, f", of which {' and '.join(stacks.values())} go on"
    (name,) = stacks
    keeps_head = all(
        getattr(model.stacks()[name], field) == getattr(of_source, field) for field in ("transform", "output", "tied")
    )
    weights[name] = _with_whole_model(weights[name], params, () if keeps_head else of_source.head_params)
    return weights, f", as the {name}" + ("" if keeps_head else " with a new output layer")


def _with_whole_model(initial: Any, params: Any, replaced: Sequence[str]) -> Any:
    """Parameters of a stack: those of another model that it has too, and initial values of those that are replaced.

    The first token type is 0 if the other model has none, so that a text alone is read as before.
    """
    merged = {**initial, **{name: x for name, x in params.items() if name in initial and name not in replaced}}
    if "token_types" in initial and "token_types" not in params:
        merged["token_types"] = {"table": initial["token_types"]["table"].at[0].set(0.0)}
    return merged


def _check_shapes(params: Any, expected: Any, source: Source) -> None:
    """Raises InputError unless the parameters of the source have the expected names and shapes."""
    if difference := first_difference(expected, params, shape_of):
        name, of_model, of_source = difference
        raise InputError(
            f"train.init_from={source.directory} does not fit this model: params{name} is {of_source} in the source, expected "
            f"{of_model}: set the model's fields to the source's"
        )
