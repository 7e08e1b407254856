"""Runs the two commands of `make demo`, and stores the report of the run and the scores with an index of its text.

python experiments/bench/demo.py
python experiments/bench/demo.py --compressors  # measures only the compressors again, on the same text, in two minutes
python experiments/bench/demo.py --path=DIR_OR_GLOB --text="sources of Perl's library" --name=demo_perl  # of other text

All compressors that are installed are measured to the end after the training, in which the report gives them only its time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import app, flags

from hpnlp import measure
from hpnlp.data import baselines, stream

ROOT = Path(__file__).parents[2]

FLAGS = flags.FLAGS
flags.DEFINE_string("out", str(ROOT / "experiments" / "results"), "Where the result goes.")
flags.DEFINE_bool("cold", True, "Start without compiled programs of earlier runs, as on a new machine.")
flags.DEFINE_string("path", "stdlib", "The text, as data.path.")
flags.DEFINE_string("text", "", "Description of the text, which replaces --path in the result.")
flags.DEFINE_string("name", "demo", "Name of the result.")
flags.DEFINE_bool("compressors", False, "Measure only the compressors again, and update the existing result.")


def measure_compressors(path: Path) -> None:
    """Updates the compressors' figures of an earlier result. Exits unless its held-out text equals that of this machine."""
    result = json.loads(path.read_text())
    (row,) = result["rows"]
    fields = {name.removeprefix("data."): value for name, value in row["config"].items() if name.startswith("data.")}
    numbers = compressors(fields | {"path": FLAGS.path})
    if any(numbers[name] != row[name] for name in ("gzip_bits_per_byte", "xz_bits_per_byte")):
        raise SystemExit(
            f"{path} was measured on other text (such as the standard library of another Python): run without --compressors"
        )
    row |= numbers
    path.write_text(json.dumps(result, indent=2) + "\n")


def compressors(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of all compressors on the held-out text of fields of `data`."""
    corpus = stream.prepare(stream.DataConfig(**{**fields, "weights": tuple(fields["weights"])}))
    started = time.perf_counter()
    training, share = corpus.read_training_text(baselines.WINDOW)
    *_, numbers = baselines.measure(training, corpus.read_heldout())
    del numbers["is_complete"]
    print(numbers, f"{time.perf_counter() - started:.1f} s")
    return {**numbers, "xz_trained_share": share}


def main(_: Any) -> None:
    if FLAGS.compressors:
        measure_compressors(Path(FLAGS.out, f"{FLAGS.name}-cpu.json"))
        return
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "hpnlp",
            "train",
            "--config=experiments/lm/bytes.py",
            f"--workdir={directory}/run",
            f"--data.path={FLAGS.path}",
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
    fields = {name.removeprefix("data."): value for name, value in row["config"].items() if name.startswith("data.")}
    row |= compressors(fields)
    if FLAGS.text:
        row["config"]["data.path"] = FLAGS.text
    row["curve"] = [
        [line["step"], line["loss"]] for line in lines if "loss" in line
    ]  # nats per token, and a token is a byte
    print(measure.write_result(FLAGS.name, [row], FLAGS.out))


if __name__ == "__main__":
    app.run(main)
