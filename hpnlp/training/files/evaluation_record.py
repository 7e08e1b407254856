"""Record of an evaluation of a model that has no training report, such as a compressed one; comparisons of runs read it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hpnlp import tasks
from hpnlp.atomic_file import replace_bytes
from hpnlp.ops.weight import parameter_count
from hpnlp.tasks.reports.reporting import Outcome
from hpnlp.training.config import flat
from hpnlp.training.evaluation import Evaluation
from hpnlp.training.files.example_scores import FILE as EXAMPLES_FILE
from hpnlp.training.files.example_scores import ExampleScores

FILE = "evaluation.json"


def write(workdir: Path, outcome: Outcome, evaluation: Evaluation, step: int) -> None:
    """Writes FILE, with the fields of report.json that an evaluation has, and the scores of the examples beside it.

    Args:
      workdir: The directory of the model.
      outcome: Config, data, model and weights of the evaluation.
      evaluation: Scores of all held-out examples.
      step: Step of the parameters.

    Raises:
      InputError: A file cannot be written.
      OSError: The same.
    """
    report = tasks.find(outcome.config.task).report
    numbers = report.numbers(outcome.dataset, evaluation.scores, {})
    is_partial = any(numbers.get(name) is None for name in report.compared(flat(outcome.config)))
    if is_partial and not report.samples_text:  # the task computes its score for its section
        numbers |= report.section(outcome).numbers
    record = {
        **numbers,
        "scored_weight": float(evaluation.sums["loss"][1]),
        "scored_step": step,
        "parameters": parameter_count(outcome.params),
        "config": flat(outcome.config),
    }
    write_examples(workdir, evaluation.examples)
    replace_bytes(workdir / FILE, (json.dumps(finite(record), indent=1, allow_nan=False) + "\n").encode())


def write_examples(workdir: Path, examples: ExampleScores | None) -> None:
    """Writes the scores of the examples, or removes those of an earlier evaluation if there are none.

    Args:
      workdir: The directory.
      examples: The scores, see `Evaluation`.

    Raises:
      OSError: The file cannot be written.
    """
    if examples is None:
        (workdir / EXAMPLES_FILE).unlink(missing_ok=True)
    else:
        examples.write(workdir)


def finite(value: object) -> Any:
    """`value` with None in place of floats that are not finite, which JSON cannot represent, and lists for tuples.

    Args:
      value: Nested dicts, lists and tuples.

    Returns:
      The JSON value.
    """
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
