"""Commands that a report proposes as next steps; each can be run as printed, in the directory that the run was started in."""

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
    """List of commands for the report.

    Args:
      workdir: Directory of the finished run, with its tokenizer.json.
      config: Config of the run.
      flags: Flags of `hpnlp train` that gave the config, quoted for a shell.

    Returns:
      Items of a Markdown list, `- PURPOSE: COMMAND`.
    """
    train_flags = shlex.split(flags)
    directory = workdir / ".." if workdir.name in ("", "..") else workdir.parent
    steps = min(2 * config.train.steps, LIMITS["train.steps"])
    commands = {
        "continue a text": ["generate", f"--workdir={workdir}", *_generation(workdir, config)],
        "train it on other text, with your files in place of data.path": [
            "train",
            *_without(train_flags, "data.path", "data.weights", "train.init_from"),
            f"--workdir={_unused(directory, workdir)}",
            f"--config.train.init_from={workdir}",
            f"--config.data.path={config.data.path}",
            *(["--config.data.weights=()"] if config.data.weights else []),
        ],
        "train longer": [
            "train",
            *_without(train_flags, "train.steps"),
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
        except InputError:  # a vocabulary of words without the prompt's: generate without a prompt
            prompt, length = [], 1
    tokens = 200
    if config.model.position == "learned":
        tokens = max(1, min(tokens, (config.model.max_len or config.data.seq_len) - length))
    choice = ["--temperature=0.8", "--top_p=0.95"] if is_normalized(config.model.output) else ["--temperature=0"]
    return [*prompt, f"--tokens={tokens}", *choice]


def _without(flags: Sequence[str], *fields: str) -> list[str]:
    """The flags that do not set one of the config fields."""
    names = "|".join(map(re.escape, fields))
    return [flag for flag in flags if not re.match(rf"--?config\.({names})=", flag)]


def _unused(directory: Path, workdir: Path) -> Path:
    """A path in `directory` that does not exist, named after the run."""
    name = os.path.basename(os.path.abspath(workdir))
    number = 1
    while (path := directory / f"{name}-tuned{f'-{number}' * (number > 1)}").exists():
        number += 1
    return path


def _code(text: str) -> str:
    """Code span of Markdown for a text that may hold backticks."""
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}{text}{ticks}"
