"""The commands that a report proposes: each runs as it is printed, in the directory where the run was trained."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from hpnlp.nn.output import is_normalized
from hpnlp.training.config import LIMITS, Config
from hpnlp.training.run_directory import saved_tokenizer
from hpnlp.types import InputError

PROMPT = "def "


def render(workdir: Path, config: Config, flags: str) -> str:
    """Returns the lines of a Markdown list: a purpose, and a command.

    Args:
        workdir: of the finished run, with its tokenizer.json.
        config: of the run.
        flags: those of `hpnlp train` that gave the config, quoted for a shell.
    """
    given = shlex.split(flags)
    directory = workdir / ".." if workdir.name in ("", "..") else workdir.parent
    steps = min(2 * config.train.steps, LIMITS["train.steps"])
    commands = {
        "continue a text": ["generate", f"--workdir={workdir}", *_generation(workdir, config)],
        "train it on other text, with your files in place of data.path": [
            "train",
            *_without(given, "data.path", "data.weights", "train.init_from"),
            f"--workdir={_free(directory, workdir)}",
            f"--config.train.init_from={workdir}",
            f"--config.data.path={config.data.path}",
            *(["--config.data.weights=()"] if config.data.weights else []),
        ],
        "train longer": [
            "train",
            *_without(given, "train.steps"),
            f"--workdir={workdir}",
            f"--config.train.steps={steps}",
            "--accept_changes",
        ],
        "compare it with the runs beside it": ["compare", str(directory)],
    }
    return "\n".join(f"- {purpose}: {_code(shlex.join(['hpnlp', *argv]))}" for purpose, argv in commands.items())


def _generation(workdir: Path, config: Config) -> list[str]:
    """Flags of `hpnlp generate` that the model's positions, output layer and vocabulary allow."""
    prompt, length = [f"--prompt={PROMPT}"], len(PROMPT)
    tokenizer = saved_tokenizer(workdir)
    if tokenizer is not None:
        try:
            length = len(tokenizer.encode_prompt(PROMPT))
        except InputError:  # a vocabulary of words without this one: the model begins by itself
            prompt, length = [], 1
    tokens = 200
    if config.model.position == "learned":
        tokens = max(1, min(tokens, (config.model.max_len or config.data.seq_len) - length))
    choice = ["--temperature=0.8", "--top_p=0.95"] if is_normalized(config.model.output) else ["--temperature=0"]
    return [*prompt, f"--tokens={tokens}", *choice]


def _without(flags: Sequence[str], *fields: str) -> list[str]:
    names = "|".join(map(re.escape, fields))
    return [flag for flag in flags if not re.match(rf"--?config\.({names})=", flag)]


def _free(directory: Path, workdir: Path) -> Path:
    """A path in `directory` that does not exist yet, named after the run."""
    name = os.path.basename(os.path.abspath(workdir))
    number = 1
    while (path := directory / f"{name}-tuned{f'-{number}' * (number > 1)}").exists():
        number += 1
    return path


def _code(text: str) -> str:
    """A code span of Markdown, which may hold backticks."""
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}{text}{ticks}"
