"""Runs the main job as a user would and keeps what it reports.

python experiments/bench/demo.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import app, flags

from hpnlp import measure

ROOT = Path(__file__).parents[2]

FLAGS = flags.FLAGS
flags.DEFINE_string("out", str(ROOT / "experiments" / "results"), "Where the result goes.")
flags.DEFINE_bool("cold", True, "Start without any compiled program from earlier runs, as on a new machine.")


def main(_: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "hpnlp",
            "train",
            "--config=experiments/lm/bytes.py",
            f"--workdir={directory}/run",
        ]
        environment = os.environ | ({"XDG_CACHE_HOME": f"{directory}/cache"} if FLAGS.cold else {})
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
        report = json.loads(Path(directory, "run", "report.json").read_text())
        lines = [json.loads(line) for line in Path(directory, "run", "metrics.jsonl").read_text().splitlines()]
    row = {name: value for name, value in report.items() if name != "environment"}
    row["curve"] = [[line["step"], line["loss"]] for line in lines if "loss" in line]  # nats a token, which is a byte
    print(measure.write_result("demo", [row], FLAGS.out))


if __name__ == "__main__":
    app.run(main)
