"""Commands of `hpnlp`, one module each; here are the flags and checks that they share."""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from absl import flags

from hpnlp.errors import InputError

FLAGS = flags.FLAGS
flags.DEFINE_bool("debug", False, "Print the traceback of errors that invalid input causes.")
flags.DEFINE_multi_string(
    "register",
    [],
    "Python file to run first, which adds entries of its own to tables such as MIXERS and TASKS; may be given more than once.",
)

# Commands that take flags of config fields, as `experiment.split` separates them.
TAKES_FIELDS = ("train", "check-data", "sweep", "lra", "plan", "scaling", "compress", "evaluate")
# Beginning of Python's error message for a value -> the expected type, in words.
EXPECTED = {
    "invalid literal for int()": "a whole number",
    "Exceeds the limit (4300 digits)": "a whole number",
    "could not convert string to float": "a number",
    "('Non-boolean argument": "true or false",
}


def parse(argv: Sequence[str], usage: str, positional: bool = False) -> list[str]:
    """Parses the flags of a command, and runs the files of --register; with --help, prints the help and exits.

    Args:
      argv: "hpnlp COMMAND" and its arguments, without config overrides.
      usage: Text that --help prints before the flags.
      positional: Whether the command takes positional arguments.

    Returns:
      The positional arguments.

    Raises:
      InputError: A flag is unknown or has an invalid value, there is an unexpected argument, or a file of --register fails.
    """
    if any(arg in ("--help", "-h", "-help", "--helpfull") for arg in argv[1:]):
        print(f"{usage.strip()}\n\nFlags:\n{_flag_help()}")
        raise SystemExit(0)
    try:
        arguments = FLAGS(list(argv))[1:]
    except flags.UnrecognizedFlagError as error:
        raise InputError(_unknown_flag_message(error, argv[0])) from error
    except flags.Error as error:
        raise InputError(_invalid_flag_message(str(error))) from error
    if arguments and not positional:
        raise InputError(f"unexpected argument {arguments[0]!r}: flags are written --name=value")
    register(FLAGS.register)
    return arguments


def register(paths: Iterable[str]) -> None:
    """Runs Python files that add entries to tables.

    Args:
      paths: Paths of the files.

    Raises:
      InputError: There is no such file, or it raises an error.
    """
    for path in paths:
        from hpnlp.cli import experiment  # only where there is a file, since it takes time

        experiment.load(path, "register")


def register_flags() -> list[str]:
    """The flags --register of this command, for commands that it starts or proposes.

    Returns:
      One flag for each file.
    """
    return [f"--register={path}" for path in FLAGS.register]


def _unknown_flag_message(error: flags.UnrecognizedFlagError, command: str) -> str:
    """The message for an unknown flag, with the flag that was probably meant."""
    name = error.flagname
    if name[:1].isdigit():
        return f"-{name} is read as a flag: a negative value is written --name=-{name}"
    unknown = f"unknown flag --{name}"
    if "." in name:
        return f"{unknown}: only {', '.join(TAKES_FIELDS[:-1])} and {TAKES_FIELDS[-1]} take config fields"
    if command.rpartition(" ")[2] in TAKES_FIELDS and (fields := _config_flags(name)):
        return f"{unknown}: did you mean {' or '.join(fields)}?"
    names = [prefix + flag.name for flag in defined_flags() for prefix in ("", "no")[: 1 + flag.boolean]]
    near = difflib.get_close_matches(name, names, n=1)
    return f"{unknown}: did you mean --{near[0]}?" if near else f"{unknown}: {command} --help lists the flags"


def _config_flags(name: str) -> list[str]:
    """Flags of the config fields with this name, in any section and task."""
    from hpnlp.cli import experiment
    from hpnlp.tasks import TASKS

    fields = dict.fromkeys(field for task in TASKS for field in experiment.field_types(task))
    return [f"--{field}" for field in fields if field.rpartition(".")[2] == name]


def _invalid_flag_message(message: str) -> str:
    """Absl's message for a flag with an invalid value; names the expected type instead of Python's conversion error."""
    for reason, expected in EXPECTED.items():
        flag, separator, _ = message.partition(f": {reason}")
        if separator:
            return f"{flag if len(flag) <= 200 else flag[:200] + '...'}: expected {expected}"
    return message


def required(name: str, example: str, more: str = "") -> str:
    """The value of a required flag.

    Args:
      name: Name of the flag.
      example: A value for the error message.
      more: Its end.

    Returns:
      The value, not empty.

    Raises:
      InputError: The flag is missing or empty, or --workdir is a file.
    """
    value = getattr(FLAGS, name)
    if not value:
        raise InputError(f"--{name} is required, for example --{name}={example}{more}")
    return check_no_file(value, example) if name == "workdir" else value


def check_no_file(workdir: str, example: str) -> str:
    """Checks that a directory to write is no file.

    Args:
      workdir: The directory, which need not exist.
      example: A directory for the error message.

    Returns:
      `workdir`.

    Raises:
      InputError: It is a file.
    """
    if Path(workdir).exists() and not Path(workdir).is_dir():
        raise InputError(f"{workdir} is a file: use a directory, for example --workdir={example}")
    return workdir


def named_runs(arguments: Sequence[str], usage: str, flag: str) -> list[str]:
    """The runs that a command reads: its positional arguments, or the value of a flag that earlier versions took.

    Args:
      arguments: The positional arguments.
      usage: The command with its run, for messages, as in "hpnlp compress RUN --to=RUN2".
      flag: Name of the flag that also names the run.

    Returns:
      The names, at least one.

    Raises:
      InputError: No run is named, or the arguments and the flag name different runs.
    """
    value = FLAGS[flag].value
    if value and arguments and value != ",".join(arguments):
        raise InputError(f"{' '.join(arguments)} and --{flag}={value} name different runs: leave out one of them")
    if arguments:
        return list(arguments)
    if not value:
        raise InputError(f"no run: write {usage}, where RUN is its directory, such as runs/bytes")
    return [value]


def named_run(arguments: Sequence[str], usage: str, flag: str) -> str:
    """The one run that a command reads; see `named_runs`."""
    names = named_runs(arguments, usage, flag)
    if len(names) > 1:
        raise InputError(f"{' '.join(names)}: expected one run: write {usage}")
    return names[0]


def refuse(names: Iterable[str], reason: str) -> None:
    """Checks that flags without an effect are not given.

    Args:
      names: Names of the flags.
      reason: The reason why they have no effect, and the fix.

    Raises:
      InputError: One of them is given.
    """
    for name in names:
        if FLAGS[name].present:
            raise InputError(f"--{name}={FLAGS[name].value} has no effect {reason}")


def plot_path(out: str, name: str, flag: str = "out") -> Path:
    """The file that a plot is written to.

    Args:
      out: Value of --out: a file, to which .png is added where it has no suffix, or a directory.
      name: Name of the file where `out` is a directory.
      flag: Name of the flag, for messages.

    Returns:
      The path of the file.

    Raises:
      InputError: `out` is empty, or is neither a regular file nor a directory, such as /dev/full.
    """
    if not out:
        raise InputError(f"--{flag} is empty: use a file, for example {name}, or a directory")
    path = Path(out)
    if path.is_dir() or out.endswith("/"):
        return path / name
    if path.exists() and not path.is_file():
        raise InputError(f"--{flag}={out} is not a regular file: use a file, for example {name}")
    return path if path.suffix else path.with_suffix(".png")


def prepare_jax() -> None:
    """Enables the cache of compiled programs on disk, and silences log messages of libraries that errors repeat."""
    import jax

    _ignore_closed_loops()
    # Orbax raises the errors that it logs, with a traceback for each of its threads and tasks.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.ERROR if FLAGS.debug else logging.CRITICAL)
    if not jax.config.values["jax_compilation_cache_dir"]:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(root) / "hpnlp" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _ignore_closed_loops() -> None:
    """Suppresses tracebacks that report a closed event loop.

    When one read or write of orbax has failed, the others report to its event loop after it was closed, and each would print a
    traceback.
    """
    show, show_unraisable = sys.excepthook, sys.unraisablehook

    def is_known(error: BaseException | None) -> bool:
        return isinstance(error, RuntimeError) and "Event loop is closed" in str(error)

    sys.excepthook = lambda kind, error, trace: None if is_known(error) else show(kind, error, trace)
    sys.unraisablehook = lambda it: None if is_known(it.exc_value) else show_unraisable(it)


def defined_flags() -> list[flags.Flag]:
    """The flags that modules of hpnlp have defined, without those of libraries."""
    by_module = FLAGS.flags_by_module_dict().items()
    return [flag for module, of_module in by_module if module.startswith("hpnlp") for flag in of_module]


def _flag_help() -> str:
    """The flags of a command, with their defaults and help."""
    lines = []
    for flag in defined_flags():
        value = "..." if flag.default in (None, "", []) else flag.default
        text = flag.help.partition(";\n")[0]  # without a line that absl adds for flags that may be repeated
        lines.append(f"  --{flag.name}{'' if flag.boolean else f'={value}'}\n      {text}")
    return "\n".join(lines)
