"""Trains small models by published recipes of compression, each beside the same small model without the technique.

    python experiments/bench/recipes.py --workdir=runs/recipes [--only=distilbert,tickets]
    python experiments/bench/recipes.py --workdir=runs/times --times  # times alone, of models after one step of training
    python experiments/bench/recipes.py --workdir=runs/trial --tiny  # a few steps: checks that everything works

Each training has three seeds, and a technique and its control have the same steps, seeds and held-out examples. Intervals of
differences are paired (`small_runs.paired`). The groups:

- distilbert: half of the layers, from every second one of the teacher, with soft targets, masked words and cosine; beside the
  same layers without a teacher, and random parameters. Masked words, and functions afterwards.
- tinybert: embeddings, layers and attention of the teacher on masked words, then of its classifier on functions, then logits.
- mobilebert: bottlenecks, taught layer by layer on masked words, then trained on functions.
- regression: the squared distance of logits, soft targets, and labels alone.
- q8bert: 8 bits after training, and in training without and with rounded inputs.
- movement: soft movement pruning, and magnitude and movement with the share of weights that it kept.
- group_lasso, lasso: penalties in training, and selection after as long a training.
- tickets: iterative magnitude pruning with rewinding; the same mask with other values, a random mask, and all weights.
- convnets: filters, channels, positions and low rank of standard and depthwise-separable networks.

Finished steps are skipped when the script runs again, and an interrupted training goes on from its checkpoint; what the steps
print is in WORKDIR/log.txt. Without augmented data, of which TinyBERT makes 20 sentences from each one, and with a teacher of
the student's width for MobileBERT, which has none of the inverted bottlenecks of the paper.

Published: Sanh et al. 2019, "DistilBERT": 97 % of BERT with 40 % fewer parameters; Jiao et al. 2020, "TinyBERT": 96.8 %, 7.5
times smaller; Sun et al. 2020, "MobileBERT": 4.3 times smaller, 5.5 times as fast; Zafrir et al. 2019, "Q8BERT": less than 1 %
lost; Sanh et al. 2020, "Movement pruning": F1 82.3 by soft movement with 3 % of the weights, 59.6 by magnitude, both distilled;
Frankle and Carbin 2019, "The lottery ticket hypothesis"; Ba and Caruana 2014, "Do deep nets really need to be deep?"; Wen et
al. 2016, "Learning structured sparsity in deep neural networks".
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from absl import flags
from recipe_runs import row_of, run_all, time_rows
from recipe_steps import CLASSIFIER, GROUPS, Step, entries
from recipe_tasks import TINY_DATA, write_tiny_data
from small_runs import is_finished

from hpnlp import cli, measure
from hpnlp.cli.errors import run_script
from hpnlp.spec import lookup

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", None, "Directory of the runs.", required=True)
flags.DEFINE_list("only", [*GROUPS], "Groups to measure.")
flags.DEFINE_bool(
    "tiny", False, "A few steps of tiny models, whose scores mean nothing; the result stays in --workdir."
)
flags.DEFINE_bool(
    "times",
    False,
    "Only the times of classifiers, of all groups, after one step of each training: recipe_times-cpu.json.",
)
flags.DEFINE_integer("rounds", 7, "Measurements of each time.", lower_bound=1)
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")

# Classifiers of functions whose times are compared with that of the first one.
TIMED = {
    "teacher of 4 layers": CLASSIFIER,
    "DistilBERT student": "distilbert/student_functions-0",
    "TinyBERT student": "tinybert/student-0",
    "MobileBERT student": "mobilebert/student_functions-0",
    "Q8BERT": "q8bert/inputs-0",
}


def check_settings(workdir: Path) -> None:
    """Exits if the directory holds results of another scale."""
    workdir.mkdir(parents=True, exist_ok=True)
    path, settings = workdir / "settings.json", {"tiny": FLAGS.tiny} | ({"times": True} if FLAGS.times else {})
    if path.exists() and (earlier := json.loads(path.read_text("utf-8"))) != settings:
        sys.exit(f"{workdir} holds results of {earlier}, where the flags ask for {settings}: choose another --workdir")
    path.write_text(json.dumps(settings) + "\n", "utf-8")


def timed_steps() -> list[Step]:
    """The steps before the classifiers of TIMED, and these, with one step of each training."""
    steps = {step.name: step for step in entries([*GROUPS], FLAGS.tiny)[0]}
    needed = list(TIMED.values())
    for name in needed:  # grows
        needed += [n for n in steps[name].inputs if n not in needed]
    return [dataclasses.replace(step, steps=min(step.steps, 1)) for name, step in steps.items() if name in needed]


def rows(workdir: Path) -> list[dict[str, Any]]:
    """Rows of all comparisons whose runs are finished, also those of other groups than --only, and of times."""
    comparisons = {} if FLAGS.times else entries([*GROUPS], FLAGS.tiny)[1]
    made = [row_of(group, each, workdir, FLAGS.tiny) for group, members in comparisons.items() for each in members]
    timed = {text: name for text, name in TIMED.items() if is_finished(workdir / name)}
    times = time_rows(timed, workdir, FLAGS.rounds) if CLASSIFIER in timed.values() else []
    return [row for row in made if row is not None] + times


def main(_: list[str]) -> None:
    cli.prepare_jax()
    workdir = Path(FLAGS.workdir).absolute()
    for group in FLAGS.only:
        lookup(GROUPS, group, "--only")
    check_settings(workdir)
    steps = timed_steps() if FLAGS.times else entries(FLAGS.only, FLAGS.tiny)[0]
    if FLAGS.tiny:
        write_tiny_data(workdir / TINY_DATA)
    run_all(steps, workdir, FLAGS.tiny)
    measured = rows(workdir)
    for row in measured:
        print(row, flush=True)
    name = "recipe_times" if FLAGS.times else "recipes"
    print(measure.write_result(name, measured, str(workdir) if FLAGS.tiny else FLAGS.out))


if __name__ == "__main__":
    run_script(main)
