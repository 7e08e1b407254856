"""Result of a run, from which its report is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hpnlp.training.files.example_scores import ExampleScores


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
      step: Number of steps done.
      scored_step: Step of `params`: of the best checkpoint, which commands load, or of the newest if none was evaluated.
      interrupted: True if a signal stopped the run early; the same command continues from `step`.
      heldout: Scores on all held-out examples by name, see `scores` of the task, and on other held-out sets, with
        their names; empty if the run was interrupted or not scored.
      sums: Loss, metrics and auxiliary losses over all held-out examples: name -> (sum, weight).
      teacher: Scores of the teacher on all held-out examples; None or empty for a run without one, or that was interrupted.
      padding: Share of padding in `tokens`.
      baselines: Results of other methods on the same data, such as bits per byte of general compressors, see
        `data.baselines`; empty if the run was interrupted and in processes other than process 0.
      dataset: The data, with its tokenizer.
      model: The model.
      params: Weights of the model after `scored_step`: averaged parameters where the run keeps an average, and buffers.
      seconds: Seconds by phase, over all restarts; "setup" holds all compilation.
      peak_memory_bytes: Largest peak memory of any restart.
      parameters: Number of parameters.
      flops_per_step: Mean number of floating-point operations of the matrix products of a step; None if batches decide it.
      flops_by_part: These operations by part of the model, an entry of `cost.parts.PARTS` or ""; None as for `flops_per_step`.
      tokens: Tokens of all batches, padding included.
      timed_tokens: Those of the steps that took the seconds of the phase "step": of all but the steps that were compiled.
      devices: Number of devices and the mesh axes that they are divided into, as text.
      examples: Scores of each held-out example, see `Evaluation`.
    """

    step: int
    scored_step: int
    interrupted: bool
    heldout: dict[str, float]
    sums: Mapping[str, Any]
    baselines: dict[str, Any]
    dataset: Any
    model: Any
    params: Any
    seconds: dict[str, float]
    peak_memory_bytes: int
    parameters: int
    flops_per_step: int | None
    tokens: int
    timed_tokens: int
    devices: str
    teacher: dict[str, float] | None = None
    padding: float = 0.0
    examples: ExampleScores | None = None
    flops_by_part: Mapping[str, float] | None = None
