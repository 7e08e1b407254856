"""Experiments: their names, imports of files from their own directory, and flags that set fields."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpnlp.cli import experiment, named_experiments
from hpnlp.nn import mixers
from hpnlp.tasks import TASKS
from hpnlp.types import InputError

ROOT = Path(__file__).parents[2]
IMPORTING = """
from common import STEPS
from parts.model import DIM
from hpnlp.training.config import default

def get_config():
    import late
    config = default()
    config.train.steps, config.model.dim, config.model.layers = STEPS, DIM, late.LAYERS
    return config
"""


def write(directory, steps, name="exp.py"):
    (directory / "parts").mkdir(parents=True)
    (directory / "parts" / "__init__.py").write_text("")
    (directory / "parts" / "model.py").write_text("from common import STEPS\nDIM = 8 * STEPS\n")
    (directory / "common.py").write_text(f"STEPS = {steps}\n")
    (directory / "late.py").write_text("LAYERS = 3\n")
    (directory / name).write_text(IMPORTING)


def test_each_experiment_imports_the_modules_of_its_directory(tmp_path, monkeypatch):
    write(tmp_path / "a", 4)
    write(tmp_path / "b", 5)
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "common.py").write_text("STEPS = None\n")
    (tmp_path / "a" / "random.py").write_text("raise ValueError('not the one of Python')\n")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.chdir(tmp_path / "b")
    import common  # pyright: ignore[reportMissingImports]

    path, modules = list(sys.path), set(sys.modules)
    for name, steps in ((tmp_path / "a" / "exp.py", 4), ("exp.py", 5), ("../a/exp.py", 4), ("./exp.py", 5)):
        values = experiment.read(str(name))
        assert (values.train.steps, values.model.dim, values.model.layers) == (steps, 8 * steps, 3)
        assert sys.path == path and sys.modules["common"] is common
        assert not {"late", "parts", "parts.model"} & set(sys.modules) - modules


def test_files_in_a_checkout_add_to_the_tables_of_the_imported_package(tmp_path, monkeypatch):
    """A directory hpnlp beside the file, as in a checkout beside which the package is installed, is not imported."""
    (tmp_path / "hpnlp").mkdir()
    (tmp_path / "hpnlp" / "__init__.py").write_text("raise AssertionError")
    path = tmp_path / "own.py"
    path.write_text("from hpnlp.nn.mixers import MIXERS\nMIXERS['own'] = MIXERS['full']\n")
    monkeypatch.setattr(mixers, "MIXERS", dict(mixers.MIXERS))
    experiment.load(str(path), "register")
    assert mixers.MIXERS["own"] is mixers.MIXERS["full"]


def test_files_may_define_dataclasses_with_postponed_annotations(tmp_path):
    source = (
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    x: Path = 1\n"
    )
    (tmp_path / "a.py").write_text(source)
    assert experiment.load(str(tmp_path / "a.py")).A().x == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\nx.dims", "common.py, line 2: AttributeError: 'int' object has no attribute 'dims'"),
        ("STEPS = (", "common.py, line 1: SyntaxError: '(' was never closed"),
        ("\nimport nowhere", "common.py, line 2: ModuleNotFoundError: No module named 'nowhere'"),
        ("", "exp.py, line 2: ImportError: cannot import name 'STEPS' from 'common'"),
    ],
)
def test_errors_in_imported_modules_name_file_and_line(tmp_path, monkeypatch, source, message):
    write(tmp_path / "a", 4)
    (tmp_path / "a" / "common.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    for path in (os.path.join("a", "exp.py"), str(tmp_path / "a" / "exp.py")):
        with pytest.raises(InputError) as raised:
            experiment.read(path)
        assert str(raised.value).startswith(os.path.join(os.path.dirname(path), message))


def test_experiments_of_the_package_have_names():
    found = named_experiments.find()
    assert {"lm/bytes", "classification/texts", "seq2seq/numbers"} <= found.keys()
    assert not [name for name in found if name.startswith(("bench/", "compression/"))] and "softmax/steps" not in found
    assert experiment.read("lm/bytes") == experiment.read(str(found["lm/bytes"]))
    assert experiment.read("classification/encoders:attention").data.path == "stdlib_functions"
    listed = named_experiments.listed()
    assert all(f"  {name}\n      " in listed for name in found)


@pytest.mark.slow
def test_experiments_are_built_into_the_package(tmp_path):
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, "build_py", "-d", tmp_path / "lib"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    built = tmp_path / "lib" / "hpnlp" / "experiments"
    names = {path.relative_to(built).with_suffix("").as_posix() for path in built.rglob("*.py")}
    assert named_experiments.find().keys() <= names and not {path.name for path in built.iterdir()} & {
        "bench",
        "results",
    }


def test_every_task_has_an_experiment_to_start_from(monkeypatch):
    assert named_experiments.STARTS.keys() == TASKS.keys()
    for task, name in named_experiments.STARTS.items():
        assert name.partition(":")[0] in named_experiments.find()
        assert experiment.start(None, [f"--config.task={task}"]) == name
        if task != "word_embeddings":  # which writes its text
            assert experiment.read(name).task == task
    assert experiment.start("a.py", ["--config.task=lm"]) == "a.py"
    monkeypatch.setitem(TASKS, "own", TASKS["lm"])
    monkeypatch.delitem(named_experiments.STARTS, "lm")
    assert experiment.start(None, ["--config.task=own"]) == ""
    assert experiment.read("", ["--config.model.dim=8"]).model.dim == 8


def test_the_section_config_may_be_left_out_of_flags():
    argv = [
        "hpnlp",
        "--model.dim=8",
        "-task=lm",
        "--config.data.path=a=b",
        "--workdir=a.b",
        "x.y",
        "--config=a.py",
        "--a",
    ]
    others, overrides = experiment.split(argv)
    assert others == ["hpnlp", "--workdir=a.b", "x.y", "--config=a.py", "--a"]
    assert overrides == ["--model.dim=8", "--task=lm", "--data.path=a=b"]


def test_columns_of_tables_are_guessed_unless_they_are_named(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("review,stars\ngood,5\nbad,1\n")
    start = ["--config.task=classification", f"--config.data.path={tmp_path / 'a.csv'}"]
    for _ in range(2):
        data = experiment.read("classification/texts", start).data
        assert (data.text_field, data.label_field) == ("review", "stars")
    assert capsys.readouterr().err.endswith("a.csv: data.text_field=review, data.label_field=stars\n")
    with pytest.raises(InputError, match="no field 'a', the fields are 'review', 'stars': pass data.text_field=NAME"):
        experiment.read("classification/texts", [*start, "--config.data.text_field=a"])
