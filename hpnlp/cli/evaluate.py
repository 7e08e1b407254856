"""`hpnlp evaluate`: scores runs on held-out data, also with another memory or other held-out data than in their training."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from hpnlp import cli
from hpnlp.cli import datastore_flags, experiment, run_names
from hpnlp.data.reading.files import Progress
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.jobs.evaluate_run import RunEvaluation
    from hpnlp.training.config import Config

USAGE = """
hpnlp evaluate RUN [RUN ...] [--model.mixer="transformer_xl(512)" --data.batch_size=8 ...]

Scores the parameters of a run, RUN, on all of its held-out examples, and prints the scores, the number of examples (of bytes,
for language models) and what is left out. Some fields of its config may have
other values, as far as the parameters stay as they are. All other fields are those of the training. A trained run is not
changed; beside a compressed or converted model, the scores of all examples are kept in evaluation.json for `hpnlp compare`.

Several runs of language models with one vocabulary are an ensemble, whose probabilities are averaged. RUN@STEP is the
checkpoint of a step, RUN@last3 the newest three checkpoints of a run, and SWEEP@best3 the three best finished runs of a
directory. After hpnlp sweep --folds=K, SWEEP@best1 is the K runs of the member with the best mean score. Each of them was
trained on what the others hold out, so that they are scored together on other text only, --data.heldout_path.

Fields:
  --model.mixer=MIXERS
      The same mixers with other sizes, such as a longer memory or window.
  --data.seq_len=N
      Tokens per sequence.
  --data.batch_size=N
      Sequences per batch.
  --data.heldout_path=PATH
      Other held-out examples.
  --data.heldout_bytes=N
      Number of bytes of held-out text, for language models.
  --data.heldout_examples=N
      Number of held-out examples, for tasks with labelled examples.
  --data.challenge_path=PATH
      Examples that are scored apart, for tasks with labelled examples.
  --data.skip_bad_lines=True
      Leave out, and count, records that cannot be read, or whose label the run does not have.
  --train.eval_stride=N
      Number of tokens at the end of each sequence that are scored.
"""

flags.DEFINE_integer("step", None, "Step of the checkpoint; by default the best, or the newest if none was evaluated.")
flags.DEFINE_integer(
    "batches",
    0,
    "Largest number of batches, spread over the held-out examples; 0 for all.",
    lower_bound=0,
    upper_bound=2**31 - 1,
)
flags.DEFINE_string(
    "cache",
    "",
    'Continuous cache of a language model with data.order=stream, as in "continuous(size=500, theta=0.3, weight=0.1)".',
)

datastore_flags.define()


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp evaluate`.

    Args:
      argv: "hpnlp evaluate" and the arguments of the command.

    Raises:
      InputError: A flag, an override or the run is invalid.
    """
    argv, overrides = experiment.split(argv)
    runs = cli.parse(argv, USAGE, positional=True)
    if not runs:
        raise InputError("no run: write hpnlp evaluate RUN, where RUN is its directory, such as runs/bytes")
    cli.prepare_jax()

    from hpnlp.jobs import evaluate_run
    from hpnlp.training import config as configs
    from hpnlp.training.config_file import load_config

    members = run_names.expand(runs, cli.FLAGS.step)
    config = load_config(members[0][0])
    changes = experiment.changes(configs.to_values(config), overrides)
    evaluation = evaluate_run.evaluate_run(
        members,
        changes,
        cli.FLAGS.batches or None,
        cache=cli.FLAGS.cache,
        neighbours=datastore_flags.neighbours(),
        progress=_progress,
    )
    changed = "".join(f", {name}={value}" for name, value in changes.items())
    named = [
        f", {name}={cli.FLAGS[name].value}"
        for name in ("cache", "datastore", "mixture", "k")
        if cli.FLAGS[name].present
    ]
    print(f"{evaluation.members}{changed}{''.join(named)}")
    _print_scores(config, evaluation)
    is_changed = members[0][1] is not None or changes or named or cli.FLAGS.batches
    if len(members) == 1 and not is_changed:
        _keep(Path(members[0][0]), evaluation)


def _print_scores(config: Config, evaluation: RunEvaluation) -> None:
    """Prints the scores, the amounts that are scored, and what is left out."""
    from hpnlp import tasks
    from hpnlp.nn.output import is_normalized
    from hpnlp.tasks.reports.lm_report import MAX_PERPLEXITY_LOSS
    from hpnlp.training import config as configs

    task, outcome = tasks.find(config.task), evaluation.outcome
    (primary, _), scores = task.primary_metric(configs.flat(config)), evaluation.scores
    texts = {name: f"{scores[name]:.4f}" for name in sorted(scores, key=lambda name: name != primary)}
    is_language_model = config.task in ("lm", "rnn_lm") and is_normalized(config.model.output)
    if is_language_model and scores["loss"] < MAX_PERPLEXITY_LOSS:
        texts["perplexity"] = f"{math.exp(scores['loss']):.5g}"
    amounts = task.scored_amounts(outcome.config, outcome.dataset, cli.FLAGS.batches or None)
    texts |= {name: str(amount) for name, amount in amounts.items()}
    width = max(map(len, texts))
    for name, text in texts.items():
        print(f"  {name:{width}}  {text}")
    for line in task.unknown_labels(outcome.dataset):
        print(f"not scored: {line}")
    for line in task.left_out(outcome.dataset):
        print(line)


def _keep(workdir: Path, evaluation: RunEvaluation) -> None:
    """Writes the scores of a compressed or converted model for `hpnlp compare`."""
    from hpnlp.report.entries import is_untrained
    from hpnlp.training.files import evaluation_record

    if not is_untrained(workdir):
        return
    try:
        evaluation_record.write(workdir, evaluation.outcome, evaluation, evaluation.step)
        print(f"written: {workdir / evaluation_record.FILE}, which hpnlp compare reads")
    except (OSError, InputError) as error:  # such as a directory of another user
        print(f"not kept for hpnlp compare: {error}")


def _progress(unit: str) -> Progress:
    """Lines of progress on standard error, since standard output has the scores."""
    from hpnlp.training.files.metrics import ProgressLines

    return ProgressLines(lambda line: print(line, file=sys.stderr, flush=True), unit)
