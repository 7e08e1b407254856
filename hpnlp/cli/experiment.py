"""Experiment files: loaded, and their config overridden by flags, with every mistake told in one line."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import traceback
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import flags
from ml_collections import ConfigDict, FrozenConfigDict, config_flags

import hpnlp
from hpnlp.spec import lookup
from hpnlp.types import InputError

EXAMPLE = "experiments/lm/bytes.py (in the repository of hpnlp)"


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """`(argv without them, overrides)`, which are written --config.section.field=value."""
    overrides = [arg for arg in argv[1:] if re.match(r"--?config\.", arg)]
    return [arg for arg in argv if arg not in overrides], overrides


def load(path: str) -> ModuleType:
    """The module of an experiment file. Raises InputError where there is none, or where it does not run."""
    if not Path(path).is_file():
        what = f"{path!r} is a directory" if Path(path).is_dir() else f"there is no file {path!r}"
        raise InputError(f"--config: {what}: name an experiment file, as {EXAMPLE}")
    spec = importlib.util.spec_from_file_location("experiment", os.path.abspath(path))
    if spec is None or spec.loader is None or Path(path).suffix != ".py":
        raise InputError(f"--config={path} is not a Python file: name an experiment file, as {EXAMPLE}")
    module = importlib.util.module_from_spec(spec)
    call(path, spec.loader.exec_module, module)
    return module


def call(path: str, function: Any, *args: Any) -> Any:
    """`function(*args)` of the experiment file at `path`; whatever it raises becomes an InputError with its file and line."""
    try:
        with _siblings(Path(os.path.abspath(path)).parent):
            return function(*args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a command that ended there would seem to be done
        # ml_collections wraps its errors in each other, and tells all that a config holds beside a name that it lacks.
        told: Any = error
        while isinstance(told, BaseException) and (len(told.args) == 1 or isinstance(told, SyntaxError)):
            told = told.args[0]
        text = re.sub(r' Other fields present: ".*?"(\n|$)', " ", str(told), flags=re.DOTALL)
        raise InputError(f"{_place(path, error)}: {type(error).__name__}: {text}") from error


def _place(path: str, error: BaseException) -> str:
    """`file, line N` of an error in the experiment file at `path` or in a module beside it."""
    experiment = os.path.abspath(path)
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno))
    beside = os.path.join(os.path.dirname(experiment), "")
    elsewhere = os.path.join(os.path.dirname(hpnlp.__file__), "")
    for name, line in reversed(frames):
        name = os.path.abspath(name) if not name.startswith("<") else name
        if name.startswith(beside) and not name.startswith(elsewhere) and "site-packages" not in name:
            return f"{path if name == experiment else os.path.join(os.path.dirname(path), name[len(beside) :])}, line {line}"
    return path


@contextlib.contextmanager
def _siblings(directory: Path) -> Iterator[None]:
    """Lets an experiment file import the modules of its directory, as Python lets a script.

    They come before installed modules of the same names, and not before those of Python itself. Afterwards they are forgotten,
    and modules that they hid are back: another experiment may have other siblings of these names.
    """
    names = {file.stem for file in directory.glob("*.py")} | {
        file.parent.name for file in directory.glob("*/__init__.py")
    }
    names -= sys.stdlib_module_names
    loaded_before = {name.partition(".")[0] for name in sys.modules}
    hidden = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.partition(".")[0] in names and not _lies_in(directory, sys.modules.get(name.partition(".")[0]))
    }
    kept = loaded_before - {name.partition(".")[0] for name in hidden}
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # an experiment may take it out itself
            sys.path.remove(str(directory))
        fresh = {name for name in sys.modules if "." not in name and name not in kept}
        fresh = {name for name in fresh if _lies_in(directory, sys.modules[name])}
        for name in [name for name in sys.modules if name.partition(".")[0] in fresh]:
            del sys.modules[name]
        sys.modules.update(hidden)


def _lies_in(directory: Path, module: ModuleType | None) -> bool:
    """Whether a module is a file or a package of the directory."""
    places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None) or ""]
    return any(os.path.dirname(os.path.abspath(place)) == str(directory) for place in places if place)


def read(path: str, overrides: Sequence[str] = ()) -> Any:
    """The ConfigDict of the experiment file `path`, or `path:argument`, with flags as `split` gives them applied.

    Raises InputError for whatever is wrong with either.
    """
    path, *argument = path.split(":", 1)
    module = load(path)
    if not hasattr(module, "get_config"):
        raise InputError(f"--config={path} has no get_config(): define one that returns a config, as {EXAMPLE} does")
    values = call(path, module.get_config, *argument)
    if not isinstance(values, ConfigDict) or isinstance(values, FrozenConfigDict):
        raise InputError(
            f"{path}: get_config() returned {type(values).__name__}: return the ConfigDict that it begins with"
        )
    types = field_types()
    held = {f"{name}.{field}" for name, fields in values.items() if isinstance(fields, ConfigDict) for field in fields}
    if lacking := [name for name in types if name not in held]:
        raise InputError(
            f"{path}: get_config() returned a config without {', '.join(lacking[:3])}{', ...' * (len(lacking) > 3)}: begin "
            "with hpnlp.training.config.default()"
        )
    for override in overrides:
        name, equals, _ = override.lstrip("-").removeprefix("config.").partition("=")
        fields = [field for field in types if field.startswith(f"{name}.")]
        if fields:
            raise InputError(f"{override}: {name} is a section: set one of its fields, as --config.{fields[0]}=VALUE")
        if lookup(types, name, "config field") != "bool" and not equals:
            raise InputError(f"{override} has no value: write {override}=VALUE ({types[name]})")
    own, argv = flags.FlagValues(), ["", *overrides]
    config_flags.DEFINE_config_dict("config", values, lock_config=True, flag_values=own, sys_argv=argv)
    try:
        own(argv)
    except flags.Error as error:
        at_fault = next(o for o in overrides if o.lstrip("-") in str(error))
        expected = types[at_fault.lstrip("-").removeprefix("config.").partition("=")[0]]
        at_fault = at_fault if len(at_fault) <= 200 else f"{at_fault[:200]}..."
        raise InputError(f"{at_fault}: expected {'tuple, as (1,3)' if expected == 'tuple' else expected}") from error
    return own["config"].value


def field_types() -> dict[str, str]:
    """section.field -> the name of its type, for every field of a config."""
    from hpnlp.training import config

    def of(section: str, field: str) -> type:
        hint = typing.get_type_hints(type(getattr(defaults, section)))[field]
        return typing.get_args(hint)[0]  # of a field that may be None

    defaults = config.Config()
    values = config.flat(defaults)
    return {name: (of(*name.split(".")) if value is None else type(value)).__name__ for name, value in values.items()}
