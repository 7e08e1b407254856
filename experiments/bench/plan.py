"""Measures the wall time of `hpnlp plan` for 512 devices: by formulas, and compiled for simulated devices.

    python experiments/bench/plan.py [--measurements=5] [--depths=formulas,compiled]
    python experiments/bench/plan.py --tpu

Models of 110M parameters (zero1) and of 7B (zero3 over 64, tensor 8). Compiling, which is measured once, also gives the error
of the planned bytes. Takes a minute on two cores. --tpu compiles for TPUs without having them (extra tpu-aot), the 110M model
also for one and eight devices under several plans, which takes about 15 minutes.
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
SMALL = "model.layers=12 model.dim=768 model.heads=12 model.mlp=gelu model.vocab=30528 optimizer.name=adamw data.seq_len=512"
MODELS = {
    "110M": f"{SMALL} data.batch_size=1024 plan.name=zero1",
    "7B": "model.layers=32 model.dim=4096 model.heads=32 model.mlp=swiglu model.mlp_dim=11008 model.vocab=32000 "
    "optimizer.name=adamw data.seq_len=4096 data.batch_size=512 "
    "plan.name=zero3 plan.tensor=8 plan.remat=full",
}
REMAT = ("none", "dots", "names(projected,mixed,hidden)", "names", "full")
PLANS = ("zero3", "tensor", "data plan.pipeline=4", "sequence", "3d")

FLAGS = flags.FLAGS
flags.DEFINE_integer("measurements", 5, "Measurements of each plan by formulas; the median is reported.")
flags.DEFINE_list("depths", ["formulas", "compiled"], "Values of --depth.")
flags.DEFINE_bool("tpu", False, "Compile for TPUs, and write the result plan_tpu.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def planned(settings: str, depth: str, devices: int = 512) -> tuple[float, str]:
    """`(seconds, output)` of `hpnlp plan`."""
    overrides = [f"--{setting}" for setting in settings.split()]
    config = ROOT / "experiments" / "lm" / "bytes.py"
    command = [sys.executable, "-m", "hpnlp", "plan", f"--config={config}", f"--devices={devices}", "--device=v5p"]
    start = time.perf_counter()
    done = subprocess.run([*command, f"--depth={depth}", *overrides], capture_output=True, text=True, cwd=ROOT)
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return seconds, done.stdout


def relative_errors(output: str) -> dict[str, float]:
    """Relative errors of the planned bytes against the compiled program, read from the output of `hpnlp plan`."""
    errors = re.findall(r"^(state|temporaries|communication), bytes .*?([+-][\d.]+) %$", output, re.MULTILINE)
    return {f"{kind} off": round(float(percent) / 100, 6) for kind, percent in errors}


def compiled_for_tpus() -> None:
    single = {("110M", 1, remat): f"{SMALL} data.batch_size=8 plan.remat={remat}" for remat in REMAT}
    eight = {("110M", 8, plan): f"{SMALL} data.batch_size=64 plan.name={plan}" for plan in PLANS}
    many = {(model, 512, ""): settings for model, settings in MODELS.items()}
    rows = []
    for (model, devices, variant), settings in (single | eight | many).items():
        for dtype in ("float32", "bfloat16") if model == "7B" else ("float32",):
            seconds, output = planned(f"{settings} model.unroll=1 model.dtype={dtype}", "tpu", devices)
            setting = {"model": model, "devices": devices, "plan": variant, "dtype": dtype}
            rows.append({**setting, "device": "v5p", "seconds": seconds, **relative_errors(output)})
            print(rows[-1], flush=True)
    print(measure.write_result("plan_tpu", rows, FLAGS.out))


def main(_: Any) -> None:
    if FLAGS.tpu:
        return compiled_for_tpus()
    rows = []
    for depth in FLAGS.depths:
        for model in MODELS:
            planned(MODELS[model], "formulas")  # warms the file cache
            results = [planned(MODELS[model], depth) for _ in range(FLAGS.measurements if depth == "formulas" else 1)]
            row: dict[str, Any] = {
                "model": model, "depth": depth, "devices": 512,
                "seconds": statistics.median(seconds for seconds, _ in results), "all_seconds": [s for s, _ in results],
            }  # fmt: skip
            row |= relative_errors(results[0][1])
            print(row, flush=True)
            rows.append(row)
    print(measure.write_result("plan", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
