"""Imports of experiment files from their own directory."""

import os
import sys

import pytest

from hpnlp.cli import experiment
from hpnlp.nn import mixers
from hpnlp.types import InputError

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
