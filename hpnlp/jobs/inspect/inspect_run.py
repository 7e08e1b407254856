"""Inspection of a run: measures of its attention and its losses, as text, JSON and pictures."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp import tasks
from hpnlp.data.reading.files import Progress, ignore_progress
from hpnlp.jobs import evaluate_run
from hpnlp.jobs.inspect import plots, positions
from hpnlp.jobs.inspect.attention import (
    HELD,
    LEADING,
    LayerAttention,
    Measures,
    choose_windows,
    documents,
    inspect_attention,
    skipped_layers,
)
from hpnlp.parallel.plan import Plan
from hpnlp.report.files import replace_text
from hpnlp.tasks.reports.reporting import Outcome
from hpnlp.training.files.evaluation_record import finite
from hpnlp.training.run_directory import check_task, load, make_model
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError, Model

TASKS = ("lm", "masked_lm", "rnn_lm", "classification", "tagging")  # their models read inputs token by token
FILE = "inspect.json"
SPECTRA, ATTENTION, LOSSES = "inspect_spectra.png", "inspect_attention.png", "inspect_loss.png"
CANDIDATES = 4  # windows that are looked through for each one that is chosen


@dataclasses.dataclass(frozen=True)
class Settings:
    """Extent of an inspection.

    Attributes:
      windows: Number of windows of held-out text whose attention is measured.
      length: Tokens of a window; 0 for those of the training.
      layers: Indices of the layers whose attention is measured; None for all.
      batches: Largest number of batches whose losses are measured, spread over the held-out text; None for all.
    """

    windows: int = 8
    length: int = 0
    layers: tuple[int, ...] | None = None
    batches: int | None = None


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Result of an inspection.

    Attributes:
      step: Step of the checkpoint.
      lengths: Tokens of each window.
      documents: Documents of each window.
      layers: Attention of the layers that have attention matrices.
      skipped: Index of a layer -> reason why it has none.
      losses: Losses by the length of the context; None for a model of whole sequences.
    """

    step: int
    lengths: Sequence[int]
    documents: Sequence[int]
    layers: Sequence[LayerAttention]
    skipped: Mapping[int, str]
    losses: positions.ContextLosses | None


def inspect_run(
    workdir: str | Path, step: int | None = None, settings: Settings = Settings(), progress: Progress = ignore_progress
) -> Inspection:
    """Looks inside of a trained model on its held-out data.

    Args:
      workdir: The run directory.
      step: Step of the checkpoint; None for the best.
      settings: Extent of the inspection.
      progress: Called with numbers of batches.

    Returns:
      The inspection.

    Raises:
      InputError: There is no such run, the run is of another task, or a setting does not fit it.
    """
    run = load(workdir, step)
    check_task(workdir, run.config, TASKS, "hpnlp inspect")
    changes = {"data.seq_len": settings.length} if settings.length else {}
    config = evaluate_run.changed_config(run.config, changes)
    model: Any = make_model(config, run.vocabulary)
    optimizer = config.optimizer.for_batch(config.data.batch_size)
    shapes = make_trainer(model, optimizer, Plan("single"), steps=1, batch_size=config.data.batch_size).state_shapes
    evaluate_run.check_shapes(run.params, shapes, changes)
    layers = _layers(model, settings)
    task = tasks.find(config.task)
    dataset = task.dataset(config.data, run.vocabulary)
    if model.has_taps:
        skipped = skipped_layers(model.config, layers)
    else:
        skipped = dict.fromkeys(layers, "recurrent layers have no attention")
    measured, windows = [layer for layer in layers if layer not in skipped], []
    if measured:
        limit = math.ceil(CANDIDATES * settings.windows / config.data.batch_size)
        windows = choose_windows(task.heldout(config, dataset, limit=limit), settings.windows)
        if not windows:
            skipped |= dict.fromkeys(measured, "no held-out sequence has at least two tokens, and one with a label")
    outcome = Outcome(config, dataset, model, run.params, {})
    attention = inspect_attention(outcome, windows, measured) if windows else []
    batches = task.heldout(config, dataset, limit=settings.batches)
    losses = positions.context_losses(model, run.params, batches, progress)
    lengths = [int((window["segment_ids"] > 0).sum()) for window in windows]
    return Inspection(run.step, lengths, [documents(window) for window in windows], attention, skipped, losses)


def _layers(model: Model, settings: Settings) -> list[int]:
    """Indices of the layers to look at."""
    count = model.config.layers
    if settings.layers is None:
        return list(range(count))
    if unknown := [layer for layer in settings.layers if not 0 <= layer < count]:
        raise InputError(f"--layers={unknown[0]}: the model has the layers 0 to {count - 1}: choose among these")
    return sorted(set(settings.layers))


def render(inspection: Inspection) -> str:
    """Tables of an inspection.

    Returns:
      Lines of text.
    """
    lines = []
    if inspection.layers:
        undivided = sum(count == 1 for count in inspection.documents)
        lines += [
            f"Attention on {len(inspection.lengths)} windows of {np.mean(inspection.lengths):,.0f} held-out tokens, "
            f"{undivided} of which lie in one document; means over windows and heads, in parentheses the lowest and highest "
            "head;",
            "even: the same for attention that is spread evenly over the same keys",
            f"{'layer':>5}  {'mixer':20}{f'singular values for {100 * HELD:.0f} %':>30}{'even':>7}"
            f"{f'sum in leading {100 * LEADING:.0f} %':>24}{'even':>7}{'distance, tokens':>22}{'even':>8}"
            f"{'entropy, nats':>20}{'even':>7}",
            *map(_row, inspection.layers),
            "",
        ]
    for reason in dict.fromkeys(inspection.skipped.values()):
        of_reason = [layer for layer, other in inspection.skipped.items() if other == reason]
        lines.append(f"no attention matrices in layers {_ranges(of_reason)}: {reason}")
    if inspection.losses is None:
        lines.append("no loss by position: the labels of the task are those of whole sequences")
    else:
        lines += [
            f"Held-out loss of {inspection.losses.sequences:,} sequences by the number of tokens of the document before",
            *positions.table(inspection.losses),
        ]
    return "\n".join(lines)


def _row(layer: LayerAttention) -> str:
    """A row of the table of layers."""
    columns = [("rank", ".0f", 30, 7), ("leading", ".2f", 24, 7), ("distance", ".1f", 22, 8), ("entropy", ".2f", 20, 7)]
    cells = [f"{layer.layer:>5}  {layer.mixer:20.20}"]
    for name, digits, width, even in columns:
        of_heads = layer.measures.by_head(name)
        text = f"{of_heads.mean():{digits}} ({of_heads.min():{digits}}-{of_heads.max():{digits}})"
        cells.append(f"{text:>{width}}{layer.uniform.by_head(name).mean():>{even}{digits}}")
    return "".join(cells)


def _ranges(numbers: Sequence[int]) -> str:
    """Consecutive numbers as ranges, as "0-3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def write(inspection: Inspection, workdir: Path) -> list[Path]:
    """Writes FILE and the pictures to a run directory.

    Args:
      inspection: The inspection.
      workdir: The directory.

    Returns:
      The files.

    Raises:
      InputError: A file cannot be written.
    """
    paths = []
    try:
        if inspection.layers:
            plots.draw_spectra(inspection.layers, workdir / SPECTRA)
            plots.draw_attention(inspection.layers, workdir / ATTENTION)
            paths += [workdir / SPECTRA, workdir / ATTENTION]
        if inspection.losses is not None:
            plots.draw_losses(inspection.losses, workdir / LOSSES)
            paths.append(workdir / LOSSES)
        text = json.dumps(finite(_as_json(inspection)), indent=1, allow_nan=False)
        replace_text(workdir / FILE, text + "\n")
    except OSError as error:
        place = error.filename2 or error.filename or workdir
        raise InputError(
            f"cannot write {place} ({error.strerror or error}): free some space there, or make it writable"
        ) from error
    return [workdir / FILE, *paths]


def _as_json(inspection: Inspection) -> dict[str, Any]:
    """Content of FILE."""
    losses = inspection.losses
    return {
        "step": inspection.step,
        "window_tokens": list(inspection.lengths),
        "window_documents": list(inspection.documents),
        "layers": [
            {
                "layer": layer.layer,
                "mixer": layer.mixer,
                "heads": _by_head(layer.measures),
                "even": _by_head(layer.uniform),
            }
            for layer in inspection.layers
        ],
        "skipped": {str(layer): reason for layer, reason in inspection.skipped.items()},
        "loss": None if losses is None else losses.loss,
        "loss_by_context": None if losses is None else positions.as_json(losses),
    }


def _by_head(measures: Measures) -> dict[str, list[Any]]:
    """Measures of each head, the means over windows."""
    return {field.name: measures.by_head(field.name).tolist() for field in dataclasses.fields(Measures)}
