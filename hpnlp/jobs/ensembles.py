"""Ensembles of runs: one model of several checkpoints, whose probabilities are averaged."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpnlp.data.tokenizers import tokenizer_digest
from hpnlp.models.mixtures.ensemble import Ensemble, joined
from hpnlp.training.run_directory import Run, load, make_model
from hpnlp.types import InputError

TASKS = ("lm", "rnn_lm")  # tasks whose runs may be members

Member = tuple[str | Path, int | None]  # a run directory, and the step of a checkpoint or None for the best


def load_members(members: Sequence[Member]) -> list[Run]:
    """Loads the members of an ensemble.

    Args:
      members: A run directory and the step of a checkpoint (None for the best) of each; at least one.

    Returns:
      The runs.

    Raises:
      InputError: A directory holds no run, a checkpoint is named twice, or several runs are not of language models with the
        same tokenizer.
    """
    runs = [load(workdir, step) for workdir, step in members]
    if len(runs) == 1:
        return runs
    _check_distinct(members, runs)
    digest = tokenizer_digest(runs[0].tokenizer)
    for (workdir, _), run in zip(members, runs, strict=True):
        if run.config.task not in TASKS:
            raise InputError(
                f"{workdir} holds a run of task={run.config.task!r}: probabilities are averaged for runs of task="
                f"{' or '.join(map(repr, TASKS))}"
            )
        if tokenizer_digest(run.tokenizer) != digest:
            raise InputError(
                f"{workdir} has another tokenizer than {members[0][0]}, so that their probabilities are of other words: name "
                "runs of one vocabulary"
            )
    return runs


def _check_distinct(members: Sequence[Member], runs: Sequence[Run]) -> None:
    """Raises InputError if two members are the same checkpoint, which would change weights of the mean, or nothing."""
    seen: set[tuple[str, int]] = set()
    for (workdir, _), run in zip(members, runs, strict=True):
        checkpoint = (os.path.realpath(workdir), run.step)
        if checkpoint in seen:
            raise InputError(
                f"{workdir}, step {run.step}, is named twice: an ensemble averages different runs or checkpoints: leave it out "
                "once"
            )
        seen.add(checkpoint)


def load_ensemble(members: Sequence[Member]) -> Run:
    """Loads runs as one model.

    Args:
      members: As for `load_members`.

    Returns:
      The run itself if there is one; otherwise the first one's config and vocabulary, with the ensemble and its weights.

    Raises:
      InputError: As `load_members`; or a member gives no probabilities.
    """
    runs = load_members(members)
    if len(runs) == 1:
        return runs[0]
    model = Ensemble(tuple(run.model for run in runs))
    return dataclasses.replace(runs[0], model=model, params=joined([run.params for run in runs]))


def model_for(configs: Sequence[Any], runs: Sequence[Run]) -> tuple[Any, Any]:
    """Model and weights of runs, for an evaluation with one config of the data.

    Args:
      configs: Config of each run, with the changes of the evaluation.
      runs: The runs.

    Returns:
      `(model, weights)`, of the run if there is one, and of the ensemble otherwise. All members read batches of the first
      config's data.

    Raises:
      InputError: A model does not fit the data.
    """
    if len(runs) == 1:
        return make_model(configs[0], runs[0].vocabulary), runs[0].params
    models = [
        make_model(dataclasses.replace(config, data=configs[0].data), run.vocabulary)
        for config, run in zip(configs, runs, strict=True)
    ]
    return Ensemble(tuple(models)), joined([run.params for run in runs])


def describe(members: Sequence[Member], runs: Sequence[Run]) -> str:
    """Directories and steps of members, for output.

    Args:
      members: As for `load_members`.
      runs: The loaded runs.

    Returns:
      A text such as "runs/a, step 300; runs/b, step 200".
    """
    return "; ".join(f"{workdir}, step {run.step}" for (workdir, _), run in zip(members, runs, strict=True))
