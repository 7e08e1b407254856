"""A training of a candidate, or of the model as it is, in a process of its own: the same steps, data order and seed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpnlp.advise.candidate import Candidate
from hpnlp.jobs.compression.compress_run import CompressionSettings, compress_run
from hpnlp.jobs.evaluate_run import evaluate_run
from hpnlp.training import loop
from hpnlp.training.config import with_changes
from hpnlp.training.config_file import load_config
from hpnlp.training.files.contents import Contents, contents_of
from hpnlp.training.files.example_scores import ExampleScores
from hpnlp.training.processes import signals
from hpnlp.types import InputError

SPEC = "arm.json"
SCORED = "scored"  # directory of the scores


@dataclasses.dataclass(frozen=True)
class Arm:
    """A training.

    Attributes:
      run: Directory of the run.
      changes: Fields of the run's config that the user has set.
      candidate: What is changed.
      steps: Steps of the training.
      seed: Seed of parameters and of the order of the data.
      is_further: Whether the weights of the run are trained further; otherwise new ones are.
      batches: Largest number of held-out batches; None for all.
      saved: Time at which the weights of the run were saved, so that trainings from other weights are not taken for these.
    """

    run: str
    changes: Mapping[str, Any]
    candidate: Candidate
    steps: int
    seed: int
    is_further: bool
    batches: int | None
    saved: str = ""

    def to_json(self) -> str:
        """The arm as JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def digest(self) -> str:
        """A digest, equal for equal arms."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def train(self, directory: Path) -> ExampleScores | None:
        """Trains, and scores the result on the held-out examples.

        Args:
          directory: Directory of the training, in which an interrupted one goes on.

        Returns:
          The scores of examples; None if the model gives none.

        Raises:
          InputError: The candidate does not fit the run.
          KeyboardInterrupt: A signal stopped the training.
        """
        model = directory / "model"
        if self.candidate.recipe:
            self._compress(model)
        else:
            self._train(model)
        return evaluate_run(model, {}, self.batches).examples

    def _train(self, model: Path) -> None:
        config = with_changes(load_config(self.run), {**self.changes, **self.candidate.changes, **self._training()})
        start = str(self.run) if self.is_further else ""
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, init_from=start))
        if loop.train(config, model, score=False).interrupted:
            raise KeyboardInterrupt

    def _compress(self, model: Path) -> None:
        if contents_of(model) is Contents.COMPRESSED:
            return
        training = self._training()
        del training["train.steps"]
        settings = CompressionSettings(
            finetune=self.steps, batch_sizes=(1,), rounds=1, batches=1, changes={**self.changes, **training}
        )
        compress_run(self.run, model, self.candidate.recipe, settings)

    def _training(self) -> dict[str, Any]:
        """Fields of a training without evaluations in between."""
        return {"train.steps": self.steps, "train.seed": self.seed, "train.eval_every": 0}


def main(directory: Path) -> None:
    """Trains the arm of a directory, and writes its scores.

    Args:
      directory: The directory.
    """
    with signals.watched():  # without it, the process would outlive its parent
        if (parent := os.environ.pop(signals.PARENT, "")).isdecimal():
            signals.follow(int(parent))
        values = json.loads((directory / SPEC).read_text("utf-8"))
        candidate = values.pop("candidate")
        arm = Arm(
            candidate=Candidate(tuple(candidate["techniques"]), candidate["recipe"], candidate["changes"]), **values
        )
        try:
            examples = arm.train(directory)
        except InputError as error:
            sys.exit(f"error: {error}")
        (directory / SCORED).mkdir(exist_ok=True)
        if examples is None:
            sys.exit("error: the model has no scores of single held-out examples")
        examples.write(directory / SCORED)
