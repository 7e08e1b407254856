"""`teacher.json`: the teacher of a run, and the variables that its distillation added to the model."""

from __future__ import annotations

import json
from pathlib import Path

from hpnlp.atomic_file import replace_bytes
from hpnlp.compress.distilling.distillation import Distilled, Extras
from hpnlp.tasks.task import Frozen
from hpnlp.types import InputError, Model

TEACHER_FILE = "teacher.json"


def write(workdir: Path, frozen: Frozen, extras: Extras) -> None:
    """Writes TEACHER_FILE, without which the checkpoints of a run with a teacher cannot be read.

    Args:
      workdir: The run directory.
      frozen: The teacher.
      extras: Variables that the distillation added to the model.
    """
    record = {"source": frozen.source, "digest": frozen.digest, **extras.to_json()}
    replace_bytes(workdir / TEACHER_FILE, (json.dumps(record, indent=1) + "\n").encode())


def student(model: Model, workdir: Path) -> Distilled:
    """The model whose variables the checkpoints of a run with a teacher hold.

    Args:
      model: The model of the run.
      workdir: The run directory.

    Returns:
      The model with the variables that the distillation added.

    Raises:
      InputError: TEACHER_FILE is absent or damaged.
    """
    try:
        extras = Extras.from_json(json.loads((workdir / TEACHER_FILE).read_text("utf-8")))
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise InputError(
            f"cannot read {workdir / TEACHER_FILE} ({error!r}): put back the file that the run has written"
        ) from error
    return Distilled(model, extras)
