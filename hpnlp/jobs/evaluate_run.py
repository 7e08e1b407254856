"""Evaluation of finished runs with another config, such as a longer memory than that of their training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
from jaxtyping import PyTree

from hpnlp import tasks
from hpnlp.data.corpus import Corpus
from hpnlp.data.reading.files import Progress, ignore_progress
from hpnlp.jobs import ensembles, fold_leakage
from hpnlp.jobs.dtypes import overflow_checked, with_dtype
from hpnlp.models import variables
from hpnlp.models.mixtures import continuous_cache
from hpnlp.ops.weight import dense_tree
from hpnlp.parallel.plan import Plan
from hpnlp.retrieval.knn import Neighbours
from hpnlp.spec import did_you_mean
from hpnlp.tasks.reports.reporting import Outcome
from hpnlp.training.config import Config, flat, with_changes
from hpnlp.training.config_file import load_config
from hpnlp.training.evaluation import Evaluation, evaluate, further_scores
from hpnlp.training.files.checksum import first_difference, shape_text
from hpnlp.training.optimizers.state_shardings import TrainState
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError

# Fields of a run's config that an evaluation can change. The fields of other tasks than the run's are unknown.
FIELDS = (
    "model.mixer",
    "model.dtype",
    "data.seq_len",
    "data.batch_size",
    "data.heldout_path",
    "data.heldout_bytes",
    "data.heldout_examples",
    "data.challenge_path",
    "data.skip_bad_lines",
    "train.eval_stride",
)


@dataclasses.dataclass(frozen=True)
class RunEvaluation(Evaluation):
    """Result of the evaluation of a run.

    Attributes:
      step: Step of the checkpoint that the parameters are from; of an ensemble, of its first member.
      members: Directories and steps of the checkpoints.
      outcome: Config, data, model and weights of the evaluation.
    """

    step: int
    members: str
    outcome: Outcome


def evaluate_run(
    workdir: str | Path | Sequence[ensembles.Member],
    changes: Mapping[str, Any],
    limit: int | None = None,
    cache: str = "",
    neighbours: Neighbours | None = None,
    progress: Callable[[str], Progress] = lambda unit: ignore_progress,
) -> RunEvaluation:
    """Scores the parameters of a run on held-out data, with changes of its config; or the mean probabilities of several runs.

    Args:
      workdir: The run directory; or the directory and the step of a checkpoint, or None, of each member of an ensemble.
      changes: Fields of the run's config and their values, such as {"model.mixer": "transformer_xl(512)"}. The changed model
        must have parameters of the same names and shapes.
      limit: Largest number of batches; None for all, and for the scores of other held-out sets (`Task.further_heldout`).
      cache: A continuous cache, as in "continuous(500, 0.3, 0.1)"; "" for none.
      neighbours: A datastore of the run's hidden states; None for none.
      progress: Function of a unit of amounts, "MiB" for bytes, that returns a function of progress.

    Returns:
      Scores, sums and the step.

    Raises:
      InputError: The directory holds no run, a field is unknown or not one of FIELDS, or the changed config is invalid or has
        other parameters; other held-out examples have labels that the run does not have; members do not fit each other; or a
        fold of the data is scored that a member was trained on.
    """
    members = [(workdir, None)] if isinstance(workdir, str | Path) else list(workdir)
    stored = [load_config(directory) for directory, _ in members]
    for config in stored:  # before anything large is read
        changed_config(config, changes)
    fold_leakage.check(
        [(str(directory), config) for (directory, _), config in zip(members, stored, strict=True)], changes
    )
    runs = ensembles.load_members(members)
    if dtype := changes.get("model.dtype"):
        runs = [with_dtype(run, dtype) for run in runs]
    # The config of a loaded run has no train.weights: its parameters are the matrices that layers read.
    configs = [changed_config(run.config, changes) for run in runs]
    config, run = configs[0], runs[0]
    model: Any  # the model of the run, or one with a cache or a datastore
    model, params = ensembles.model_for(configs, runs)
    if cache:
        model = _with_cache(model, cache, config)
    store = frozen = None
    if neighbours is not None:
        if len(runs) > 1 or cache:
            raise InputError(
                f"datastore={neighbours.directory}: a datastore is for one run without a cache: name one run, or leave it out"
            )
        store, model, frozen = neighbours.load(model, params, run.tokenizer, members[0][0])
    optimizer = config.optimizer.for_batch(config.data.batch_size)
    trainer = make_trainer(model, optimizer, Plan("single"), steps=1, batch_size=config.data.batch_size)
    check_shapes(params, trainer.state_shapes, changes)
    task = tasks.find(config.task)
    dataset = task.dataset(config.data, run.vocabulary, progress("MiB"))
    if store is not None:
        corpus = cast(Corpus, dataset)
        trainer, heldout = trainer.with_frozen(frozen), corpus.documents[1]
        # Other held-out text is never trained on, and has at most copies of training documents.
        if config.data.heldout_path:
            store.check_scored(heldout.document(i) for i in range(corpus.heldout_documents))
    _check_labels(task.unknown_labels(dataset), changes)
    with overflow_checked(run):
        result = evaluate(trainer, params, dataset, config, limit, progress("batches"))
        scores = dict(result.scores)
        if limit is None:
            scores |= further_scores(trainer, params, dataset, config, progress("batches"))
    outcome = Outcome(config, dataset, model, params, result.sums)
    description = ensembles.describe(members, runs)
    return RunEvaluation(scores, result.sums, run.step, description, outcome, examples=result.examples)


def _check_labels(unknown: Sequence[str], changes: Mapping[str, Any]) -> None:
    """Raises InputError if other examples than the run's would be scored without those of no class of the run.

    The run's data.skip_bad_lines is for its own data. A model is wrong on each example of another class.
    """
    fields = [name for name in ("data.heldout_path", "data.challenge_path") if name in changes]
    if unknown and fields and "data.skip_bad_lines" not in changes:
        raise InputError(
            f"{', '.join(f'{name}={changes[name]!r}' for name in fields)}: {'; '.join(unknown)}: correct the labels, "
            "remove these examples, or pass --data.skip_bad_lines=True to score the others alone"
        )


def _with_cache(model: Any, cache: str, config: Config) -> Any:
    """The model with a continuous cache; raises InputError if the run does not read text as streams."""
    config_of_cache = continuous_cache.find(cache)
    if not model.predicts_next_words:
        raise InputError(
            f"cache={cache!r}: a cache is for one run of task='lm' or 'rnn_lm': name one, or leave out the cache"
        )
    if not model.is_normalized:
        raise InputError(
            f"cache={cache!r}: model.output={config.model.output!r} gives no probabilities to mix with: leave out the cache"
        )
    if config.data.order != "stream":
        raise InputError(
            f"cache={cache!r}: batches of data.order={config.data.order!r} do not continue each other: train the run with "
            "data.order='stream', or leave out the cache"
        )
    return continuous_cache.CachedModel(model, config_of_cache)


def changed_config(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config of a run with other values of fields that an evaluation can change.

    Args:
      config: Config of the run.
      changes: "section.field", one of FIELDS -> value.

    Returns:
      The config.

    Raises:
      InputError: The field is unknown or not one of FIELDS, or the value is invalid.
    """
    known = flat(config)
    for name, value in changes.items():
        if name not in known:
            raise InputError(f"a run's config has no field {name!r}: {did_you_mean(name, known)}")
        if name not in FIELDS:
            fields = ", ".join(field for field in FIELDS if field in known)
            raise InputError(
                f"{name}={value!r} would not be the run that was trained: leave it out, an evaluation can change {fields}"
            )
    if changes.get("data.heldout_path"):  # in place of a part
        changes = {**changes, **{name: 0 for name in fold_leakage.FIELDS if name in known}}
    return with_changes(config, changes)


def check_shapes(params: PyTree, shapes: TrainState, changes: Mapping[str, Any]) -> None:
    """Checks that a changed model has the parameters of the run.

    Args:
      params: Weights of the run.
      shapes: Shapes of the changed model, `Trainer.state_shapes`.
      changes: The changes of its config, for the message.

    Raises:
      InputError: Names or shapes differ.
    """
    params = jax.eval_shape(dense_tree, params)
    if difference := first_difference(variables.join(shapes.params, shapes.buffers), params, shape_text):
        name, of_model, of_run = difference
        fault = f"params{name} is {of_model} in the model and {of_run} in the run"
        if not changes:
            raise InputError(f"the parameters of the run do not fit its config.json: {fault}")
        changed = ", ".join(f"{field}={value}" for field, value in changes.items())
        raise InputError(f"with {changed}, {fault}: change fields that leave the parameters as they are")
