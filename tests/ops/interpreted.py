"""Runs tests of Pallas' interpreter in a process of its own."""

import pathlib
import subprocess
import sys

import pytest


def run_interpreted(test_file):
    """Runs `interpreted_kernels.py` beside a file of tests.

    Threads of JAX's interpreter end the process by a segmentation fault once in hundreds of runs.
    """
    pytest.importorskip("jax._src.pallas.mosaic.interpret.thread_map")  # without it, the process would run no test
    path = pathlib.Path(test_file).with_name("interpreted_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-p", "no:cacheprovider", str(path)]
    for _ in range(3):
        outcome = subprocess.run(command, capture_output=True, text=True)
        if outcome.returncode >= 0:  # not ended by a signal
            break
    assert outcome.returncode == 0, f"{outcome.returncode}\n{outcome.stdout}\n{outcome.stderr}"
