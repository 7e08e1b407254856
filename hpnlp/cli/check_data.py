"""`hpnlp check-data`: lists all faults of the data that an experiment names, with their places."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import flags

from hpnlp import cli
from hpnlp.cli import experiment
from hpnlp.types import InputError

USAGE = """
hpnlp check-data --config=lm/bytes [--section.field=value ...]
hpnlp check-data --task=classification --data.path=reviews.csv [--section.field=value ...]

Reads the data as `hpnlp train` with the same flags does, and lists all faults that would stop the training, with their numbers
and first places: records that cannot be read, empty texts, labels that are written with and without blanks, labels that only
held-out examples have. With data.unlabelled=True, counts the records without a label, which need a teacher (distill.teacher).
Also lists remarks (duplicates within the training examples and between them and the held-out ones,
labels that differ only in case), what is left out and why, the sizes of the sets and of the classes, the lengths of texts in
tokens, the share that data.seq_len cuts, and the share of padding.

Exits with code 2 if a fault would stop the training, and with code 0 otherwise.
"""

_SHOWN = 20  # lines of each part that are printed

flags.DEFINE_string("config", None, "Experiment file, which defines get_config(); by default the defaults of the task.")


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp check-data`.

    Args:
      argv: "hpnlp check-data" and the arguments of the command.

    Raises:
      InputError: A flag or the config is invalid.
    """
    argv, overrides = experiment.split(argv)
    cli.parse(argv, USAGE)
    path = experiment.start(cli.FLAGS.config, overrides)

    from hpnlp import tasks
    from hpnlp.data.check import Check, check_text
    from hpnlp.data.config import DataConfig
    from hpnlp.data.examples.checks.check import check_examples
    from hpnlp.training import config as configs
    from hpnlp.training.files.metrics import reading_progress
    from hpnlp.training.start import teacher_vocabulary

    # Data with faults have no lengths; those of valid data are among the figures.
    with_numbers = [override for override in overrides if override != experiment.AUTO]
    values = experiment.read(path, with_numbers)
    experiment.check_data_is_named(cli.FLAGS.config, overrides)
    config = configs.resolve(values)
    data = config.data
    progress = reading_progress()
    if tasks.find(config.task).reads_examples:
        vocabulary = teacher_vocabulary(config) if config.distill.teacher else None
        check: Check = check_examples(data, progress, vocabulary and vocabulary.labels)
    elif experiment.AUTO in overrides:
        raise InputError(experiment.no_length(values.task))
    elif isinstance(data, DataConfig):
        check = check_text(data, progress)
    else:
        raise InputError(f"task={values.task!r} has data of its own, which cannot be checked: train on them")
    sections = {
        "Faults that stop the training:": check.faults,
        "Remarks:": check.remarks,
        "Left out:": check.left_out,
        "Data:": check.figures,
    }
    for title, lines in sections.items():
        if lines:
            more = [f"and {len(lines) - _SHOWN:,} more"] if len(lines) > _SHOWN else []
            print("\n  ".join([title, *lines[:_SHOWN], *more]))
    if check.faults:
        sys.exit(2)
    print("No fault stops the training.")
