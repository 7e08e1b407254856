"""`hpnlp advise`: which techniques make a model faster or smaller on this machine, and keep its quality."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from hpnlp import cli
from hpnlp.cli import experiment
from hpnlp.training.files.contents import Contents, check_run, contents_of
from hpnlp.training.processes import signals
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.advise import Finding
    from hpnlp.training.config import Config

USAGE = """
hpnlp advise RUN_OR_CHECKPOINT [--goal=latency|throughput|training|memory|disk] [--keep=0.97] [--budget=10min]
    [--train=20min] [--to=RUN2] [--data.path=PATH] [--section.field=value ...]
hpnlp advise --config=EXPERIMENT --goal=training|memory [--section.field=value ...]
hpnlp advise RUN --verify="int8 + model.dtype=bfloat16"
hpnlp advise RUN --device=h200 [--goal=...]
hpnlp advise --config=EXPERIMENT --device=h200 [--goal=...]

Measures which techniques make a model faster or smaller on this machine and keep its quality. It times the call that users
make (predictions, vectors, generated text, the loss of a batch or a training step) of the model as it is and with each
technique, in paired rounds; scores the faster ones on half of the held-out examples; adds techniques to the best one while
that pays; and confirms the result in a new process and on the other half. Trained models are changed as they are; techniques
that need training are listed.

RUN_OR_CHECKPOINT is a run, or a directory of Hugging Face with config.json and model.safetensors, for which --data.path names
labelled examples. A technique is recommended if, with 95 % confidence, it is faster and keeps --keep of the quality above
that of a predictor without inputs (the most frequent label, or the frequencies of tokens). With --train, the fastest
techniques that need training are trained, each with two seeds, beside the unchanged model for as many steps.

The report is printed, and written with every round to advise.md, advise.json and advise.png in RUN/advise, or --out. The same
command goes on with a search that was interrupted. --verify measures a row of the report again.
"""

flags.DEFINE_string("workdir", None, "The same as RUN.")
flags.DEFINE_string("config", None, "An experiment that is not trained yet, in place of RUN: its training is measured.")
flags.DEFINE_enum(
    "goal",
    "latency",
    ["latency", "throughput", "training", "memory", "disk"],
    "What is to become less: time of a call for one sequence or a batch, time or memory of a training step, bytes on disk.",
)
flags.DEFINE_float("keep", 0.97, "Least share of the quality that is to be kept.", lower_bound=0.5, upper_bound=0.9999)
flags.DEFINE_string(
    "budget", "10min", "Time of the search, as 90s, 10min or 2h; a measurement that has begun is finished."
)
flags.DEFINE_integer("batch_size", 0, "Sequences of a batch; 0 for one, or those of the run's batches.", lower_bound=0)
flags.DEFINE_integer("batches", 0, "Largest number of held-out batches of a score; 0 for all.", lower_bound=0)
flags.DEFINE_list("only", [], "Techniques or groups of hpnlp techniques that are tried, separated by commas.")
flags.DEFINE_list("exclude", [], "Techniques or groups that are left out.")
flags.DEFINE_string(
    "train", None, "Time for trainings of the fastest techniques that need them, beside the unchanged model."
)
flags.DEFINE_string("out", None, "Directory of the report and of the measurements; by default RUN/advise.")
flags.DEFINE_string("to", None, "Directory to which the recommended model is written, by hpnlp compress.")
flags.DEFINE_string(
    "device", None, "Estimate for this device in place of measuring: a100, h100, h200, v5e, v5p, or cpu, this machine."
)
flags.DEFINE_string("verify", None, "Row of the report that is measured again, in a new process.")

_SECONDS = {"s": 1, "min": 60, "h": 3600}


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp advise`.

    Args:
      argv: "hpnlp advise" and the arguments of the command.

    Raises:
      InputError: A flag, the run or its data are invalid.
    """
    if (parent := os.environ.pop(signals.PARENT, "")).isdecimal():
        signals.follow(int(parent))
    argv, overrides = experiment.split(argv)
    arguments = cli.parse(argv, USAGE, positional=True)
    f = cli.FLAGS
    seconds, train_seconds = _seconds("budget", f.budget), _seconds("train", f.train) if f.train else 0.0
    if f.verify:
        names = ("goal", "keep", "budget", "batch_size", "batches", "only", "exclude", "train", "to")
        cli.refuse([*names, "device"], "with --verify, which measures a row as its report did: leave it out")
    if f.device:
        names = ("keep", "budget", "batches", "train", "to")
        cli.refuse(names, "with --device, which measures nothing: leave it out")
        _check_device(f.device)
    # A run does not name its experiment.
    flags_of_config: tuple[str, ...] = ("--config=EXPERIMENT",)
    if f.config and f.device:
        _check_untrained(arguments)
        _estimate(_resolved(overrides), {}, Path(f.out) if f.out else None)
        return
    if f.config is None:
        source = Path(cli.named_run(arguments, "hpnlp advise RUN", "workdir"))
        directory = Path(f.out) if f.out else source / "advise"
    else:
        source, directory = _untrained(arguments, overrides)
        flags_of_config, overrides = (f"--config={f.config}", *overrides), []
    cli.prepare_jax()

    from hpnlp.advise import AdviseSettings, Goal, advise, report, verify
    from hpnlp.jobs.compression import compress_run
    from hpnlp.training import config as configs
    from hpnlp.training.config_file import load_config

    log = functools.partial(print, flush=True)
    if f.to:
        compress_run.check_target(Path(f.to))
    workdir = _run_of_checkpoint(source, directory) if contents_of(source) is Contents.CHECKPOINT else source
    check_run(workdir, " and no Hugging Face checkpoint")
    config = load_config(workdir)
    changes = experiment.changes(configs.to_values(config), overrides) if overrides else {}
    if f.device:
        _estimate(workdir, changes, directory)
        return
    settings = AdviseSettings(
        goal=Goal(f.goal),
        keep=f.keep,
        seconds=seconds,
        batch_size=f.batch_size,
        batches=f.batches or None,
        only=_names(f.only),
        exclude=_names(f.exclude),
        train_seconds=train_seconds,
        changes=changes,
        experiment=flags_of_config,
    )
    if f.verify:
        print(verify(workdir, f.verify, directory, log=log))
        return
    advice = advise(workdir, settings, directory=directory, log=log)
    paths = report.write(advice, directory)
    print(f"\n{report.render(advice)}\nwritten: {', '.join(map(str, paths))}", flush=True)
    if f.to:
        _write_model(workdir, advice.recommended, overrides)


def _write_model(workdir: Path, recommended: Finding | None, overrides: Sequence[str]) -> None:
    """Writes the recommended model to --to, trained for as many steps as that whose quality was measured."""
    from hpnlp.cli import members

    recipe = recommended.candidate.recipe if recommended else ""
    steps = recommended.steps if recommended else 0
    flags = [f"--to={cli.FLAGS.to}", f"--recipe={recipe}", *[f"--finetune={steps}"] * bool(steps), *overrides]
    if not recipe:
        print(f"--to={cli.FLAGS.to}: nothing is written, since no change of the weights is recommended")
    elif code := members.run(["compress", str(workdir), *flags], cli.FLAGS.to):
        raise InputError(f"--to={cli.FLAGS.to} could not be written (exit code {code}): see the error above")


def _names(values: Sequence[str]) -> tuple[str, ...]:
    """Names that were separated by commas, of which those in parentheses, as in window(64,0), separate nothing."""
    names: list[str] = []
    for value in values:
        if names and names[-1].count("(") > names[-1].count(")"):
            names[-1] += f", {value}"  # as the names of techniques are written; absl has removed spaces
        else:
            names.append(value)
    return tuple(names)


def _seconds(flag: str, text: str) -> float:
    """Seconds of a time such as 10min."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", text)
    if match is None or not float(match[1]):
        raise InputError(f"--{flag}={text}: expected a time above 0, as 90s, 10min or 2h")
    return float(match[1]) * _SECONDS[match[2]]


def _estimate(source: Path | Config, changes: dict[str, Any], directory: Path | None) -> None:
    """Prints the estimates for --device, and writes them where there is a directory."""
    f = cli.FLAGS
    from hpnlp.advise import AdviseSettings, Goal, estimates

    settings = AdviseSettings(
        goal=Goal(f.goal),
        batch_size=f.batch_size,
        only=_names(f.only),
        exclude=_names(f.exclude),
        changes=changes,
    )
    log = functools.partial(print, file=sys.stderr, flush=True)
    result = estimates.estimate(source, f.device, settings, directory=directory, log=log)
    print(estimates.render(result))
    if directory is not None:
        print(f"written: {', '.join(map(str, estimates.write(result, directory)))}")


def _check_device(name: str) -> None:
    from hpnlp import planner
    from hpnlp.spec import lookup

    lookup({**planner.DEVICES, "cpu": None}, name, "--device")


def _check_untrained(arguments: Sequence[str]) -> None:
    if arguments or cli.FLAGS.workdir:
        raise InputError("RUN and --config both name a model: leave out one of them")


def _resolved(overrides: Sequence[str]) -> Config:
    """The config of --config."""
    cli.prepare_jax()
    from hpnlp.training import config

    return config.resolve(experiment.read(experiment.start(cli.FLAGS.config, overrides), overrides))


def _untrained(arguments: Sequence[str], overrides: Sequence[str]) -> tuple[Path, Path]:
    """`(run after one step, directory of the report)` of an experiment."""
    f = cli.FLAGS
    _check_untrained(arguments)
    if f.goal not in ("training", "memory"):
        raise InputError(f"--goal={f.goal} needs a trained model, and --config={f.config} has none: name a run")
    if not f.out:
        raise InputError("--config needs a directory for the report: add --out=DIR")
    directory = Path(f.out)
    target = directory / "untrained"
    resolved = _resolved(overrides)

    from hpnlp.training import config, loop

    print(f"{f.config}: one step, to {target}", flush=True)
    # A run that has made its step is left as it is, and one of another experiment raises an error.
    one_step = config.with_changes(resolved, {"train.steps": 1, "train.eval_every": 0})
    if loop.train(one_step, target, score=False).interrupted:
        raise KeyboardInterrupt
    return target, directory


def _run_of_checkpoint(source: Path, directory: Path) -> Path:
    """A run at step 0 with the model of a Hugging Face checkpoint, converted once."""
    from hpnlp.cli import members

    target = directory / "converted"
    newest = max((path.stat().st_mtime for path in source.iterdir() if path.is_file()), default=0.0)
    if contents_of(target) is Contents.RUN and newest > (target / "config.json").stat().st_mtime:
        raise InputError(
            f"{source} has changed since it was converted to {target}: remove {directory}, or add --out=DIR"
        )
    if contents_of(target) is not Contents.RUN:
        print(f"converting {source} to {target}", flush=True)
        directory.mkdir(parents=True, exist_ok=True)
        if code := members.run(["convert", str(source), f"--to={target}"], str(source)):
            raise InputError(f"{source} could not be converted (exit code {code}): see the error above")
    return target
