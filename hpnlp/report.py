"""What a run saw, as report.json, report.md and loss.png; and several runs beside each other."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from hpnlp import measure, plots
from hpnlp.data import baselines
from hpnlp.data.files import is_special
from hpnlp.models import decode
from hpnlp.nn.output import is_normalized
from hpnlp.training import next_commands
from hpnlp.training.config import Config, flat
from hpnlp.training.loop import Result
from hpnlp.types import InputError

_LOADED = time.time()

# What runs are put beside each other by.
COMPARED = (
    "heldout_bits_per_byte",
    "heldout_loss",
    "heldout_bytes",
    "tokens_per_second",
    "peak_memory_bytes",
    "seconds",
)
COMPARED += ("phase_seconds", "parameters", "config")

# Under so many bytes, compressors have seen too little to show what they can, and a score is mostly chance.
_FEW_BYTES = 10_000


def write(workdir: str | Path, config: Config, result: Result, flags: str = "--config=FILE") -> dict[str, Any]:
    """Writes the report of a finished run and prints it. Returns what report.json holds.

    flags: those of `hpnlp train` that gave the config, for the commands that the report proposes.
    Raises InputError where the disk does not take it; the run itself is saved, and a second call is quick.
    """
    workdir = Path(workdir)
    curve, fault = read_metrics(workdir, result.step)
    params, sample = result.params, ""
    if all(leaf.is_fully_addressable or leaf.is_fully_replicated for leaf in jax.tree.leaves(params)):
        # Those that lie on several hosts make no text here: `hpnlp generate` reads the checkpoint.
        params = params if jax.process_count() == 1 else jax.device_get(params)
        sample = decode.sample_text(result.model, params, result.corpus.tokenizer, config.train.sample)
    report = summarize(config, result) | {"skipped_steps": sum(line.get("skipped") or 0 for line in curve)}
    text = render(workdir, config, report, sample, flags, fault)
    try:
        plots.plot_curves({workdir.name: curve}, workdir / "loss.png", report)
        _replace(workdir / "report.md", text)
        _replace(
            workdir / "report.json", json.dumps(report, indent=1, allow_nan=False) + "\n"
        )  # the last, because it says: finished
    except OSError as error:
        fix = "move it away" if error.errno == errno.EISDIR else "free some space there"
        raise InputError(
            f"cannot write the report to {error.filename2 or error.filename or workdir} ({error.strerror or error}): {fix} and "
            "run the same command again"
        ) from error
    print(text)
    return report


def summarize(config: Config, result: Result) -> dict[str, Any]:
    """The numbers of a run, those that are not finite None, as JSON has no word for them; so are the bits a byte of a
    tokenizer that loses text, and of an output layer that gives no probabilities."""
    raw = result.corpus.read_heldout()
    tokens = result.step * config.data.batch_size * config.data.seq_len
    busy, flops = result.seconds["data"] + result.seconds["step"], result.flops_per_step
    numbers = {
        "heldout_bits_per_byte": result.heldout.get("bits_per_byte"),
        "heldout_loss": result.heldout["loss"],
        "heldout_bytes": len(raw),
        "heldout_digest": result.corpus.heldout_digest,
        "heldout_text_digest": hashlib.blake2b(raw, digest_size=16).hexdigest(),  # whatever the tokenizer
        **dict.fromkeys(baselines.NAMES),
        **result.baselines,
        "tokens_per_second": tokens / busy if busy else 0.0,
        "flops_per_second": flops if flops is None else result.step * flops / busy if busy else 0.0,
        "flops_per_step": flops,
        "peak_memory_bytes": result.peak_memory_bytes,
        "devices": result.devices,
        "steps": result.step,
        "tokens": tokens,
        "parameters": result.parameters,
        "seconds": _process_seconds(),
        "phase_seconds": result.seconds,
        "environment": measure.environment(),
        "config": flat(config),
    }
    return _finite(numbers)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def verdict(report: Mapping[str, Any]) -> str:
    """Compares in words the bits per byte of the model and of compressors, or gives the reason for no comparison.

    The model is said to need the fewest only if xz, too, has seen the training text and needs more, and if the model did not
    start from another one, which has seen further text.
    """
    if report["heldout_loss"] is None:
        return "The held-out loss is not finite: the model is of no use. Lower optimizer.learning_rate, and train anew."
    model = report["heldout_bits_per_byte"]
    if model is None:
        probable = is_normalized(report["config"]["model.output"])
        why = (
            "The tokenizer does not keep every byte"
            if probable
            else "The output layer gives no probabilities of tokens"
        )
        return f"{why}, so the loss cannot be put beside a compressor's."
    if report["heldout_bytes"] < _FEW_BYTES:
        return (
            f"{report['heldout_bytes']:,} bytes of held-out text are too few to put the model beside compressors: raise "
            "data.heldout or data.heldout_bytes, or pass data.heldout_path=PATH."
        )
    needs = {"the model": model, **{name: bits for name, bits in _compressors(report) if bits is not None}}
    first, second, *_ = sorted(needs, key=lambda name: needs[name])
    figures = {name: f"{name} {bits:.3f}" for name, bits in needs.items() if name != "the model"}
    source, unfair = report["config"].get("train.init_from"), ""
    if report.get("xz_trained_bits_per_byte") is None:
        unfair = "The compressors have not seen the training text, and xz after it could not be measured"
    elif source and first == "the model":
        unfair = f"The model started from {source}, and the compressors have not seen the text that this was trained on"
    if unfair:
        others = ", ".join(figures.values())
        return f"The model needs {model:.3f} bits a byte of held-out text; {others}. {unfair}: this says little of the model."
    others = ", ".join(figure for name, figure in figures.items() if name != first)
    if first == "the model":
        lead = 100 * (1 - model / needs[second])
        said = f"The model needs the fewest bits: {model:.3f} a byte of held-out text, {lead:.0f} % fewer than {second}"
    else:
        more = 100 * (model / needs[first] - 1)
        said = f"{first} needs the fewest bits: {needs[first]:.3f} a byte of held-out text; "
        said += f"the model {model:.3f}, {more:.0f} % more"
    return f"{said} ({others}). Neither the model's own size nor the training text is counted."


def _compressors(report: Mapping[str, Any]) -> list[tuple[str, float | None]]:
    """Names of the compressors, with how much of the training text was seen, and their bits per byte."""
    names = dict(baselines.NAMES)
    if 0 < (share := report.get("xz_trained_share") or 0) < 1:
        part = f"the last {baselines.WINDOW >> 20} MiB ({100 * share:.2g} %) of the training text"
        names["xz_trained_bits_per_byte"] = f"xz -9e after {part}"
    return [(name, report.get(field)) for field, name in names.items()]


def render(
    workdir: Path, config: Config, report: Mapping[str, Any], sample: str, flags: str = "--config=FILE", fault: str = ""
) -> str:
    """Returns report.md. fault: a sentence on what is wrong with metrics.jsonl, or ""."""
    phases = report["phase_seconds"]
    total = sum(phases.values()) or 1.0
    where = ", ".join(f"{name} {seconds:.1f} s ({100 * seconds / total:.0f} %)" for name, seconds in phases.items())
    probable, loss = is_normalized(config.model.output), report["heldout_loss"]
    perplexity = None  # said of words, where bits a byte are not
    if probable and report["heldout_bits_per_byte"] is None and loss is not None and loss < 100:
        perplexity = f"{math.exp(loss):.5g}"
    rows = [
        ("held-out bytes", f"{report['heldout_bytes']:,}"),
        ("held-out bits a byte", _decimals(report["heldout_bits_per_byte"])),
        *((f"{name}, the same bytes", _decimals(bits)) for name, bits in _compressors(report)),
        ("held-out loss, nats a token" if probable else "held-out loss", _decimals(loss)),
        *([(plots.PERPLEXITY, perplexity)] if perplexity else []),
        ("parameters", f"{report['parameters']:,}"),
        ("devices", report["devices"]),
        ("steps, tokens", f"{report['steps']:,}, {report['tokens']:,}"),
        *([("steps skipped, not finite", f"{skipped:.0f}")] if (skipped := report.get("skipped_steps")) else []),
        ("tokens/s", f"{report['tokens_per_second']:,.0f}"),
        ("achieved GFLOP/s", _giga(report["flops_per_second"])),
        ("peak memory", f"{report['peak_memory_bytes'] / 2**20:,.0f} MiB"),
        ("wall time of the last process, s", f"{report['seconds']:.1f}"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    faulty = f"\n{fault}\n" if fault else ""
    shown = f"\nA sample:\n\n```\n{sample.rstrip()}\n```\n" if sample else ""
    return f"""# {workdir.name}

{verdict(report)}

| | |
|---|---|
{table}

Where the time went, over all restarts: {where}.

![loss](loss.png)
{faulty}{shown}
Next:

{next_commands.render(workdir, config, flags)}
"""


def _giga(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:,.1f}"


def _decimals(value: int | float | None, digits: str = ".4f") -> str:
    return "-" if value is None else f"{value:{digits}}"


def read_metrics(workdir: str | Path, steps: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Reads metrics.jsonl, leaving out lines that are not of a run.

    Args:
        workdir: of the run.
        steps: steps that the run has taken, each of which should have a line.

    Returns:
        The lines, in which a value that was not finite is None; and a sentence on what is missing, or "".
    """
    path = Path(workdir) / "metrics.jsonl"
    try:
        found = [_metrics_line(line) for line in path.read_bytes().splitlines()]
    except OSError as error:
        why = f"metrics.jsonl cannot be read ({error.strerror or error})"
        return [], f"{why}: loss.png shows no training loss, and skipped steps are not counted."
    lines = [line for line in found if line is not None]
    faults = []
    if damaged := len(found) - len(lines):
        faults.append(f"{damaged} of its {len(found)} lines are damaged")
    if missing := max(0, steps - len({line["step"] for line in lines if "loss" in line})):
        faults.append(f"{missing} of {steps} steps have no line")
    if not faults:
        return lines, ""
    return (
        lines,
        f"metrics.jsonl is not complete, and neither are loss.png and the count of skipped steps: {'; '.join(faults)}.",
    )


def _metrics_line(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
        numbers = all(value is None or isinstance(value, int | float) for value in line.values())
        return line if numbers and line.get("step") is not None else None
    except (ValueError, AttributeError, RecursionError):
        return None


def read_report(workdir: str | Path) -> dict[str, Any]:
    """Reads report.json of a run. Raises InputError where there is none, or a damaged one."""
    path = Path(workdir) / "report.json"
    if is_special(path):
        raise InputError(f"{path} is not a regular file: move it away, and run the training command again")
    try:
        report = json.loads(path.read_text("utf-8"), parse_constant=lambda word: None)
        faults = _faults(report)
        if faults:
            raise ValueError(faults)
        return report
    except (FileNotFoundError, NotADirectoryError):
        if not Path(workdir).is_dir():
            raise InputError(f"there is no directory {str(workdir)!r}: name the workdir of a run") from None
        raise InputError(
            f"{workdir} has no report.json: finish the run first, with the command that began it"
        ) from None
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror or error}): mend or remove it") from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is not a report ({error}): run the training command again to write it anew"
        ) from error


def _faults(report: Any) -> str:
    """What `compare` lacks in a report, which another version may have written; "" if nothing."""
    if not isinstance(report, dict):
        return f"it holds a {type(report).__name__}"
    lacking = [name for name in COMPARED if name not in report]
    if lacking:
        return f"it lacks {', '.join(lacking)}"
    inner = [("phase_seconds", "data"), ("phase_seconds", "step"), ("config", "model.output")]
    lacking = [f"{at}[{name}]" for at, name in inner if not isinstance(report[at], dict) or name not in report[at]]
    if lacking:
        return f"it lacks {', '.join(lacking)}"
    numbers = {name: report[name] for name in COMPARED[:-3]} | {"parameters": report["parameters"]}
    numbers |= {f"phase_seconds[{name}]": report["phase_seconds"][name] for name in ("data", "step")}
    for name, value in numbers.items():
        unscored = value is None and name in ("heldout_bits_per_byte", "heldout_loss")
        if not unscored and not _is_number(value):
            return f"{name} is {value!r:.40}"
    for name in ("heldout_digest", "heldout_text_digest"):  # which older reports lack
        if not isinstance(report.get(name) or "", str):
            return f"{name} is {report[name]!r:.40}"
    if report.get("skipped_steps") is not None and not _is_number(report["skipped_steps"]):
        return f"skipped_steps is {report['skipped_steps']!r:.40}"
    return "" if isinstance(report["config"]["model.output"], str) else "config[model.output] is no spec"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def compare(workdirs: Sequence[str | Path], out: str | Path) -> str:
    """Writes a table of runs, best first, and a plot of quality against time and memory.

    Quality is held-out bits a byte; where a tokenizer loses text it is perplexity, e to the power of the loss, of the runs that
    were scored on the same tokens. Runs without it come last, and lines below the table give the reason.

    Args:
        workdirs: of finished runs; one that is named twice is listed once.
        out: file of the plot. The table is written beside it, with the extension .md.

    Returns:
        The table, as Markdown.

    Raises:
        InputError: a run has no valid report, or `out` cannot be written.
    """
    distinct = {os.path.realpath(workdir): str(workdir) for workdir in reversed(workdirs)}
    names = list(reversed(distinct.values()))
    reports = {name: read_report(name) for name in names}
    label, scores, unscored = _scores(reports)
    order = sorted(reports, key=lambda name: scores.get(name, math.inf))
    skipped = any(report.get("skipped_steps") for report in reports.values())
    header = ["run", label, "tokens/s", "peak MiB", "training s", "parameters"]
    header += [*(["skipped steps"] if skipped else []), "differs in"]
    rows = [
        [
            name,
            _decimals(scores.get(name), ".5g" if label == plots.PERPLEXITY else ".4f"),
            f"{reports[name]['tokens_per_second']:,.0f}",
            f"{reports[name]['peak_memory_bytes'] / 2**20:,.0f}",
            f"{plots.training_seconds(reports[name]):.1f}",
            f"{reports[name]['parameters']:,}",
            *([_decimals(reports[name].get("skipped_steps"), ".0f")] if skipped else []),
            _differs(reports[name]["config"], reports[order[0]]["config"]),
        ]
        for name in order
    ]
    lines = [
        "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
        for cells in [header, ["---"] * len(header), *rows]
    ]
    notes = [f"- {name}: {unscored[name]}." for name in order if name in unscored]
    if len(names) < len(workdirs):
        notes.append("- A run that was named more than once is listed once.")
    if notes:
        lines += ["", *notes]
    if texts := _different_texts({name: reports[name] for name in order if name in scores}):
        lines += ["", f"The runs were scored on different held-out text: quality cannot be compared ({texts})."]
    table = "\n".join(lines) + "\n"
    _write_comparison(
        Path(out), table, label, {name: (reports[name], scores[name]) for name in order if name in scores}
    )
    return table


def _scores(reports: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, float], dict[str, str]]:
    """The name of the measure of quality, its value for runs that have one, and for the others the reason."""
    unscored = {name: why for name, report in reports.items() if (why := _why_unscored(report))}
    scored = {name: report for name, report in reports.items() if name not in unscored}
    if all(report["heldout_bits_per_byte"] is not None for report in scored.values()):
        return "held-out bits/byte", {name: r["heldout_bits_per_byte"] for name, r in scored.items()}, unscored
    texts = [report.get("heldout_digest") for report in scored.values()]
    most = max(filter(None, texts), key=texts.count, default="")
    others = {name: report.get("heldout_digest") for name, report in scored.items()}
    others = {name: digest for name, digest in others.items() if digest != most}
    unknown = "its report does not say on which tokens it was scored: run its training command again"
    elsewhere = "scored on other tokens than the runs above, so that perplexities do not compare"
    unscored |= {name: elsewhere if digest else unknown for name, digest in others.items()}
    scores = {name: math.exp(min(scored[name]["heldout_loss"], 100.0)) for name in scored if name not in others}
    return plots.PERPLEXITY, scores, unscored


def _different_texts(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """The runs by held-out text, or "" if all were scored on the same. Reports of older versions give only its size."""
    digests = {report.get("heldout_text_digest") for report in reports.values()} - {None}
    sizes = {report["heldout_bytes"] for report in reports.values()}
    if len(digests) < 2 and len(sizes) < 2:
        return ""
    return "; ".join(
        f"{name}: {report['heldout_bytes']:,} bytes, digest {str(report.get('heldout_text_digest', 'unknown'))[:8]}"
        for name, report in reports.items()
    )


def _write_comparison(
    path: Path, table: str, label: str, scored: Mapping[str, tuple[Mapping[str, Any], float]]
) -> None:
    beside = path.with_suffix(".md")
    labels, title = _labels({name: report for name, (report, _) in scored.items()})
    try:
        if beside.exists() and not beside.read_bytes().startswith(b"| run |"):
            raise InputError(f"{beside} is there and is no table of runs: name another plot than {path}")
        plots.plot_tradeoff({labels[name]: scored[name] for name in scored}, label, path, title)
        _replace(beside, table)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot draw {path} ({error}): name a file that can be written, as compare.png") from error


def _labels(reports: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, str], str]:
    """Texts of the legend, no two the same, and its title.

    The directory of a sweep's member has a name in which characters of specs are replaced, so that a member is labelled with
    the fields in which the sweep's members differ, and with the sweep's name.
    """
    paths = {name: Path(os.path.abspath(name)) for name in reports}
    sweeps: dict[Path, list[str]] = {}
    for name, path in paths.items():
        if re.match(r"\d\d+-.*=", path.name):
            sweeps.setdefault(path.parent, []).append(name)
    labels = {name: path.name for name, path in paths.items()}
    of_one = len(sweeps) == 1 and len(next(iter(sweeps.values()))) == len(reports)
    for sweep, members in sweeps.items():
        configs = [reports[name]["config"] for name in members]
        varied = [field for field in configs[0] if len({str(config.get(field)) for config in configs}) > 1]
        for name in members if varied else ():
            differs = ", ".join(f"{f.rpartition('.')[2]}={reports[name]['config'].get(f)}" for f in varied)
            differs = differs if len(differs) <= 60 else f"{differs[:59]}\u2026"
            labels[name] = differs if of_one else f"{sweep.name}: {differs}"
    shared = [label for label in labels.values() if list(labels.values()).count(label) > 1]
    unique = {name: f"{label} ({name})" if label in shared else label for name, label in labels.items()}
    return unique, next(iter(sweeps)).name if of_one else ""


def _why_unscored(report: Mapping[str, Any]) -> str:
    """Why a run's loss cannot be put beside any other's; "" where it can."""
    if report["heldout_loss"] is None:
        return "its held-out loss is not finite"
    output = report["config"]["model.output"]
    try:
        normalized = is_normalized(output)
    except InputError as error:
        return str(error)
    if not normalized:
        return f"{output} gives no probabilities of tokens, and its loss is of a kind of its own"
    return ""


def _differs(config: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    changed = [f"{name}={config[name]}" for name in config if config.get(name) != first.get(name)]
    return ", ".join(changed) or "-"


def _process_seconds() -> float:
    """Wall time since this process began, or since this module was loaded where the system does not tell."""
    try:
        started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(Path("/proc/uptime").read_text().split()[0]) - started
    except (OSError, ValueError, IndexError):
        return time.time() - _LOADED


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_bytes(text.encode("utf-8", "surrogateescape"))  # names of files need not be UTF-8
    fresh.replace(path)
