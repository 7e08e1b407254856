"""Commands: each turns flags into one call. What they share is here."""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from hpnlp.types import InputError

FLAGS = flags.FLAGS
flags.DEFINE_bool("debug", False, "Show the traceback of an error that a bad input causes.")

# Beginnings of what Python says of a value -> what was expected.
REASONS = {
    "invalid literal for int()": "a whole number",
    "Exceeds the limit (4300 digits)": "a whole number",
    "could not convert string to float": "a number",
    "('Non-boolean argument": "true or false",
}


def parse(argv: Sequence[str], usage: str, positional: bool = False) -> list[str]:
    """Parses flags and returns the positional arguments, which only some commands take.

    Prints help and exits where it is asked for; raises InputError on a bad flag.
    """
    if any(arg in ("--help", "-h", "-help", "--helpfull") for arg in argv[1:]):
        print(f"{usage.strip()}\n\nFlags:\n{_own_flags()}")
        raise SystemExit(0)
    try:
        rest = FLAGS(list(argv))
    except flags.UnrecognizedFlagError as error:
        section, dot, field = error.flagname.partition(".")
        if dot and "config" not in FLAGS and section == "config":
            raise InputError(
                f"unknown flag --{error.flagname}: only train, sweep and plan take config fields"
            ) from error
        if dot and "config" in FLAGS and difflib.get_close_matches(section, ["config"]):
            raise InputError(f"unknown flag --{error.flagname}: did you mean --config.{field}?") from error
        if "config" in FLAGS and (fields := _config_flags(error.flagname)):
            raise InputError(f"unknown flag --{error.flagname}: did you mean {' or '.join(fields)}?") from error
        hint = "" if "Did you mean" in str(error) else f": {argv[0]} --help lists the flags"
        raise InputError(f"{error}{hint}") from error
    except flags.Error as error:
        raise InputError(_plain(str(error))) from error
    if len(rest) > 1 and not positional:
        raise InputError(f"unexpected argument {rest[1]!r}: flags are written --name=value")
    return rest[1:]


def _config_flags(name: str) -> list[str]:
    """The flags of the config fields that are called `name`, in any section."""
    from hpnlp.cli import experiment

    return [f"--config.{field}" for field in experiment.field_types() if field.rpartition(".")[2] == name]


def _plain(text: str) -> str:
    """The message of absl for a flag whose value is of another type, in which Python's own reason is put in words."""
    for reason, expected in REASONS.items():
        flag, found, _ = text.partition(f": {reason}")
        if found:
            return f"{flag if len(flag) <= 200 else flag[:200] + '...'}: expected {expected}"
    return text


def required(name: str, example: str) -> str:
    """The value of a flag that must be given."""
    value = getattr(FLAGS, name)
    if not value:
        raise InputError(f"--{name} is needed, as in --{name}={example}")
    if name == "workdir" and Path(value).exists() and not Path(value).is_dir():
        raise InputError(f"--workdir={value} is a file: name a directory, as --workdir={example}")
    return value


def plot_path(out: str, name: str) -> Path:
    """The file that a picture goes to.

    Args:
        out: as given: a file, whose suffix is .png where it has none, or a directory.
        name: of the file in a directory.

    Raises:
        InputError: `out` is neither a file that may be written nor a directory, as /dev/full.
    """
    if not out:
        raise InputError(f"--out is empty: name a file, as {name}, or a directory")
    path = Path(out)
    if path.is_dir() or out.endswith("/"):
        return path / name
    if path.exists() and not path.is_file():
        raise InputError(f"--out={out} is not a regular file: name one, as {name}")
    return path if path.suffix else path.with_suffix(".png")


def prepare_jax() -> None:
    """Compiled programs are kept between runs, and chatty libraries are quietened."""
    import jax

    _ignore_closed_loops()
    # What orbax logs as an error, with a traceback for each of its threads and tasks, it raises as well.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.ERROR if FLAGS.debug else logging.CRITICAL)
    if not jax.config.values["jax_compilation_cache_dir"]:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(root) / "hpnlp" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _ignore_closed_loops() -> None:
    """Reads and writes that go on when another of them has failed report to orbax's event loop, which is closed by
    then, and each would print a traceback."""
    show, show_unraisable = sys.excepthook, sys.unraisablehook

    def is_known(error: BaseException | None) -> bool:
        return isinstance(error, RuntimeError) and "Event loop is closed" in str(error)

    sys.excepthook = lambda kind, error, trace: None if is_known(error) else show(kind, error, trace)
    sys.unraisablehook = lambda it: None if is_known(it.exc_value) else show_unraisable(it)


def _own_flags() -> str:
    own = [f for module, defined in FLAGS.flags_by_module_dict().items() if module.startswith("hpnlp") for f in defined]
    lines = [f"  --{f.name}{'' if f.boolean else '=' + str(f.default or '...')}\n      {f.help}" for f in own]
    return "\n".join(lines)
