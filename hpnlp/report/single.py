"""Report of one run: report.json, report.md and loss.png."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from hpnlp import measure, plots
from hpnlp.data import baselines
from hpnlp.models import decode
from hpnlp.nn.output import is_normalized
from hpnlp.report.files import decimals, read_metrics, replace_text
from hpnlp.training import next_commands
from hpnlp.training.config import Config, flat
from hpnlp.training.loop import Result
from hpnlp.types import InputError

_LOADED = time.time()

# With fewer held-out bytes, compressors have seen too little to reach their rate, and the model's score is mostly chance.
MIN_COMPARED_BYTES = 10_000

# Losses above this have no meaningful perplexity, and e to their power may overflow.
MAX_PERPLEXITY_LOSS = 100


def write(workdir: str | Path, config: Config, result: Result, flags: str = "--config=FILE") -> dict[str, Any]:
    """Writes and prints the report of a finished run.

    Args:
      workdir: The run directory.
      config: Config of the run.
      result: Result of the run.
      flags: Flags of `hpnlp train` that gave the config, for the commands that the report proposes.

    Returns:
      The content of report.json.

    Raises:
      InputError: The report cannot be written. The run itself is saved, and running the same command again is quick.
    """
    workdir = Path(workdir)
    curve, fault = read_metrics(workdir, result.step)
    params, sample = result.params, ""
    if all(leaf.is_fully_addressable or leaf.is_fully_replicated for leaf in jax.tree.leaves(params)):
        # No sample from parameters that are sharded over several hosts: `hpnlp generate` reads the checkpoint instead.
        params = params if jax.process_count() == 1 else jax.device_get(params)
        sample = decode.sample_text(result.model, params, result.corpus.tokenizer, config.train.sample)
    report = summarize(config, result) | {"skipped_steps": sum(line.get("skipped") or 0 for line in curve)}
    text = render(workdir, config, report, sample, flags, fault)
    try:
        plots.plot_curves({workdir.name: curve}, workdir / "loss.png", report)
        replace_text(workdir / "report.md", text)
        # Written last, because its existence marks the run as finished.
        replace_text(workdir / "report.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        fix = "move it away" if error.errno == errno.EISDIR else "free some space there"
        raise InputError(
            f"cannot write the report to {error.filename2 or error.filename or workdir} ({error.strerror or error}): {fix} and "
            "run the same command again"
        ) from error
    print(text)
    return report


def summarize(config: Config, result: Result) -> dict[str, Any]:
    """Numbers of a run.

    Args:
      config: Config of the run.
      result: Result of the run.

    Returns:
      Content of report.json. Numbers that are not finite are None, and so are the bits per byte of a tokenizer that loses text
      or an output layer that gives no probabilities.
    """
    heldout_text = result.corpus.read_heldout()
    tokens = result.step * config.data.batch_size * config.data.seq_len
    busy, flops = result.seconds["data"] + result.seconds["step"], result.flops_per_step
    numbers = {
        "heldout_bits_per_byte": result.heldout.get("bits_per_byte"),
        "heldout_loss": result.heldout["loss"],
        "heldout_bytes": len(heldout_text),
        "heldout_digest": result.corpus.heldout_digest,
        # Unlike heldout_digest, which is of tokens, this one does not depend on the tokenizer.
        "heldout_text_digest": hashlib.blake2b(heldout_text, digest_size=16).hexdigest(),
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
    """`value` with None in place of floats that are not finite, which JSON cannot represent, and lists for tuples."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def verdict(report: Mapping[str, Any]) -> str:
    """Comparison of the model's bits per byte with those of general compressors, in a sentence or two.

    The model is reported as the best only if xz with the training text as its dictionary was measured and needs more bits, and
    if the model did not start from another model, which has seen further text.

    Args:
      report: Content of report.json.

    Returns:
      The comparison, or the reason why there is none.
    """
    if obstacle := _obstacle(report):
        return obstacle
    bits = {"the model": report["heldout_bits_per_byte"]}
    bits |= {name: value for name, value in _compressors(report) if value is not None}
    model = bits["the model"]
    figures = {name: f"{name} {value:.3f}" for name, value in bits.items() if name != "the model"}
    best, second, *_ = sorted(bits, key=lambda name: bits[name])
    if unfair := _unfairness(report, best):
        compressors = ", ".join(figures.values())
        text = f"The model needs {model:.3f} bits a byte of held-out text; {compressors}"
        return f"{text}. {unfair}: this says little of the model."
    if best == "the model":
        lead = 100 * (1 - model / bits[second])
        text = f"The model needs the fewest bits: {model:.3f} a byte of held-out text, {lead:.0f} % fewer than {second}"
    else:
        excess = 100 * (model / bits[best] - 1)
        text = f"{best} needs the fewest bits: {bits[best]:.3f} a byte of held-out text; "
        text += f"the model {model:.3f}, {excess:.0f} % more"
    compressors = ", ".join(figure for name, figure in figures.items() if name != best)
    return f"{text} ({compressors}). Neither the model's own size nor the training text is counted."


def _obstacle(report: Mapping[str, Any]) -> str:
    """Sentence on why a model cannot be compared with compressors; "" if it can."""
    if report["heldout_loss"] is None:
        return "The held-out loss is not finite: the model is of no use. Lower optimizer.learning_rate, and train anew."
    if report["heldout_bits_per_byte"] is None:
        if is_normalized(report["config"]["model.output"]):
            reason = "The tokenizer does not keep every byte"
        else:
            reason = "The output layer gives no probabilities of tokens"
        return f"{reason}, so the loss cannot be put beside a compressor's."
    if report["heldout_bytes"] < MIN_COMPARED_BYTES:
        return (
            f"{report['heldout_bytes']:,} bytes of held-out text are too few to put the model beside compressors: raise "
            "data.heldout or data.heldout_bytes, or pass data.heldout_path=PATH."
        )
    return ""


def _unfairness(report: Mapping[str, Any], best: str) -> str:
    """Clause on why a comparison with compressors shows nothing; "" if it does. `best` needs the fewest bits."""
    if report.get("xz_trained_bits_per_byte") is None:
        return "The compressors have not seen the training text, and xz after it could not be measured"
    source = report["config"].get("train.init_from")
    if source and best == "the model":
        return f"The model started from {source}, and the compressors have not seen the text that this was trained on"
    return ""


def _compressors(report: Mapping[str, Any]) -> list[tuple[str, float | None]]:
    """`(name, bits per byte)` of each compressor; xz names the share of the training text that its dictionary held."""
    names = dict(baselines.NAMES)
    if 0 < (share := report.get("xz_trained_share") or 0) < 1:
        seen = f"the last {baselines.WINDOW >> 20} MiB ({100 * share:.2g} %) of the training text"
        names["xz_trained_bits_per_byte"] = f"xz -9e after {seen}"
    return [(name, report.get(field)) for field, name in names.items()]


def render(
    workdir: Path, config: Config, report: Mapping[str, Any], sample: str, flags: str = "--config=FILE", fault: str = ""
) -> str:
    """Text of report.md.

    Args:
      workdir: The run directory.
      config: Config of the run.
      report: Content of report.json.
      sample: Generated text, or "".
      flags: Flags of `hpnlp train` that gave the config.
      fault: A sentence on what is absent from metrics.jsonl, or "".

    Returns:
      The text, as Markdown.
    """
    phases = report["phase_seconds"]
    total = sum(phases.values()) or 1.0
    times = ", ".join(f"{name} {seconds:.1f} s ({100 * seconds / total:.0f} %)" for name, seconds in phases.items())
    table = "\n".join(f"| {name} | {value} |" for name, value in _rows(report, is_normalized(config.model.output)))
    fault_text = f"\n{fault}\n" if fault else ""
    sample_text = f"\nA sample:\n\n```\n{sample.rstrip()}\n```\n" if sample else ""
    return f"""# {workdir.name}

{verdict(report)}

| | |
|---|---|
{table}

Where the time went, over all restarts: {times}.

![loss](loss.png)
{fault_text}{sample_text}
Next:

{next_commands.render(workdir, config, flags)}
"""


def _rows(report: Mapping[str, Any], gives_probabilities: bool) -> list[tuple[str, str]]:
    """`(name, value)` of each row of the table in report.md."""
    loss = report["heldout_loss"]
    perplexity = None  # given only where bits per byte, which compare across tokenizers, are unknown
    if gives_probabilities and report["heldout_bits_per_byte"] is None and loss is not None:
        perplexity = f"{math.exp(loss):.5g}" if loss < MAX_PERPLEXITY_LOSS else None
    skipped = report.get("skipped_steps")
    return [
        ("held-out bytes", f"{report['heldout_bytes']:,}"),
        ("held-out bits a byte", decimals(report["heldout_bits_per_byte"])),
        *((f"{name}, the same bytes", decimals(bits)) for name, bits in _compressors(report)),
        ("held-out loss, nats a token" if gives_probabilities else "held-out loss", decimals(loss)),
        *([(plots.PERPLEXITY, perplexity)] if perplexity else []),
        ("parameters", f"{report['parameters']:,}"),
        ("devices", report["devices"]),
        ("steps, tokens", f"{report['steps']:,}, {report['tokens']:,}"),
        *([("steps skipped, not finite", f"{skipped:.0f}")] if skipped else []),
        ("tokens/s", f"{report['tokens_per_second']:,.0f}"),
        ("achieved GFLOP/s", _giga(report["flops_per_second"])),
        ("peak memory", f"{report['peak_memory_bytes'] / 2**20:,.0f} MiB"),
        ("wall time of the last process, s", f"{report['seconds']:.1f}"),
    ]


def _giga(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:,.1f}"


def _process_seconds() -> float:
    """Wall time since this process started, from Linux's /proc; elsewhere, since this module was loaded."""
    try:
        started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(Path("/proc/uptime").read_text().split()[0]) - started
    except (OSError, ValueError, IndexError):
        return time.time() - _LOADED
