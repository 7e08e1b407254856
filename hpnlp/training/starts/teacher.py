"""The teacher of a run: read from `distill.teacher`, checked against the student, and scored beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hpnlp import tasks
from hpnlp.compress.distilling.distillation import (
    TEACHER,
    Distillation,
    make_extras,
)
from hpnlp.compress.distilling.distillation_losses import check_terms, chosen_layers
from hpnlp.compress.distilling.distillation_terms import parse_terms
from hpnlp.compress.layers import join_layers, split_layers
from hpnlp.compress.weight_training import with_own
from hpnlp.data.reading.files import Progress, ignore_progress
from hpnlp.data.tokenizers import tokenizer_digest
from hpnlp.models import variables
from hpnlp.models.huggingface import convert
from hpnlp.models.stacks.layer_forms import carries
from hpnlp.ops.weight import dense_tree
from hpnlp.parallel.plan import Plan
from hpnlp.tasks.task import Dataset, Frozen
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training import run_directory
from hpnlp.training.config import Config
from hpnlp.training.config_file import load_config
from hpnlp.training.evaluation import evaluate
from hpnlp.training.files.checksum import first_difference
from hpnlp.training.starts import teacher_file, teacher_outputs, warm_start
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.data.batches import Batches

FIELD = "distill.teacher"


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
    """A model whose outputs another one learns.

    Attributes:
      source: Its directory.
      model: The Model.
      weights: Its parameters and buffers, dense arrays.
      digest: Digest of the weights.
    """

    source: str
    model: Any
    weights: Mapping[str, Any]
    digest: str

    @property
    def values(self) -> dict[str, Any]:
        """The weights by collection, as `Model.apply` takes them."""
        return variables.collections(self.weights)

    def frozen(self, is_stored: bool) -> Frozen:
        """The frozen variables of a `Distillation`.

        Args:
          is_stored: Whether batches have the teacher's logits, so that there is no such variable.

        Returns:
          The record.
        """
        return Frozen(self.source, self.digest, None if is_stored else {TEACHER: self.values})

    def distilled(self, config: Config, model: Any) -> Distillation:
        """The model that a run with this teacher trains.

        Args:
          config: Config of the run.
          model: The student.

        Returns:
          The student with its teacher.

        Raises:
          InputError: The two models or the losses do not fit.
        """
        return distilled(config, model, self.model)

    def save(self, workdir: Path, student: Distillation) -> None:
        """Writes the record without which the checkpoints of the run cannot be read.

        Args:
          workdir: The run directory.
          student: The student with its teacher.
        """
        teacher_file.write(workdir, self.frozen(student.stored > 0), student.extras)

    def stored_batches(self, batches: Batches, directory: str, student: Distillation) -> teacher_outputs.StoredBatches:
        """Batches with the logits of the teacher, which are computed once and stored.

        Args:
          batches: Batches of the run.
          directory: `distill.cache`.
          student: The student with its teacher.

        Returns:
          The batches.
        """
        return teacher_outputs.StoredBatches(batches, directory, student, self)

    def first_weights(self, kind: str, student: Any) -> dict[str, Any]:
        """Weights that a student starts from, with layers of this teacher.

        Args:
          kind: `distill.init`, "alternate" or "bottom".
          student: The student with its teacher, a `Distillation`.

        Returns:
          Weights for `Trainer.init`.

        Raises:
          InputError: The student has other widths or parts than the teacher.
        """
        config = student.config
        if not (config.is_single_stack and self.model.config.is_single_stack):
            raise InputError(
                f"distill.init={kind!r} takes layers from the stack of the teacher, and not both models have one stack of "
                "layers: set distill.init='none'"
            )
        layers = split_layers(self.model.config, self.weights)
        chosen = [layers[i] for i in chosen_layers(kind, len(layers), config.layers)]
        weights = join_layers(self.model.config, self.weights, chosen)[1]
        shapes = variables.axes_and_shapes(student)[1]
        weights = student.extras.added(with_own(weights, shapes))
        expected = {name: tree for name, tree in shapes.items() if name != variables.FROZEN}
        if difference := first_difference(expected, weights):
            name, of_student, of_teacher = difference
            raise InputError(
                f"distill.init={kind!r}: params{name} of the student are {of_student}, and those of the teacher {of_teacher}: "
                "set the model's fields to those of the teacher except model.layers, or set distill.init='none'"
            )
        return weights

    def scores(self, dataset: Dataset, config: Config, progress: Progress = ignore_progress) -> dict[str, float]:
        """Scores on all held-out examples of a run, on one device.

        Args:
          dataset: Data of the run.
          config: Config of the run.
          progress: As for `evaluation.evaluate`.

        Returns:
          Scores by name; empty in a run of several processes.
        """
        if jax.process_count() > 1:
            return {}
        optimizer = config.optimizer.for_batch(config.data.batch_size)
        trainer = make_trainer(
            self.model,
            optimizer,
            Plan("single"),
            steps=1,
            devices=jax.devices()[:1],
            batch_size=config.data.batch_size,
        )
        weights = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), self.weights)
        return evaluate(trainer, weights, dataset, config, progress=progress).scores


def find_teacher(config: Config, vocabulary: Vocabulary) -> Teacher:
    """Reads the teacher of a run.

    Args:
      config: Config of the run, with a teacher.
      vocabulary: Vocabulary of the run.

    Returns:
      The teacher.

    Raises:
      InputError: `distill.teacher` is no model, has no checkpoint, or is of another task, tokenizer or labels.
    """
    source = _source(config, vocabulary)
    try:
        model, weights = _loaded(source)
    except InputError as error:
        raise InputError(f"{FIELD}={config.distill.teacher}: {error}") from None
    weights = jax.tree.map(np.asarray, jax.device_get(dense_tree(weights)))
    return Teacher(str(source.directory), model, weights, variables.weights_digest(weights))


def planned(config: Config) -> Distillation:
    """The model that a run with a teacher trains, from config and vocabulary of the teacher alone, for the planner.

    Args:
      config: Config of the run.

    Returns:
      The student with its teacher.

    Raises:
      InputError: See `find_teacher` and `distilled`.
    """
    source = _source(config, None)
    return distilled(config, run_directory.make_model(config, source.vocabulary), _model(source))


def distilled(config: Config, model: Any, teacher: Any) -> Distillation:
    """The model that a run with a teacher trains.

    Args:
      config: Config of the run.
      model: The student.
      teacher: The teacher's Model.

    Returns:
      The student with its teacher.

    Raises:
      InputError: The two models or the losses do not fit.
    """
    terms = parse_terms(config.distill.losses)
    if not (model.has_taps and teacher.has_taps):
        raise InputError(
            f"{FIELD}={config.distill.teacher}: models of task={config.task!r} report no logits and states to compare: distil "
            "tasks lm, masked_lm, classification or tagging"
        )
    _check_models(config, model.config, teacher.config)
    check_terms(terms, model.config, teacher.config)
    extras = make_extras(terms, model.config, teacher.config)
    classes = teacher.config.outputs()[0]
    stored = min(config.distill.cache_top_k or classes, classes) if config.distill.cache else 0
    unlabelled = tasks.find(config.task).may_lack_labels(config.data)
    return Distillation(model, extras, teacher, terms, config.train.steps, stored, unlabelled)


def first_vocabulary(config: Config) -> Vocabulary:
    """The vocabulary of the teacher, with which data whose examples may lack labels are read.

    Args:
      config: Config of a run on such data.

    Returns:
      The vocabulary.

    Raises:
      InputError: There is no teacher, or one of another task or tokenizer.
    """
    if not config.distill.teacher:
        raise InputError(
            "data.unlabelled=True, and no teacher that could label the texts: set distill.teacher=RUN, or "
            "data.unlabelled=False (and data.skip_bad_lines=True, to leave out the records without a label)"
        )
    source = _source(config, None)
    warm_start.check_tokenizer(config.data.tokenizer, source)
    return source.vocabulary


def _source(config: Config, vocabulary: Vocabulary | None) -> warm_start.StartSource:
    """The teacher's config and vocabulary, compared with those of the run unless the vocabulary is None."""
    name = config.distill.teacher
    try:
        source = warm_start.find(name)
    except InputError as error:
        raise InputError(str(error).replace("train.init_from", FIELD)) from None
    if source.task != config.task:
        raise InputError(
            f"{FIELD}={name} is a model of task={source.task!r}, and this config has task={config.task!r}: name a run of the "
            "same task"
        )
    if vocabulary is None:
        return source
    if tokenizer_digest(source.tokenizer) != tokenizer_digest(vocabulary.tokenizer):
        raise InputError(
            f"{FIELD}={name} has another tokenizer than data.tokenizer={config.data.tokenizer!r}: set "
            f"--data.tokenizer={source.tokenizer_field}"
        )
    if source.vocabulary.labels != vocabulary.labels:
        raise InputError(
            f"{FIELD}={name} has {len(source.vocabulary.labels or ())} labels, and the data have "
            f"{len(vocabulary.labels or ())} or others: name a teacher that was trained on the same labels"
        )
    return source


def _model(source: warm_start.StartSource) -> Any:
    if source.is_run:
        config = load_config(source.directory)
        train = dataclasses.replace(config.train, weights="")
        return run_directory.make_model(dataclasses.replace(config, train=train), source.vocabulary)
    return convert.family_in(source.directory).model(source.model)


def _loaded(source: warm_start.StartSource) -> tuple[Any, Any]:
    """`(model, weights)`."""
    if source.is_run:
        run = run_directory.load(source.directory)
        return run.model, run.params
    return _model(source), convert.read(source.directory)[1]


def _check_models(config: Config, student: Any, teacher: Any) -> None:
    """Raises InputError if the teacher has other classes or does not read the student's batches."""
    name = config.distill.teacher
    if student.outputs() != teacher.outputs():
        (count, axis), (others, _) = student.outputs(), teacher.outputs()
        field = "model.vocab" if axis == "vocab" else "model.classes"
        raise InputError(f"{FIELD}={name} predicts {others} classes, the student {count}: set {field}={others}")
    if teacher.position == "learned" and teacher.max_len < config.data.seq_len:
        raise InputError(
            f"{FIELD}={name} has {teacher.max_len} learned positions: set data.seq_len to at most {teacher.max_len}"
        )
    if teacher.fixed_length() not in (0, config.data.seq_len):
        raise InputError(
            f"{FIELD}={name} mixes sequences of {teacher.fixed_length()} tokens: set data.seq_len to that number"
        )
    if any(carries(mixer) for mixer in (student.mixer, teacher.mixer)):
        raise InputError(
            f"{FIELD}={name}: student or teacher carries state from batch to batch, which the other does not have: choose "
            "mixers without a carry"
        )
