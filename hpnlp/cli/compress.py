"""`hpnlp compress`: makes a smaller model of a run, and measures it before and after each stage."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from hpnlp import cli
from hpnlp.cli import experiment
from hpnlp.training.processes import signals
from hpnlp.types import InputError

USAGE = """
hpnlp compress RUN --to=RUN2 --recipe="heads(0.5),mlp(0.5),int8" [--finetune=STEPS] [--rewind=RUN@STEP]
    [--section.field=value ...]

Applies the stages of a recipe to the model of a run, one after the other, and writes the result to RUN2, which `hpnlp generate`
and `hpnlp evaluate` read like any run. Prints bytes, time and held-out scores before and after each stage, and writes them to
compress.md, compress.json and compress.png. The difference of the score to the original has a 95 % interval, paired over the
held-out examples, and is called "no difference" if the interval contains 0.

Stages: layers(3) or layers("0 2 4"), heads(0.5), mlp(0.5), experts(0.5), magnitude(0.1); filters(0.5), channels(0.5),
hidden(0.5) and shapes(0.5) of convolutions; factorize(parameters=0.5); and the formats int8, int4(group=32), mixed(4), fp8,
bf16, fp16, ternary, binary, pow2, codebook(bits=4), two_four, balanced(0.1), blocks(0.25), of which a recipe has at most one.
Fractions are those that are kept. Stages that remove units or weights come first, then factorize, then the format.

--finetune trains the model for some steps after the last stage that removes units or weights; weights that magnitude has
removed stay 0. It has the run's config, in which fields of data, optimizer, train and distill may have other values, such as
--distill.teacher=RUN, a teacher for this training, or --data.path=PATH.

--rewind gives the weights that magnitude keeps their values of a checkpoint, RUN@STEP, or those before the first step, initial,
before this training: a lottery ticket. Its controls are --rewind=random, other first values, and magnitude(0.1, by=random).

--iterations=5 removes a part of the units or weights in each of five iterations, the same share of what is left, and trains for
--finetune steps after each (iterative pruning); an interrupted command goes on where it stopped.
"""

flags.DEFINE_string("from", None, "The same as RUN.")
flags.DEFINE_string("to", None, "Directory of the compressed model, which must not hold a run.")
flags.DEFINE_string("recipe", None, "Stages, separated by commas.")
flags.DEFINE_integer(
    "finetune", 0, "Steps of training after the last stage that removes units or weights, 0 for none.", lower_bound=0
)
flags.DEFINE_string("rewind", "", "Values of the weights before this training: RUN@STEP, initial or random.")
flags.DEFINE_integer(
    "iterations", 1, "Times that units or weights are removed, each followed by --rewind and --finetune.", lower_bound=1
)
flags.DEFINE_string("batch_sizes", "1,8,32", "Numbers of sequences at which the time is measured, separated by commas.")
flags.DEFINE_integer("calibration", 8, "Training batches for the importance of units.", lower_bound=1)
flags.DEFINE_integer("batches", 0, "Largest number of held-out batches of a score; 0 for all.", lower_bound=0)
flags.DEFINE_integer(
    "rounds",
    64,
    "Most rounds in which each time is paired with the original's; they end with a verdict.",
    lower_bound=1,
    upper_bound=64,
)


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp compress`.

    Args:
      argv: "hpnlp compress" and the arguments of the command.

    Raises:
      InputError: A flag, the recipe or the run is invalid.
    """
    if (parent := os.environ.pop(signals.PARENT, "")).isdecimal():
        signals.follow(int(parent))
    argv, overrides = experiment.split(argv)
    source = cli.named_run(cli.parse(argv, USAGE, positional=True), "hpnlp compress RUN --to=RUN2", "from")
    f, target, recipe = cli.FLAGS, cli.required("to", "RUN2"), cli.required("recipe", '"int8"')
    if not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", f.batch_sizes):
        raise InputError(f"--batch_sizes={f.batch_sizes}: expected numbers of sequences, as 1,8,32")
    cli.prepare_jax()

    from hpnlp import tasks
    from hpnlp.jobs.compression import compress_run
    from hpnlp.report import comparison_plots, compression
    from hpnlp.report.files import replace_text
    from hpnlp.training import config as configs
    from hpnlp.training.config_file import load_config

    config = load_config(source)
    changes = experiment.changes(configs.to_values(config), overrides) if overrides else {}
    (metric, higher_is_better), texts = tasks.find(config.task).primary_metric(configs.flat(config)), []

    def write_report(rows: list[compress_run.Measurement]) -> None:
        texts.append(compression.render(rows, metric, higher_is_better))
        replace_text(Path(target) / "compress.md", texts[0])
        replace_text(Path(target) / "compress.json", compression.to_json(rows, metric, source, recipe))
        panels, intervals = compression.panels(rows, metric), compression.score_intervals(rows, metric)
        comparison_plots.plot_compression(panels, Path(target) / "compress.png", intervals)

    settings = compress_run.CompressionSettings(
        finetune=f.finetune,
        rewind=f.rewind,
        iterations=f.iterations,
        calibration_batches=f.calibration,
        batch_sizes=list(map(int, f.batch_sizes.split(","))),
        batches=f.batches or None,
        rounds=f.rounds,
        changes=changes,
    )
    log = functools.partial(print, flush=True)
    compress_run.compress_run(source, target, recipe, settings, log=log, write_report=write_report)
    print(f"\n{texts[0]}\nwritten: {target}, with compress.md, compress.json and compress.png", flush=True)
