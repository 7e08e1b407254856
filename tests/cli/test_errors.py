"""Scripts of experiments/ report invalid input in one line, as commands do."""

import errno
import importlib.util
import os
import time
from pathlib import Path

import jax
import pytest
from absl import app, flags

from hpnlp import cli
from hpnlp.cli.errors import at_once, run_script
from hpnlp.errors import TemporaryError
from hpnlp.types import InputError
from tests.messages import raises

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def fail(error):
    def main(_):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InputError("--out=x:\nmake it"), 2, "hpnlp: --out=x: make it\n"),
        (FileNotFoundError(2, "No such file", "a.txt"), 2, "hpnlp: cannot read or write a.txt (No such file)"),
        (KeyboardInterrupt(), 130, "hpnlp: interrupted\n"),
        (TemporaryError("port 1 cannot be opened"), 75, "hpnlp: port 1 cannot be opened\n"),
        (OSError(errno.ENOSPC, "No space left", "a.npy"), 75, "hpnlp: cannot write a.npy (No space left): free some"),
        (OSError(errno.ESTALE, "Stale file handle", "a"), 75, "hpnlp: cannot use a (Stale file handle): run the same"),
    ],
)
def test_errors_of_scripts_are_one_line(monkeypatch, capsys, error, code, message):
    monkeypatch.setattr(app, "run", lambda main: main([]))
    with pytest.raises(SystemExit) as stopped:
        run_script(fail(error))
    out = capsys.readouterr()
    assert (stopped.value.code, out.out, out.err.count("\n")) == (code, "", 1) and out.err.startswith(message)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InputError("--out=x: make it"), 2, "hpnlp: --out=x: make it\n"),
        (TemporaryError("the disk is full"), 75, "hpnlp: the disk is full\n"),
        (ZeroDivisionError("a defect"), 1, "ZeroDivisionError: a defect\n"),
    ],
)
def test_one_of_several_processes_ends_at_once(monkeypatch, capsys, error, code, message):
    """The exit code of a process that waits for the others, as JAX has it do, would come minutes later."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(type(error)), at_once():
        raise error
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(time, "sleep", lambda seconds: ended.append(f"after {seconds} s"))
    with at_once():
        raise error
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with at_once():
        raise error
    assert ended == ["after 2.0 s", code, code] and capsys.readouterr().err.endswith(message)


def test_defects_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(app, "run", lambda main: main([]))
    with pytest.raises(ZeroDivisionError):
        run_script(fail(ZeroDivisionError()))


@pytest.fixture
def load(monkeypatch):
    """`load(script, **values)` imports a script of experiments/, with values of its flags apart from those of hpnlp."""

    def load_script(script, **values):
        holder = flags.FlagValues()
        monkeypatch.setattr(flags, "FLAGS", holder)
        for define in ("DEFINE_string", "DEFINE_list", "DEFINE_integer"):
            original = getattr(flags, define)
            monkeypatch.setattr(
                flags, define, lambda *args, f=original, **options: f(*args, **{"flag_values": holder, **options})
            )
        monkeypatch.setattr(cli, "prepare_jax", lambda: None)
        spec = importlib.util.spec_from_file_location("script", EXPERIMENTS / f"{script}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        holder(["script", "--workdir=x"] if "workdir" in holder else ["script"])
        for name, value in values.items():
            setattr(holder, name, value)
        return module

    return load_script


def test_invalid_flags_of_scripts_raise_before_their_work(load):
    for script, values, message in (
        ("lm/evaluate_memory", {"memories": ["48", "a"]}, "--memories=48,a: expected numbers of tokens"),
        ("lm/evaluate_memory", {"workdir": "/no/such"}, "holds 0 runs, none of which has one of the mixers segment"),
        ("embeddings/word2vec", {"out": "/no/such/a.bin"}, "there is no directory /no/such: make it first"),
        ("embeddings/word2vec", {"set": ["dims=3"]}, r"--set=dims=3: unknown field 'dims': did you mean 'dim'\?"),
    ):
        raises(message, lambda s=script, v=values: load(s, **v).main([]))
