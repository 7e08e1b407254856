"""Loads experiment files and applies config overrides; every mistake is an InputError of one line."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import os
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from absl import flags
from ml_collections import ConfigDict, FrozenConfigDict, config_flags

import hpnlp
from hpnlp.cli import named_experiments
from hpnlp.spec import lookup
from hpnlp.types import InputError

if TYPE_CHECKING:
    pass

EXAMPLE = "lm/bytes"
AUTO = "--data.seq_len=auto"  # the length of the training texts, which `read` replaces by a number
# Flag -> the files that it takes, for error messages.
_EXPECTED = {
    "config": f"an experiment file, or an experiment of the package, for example {EXAMPLE}; hpnlp train --help lists them",
    "register": "a Python file that adds entries to tables such as MIXERS",
}


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates the overrides of a config from the other arguments.

    Args:
      argv: The program and its arguments.

    Returns:
      (`argv` without the overrides, the overrides as --section.field=value). In `argv`, "config." may be written before them.
    """
    overrides = [_override(argument) for argument in argv[1:]]
    others = [argument for argument, override in zip(argv[1:], overrides, strict=True) if not override]
    return [argv[0], *others], list(filter(None, overrides))


def _override(argument: str) -> str:
    """The override --FIELD=VALUE of an argument, "" for an argument that sets no field."""
    name, equals, value = argument.lstrip("-").partition("=")
    field = name.removeprefix("config.")
    is_field = field != name or field == "task" or re.fullmatch(r"[^\W\d]\w*\..*", field)
    return f"--{field}{equals}{value}" if argument.startswith("-") and is_field else ""


def locate(path: str) -> str:
    """The file of an experiment.

    Args:
      path: Path of a file, or the name of an experiment of the package, such as "lm/bytes".

    Returns:
      The path of the file; `path` itself where there is no such experiment.
    """
    return path if Path(path).is_file() else str(named_experiments.find().get(path, path))


def load(path: str, flag: str = "config") -> ModuleType:
    """Imports an experiment file, or another Python file that a flag names.

    Args:
      path: Path of a Python file.
      flag: Name of the flag, for error messages.

    Returns:
      Its module.

    Raises:
      InputError: There is no such file, or it raises an error.
    """
    if not Path(path).is_file():
        problem = f"{path!r} is no regular file" if Path(path).exists() else f"there is no file {path!r}"
        problem = f"{path!r} is a directory" if Path(path).is_dir() else problem
        names = list(named_experiments.find()) if flag == "config" else []
        name = path.removeprefix("experiments/").removesuffix(".py")
        if near := [name] if name in names else difflib.get_close_matches(name, names, n=3):
            raise InputError(
                f"--{flag}: {problem}: did you mean {' or '.join(near)}, of the experiments of the package?"
            )
        raise InputError(f"--{flag}: {problem}: use {_EXPECTED[flag]}")
    # The path is a name that no other module has. Dataclasses and Flax modules look their module up by its name.
    name = os.path.abspath(path)
    spec = importlib.util.spec_from_file_location(name, name)
    if spec is None or spec.loader is None or Path(path).suffix != ".py":
        raise InputError(f"--{flag}={path} is not a Python file: use {_EXPECTED[flag]}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    call(path, spec.loader.exec_module, module)
    return module


def call(path: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function of an experiment file, which may import the modules beside the file.

    Args:
      path: Path of the experiment file.
      function: The function.
      *args: Arguments of the function.

    Returns:
      The result of the function.

    Raises:
      InputError: The function raised an error, with its file and line.
    """
    try:
        with _siblings(Path(os.path.abspath(path)).parent):
            return function(*args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too, which would end the command as if it had succeeded
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        raise InputError(f"{_location(path, error)}: {kind}{_message(error)}") from error


def _message(error: BaseException) -> str:
    """The message of an error, without what ml_collections adds to it."""
    # ml_collections wraps its errors in each other, and lists all fields of a config beside the name that it lacks.
    message: Any = error
    while isinstance(message, BaseException) and (len(message.args) == 1 or isinstance(message, SyntaxError)):
        message = message.args[0]
    return re.sub(r' Other fields present: ".*?"(\n|$)', " ", str(message), flags=re.DOTALL)


def _location(path: str, error: BaseException) -> str:
    """Place of an error in an experiment file or in a module beside it, as "FILE, line N"."""
    experiment = os.path.abspath(path)
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno))
    directory = os.path.join(os.path.dirname(experiment), "")
    package = os.path.join(os.path.dirname(hpnlp.__file__), "")
    for file, line in reversed(frames):
        file = os.path.abspath(file) if not file.startswith("<") else file
        if file.startswith(directory) and not file.startswith(package) and "site-packages" not in file:
            shown = path if file == experiment else os.path.join(os.path.dirname(path), file[len(directory) :])
            return f"{shown}, line {line}"
    return path


@contextlib.contextmanager
def _siblings(directory: Path) -> Iterator[None]:
    """Puts the directory of an experiment file on the import path while it runs, as Python does for a script.

    Its modules take precedence over installed modules of the same names, but not over the standard library and hpnlp.
    Afterwards they are removed from `sys.modules`, and modules that they replaced are restored, since another experiment may
    have other modules of these names.
    """
    names = {file.stem for file in directory.glob("*.py")} | {
        file.parent.name for file in directory.glob("*/__init__.py")
    }
    # A checkout of hpnlp beside the file is not the package whose tables it adds to.
    names -= sys.stdlib_module_names | {"hpnlp"}
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
        with contextlib.suppress(ValueError):  # the experiment may have removed it
            sys.path.remove(str(directory))
        fresh = {name for name in sys.modules if "." not in name and name not in kept}
        fresh = {name for name in fresh if _lies_in(directory, sys.modules[name])}
        for name in [name for name in sys.modules if name.partition(".")[0] in fresh]:
            del sys.modules[name]
        sys.modules.update(hidden)


def _lies_in(directory: Path, module: ModuleType | None) -> bool:
    """Whether a module is a file or a package of the directory."""
    names = vars(module) if isinstance(module, ModuleType) else {}
    paths = [*names.get("__path__", ()), names.get("__file__") or ""]
    return any(os.path.dirname(os.path.abspath(path)) == str(directory) for path in paths if path)


def read(path: str, overrides: Sequence[str] = (), workdir: str = "") -> Any:
    """The config of an experiment file.

    Fields that no flag sets are those of the model that the run starts from (`training.starts.inherited`).

    Args:
      path: Path of the file or name of an experiment of the package, or "FILE:ARGUMENT" with an argument of its get_config();
        "" for the defaults of the task that the overrides name.
      overrides: Flags that set fields of the config, from `split`. The last data.seq_len may be AUTO.
      workdir: Directory of the run, if there is one.

    Returns:
      A `ConfigDict`.

    Raises:
      InputError: The file, its config or an override is invalid.
    """
    lengths = [override for override in overrides if overridden_field(override) == "data.seq_len"]
    values = _read(path, [override for override in overrides if override != AUTO])
    if values.train.init_from:
        from hpnlp.training.starts.inherited import inherited_fields

        if inherited := inherited_fields(values, overridden_fields(overrides), workdir):
            values.update_from_flattened_dict(inherited)
            _note(f"{values.train.init_from}: {', '.join(f'{name}={value}' for name, value in inherited.items())}")
    return _with_length(values) if lengths[-1:] == [AUTO] else values


def _read(path: str, overrides: Sequence[str]) -> Any:
    """As `read`, with numbers for all fields that are numbers."""
    if not path:
        from hpnlp.training.config import default

        return _with_columns(overridden(default(last_override("task", overrides) or "lm"), overrides))
    path, *argument = path.split(":", 1)
    path = locate(path)
    module = load(path)
    if not hasattr(module, "get_config"):
        raise InputError(f"--config={path} has no get_config(): define one that returns a config, as {EXAMPLE} does")
    config = call(path, module.get_config, *argument)
    _check_config(path, config)
    return _with_columns(overridden(_with_task(path, config, overrides), overrides))


def _with_columns(values: ConfigDict) -> ConfigDict:
    """The config with the columns of its table of labelled texts, where these have other names than the defaults."""
    from hpnlp.tasks import TASKS

    data: Any = values.data
    if fields := TASKS[str(values.task)].guessed_fields(data.to_dict()):
        data.update(fields)
        _note(f"{data.path}: {', '.join(f'data.{name}={value}' for name, value in fields.items())}")
    return values


def _with_length(values: ConfigDict) -> ConfigDict:
    """The config with the length of its training texts as data.seq_len, at most the one that it has."""
    from hpnlp import tasks
    from hpnlp.data.examples import prepare_examples
    from hpnlp.training.config import resolve
    from hpnlp.training.files.metrics import reading_progress
    from hpnlp.training.start import teacher_vocabulary
    from hpnlp.training.starts import warm_start

    config = resolve(values)
    if not tasks.find(config.task).reads_examples:
        raise InputError(no_length(config.task))
    first = teacher_vocabulary(config)
    if first is None and config.train.init_from:
        first = warm_start.find(config.train.init_from).vocabulary_for(config.task)
    known = (first.labels, first.tokenizer) if first else (None, None)
    examples = prepare_examples(config.data, *known, reading_progress())
    length, share = examples.fitting_length()
    for line in examples.remarks:
        _note(line)
    limit = "; auto takes at most the number of the experiment" if length == config.data.seq_len else ""
    _note(f"data.seq_len={length} holds {100 * share:.5g} % of the training sequences{limit}")
    data: Any = values.data
    data.seq_len = length
    return values


def no_length(task: str) -> str:
    """The message for AUTO in a task whose examples have no lengths of their own."""
    return f"data.seq_len=auto: sequences of task={task!r} are filled with text of any length: pass a number of tokens"


@functools.cache
def _note(line: str) -> None:
    """Prints a line to stderr, once."""
    print(f"hpnlp: {line}", file=sys.stderr)


def start(config: str | None, overrides: Sequence[str]) -> str:
    """The experiment that a run starts from.

    Args:
      config: Value of --config.
      overrides: Flags that set fields of the config, from `split`.

    Returns:
      `config`; without it, the experiment that runs of the overrides' task start from, "" for the defaults of the task.

    Raises:
      InputError: There is neither --config nor a task.
    """
    if config:
        return config
    from hpnlp import tasks

    if not (task := last_override("task", overrides)):
        raise InputError(
            f"--config is required, for example --config={EXAMPLE}, or --task=TASK --data.path=FILE, where TASK is "
            f"{', '.join(tasks.TASKS)}"
        )
    return named_experiments.STARTS.get(tasks.find(task).name, "")


def check_data_is_named(config: str | None, overrides: Sequence[str]) -> None:
    """Checks that the user has named the data, or an experiment with data.

    Args:
      config: As for `start`.
      overrides: As for `start`.

    Raises:
      InputError: Only a task is named, whose experiment to start from has data of its own.
    """
    task = last_override("task", overrides)
    name = named_experiments.STARTS.get(task)
    if not config and name and "data.path" not in overridden_fields(overrides):
        raise InputError(
            f"--task={task} names no data: add --data.path=FILE, or pass --config={name} in its place, for the data of that "
            "experiment"
        )


def overridden_fields(overrides: Sequence[str]) -> set[str]:
    """Names of the fields that flags set.

    Args:
      overrides: Flags that set fields of the config, from `split`.

    Returns:
      Names such as "model.dim".
    """
    return set(map(overridden_field, overrides))


def changes(config: ConfigDict, overrides: Sequence[str]) -> dict[str, Any]:
    """The fields that overrides set.

    Args:
      config: Values that are overridden.
      overrides: Flags that set fields of the config, from `split`.

    Returns:
      Field, as "section.field" -> its value.

    Raises:
      InputError: An override is invalid.
    """
    values = overridden(config, overrides)
    names = dict.fromkeys(map(overridden_field, overrides))
    return {name: functools.reduce(lambda section, key: section[key], name.split("."), values) for name in names}


def overridden_field(override: str) -> str:
    """The field that an override sets, as --section.field=value or --config.section.field=value."""
    return override.lstrip("-").removeprefix("config.").partition("=")[0]


def _check_config(path: str, config: object) -> None:
    """Raises InputError where the result of get_config() is not a config with all fields of its task."""
    if not isinstance(config, ConfigDict) or isinstance(config, FrozenConfigDict):
        raise InputError(
            f"{path}: get_config() returned {type(config).__name__}: return the ConfigDict of "
            "hpnlp.training.config.default()"
        )
    sections = {name: section for name, section in config.items() if isinstance(section, ConfigDict)}
    fields = {f"{name}.{field}" for name, section in sections.items() for field in section} | set(config)
    task: Any = config.get("task", "lm")
    if missing := [name for name in field_types(task) if name not in fields]:
        argument = "" if task == "lm" else repr(task)
        raise InputError(
            f"{path}: get_config() returned a config without {', '.join(missing[:3])}{', ...' * (len(missing) > 3)}: begin "
            f"with hpnlp.training.config.default({argument})"
        )


def _with_task(path: str, config: Any, overrides: Sequence[str]) -> Any:
    """The config with the sections of the task that an override names."""
    from hpnlp.training import config as configs

    task = last_override("task", overrides) or config.task
    if task == config.task:
        return config
    try:
        return configs.for_task(config, task)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def last_override(field: str, overrides: Sequence[str]) -> str:
    """The value of the last override that sets a field; "" without one."""
    values = [override.partition("=")[2] for override in overrides if overridden_field(override) == field]
    return values[-1] if values else ""


def _check_override(override: str, types: Mapping[str, str]) -> None:
    """Raises InputError where an override names no field, or has no value."""
    name, equals = overridden_field(override), "=" in override
    fields = [field for field in types if field.startswith(f"{name}.")]
    if fields:
        raise InputError(f"{override}: {name} is a section: set one of its fields, for example --{fields[0]}=VALUE")
    if lookup(types, name, "config field") != "bool" and not equals:
        raise InputError(f"{override} has no value: write {override}=VALUE ({types[name]})")


def overridden(config: ConfigDict, overrides: Sequence[str]) -> Any:
    """A config with its overrides applied.

    Args:
      config: Values that are overridden.
      overrides: Flags that set fields of the config, from `split`.

    Returns:
      A `ConfigDict`.

    Raises:
      InputError: An override names no field, or has a wrong value.
    """
    task: Any = config.task
    types = field_types(task)
    for override in overrides:
        _check_override(override, types)
    values = flags.FlagValues()
    argv = ["", *(f"--config.{override.lstrip('-').removeprefix('config.')}" for override in overrides)]
    config_flags.DEFINE_config_dict("config", config, lock_config=True, flag_values=values, sys_argv=argv)
    try:
        values(argv)
    except flags.Error as error:
        override = next(override for override in overrides if override.lstrip("-") in str(error))
        expected = types[overridden_field(override)]
        shown = override if len(override) <= 200 else f"{override[:200]}..."
        raise InputError(
            f"{shown}: expected {'tuple, for example (1,3)' if expected == 'tuple' else expected}"
        ) from error
    return values["config"].value


def field_types(task: str) -> dict[str, str]:
    """The types of all config fields.

    Args:
      task: Name of the task, which determines the fields of the sections model and data.

    Returns:
      "section.field", or the name of a field without a section, -> name of the type; of a field that may be None, the other
      type.

    Raises:
      InputError: There is no such task.
    """
    from hpnlp.training import config

    defaults = config.Config(task=task)
    return {
        name: (_optional_type(defaults, *name.split(".")) if value is None else type(value)).__name__
        for name, value in config.flat(defaults).items()
    }


def _optional_type(defaults: Any, section: str, field: str) -> type:
    """The type of a field whose default is None."""
    hint = typing.get_type_hints(type(getattr(defaults, section)))[field]
    return typing.get_args(hint)[0]
