"""Folds of cross-validation: the runs of `hpnlp sweep --folds=K` for each member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpnlp import cli
from hpnlp.cli import experiment
from hpnlp.cli.members import BASE, Member

FOLDS, FOLD = "data.folds", "data.fold"


def first_fold(flags: Sequence[str], count: int) -> list[str]:
    """Flags of the run that holds out the first fold.

    Args:
      flags: Flags that set fields of a member's config.
      count: Number of folds.

    Returns:
      The flags with those of the fold.

    Raises:
      InputError: A flag sets the fields of folds itself.
    """
    for flag in flags:
        if (field := experiment.overridden_field(flag)) in (FOLDS, FOLD):
            raise cli.InputError(
                f"--folds={count}, {flag}: --folds sets data.folds and data.fold of each run: leave out {field}, or --folds"
            )
    return [*flags, f"--{FOLDS}={count}", f"--{FOLD}=1"]


def check_data(run: Member) -> None:
    """Reads the data of a run, which its training then finds in the cache, so that a fault is found before anything starts.

    Args:
      run: The run.

    Raises:
      InputError: The data are invalid, or have fewer examples or documents than folds.
    """
    from hpnlp import tasks

    tasks.find(run.config.task).dataset(run.config.data, None)


def divided(members: Mapping[str, Member], count: int) -> dict[str, Member]:
    """The runs of all folds of members.

    Args:
      members: Name -> run that holds out the first fold.
      count: Number of folds.

    Returns:
      Name -> run; names end with the fold, as "dim=64,fold=2".
    """
    from hpnlp.training.config import with_changes

    runs = {}
    for name, member in members.items():
        # The length of the training texts of the first fold, if it was not a number: all folds train models of one length.
        length = [f"--data.seq_len={member.config.data.seq_len}"] if experiment.AUTO in member.flags else []
        flags = [flag for flag in member.flags if flag not in (experiment.AUTO, f"--{FOLD}=1")]
        for fold in range(1, count + 1):
            run = Member([*flags, *length, f"--{FOLD}={fold}"], with_changes(member.config, {FOLD: fold}))
            runs[f"fold={fold}" if name == BASE else f"{name},fold={fold}"] = run
    return runs
