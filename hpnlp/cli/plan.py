"""`hpnlp plan`: estimates memory, communication and time of an experiment on devices that need not exist."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import shlex
import sys
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from hpnlp import cli
from hpnlp.cli import experiment
from hpnlp.spec import lookup
from hpnlp.types import InputError

if TYPE_CHECKING:  # JAX is imported later, because the flags choose its platform
    from hpnlp.planner import Costs, Device
    from hpnlp.training.config import Config

USAGE = """
hpnlp plan --config=lm/bytes --devices=512 --device=h200 [--plan.name=zero3 ...]
hpnlp plan --config=lm/bytes --recipe="heads(0.5),int8" [--model.dim=512 ...]
hpnlp plan --config=lm/bytes --compatible [--model.mixer=...]
hpnlp plan RUN [--recipe="heads(0.5),int8"]
hpnlp plan --budget=1e18 [--config=lm/bytes --law=runs/scaling --devices=8 --device=h100]

Estimates the memory, work and communication of each device in a training step, a lower bound of its time by the device's data
sheet, and, where the step does not fit, the smallest change that makes it fit. Nothing is trained; no accelerator is needed.
--out=plan.png draws memory and time as stacked bars.

--depth=compiled also compiles the step for simulated devices of this CPU (at most 2048), and --depth=tpu for TPUs (with libtpu:
pip install '.[tpu-aot]' in the repository of hpnlp); both print the error of the plan. --search ranks the plans that fit: all
sizes of tensor, pipeline and sequence that are powers of two, with each stage of ZeRO. If the config's own plan is not valid
for these devices and this model, --depth and --out use the first plan of the ranking.

--recipe prints the parameters, the bytes in memory and the bytes on disk of the model after each stage of `hpnlp compress`,
without weights. Of a compressed RUN, the bytes are those of its file.

--compatible prints which settings of plan and optimizer the layers of the model work with, each by itself, and why not; whether
they divide the sizes of the model and fit other settings, a plan of the step shows.

--budget prints the size, tokens, steps, batch, learning rate and time of the best run for a budget, by a scaling law: that of a
study (--law, see hpnlp scaling), or the law of Hoffmann et al. 2022. The model has the head size and the ratio of width and
depth of the config, lm/bytes by default.
"""

flags.DEFINE_string("config", None, "Experiment file, which defines get_config().")
flags.DEFINE_string("from", None, "The same as RUN, whose model --recipe compresses, or which is compressed.")
flags.DEFINE_string("recipe", "", "Stages of a compression whose sizes are planned, see hpnlp compress.")
flags.DEFINE_string(
    "budget", "", 'Training FLOPs of a run, as "1e18", or its time on all devices, as "2h", "30min" or "90s".'
)
flags.DEFINE_string("law", "", "scaling.json of a study or its directory; the default is a published law.")
flags.DEFINE_integer("devices", 8, "Number of devices.", lower_bound=1, upper_bound=2**31 - 1)
flags.DEFINE_string("device", "h100", "Kind of device: a100, h100, h200, v5e, v5p, or cpu (this machine, measured).")
flags.DEFINE_enum(
    "depth", "formulas", ["formulas", "compiled", "tpu"], "Whether the step is also compiled, for CPU devices or TPUs."
)
flags.DEFINE_bool("compatible", False, "Print which plans and optimizer settings the layers of the model work with.")
flags.DEFINE_bool("search", False, "Rank the plans that fit on these devices.")
flags.DEFINE_string("out", None, "File of the plot, or a directory for plan.png; by default nothing is drawn.")


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp plan`.

    Args:
      argv: "hpnlp plan" and the arguments of the command.

    Raises:
      InputError: A flag or the config is invalid, or no plan is valid.
    """
    gc.disable()  # garbage collection takes 1/5 of the time
    try:
        _run(argv)
    finally:
        gc.enable()


def _run(argv: Sequence[str]) -> None:
    """Prints what the flags ask for: the plan of a step, the run for a budget, or the sizes of a model."""
    argv, overrides = experiment.split(argv)
    arguments = cli.parse(argv, USAGE, positional=True)
    workdir = ""
    if arguments or cli.FLAGS["from"].present:
        workdir = cli.named_run(arguments, "hpnlp plan RUN --recipe=RECIPE", "from")
    _check_no_sizes_of_steps(workdir)
    if cli.FLAGS["budget"].present:
        cli.refuse(["depth", "search", "compatible", "out"], "with --budget, which plans a whole run: leave it out")
        _plan_budget(cli.FLAGS.config or experiment.EXAMPLE, overrides)
        return
    cli.refuse(["law"], "without --budget: add it, as --budget=1e18")
    if workdir:
        _print_sizes_of_run(workdir, overrides)
        return
    values = experiment.read(experiment.start(cli.FLAGS.config, overrides), overrides)
    _simulate_devices()
    if cli.FLAGS.recipe:
        _print_sizes(values)
    elif cli.FLAGS.compatible:
        _print_compatible(values)
    else:
        _plan_step(values, experiment.overridden_fields(overrides))


def _plan_step(values: Any, fields: Container[str]) -> None:
    """Prints and draws the plan of a training step; `fields` are those that the flags set."""
    from hpnlp import planner
    from hpnlp.planner import compiled, devices, render, search
    from hpnlp.training import config
    from hpnlp.training.starts import unused_fields

    f = cli.FLAGS
    if f.depth == "compiled" and f.devices > compiled.MAX_SIMULATED:
        raise InputError(
            f"--devices={f.devices}: --depth=compiled simulates at most {compiled.MAX_SIMULATED} devices on a CPU: use fewer "
            "devices, or --depth=formulas"
        )
    out = None if f.out is None else cli.plot_path(f.out, "plan.png")
    if out:
        render.check_writable(out)
    device = lookup({**planner.DEVICES, "cpu": None}, f.device, "--device") or devices.this_cpu(f.devices)
    if f.depth == "tpu":
        compiled.tpu_devices(f.device, f.devices)  # raises now rather than after the plan
    resolved = config.resolve(values)
    unused_fields.check(resolved, fields)
    costs = _plan(resolved, device)
    gc.enable()  # the next steps may take long
    if costs and not costs.fits(device):
        _print_smallest_change(costs, device)
    if f.search:
        ranked = search.rank_plans(resolved, f.devices, device, _Progress("plans tried"))
        print(render.ranking(ranked, device, resolved.plan))
        costs = costs or next(iter(ranked), None)
    if costs and f.depth != "formulas":
        print(f"compiling for {f.devices} devices", file=sys.stderr)
        print(compiled.compare(costs, f.depth, f.device))
    if costs and out:
        print(render.draw(costs, device, f.device, out))


def _check_no_sizes_of_steps(workdir: str) -> None:
    """Raises InputError for flags about training steps where the sizes of a model are asked for."""
    asked = workdir or ("--recipe" if cli.FLAGS["recipe"].present else "")
    ignored = [
        n for n in ("budget", "devices", "device", "depth", "search", "compatible", "out") if cli.FLAGS[n].present
    ]
    if asked and ignored:
        raise InputError(
            f"{asked}: the sizes of a model are printed, not those of a training step: leave out --{ignored[0]}"
        )


def _plan_budget(config: str, overrides: Sequence[str]) -> None:
    """Prints the run for --budget."""
    f = cli.FLAGS
    _simulate_devices()
    from hpnlp import planner
    from hpnlp.planner import devices
    from hpnlp.scaling_laws import budget, recipe
    from hpnlp.training.config import resolve

    parsed = recipe.parse_budget(f.budget, "--budget")
    law = budget.read_law(f.law) if f.law else budget.published_law()
    device = lookup({**planner.DEVICES, "cpu": None}, f.device, "--device") or devices.this_cpu(f.devices)
    values = resolve(experiment.read(config, overrides))
    run = budget.plan_run(parsed, values, law, device, f.devices, _Progress("changes tried"))
    command = shlex.join(["hpnlp", "train", f"--config={config}", *overrides])
    print(budget.render(run, law, device, f.device, command))


def _print_compatible(values: Any) -> None:
    """Prints the settings that the layers of a config's model work with."""
    unused = ["devices", "device", "depth", "search", "out"]
    cli.refuse(unused, "with --compatible, which plans no step: leave it out")
    from hpnlp import compatibility
    from hpnlp.training import config

    resolved = config.resolve(values)
    facts = dataclasses.replace(resolved.model.facts(), optimizer=resolved.optimizer.name)
    print(compatibility.table(facts))


def _print_sizes(values: Any) -> None:
    """Prints the sizes of a config's model after each stage of --recipe."""
    from hpnlp.planner import compressed
    from hpnlp.training import config

    print(compressed.table(compressed.sizes_of_config(config.resolve(values), cli.FLAGS.recipe)))


def _print_sizes_of_run(workdir: str, overrides: Sequence[str]) -> None:
    """Prints the sizes of a run's model after each stage of --recipe, or those of a compressed run."""
    if cli.FLAGS.config is not None or overrides:
        raise InputError(f"{workdir} has a config of its own: leave out --config")
    _simulate_devices()
    cli.prepare_jax()  # silences orbax

    from hpnlp.planner import compressed

    print(compressed.table(compressed.sizes_of_run(workdir, cli.FLAGS.recipe)))


def _simulate_devices() -> None:
    """Makes JAX use the CPU, so that the plan is the same on every machine, with as many devices as are compiled for."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if cli.FLAGS.depth == "compiled":
        kept = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
        os.environ["XLA_FLAGS"] = f"{kept} --xla_force_host_platform_device_count={cli.FLAGS.devices}"


def _plan(config: Config, device: Device) -> Costs | None:
    """Prints and returns the costs of the config's own plan; with --search, None where that plan is not valid."""
    from hpnlp.planner import render

    try:
        costs = _costs(config)
    except InputError as error:
        if not cli.FLAGS.search:
            raise
        print(f"The plan of the config is not valid: {error}")
        return None
    print(render.table(costs, device, cli.FLAGS.device))
    return costs


def _costs(config: Config) -> Costs:
    """Costs of a step on --devices. An error that one device does not have names the default, where it is taken."""
    from hpnlp import planner

    try:
        return planner.costs(config, cli.FLAGS.devices)
    except InputError as error:
        if cli.FLAGS["devices"].present:
            raise
        try:
            planner.costs(config, 1)
        except InputError:
            raise error from None
        default = f"{cli.FLAGS.devices} x {cli.FLAGS.device}"
        raise InputError(
            f"{error}, or plan another number of devices than the default, {default}: pass --devices=1"
        ) from error


def _print_smallest_change(costs: Costs, device: Device) -> None:
    from hpnlp.planner import render, search

    change = search.smallest_change(costs, device, _Progress("changes tried"))
    if change is None:
        print("None of the changes tried makes it fit: use more devices, a smaller batch or a smaller model.")
        return
    flags_of_change, fitting = change
    print(
        f"It fits with {flags_of_change}: {fitting.bytes / 1e9:.1f} GB, at least {fitting.total_seconds(device):.3g} s per step"
        f"{render.tightness_warning(fitting, device)}."
    )


@dataclasses.dataclass(frozen=True)
class _Progress:
    """Prints every eighth step of a search, and its end, to stderr."""

    label: str

    def __call__(self, done: int, total: int) -> None:
        if done and (done % 8 == 0 or done == total):
            print(f"{done} of {total} {self.label}", file=sys.stderr)
