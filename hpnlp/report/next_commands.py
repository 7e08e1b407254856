"""Commands that a report proposes as next steps, for the directory that the run was started in.

Each can be run as printed, but for the path of other data, which the user fills in.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from hpnlp import tasks
from hpnlp.nn.feed_forward import FEED_FORWARDS
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.output import OUTPUTS
from hpnlp.training.config import LIMITS, Config, flat
from hpnlp.training.optim import OPTIMIZERS

# Tables whose entries have the path of the file that adds them as the name of their module (`cli.experiment.load`).
TABLES = (tasks.TASKS, MIXERS, FEED_FORWARDS, OUTPUTS, OPTIMIZERS)
PREDICTING = ("classification", "hashed_classification", "rnn_classification", "tagging", "seq2seq", "dual_encoder")
OTHER_DATA = "YOUR_FILES"  # in place of the path of data that the run has not read
# Fields that describe the run's data, and their values for other data.
DATA_FIELDS = {"data.weights": "()", "data.heldout_path": "", "data.challenge_path": ""}


def render(workdir: Path, config: Config, flags: str, processes: int = 1) -> str:
    """List of commands for the report.

    Args:
      workdir: Directory of the finished run.
      config: Config of the run.
      flags: Flags of `hpnlp train` that gave the config, quoted for a shell.
      processes: Number of processes of the run, which commands that train have too.

    Returns:
      Items of a Markdown list, `- PURPOSE: COMMAND`.
    """
    train_flags = shlex.split(flags)
    registered = _registering(train_flags)
    directory = workdir / ".." if workdir.name in ("", "..") else workdir.parent
    steps = min(2 * config.train.steps, LIMITS["train.steps"])
    of_task = {
        **tasks.find(config.task).report.commands(workdir, config),
        **_uses(workdir, config, directory),
    }
    if config.distill.teacher:
        # Without a teacher, records without a label are left out.
        labelled = (
            {"data.unlabelled": False, "data.skip_bad_lines": True}
            if tasks.find(config.task).may_lack_labels(config.data)
            else {}
        )
        kept = _without(
            train_flags, *labelled, "distill.teacher", "distill.init", "distill.cache", "distill.cache_top_k"
        )
        plain = ["train", *kept, f"--workdir={_unused(directory, workdir, 'alone')}", "--distill.teacher="]
        fields = {"init": "none", "cache": "", "cache_top_k": 0}
        plain += [f"--{name}={value}" for name, value in labelled.items()]
        changed = [name for name, value in fields.items() if getattr(config.distill, name) != value]
        plain += [f"--distill.{name}={fields[name]}" for name in changed]
        of_task = {"train the same student without its teacher, as the baseline": plain, **of_task}
    commands = {
        **{purpose: [*argv, *registered] for purpose, argv in of_task.items()},
        f"train it on other data, with the path of your files in place of {OTHER_DATA}": [
            "train",
            *_without(train_flags, "data.path", *DATA_FIELDS, "train.init_from"),
            f"--workdir={_unused(directory, workdir)}",
            f"--train.init_from={workdir}",
            f"--data.path={OTHER_DATA}",
            *(f"--{field}={value}" for field, value in DATA_FIELDS.items() if flat(config).get(field)),
        ],
        "train longer": [
            "train",
            *_without(train_flags, "train.steps"),
            f"--workdir={workdir}",
            f"--train.steps={steps}",
            "--accept_changes",
        ],
        **{purpose: [*argv, *registered] for purpose, argv in _smaller(workdir, config, directory).items()},
        "compare it with the runs beside it": ["compare", str(directory), *registered],
    }
    if processes > 1:
        launch = ["launch", f"--processes={processes}", "--"]
        commands = {key: [*launch, *argv] if argv[0] == "train" else argv for key, argv in commands.items()}
    return "\n".join(f"- {purpose}: {_code(shlex.join(['hpnlp', *argv]))}" for purpose, argv in commands.items())


def _smaller(workdir: Path, config: Config, directory: Path) -> dict[str, list[str]]:
    """The command that stores the matrices of layers in 8 bits, unless their training has given them fewer already."""
    if config.train.weights or not config.model.all_forms():
        return {}
    target = f"--to={_unused(directory, workdir, 'int8')}"
    return {"make it smaller, and measure what that costs": ["compress", str(workdir), target, "--recipe=int8"]}


def _uses(workdir: Path, config: Config, directory: Path) -> dict[str, list[str]]:
    """Commands that predict or encode texts with the run, and that export it to be served."""
    task = tasks.find(config.task)
    commands = {}
    if task.name in PREDICTING:
        purpose = f"predict with it, with the path of your texts in place of {OTHER_DATA}"
        commands[purpose] = ["predict", str(workdir), f"--file={OTHER_DATA}"]
    if task.name == "dual_encoder":
        purpose = f"write the vectors of texts to a file, with the path of your texts in place of {OTHER_DATA}"
        commands[purpose] = ["encode", str(workdir), OTHER_DATA, "--to=vectors.npy"]
    if task.is_served:
        target = f"--to={_unused(directory, workdir, 'served')}"
        commands["write a directory that is served without hpnlp"] = ["export", str(workdir), target]
    return commands


def _registering(train_flags: Sequence[str]) -> list[str]:
    """Flags that add the run's own entries of tables: --register, also of the experiment file if it adds entries."""
    files = [flag.partition("=")[2].partition(":")[0] for flag in train_flags if flag.startswith("--config=")]
    modules = {getattr(entry, "__module__", "") for table in TABLES for entry in table.read().values()}
    of_experiment = [f"--register={file}" for file in files if os.path.abspath(file) in modules]
    return [*(flag for flag in train_flags if flag.startswith("--register=")), *of_experiment]


def _without(flags: Sequence[str], *fields: str) -> list[str]:
    """The flags that do not set one of the config fields."""
    names = "|".join(map(re.escape, fields))
    return [flag for flag in flags if not re.match(rf"--?(config\.)?({names})=", flag)]


def _unused(directory: Path, workdir: Path, suffix: str = "tuned") -> Path:
    """A path in `directory` that does not exist, named after the run."""
    name = os.path.basename(os.path.abspath(workdir))
    number = 1
    while (path := directory / f"{name}-{suffix}{f'-{number}' * (number > 1)}").exists():
        number += 1
    return path


def _code(text: str) -> str:
    """Code span of Markdown for a text that may hold backticks."""
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}{text}{ticks}"
