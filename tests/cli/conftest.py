"""Fixtures that run commands, in this process where possible."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from absl import flags

import hpnlp
from hpnlp.__main__ import main
from tests.tiny import quick_compiler, shared_trainers, text, xla_cache  # noqa: F401  (fixtures of every test here)

ROOT = Path(__file__).parents[2]
jax.devices()  # starts all devices, before a command that takes one of them runs in this process


@dataclasses.dataclass
class Outcome:
    """The result of a command."""

    code: int  #: exit code
    out: str  #: stdout
    err: str  #: stderr


@contextlib.contextmanager
def fresh_commands():
    """Removes the modules of commands and their flags for a while.

    Commands define flags of the same names when they are imported, since a process runs only one of them.
    """

    def remove():
        by_module = flags.FLAGS.flags_by_module_dict().items()
        defined = {name: list(of_module) for name, of_module in by_module if name.startswith("hpnlp.cli")}
        for flag in (flag for of_module in defined.values() for flag in of_module):
            delattr(flags.FLAGS, flag.name)
        return defined, {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("hpnlp.cli")}

    defined, modules = remove()
    try:
        yield
    finally:
        remove()
        sys.modules.update(modules)
        if modules:
            hpnlp.cli = modules["hpnlp.cli"]
        for name, of_module in defined.items():
            for flag in of_module:
                flags.FLAGS.register_flag_by_module(name, flag)
                flags.FLAGS[flag.name] = flag


def run_here(*argv):
    """Runs a command in this process and returns its exit code."""
    with pytest.MonkeyPatch.context() as patch, fresh_commands():
        patch.setattr(sys, "argv", ["hpnlp", *map(str, argv)])
        for hook in ("excepthook", "unraisablehook"):  # commands replace these
            patch.setattr(sys, hook, getattr(sys, hook))
        try:
            main()
        except SystemExit as stop:
            return stop.code or 0
    return 0


@pytest.fixture
def run(capsys):
    """`run("train", "--workdir=...")` runs a command in this process and returns its Outcome."""

    def call(*argv):
        capsys.readouterr()
        return Outcome(run_here(*argv), *capsys.readouterr())

    return call


class Here:
    """Stands for the process of a command, which runs in this process."""

    def __init__(self, argv):
        self.argv = argv

    def wait(self):
        return run_here(*self.argv)


@pytest.fixture
def members_here(monkeypatch):
    """Members of sweeps, for which commands start `python -m hpnlp`, run in this process."""
    popen, start = subprocess.Popen, [sys.executable, "-m", "hpnlp"]

    def call(command, **options):
        return Here(command[3:]) if command[:3] == start else popen(command, **options)

    monkeypatch.setattr(subprocess, "Popen", call)


@pytest.fixture(scope="session")
def start():
    """`start("train", ...)` starts `python -m hpnlp train ...` and returns the Popen."""

    def call(*argv, wrapper=(), **options):
        command = [*wrapper, sys.executable, "-m", "hpnlp", *map(str, argv)]
        return subprocess.Popen(
            command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )

    return call


@pytest.fixture(scope="session")
def finish():
    """`finish(process)` waits for a process of `start` and returns its Outcome."""

    def call(process, timeout=300):
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()  # its children follow
            raise
        return Outcome(process.returncode, out, err)

    return call
