"""Measures the wall time of `make test` and `make test-all` after set-up, and their numbers of tests.

python experiments/bench/suite.py
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from hpnlp import measure

ROOT = Path(__file__).parents[2]

FLAGS = flags.FLAGS
flags.DEFINE_string("out", str(ROOT / "experiments" / "results"), "Where the result goes.")


def main(_: Any) -> None:
    rows = []
    for target in ("test", "test-all"):
        subprocess.run(["make", target, "ARGS=--collect-only -q"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        start = time.perf_counter()
        done = subprocess.run(["make", target], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - start
        passed = re.findall(r"(\d+) passed", done.stdout)
        rows.append({"target": target, "seconds": seconds, "passed": int(passed[-1])})
        print(rows[-1], flush=True)
    print(measure.write_result("suite", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
