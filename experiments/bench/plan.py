"""How long `hpnlp plan` takes for 512 devices, from the command to its end: by formulas, and compiled for pretended ones.

    python experiments/bench/plan.py [--measurements=5] [--depths=formulas,compiled]

Models of 110 M parameters (zero1) and of 7 B (zero3 over 64, tensor 8). Compiled, once each, it also says how far off the
plan's bytes are. A few minutes on two cores.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from hpnlp import measure

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
MODELS = {
    "110M": "model.layers=12 model.dim=768 model.heads=12 model.mlp=gelu model.vocab=30528 optimizer.name=adamw "
    "data.seq_len=512 data.batch_size=1024 plan.name=zero1",
    "7B": "model.layers=32 model.dim=4096 model.heads=32 model.mlp=swiglu model.mlp_dim=11008 model.vocab=32000 "
    "optimizer.name=adamw data.seq_len=4096 data.batch_size=512 "
    "plan.name=zero3 plan.tensor=8 plan.remat=full",
}

FLAGS = flags.FLAGS
flags.DEFINE_integer("measurements", 5, "Of each by formulas; the median counts.")
flags.DEFINE_list("depths", ["formulas", "compiled"], "Depths.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def planned(model: str, depth: str) -> tuple[float, str]:
    """`(seconds, what it says)`."""
    overrides = [f"--config.{setting}" for setting in MODELS[model].split()]
    config = ROOT / "experiments" / "lm" / "bytes.py"
    command = [sys.executable, "-m", "hpnlp", "plan", f"--config={config}", "--devices=512"]
    start = time.perf_counter()
    done = subprocess.run([*command, f"--depth={depth}", *overrides], capture_output=True, text=True, cwd=ROOT)
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return seconds, done.stdout


def main(_: Any) -> None:
    rows = []
    for depth in FLAGS.depths:
        for model in MODELS:
            planned(model, "formulas")  # what is read from disk is read once
            found = [planned(model, depth) for _ in range(FLAGS.measurements if depth == "formulas" else 1)]
            row: dict[str, Any] = {
                "model": model, "depth": depth, "devices": 512,
                "seconds": statistics.median(seconds for seconds, _ in found), "all_seconds": [s for s, _ in found],
            }  # fmt: skip
            off = re.findall(
                r"^(state|temporaries|all that is sent), bytes .*?([+-][\d.]+) %$", found[0][1], re.MULTILINE
            )
            row |= {f"{what} off": float(percent) / 100 for what, percent in off}
            print(row, flush=True)
            rows.append(row)
    print(measure.write_result("plan", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
