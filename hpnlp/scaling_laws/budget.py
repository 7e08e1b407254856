"""The run for a budget by a scaling law: size, tokens, steps, batch, learning rate and time."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp.planner import Costs, Device, costs, search
from hpnlp.scaling_laws import diagnostics, recipe
from hpnlp.scaling_laws.fit import Estimate, Fit, FlopsPerToken, Optimum, fit, interpolated_flops, six_n
from hpnlp.scaling_laws.fitting.forms import LOSS_FORMS
from hpnlp.scaling_laws.flops import CONVENTIONS, ModelSize, model_size
from hpnlp.scaling_laws.points import Points
from hpnlp.scaling_laws.study import duration
from hpnlp.spec import lookup
from hpnlp.training.config import Config, with_changes
from hpnlp.types import InputError

ASSUMED_MFU = 0.3  # gives the first guess of the FLOPs for a time
ROUNDS = 4  # iterations of the search for the FLOPs that take a time

# Fit of experiments/bench/scaling_laws.py to the 240 points that Besiroglu et al. 2024 ("Chinchilla scaling: a replication
# attempt") read off figure 4 of Hoffmann et al. 2022: log A, log B, log E, alpha and beta, and their bootstrap covariance.
REPLICATION = (6.16924647189, 7.67015666940, 0.59730681797, 0.34731050492, 0.36717242943)
COVARIANCE = (
    (6.4252218481e-02, -2.4822870310e-02, 2.1024398328e-03, 3.8276784571e-03, -1.2458020718e-03),
    (-2.4822870310e-02, 1.7283758875e-01, 3.6631428493e-03, -1.5407517848e-03, 8.4555870580e-03),
    (2.1024398328e-03, 3.6631428493e-03, 2.0000122072e-04, 1.2417484183e-04, 1.7859880972e-04),
    (3.8276784571e-03, -1.5407517848e-03, 1.2417484183e-04, 2.2832848422e-04, -7.7381913199e-05),
    (-1.2458020718e-03, 8.4555870580e-03, 1.7859880972e-04, -7.7381913199e-05, 4.1393172371e-04),
)


@dataclasses.dataclass(frozen=True)
class Law:
    """A scaling law with the runs that it is from.

    Attributes:
      fit: The fit.
      convention: How its N and C are counted, an entry of CONVENTIONS.
      flops: Training FLOPs of a token as a function of N.
      source: Description.
      largest: FLOPs of the largest run, beyond which it is extrapolated.
      is_subword: Whether its tokens are known to be subwords.
      has_experts: Whether its models have experts.
      warnings: Reasons to doubt the fit.
    """

    fit: Fit
    convention: str
    flops: FlopsPerToken
    source: str
    largest: float | int
    is_subword: bool = False
    has_experts: bool = False
    warnings: tuple[str, ...] = ()


def published_law() -> Law:
    """The law of Hoffmann et al. 2022, fitted to the points of Besiroglu et al. 2024, for subword tokens of web text.

    The constants are those of REPLICATION, and differ from the rounded ones of Besiroglu et al. by less than a standard error.

    Returns:
      The law.
    """
    form = LOSS_FORMS["additive"]
    samples = np.random.default_rng(0).multivariate_normal(REPLICATION, COVARIANCE, 1000)
    constants = dict(zip(form.constants, form.to_constants(np.array(REPLICATION)).tolist(), strict=True))
    none = Points(np.empty(0), np.empty(0), np.empty(0))
    law = Fit("additive", none, constants, form.to_constants(samples), np.empty(0), 240 - len(constants))
    source = "Hoffmann et al. 2022, fitted to the points of Besiroglu et al. 2024: subword tokens of web text"
    return Law(law, "chinchilla", six_n, source, 1.3e22, is_subword=True)


def read_law(path: str | Path) -> Law:
    """The law of a study.

    Args:
      path: scaling.json, or its directory.

    Returns:
      The law.

    Raises:
      InputError: There is no such file, or it was not written by `hpnlp scaling fit`.
    """
    file = Path(path) / "scaling.json" if Path(path).is_dir() else Path(path)
    try:
        record = json.loads(file.read_text("utf-8"))
        convention = record["convention"]
        fitted = [point for point in record["points"] if not point["held_out"]]
        counted = [point["conventions"][convention] for point in fitted]
        points = Points(
            np.array([x["n"] for x in counted], np.float64),
            np.array([point["d"] for point in fitted], np.float64),
            np.array([point["loss"] for point in fitted], np.float64),
            np.array([x["c"] for x in counted], np.float64),
        )
        delta = float(record["delta"])
    except OSError as error:
        raise InputError(f"--law: cannot read {file} ({error.strerror}): write it by hpnlp scaling fit DIR") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"--law: {file} is not the result of a study ({error!r}): write it by hpnlp scaling fit DIR"
        ) from error
    lookup(CONVENTIONS, convention, f"convention of {file}")
    try:
        law = fit(points, delta=delta)
    except InputError as error:
        raise InputError(f"--law={path}: {error}") from error
    doubts = tuple(diagnostics.warnings(law))
    return Law(
        law,
        convention,
        interpolated_flops(points),
        str(file),
        float(points.c.max()),
        has_experts=bool(record.get("has_experts", False)),
        warnings=doubts,
    )


@dataclasses.dataclass(frozen=True)
class BudgetedRun:
    """The run for a budget.

    Attributes:
      optimum: Optimum of the law.
      config: Config of the run.
      changes: Fields in which it differs from the config that was given.
      n: Parameters of the model, in the convention of the law.
      costs: Costs of a step.
      seconds: Lower bound of the time of all steps.
      fix: Flags of the layout without which a step does not fit; "" where it fits with that of the given config.
    """

    optimum: Optimum
    config: Config
    changes: dict[str, Any]
    n: int
    costs: Costs
    seconds: float | int
    fix: str = ""


def plan_run(
    budget: recipe.Budget, config: Config, law: Law, device: Device, devices: int, progress: search.Progress
) -> BudgetedRun:
    """Plans the run for a budget, with the smallest change of the layout that makes its step fit, if there is one.

    Args:
      budget: FLOPs, or a time on all devices.
      config: Config whose head size, ratio of width and depth, length, layout and data the run keeps.
      law: The scaling law.
      device: The accelerator.
      devices: Number of accelerators.
      progress: Called with (changes tried, all changes) where the step does not fit.

    Returns:
      The run.

    Raises:
      InputError: The budget is less than one step, or the config is not valid for these devices.
    """
    run = _within(budget, config, law, device, devices)
    if run.costs.fits(device) or (change := search.smallest_change(run.costs, device, progress)) is None:
        return run
    fix, fitting = change
    # A time is planned again, since the change costs some.
    accumulate = {"optimizer.accumulate": fitting.config.optimizer.accumulate}
    config = with_changes(dataclasses.replace(config, plan=fitting.config.plan), accumulate)
    return dataclasses.replace(_within(budget, config, law, device, devices), fix=fix)


def _within(budget: recipe.Budget, config: Config, law: Law, device: Device, devices: int) -> BudgetedRun:
    """The run for a budget, in the layout of the config."""
    if budget.flops:
        return _plan(budget.flops, config, law, device, devices)
    flops = budget.seconds * devices * device.flops["float32"] * ASSUMED_MFU
    run = _plan(flops, config, law, device, devices)
    for _ in range(ROUNDS):
        flops *= budget.seconds / run.seconds
        run = _plan(flops, config, law, device, devices)
    return run


def _plan(flops: float | int, config: Config, law: Law, device: Device, devices: int) -> BudgetedRun:
    convention, length = CONVENTIONS[law.convention], config.data.seq_len
    optimum = law.fit.optimum(flops, law.flops)
    shape = _shape(config, optimum.n.value, law.convention)
    size = model_size(with_changes(config, shape))
    per_token = convention.flops_per_token(size)
    tokens = flops / per_token
    batch = max(recipe.batch_size(tokens, length), devices)
    steps = recipe.steps(
        tokens, batch, length, per_token, f"{flops:.3g} FLOPs, {convention.parameters(size):,} parameters"
    )
    changes: dict[str, Any] = {
        **shape,
        "optimizer.name": "adamw",  # for which the Step law states learning rates
        "data.batch_size": batch,
        "train.steps": steps,
        "optimizer.learning_rate": float(f"{recipe.learning_rate(size.layers, tokens):.3g}"),
        "optimizer.warmup": recipe.warmup(size.layers, batch * length, steps),
    }
    changed = with_changes(config, changes)
    step = costs(changed, devices)
    return BudgetedRun(optimum, changed, changes, convention.parameters(size), step, steps * step.total_seconds(device))


def _shape(config: Config, n: float | int, convention: str) -> dict[str, int]:
    """Width, depth and heads with about N parameters, at the head size and the ratio of width and depth of a config."""
    model = config.model
    size = model_size(config)
    vocab, head_size, aspect = size.head // model.dim, model.dim // model.heads, model.dim / model.layers
    best: tuple[float, dict[str, int]] = (math.inf, {})
    heads = 0
    while True:
        heads += 1
        dim = heads * head_size
        ratio = dim / model.dim
        for layers in {max(1, math.floor(dim / aspect)), max(1, math.ceil(dim / aspect))}:
            fields = {"dim": dim, "heads": heads, "layers": layers}
            fields |= {
                name: max(1, round(getattr(model, name) * ratio))
                for name in ("mlp_dim", "kv_heads")
                if getattr(model, name)
            }
            matrices = dataclasses.replace(model, **fields).non_embedding_parameters()
            counted = CONVENTIONS[convention].parameters(ModelSize(matrices, vocab * dim, vocab * dim, 0, 1))
            best = min(
                best, (abs(math.log(counted / n)), {f"model.{k}": v for k, v in fields.items()}), key=lambda x: x[0]
            )
        if counted > 2 * n:
            return best[1]


def render(run: BudgetedRun, law: Law, device: Device, kind: str, command: str) -> str:
    """Text of a planned run.

    Args:
      run: The run.
      law: The law that it is from.
      device: The accelerator.
      kind: Name of the accelerator.
      command: Beginning of the command that trains it, as "hpnlp train --config=FILE".

    Returns:
      Lines of text.
    """
    o, c = run.optimum, run.config
    tokens = c.train.steps * c.data.batch_size * c.data.seq_len
    fits = run.costs.fits(device)
    unused = model_size(c).idle
    idle = f" that a token uses, and {unused:,} of other experts" * bool(unused)
    memory = f", with {run.fix}" * bool(run.fix) if fits else ", more than there is"
    rows = {
        "N*, parameters": _interval(o.n),
        "D*, tokens": _interval(o.d),
        "D*/N*": _interval(o.ratio),
        "loss, nats per token": _interval(o.loss) if o.loss else "-",
        "model": f"{run.n:,} parameters{idle}: "
        + ", ".join(f"{k.partition('.')[2]} {v}" for k, v in run.changes.items() if "model." in k),
        "tokens": f"{tokens:,} in {c.train.steps:,} steps of {c.data.batch_size} x {c.data.seq_len}",
        "learning rate": f"{c.optimizer.learning_rate:.3g} ({c.optimizer.name}), {c.optimizer.warmup:,} steps of warm-up",
        "time": f"at least {duration(run.seconds)} on {run.costs.devices} x {kind}",
        "memory": f"{run.costs.bytes / 1e9:.3g} GB per device{memory}",
    }
    lines = [
        f"{o.budget:.3g} FLOPs by the law of {law.source}",
        f"Convention {law.convention}: {CONVENTIONS[law.convention].description}",
        "",
        *(f"  {name:22}{text}" for name, text in rows.items()),
        "",
        " ".join(
            [command, *(f"--{name}={value}" for name, value in run.changes.items()), *([run.fix] if run.fix else [])]
        )
        if fits
        else "None of the changes tried makes a step fit: plan more devices, or a smaller budget.",
    ]
    lines[2:2] = _doubts(run, law)
    return "\n".join(lines)


def _doubts(run: BudgetedRun, law: Law) -> list[str]:
    """Reasons to doubt that a law holds for a run, as lines of text."""
    lines = []
    if run.optimum.budget > law.largest:
        times = run.optimum.budget / law.largest
        lines.append(f"The budget is {times:,.3g} times that of the largest run of the law: extrapolated.")
    lines += [f"Warning: {text}." for text in law.warnings]
    if law.has_experts != bool(run.config.model.expert_sizes()):
        given, fitted = ("no experts", "with experts") if law.has_experts else ("experts", "without experts")
        lines.append(
            f"The config has {given}, and this law is of models {fitted}, which it does not hold for: fit a study of your own, "
            "--law=DIR."
        )
    if law.is_subword and run.config.data.tokenizer == "bytes":
        lines.append(
            "The config reads bytes, to which losses and tokens of this law do not apply: fit a study of your own, --law=DIR."
        )
    return lines


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:.4g}  (90 %: {estimate.low:.4g} to {estimate.high:.4g})"
