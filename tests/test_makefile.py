"""The environment of the Makefile is the same whether or not it is active."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_active_environment_is_reused_and_not_its_own_base(tmp_path):
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", tmp_path / "active"], check=True)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }

    def dry_run(python):
        command = ["make", "-n", "test", "VENV=nowhere", f"PYTHON={python}"]
        process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        (base_python,) = re.findall(r"'(\S+)' -m venv nowhere", process.stdout)
        return set(re.findall(r"\.hpnlp-made-\w+", process.stdout)), base_python

    stamps, base_python = dry_run(base)
    active_stamps, active_base = dry_run(tmp_path / "active" / "bin" / "python")
    assert active_stamps == stamps and len(stamps) == 1
    assert not active_base.startswith(str(tmp_path)) and base_python
