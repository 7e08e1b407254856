"""Runs the two commands of `make demo`, and stores the report of the run and the scores with an index of its text.

python experiments/bench/demo.py
python experiments/bench/demo.py --compressors  # measures only the compressors again, on the same text, in half a minute
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from hpnlp import measure
from hpnlp.data import baselines, stream

ROOT = Path(__file__).parents[2]

FLAGS = flags.FLAGS
flags.DEFINE_string("out", str(ROOT / "experiments" / "results"), "Where the result goes.")
flags.DEFINE_bool("cold", True, "Start without compiled programs of earlier runs, as on a new machine.")
flags.DEFINE_bool("compressors", False, "Measure only the compressors again, and update the existing result.")


def measure_compressors(path: Path) -> None:
    """Updates the compressors' figures of an earlier result. Exits unless its held-out text equals that of this machine."""
    result = json.loads(path.read_text())
    (row,) = result["rows"]
    fields = {name.removeprefix("data."): value for name, value in row["config"].items() if name.startswith("data.")}
    corpus = stream.prepare(stream.DataConfig(**fields | {"weights": tuple(fields["weights"])}))
    started = time.perf_counter()
    numbers = baselines.Baselines(corpus).result(print)
    print(numbers, f"{time.perf_counter() - started:.1f} s")
    matches = [corpus.heldout_bytes == row["heldout_bytes"]]
    matches += [numbers[name] == row[name] for name in ("gzip_bits_per_byte", "xz_bits_per_byte")]
    if not all(matches):
        raise SystemExit(
            f"{path} was measured on other text (the standard library of another Python): run without --compressors"
        )
    row |= numbers
    path.write_text(json.dumps(result, indent=2) + "\n")


def main(_: Any) -> None:
    if FLAGS.compressors:
        measure_compressors(Path(FLAGS.out, "demo-cpu.json"))
        return
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
        begun = time.perf_counter()
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
        mix = [sys.executable, "-m", "hpnlp", "mix", f"{directory}/run"]
        subprocess.run(mix, check=True, cwd=ROOT, env=environment)
        wall_seconds = time.perf_counter() - begun
        mixture = json.loads(Path(directory, "run", "mixture.json").read_text())
        report = json.loads(Path(directory, "run", "report.json").read_text())
        lines = [json.loads(line) for line in Path(directory, "run", "metrics.jsonl").read_text().splitlines()]
    row = {name: value for name, value in report.items() if name != "environment"}
    row |= {"mixture": mixture, "wall_seconds": wall_seconds}
    row["curve"] = [
        [line["step"], line["loss"]] for line in lines if "loss" in line
    ]  # nats per token, and a token is a byte
    print(measure.write_result("demo", [row], FLAGS.out))


if __name__ == "__main__":
    app.run(main)
