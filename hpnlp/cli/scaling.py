"""`hpnlp scaling`: plans a study of scaling laws, and fits its runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from hpnlp import cli
from hpnlp.cli import experiment
from hpnlp.cli.members import check_overrides
from hpnlp.types import InputError

USAGE = """
hpnlp scaling plan --config=scaling/bytes [--section.field=value ...]
hpnlp scaling fit DIR [--held_out=1] [--convention=porian]

`plan` prints parameters, tokens, FLOPs, steps, batch, learning rate, memory and time of all runs of a study, and fails where a
run has more tokens than the text, does not fit, or the study exceeds its budget. FILE defines get_study(), which returns a
hpnlp.scaling_laws.Study, and get_sweep(), by which hpnlp sweep trains its runs.

`fit` reads the finished runs in DIR, fits E + A N^-alpha + B D^-beta and other forms to their held-out losses, predicts the
runs with the most FLOPs, which are not fitted, and writes scaling.json, scaling.md and scaling.png to DIR. hpnlp plan --budget
reads scaling.json.
"""

flags.DEFINE_string(
    "config", None, "Experiment file of a study, which defines get_config(), get_study() and get_sweep()."
)
flags.DEFINE_string("device", "cpu", "Kind of device: a100, h100, h200, v5e, v5p, or cpu (this machine, measured).")
flags.DEFINE_integer(
    "held_out", 1, "Number of runs with the most FLOPs that are predicted and not fitted.", lower_bound=0
)
flags.DEFINE_string("convention", "porian", "How N and C are counted: kaplan, porian or chinchilla.")
flags.DEFINE_float("delta", 1e-3, "Residuals of log losses count linearly beyond it; 1 or more is least squares.")

ACTIONS = ("plan", "fit")
_OF_PLAN, _OF_FIT = ("config", "device"), ("held_out", "convention", "delta")


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp scaling`.

    Args:
      argv: "hpnlp scaling" and the arguments of the command.

    Raises:
      InputError: The action, a flag or a run is invalid, or the study exceeds a limit.
    """
    argv, overrides = experiment.split(argv)
    action, *names = cli.parse(argv, USAGE, positional=True) or [""]
    if action not in ACTIONS:
        raise InputError("expected plan or fit: write hpnlp scaling plan --config=FILE, or hpnlp scaling fit DIR")
    if action == "plan":
        cli.refuse(_OF_FIT, "with hpnlp scaling plan, which fits nothing: leave it out")
        if names:
            raise InputError(f"unexpected argument {names[0]!r}: write hpnlp scaling plan --config=FILE")
        _plan(cli.required("config", "scaling/bytes"), overrides)
    else:
        cli.refuse(_OF_PLAN, "with hpnlp scaling fit, which reads the configs of the runs: leave it out")
        if overrides:
            raise InputError(f"{overrides[0]}: the runs have configs of their own: leave it out")
        if len(names) != 1:
            raise InputError("expected one directory: write hpnlp scaling fit DIR, the --workdir of hpnlp sweep")
        _fit(Path(names[0]))


def _plan(config: str, overrides: Sequence[str]) -> None:
    """Prints the table of a study, and checks its costs."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from hpnlp import planner
    from hpnlp.planner import devices
    from hpnlp.scaling_laws import study as studies
    from hpnlp.spec import lookup

    path, *argument = config.split(":", 1)
    path = experiment.locate(path)
    module = experiment.load(path)
    if not callable(getattr(module, "get_study", None)):
        raise InputError(f"{path} has no get_study(): define one that returns a hpnlp.scaling_laws.Study")
    study = experiment.call(path, module.get_study, *argument)
    if not isinstance(study, studies.Study):
        raise InputError(f"{path}: get_study() returned {type(study).__name__}: return a hpnlp.scaling_laws.Study")
    runs = study.runs(experiment.read(config, overrides))
    for each in runs:
        check_overrides(each.fields, overrides, "get_study()", lambda field: f"or change {field} in get_study()")
    device = lookup({**planner.DEVICES, "cpu": None}, cli.FLAGS.device, "--device") or devices.this_cpu(1)
    estimated = [studies.run_costs(each, device) for each in runs]
    print(studies.render(study, runs, estimated), flush=True)
    studies.check_costs(study, runs, estimated)


def _fit(directory: Path) -> None:
    """Fits the runs of a directory, and writes its files."""
    cli.prepare_jax()
    from hpnlp import measure
    from hpnlp.report.files import replace_text
    from hpnlp.scaling_laws import analysis, members, page, plots
    from hpnlp.scaling_laws.flops import CONVENTIONS
    from hpnlp.spec import lookup
    from hpnlp.training.files.evaluation_record import finite

    f = cli.FLAGS
    lookup(CONVENTIONS, f.convention, "--convention")
    runs, unfinished = members.read_members(directory)
    result = analysis.analyse(runs, f.convention, f.held_out, f.delta)
    record = finite(analysis.to_json(result)) | {
        "unfinished": unfinished,
        "has_experts": any(member.size.idle for member in runs),
        "environment": measure.environment(),
    }
    text = page.render(result, unfinished, "scaling.png")
    plots.draw(result, directory / "scaling.png")
    try:
        replace_text(directory / "scaling.md", text)
        replace_text(directory / "scaling.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise InputError(f"cannot write to {directory} ({error.strerror or error}): correct its permissions") from error
    print(text)
    print(f"written: {', '.join(str(directory / f'scaling.{suffix}') for suffix in ('json', 'md', 'png'))}")
