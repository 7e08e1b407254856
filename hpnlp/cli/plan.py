"""`hpnlp plan`: what an experiment will take on devices that are not there."""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
from collections.abc import Sequence

from absl import flags

from hpnlp import cli
from hpnlp.cli import experiment
from hpnlp.spec import lookup
from hpnlp.types import InputError

USAGE = """
hpnlp plan --config=experiments/lm/bytes.py --devices=512 --device=h200 [--config.plan.name=zero3 ...]

Says what each device will hold, compute and send in a step, how long that takes at least by the device's data sheet, and,
where it does not fit, the smallest change that would make it fit. Nothing is trained, and no accelerator is needed.
--out=plan.png draws both as stacked bars.

--depth=compiled compiles the step for so many pretended devices of this CPU as well (at most 2048), --depth=tpu for TPUs
(with libtpu: pip install '.[tpu-aot]' in the repository of hpnlp), and says how far off the plan was. --search ranks plans
that fit: of tensor, pipeline and sequence the sizes that are powers of two, and each stage of ZeRO. The config's own plan
need not be one that these devices and the model allow; then --depth and --out are of the first.
"""

flags.DEFINE_string("config", None, "An experiment file with get_config().")
flags.DEFINE_integer("devices", 8, "How many.", lower_bound=1, upper_bound=2**31 - 1)
flags.DEFINE_string("device", "h100", "Which: a100, h100, h200, v5e, v5p, or cpu, this machine's, as measured at once.")
flags.DEFINE_enum("depth", "formulas", ["formulas", "compiled", "tpu"], "How far the step is followed.")
flags.DEFINE_bool("search", False, "Rank plans for these devices that fit.")
flags.DEFINE_string("out", None, "File of a picture, or a directory for plan.png; by default none is drawn.")


def run(argv: Sequence[str]) -> None:
    gc.disable()  # it is a fifth of the time
    try:
        _run(argv)
    finally:
        gc.enable()


def _run(argv: Sequence[str]) -> None:
    argv, overrides = experiment.split(argv)
    cli.parse(argv, USAGE)
    f, path = cli.FLAGS, cli.required("config", experiment.EXAMPLE)
    values = experiment.read(path, overrides)
    # Before anything is asked of JAX: what is said is to be the same on every machine.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if f.depth == "compiled":
        given = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
        os.environ["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count={f.devices}"

    from hpnlp import planner
    from hpnlp.planner import compiled, devices, render, search
    from hpnlp.training import config

    if f.depth == "compiled" and f.devices > compiled.MAX_SIMULATED:
        raise InputError(
            f"--devices={f.devices}: --depth=compiled pretends at most {compiled.MAX_SIMULATED} devices on a CPU: take fewer, "
            "or --depth=formulas"
        )
    out = None if f.out is None else cli.plot_path(f.out, "plan.png")
    if out:
        render.check_writable(out)
    device = lookup({**planner.DEVICES, "cpu": None}, f.device, "--device") or devices.this_cpu(f.devices)
    if f.depth == "tpu":
        compiled.tpu_devices(f.device, f.devices)  # or says why not
    resolved = config.resolve(values)
    try:
        costs = planner.costs(resolved, f.devices)
        print(render.table(costs, device, f.device))
    except InputError as error:
        if not f.search:
            raise
        costs = None
        print(f"The config's own plan is left out: {error}")
    gc.enable()  # what follows may be long
    if costs and not costs.fits(device):
        mend = search.smallest_change(costs, device, functools.partial(_say, "changes tried"))
        print(
            f"It fits with {mend[0]}: {mend[1].bytes / 1e9:.1f} GB, at least {mend[1].total_seconds(device):.3g} s a step"
            f"{render.tightness_warning(mend[1], device)}."
            if mend
            else "No change that was tried makes it fit: take more devices, a smaller batch or a smaller model."
        )
    if f.search:
        found = search.rank_plans(resolved, f.devices, device, functools.partial(_say, "plans looked at"))
        print(render.ranking(found, device, resolved.plan))
        costs = costs or next(iter(found), None)
    if costs and f.depth != "formulas":
        print(f"compiling for {f.devices} devices", file=sys.stderr)
        print(compiled.compare(costs, f.depth, f.device))
    if costs and out:
        print(render.draw(costs, device, f.device, out))


def _say(what: str, done: int, of: int) -> None:
    if done and (done % 8 == 0 or done == of):
        print(f"{done} of {of} {what}", file=sys.stderr)
