"""The Makefile's environment: the same one whether or not it is active."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_active_environment_is_not_made_anew_and_not_by_itself(tmp_path):
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", tmp_path / "active"], check=True)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }

    def planned(python):
        command = ["make", "-n", "test", "VENV=nowhere", f"PYTHON={python}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        (maker,) = re.findall(r"'(\S+)' -m venv nowhere", done.stdout)
        return set(re.findall(r"\.hpnlp-made-\w+", done.stdout)), maker

    stamps, maker = planned(base)
    assert planned(tmp_path / "active" / "bin" / "python")[0] == stamps and len(stamps) == 1
    assert not planned(tmp_path / "active" / "bin" / "python")[1].startswith(str(tmp_path)) and maker
