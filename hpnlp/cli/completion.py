"""`hpnlp completion`: prints a script by which a shell completes commands, flags, config fields and names of entries."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpnlp import cli
from hpnlp.cli import experiment, fields, named_experiments
from hpnlp.types import InputError

USAGE = """
hpnlp completion bash > ~/.local/share/bash-completion/completions/hpnlp
hpnlp completion zsh >> ~/.zshrc
hpnlp completion fish > ~/.config/fish/completions/hpnlp.fish

Prints a script for a shell, which then completes commands, flags, config fields, and the names of experiments and of entries of
tables, such as --model.mixer=. Entries that --register adds are not among them.
"""

TAKE_FIELDS = ("train", "check-data", "sweep", "lra", "plan", "scaling")  # commands that take all config fields
_FLAG = re.compile(r'flags\.DEFINE_(\w+)\(\s*"(\w+)"')

BASH = """
_hpnlp() {
  local line="${COMP_LINE:0:COMP_POINT}" words="" prefix=""
  local current="${line##* }"
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="@commands@"
  else
    case "${COMP_WORDS[1]}" in
@flags@
    esac
  fi
  case "$current" in
@values@
    -*=*) words="" ;;
  esac
  if [[ "$current" == -*=* ]]; then
    [[ "$COMP_WORDBREAKS" == *=* ]] || prefix="${current%%=*}="
    current="${current#*=}"
  elif [[ "$current" != -* ]] && [ "$COMP_CWORD" -gt 1 ]; then
    words=""
  fi
  COMPREPLY=($(compgen -P "$prefix" -W "$words" -- "$current"))
  if [ -z "$words" ] || [ "${#COMPREPLY[@]}" -eq 0 ]; then
    COMPREPLY=($(compgen -P "$prefix" -f -- "$current"))
  fi
  [[ "${COMPREPLY[0]}" == *= ]] && compopt -o nospace 2> /dev/null
  return 0
}
complete -F _hpnlp hpnlp
"""


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp completion`.

    Args:
      argv: "hpnlp completion" and the arguments of the command.

    Raises:
      InputError: The shell is not named, or is another.
    """
    shells = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    names = cli.parse(argv, USAGE, positional=True)
    if len(names) != 1 or names[0] not in shells:
        raise InputError(f"expected a shell: write hpnlp completion {' | '.join(shells)}")
    print(shells[names[0]](_flags(), _values()))


def _commands() -> dict[str, Path]:
    """Command -> the file of its module, which has the text of its help."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return {path.stem.replace("_", "-"): path for path in files if "\nUSAGE = " in path.read_text("utf-8")}


def _flags() -> dict[str, list[str]]:
    """Command -> its flags, with = for those that take a value."""
    from hpnlp.tasks import TASKS

    # The modules of commands define flags of equal names and cannot be imported together.
    shared = _FLAG.findall((Path(__file__).parent / "__init__.py").read_text("utf-8"))
    of_config = dict.fromkeys(f"--{field}=" for task in TASKS for field in experiment.field_types(task))
    result = {}
    for command, path in _commands().items():
        of_command = _FLAG.findall(path.read_text("utf-8"))
        defined = [f"--{name}{'' if kind == 'bool' else '='}" for kind, name in shared + of_command]
        result[command] = ["--help", *defined, *(of_config if command in TAKE_FIELDS else ())]
    return result


def _values() -> dict[str, list[str]]:
    """Flag -> the names that it may hold."""
    of_fields = {f"--{field}": [name for name in names if " " not in name] for field, names in fields.tables().items()}
    return {"--config": list(named_experiments.find()), **of_fields}


def _bash(flags: Mapping[str, Sequence[str]], values: Mapping[str, Sequence[str]]) -> str:
    """The script for bash."""
    of_commands = (f'      {command}) words="{" ".join(names)}" ;;' for command, names in flags.items())
    of_values = (f'    {flag}=*) words="{" ".join(names)}" ;;' for flag, names in values.items())
    script = BASH.replace("@commands@", " ".join(flags)).replace("@flags@", "\n".join(of_commands))
    return script.replace("@values@", "\n".join(of_values)).strip()


def _zsh(flags: Mapping[str, Sequence[str]], values: Mapping[str, Sequence[str]]) -> str:
    """The script for zsh, which runs that of bash."""
    return f"autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n{_bash(flags, values)}"


def _fish(flags: Mapping[str, Sequence[str]], values: Mapping[str, Sequence[str]]) -> str:
    """The script for fish."""
    lines = []
    for name, path in _commands().items():
        purpose = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition(": ")[2]
        lines.append(f"complete -c hpnlp -f -n __fish_use_subcommand -a {name} -d {shlex.quote(purpose)}")
    commands: dict[str, list[str]] = {}
    for command, names in flags.items():
        for name in names:
            commands.setdefault(name, []).append(command)
    for name, of_flag in commands.items():
        flag = name.removesuffix("=")
        entries = f" -x -a '{' '.join(values[flag])}'" if flag in values else " -r" * name.endswith("=")
        condition = f"'__fish_seen_subcommand_from {' '.join(of_flag)}'"
        lines.append(f"complete -c hpnlp -n {condition} -l {flag.removeprefix('--')}{entries}")
    return "\n".join(lines)
