"""Command lines, run in this process where no process is what is tested."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

import hpnlp
from hpnlp.__main__ import main
from tests.tiny import quick_compiler, text, xla_cache  # noqa: F401  (fixtures of every test here)

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass
class Outcome:
    """code: the exit code. out, err: what was printed."""

    code: int
    out: str
    err: str


@contextlib.contextmanager
def fresh_commands():
    """Commands define their flags when they are imported, and several of them a flag of the same name: a process runs
    one. So none is imported before, and what others had imported comes back after."""

    def take_away():
        of_modules = flags.FLAGS.flags_by_module_dict().items()
        taken = {name: list(own) for name, own in of_modules if name.startswith("hpnlp.cli")}
        for flag in (flag for own in taken.values() for flag in own):
            delattr(flags.FLAGS, flag.name)
        return taken, {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("hpnlp.cli")}

    defined, modules = take_away()
    try:
        yield
    finally:
        take_away()
        sys.modules.update(modules)
        if modules:
            hpnlp.cli = modules["hpnlp.cli"]
        for name, own in defined.items():
            for flag in own:
                flags.FLAGS.register_flag_by_module(name, flag)
                flags.FLAGS[flag.name] = flag


@pytest.fixture
def run(capsys, monkeypatch):
    """`run("train", "--workdir=...")` -> Outcome, in this process."""

    def call(*argv):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["hpnlp", *map(str, argv)])
        for hook in ("excepthook", "unraisablehook"):  # which commands replace
            monkeypatch.setattr(sys, hook, getattr(sys, hook))
        code = 0
        with fresh_commands():
            try:
                main()
            except SystemExit as stop:
                code = stop.code or 0
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def start():
    """`start("train", ...)` -> Popen of `python -m hpnlp train ...`."""

    def call(*argv, wrapper=(), **options):
        command = [*wrapper, sys.executable, "-m", "hpnlp", *map(str, argv)]
        return subprocess.Popen(
            command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )

    return call


@pytest.fixture(scope="session")
def finish():
    """Waits for what `start` began: its Outcome."""

    def call(process, timeout=300):
        out, err = process.communicate(timeout=timeout)
        return Outcome(process.returncode, out, err)

    return call
