"""Budgets as text, and batch size, learning rate and warm-up of a run as functions of its size and tokens."""

from __future__ import annotations

import dataclasses
import math
import re

from hpnlp.types import InputError

LARGEST_WARMUP = 0.02  # share of the steps
SMALLEST_BATCH = 1  # sequences
LARGEST_BUDGET = 1e28  # FLOPs, above those of all models that were trained
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclasses.dataclass(frozen=True)
class Budget:
    """Budget of a run or a study: training FLOPs, or time on a device. The other one is 0."""

    flops: float | int = 0.0  #: training FLOPs
    seconds: float | int = 0.0  #: seconds on the devices


def parse_budget(text: str | float, name: str) -> Budget:
    """Reads a budget.

    Args:
      text: FLOPs as in "1e18" or 1e18, or a time as in "2h", "30min", "90s" or "1.5d".
      name: Name of the flag or field, for the message.

    Returns:
      The budget.

    Raises:
      InputError: The text is neither, or not over 0.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(s|min|h|d|)\s*", str(text))
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or not 0 < number < math.inf:
        raise InputError(
            f'{name}={text!r}: expected FLOPs over 0, as in "1e18", or a time, as in "2h", "30min" or "90s"'
        )
    if match[2]:
        return Budget(seconds=number * _UNITS[match[2]])
    if number > LARGEST_BUDGET:
        raise InputError(f"{name}={text!r}: expected at most {LARGEST_BUDGET:g} FLOPs")
    return Budget(flops=number)


def batch_size(tokens: float | int, length: int) -> int:
    """Sequences of a batch for a number of training tokens.

    Args:
      tokens: Training tokens D.
      length: Tokens of a sequence.

    Returns:
      The power of two that is closest to 0.58 D^0.571 tokens, at least SMALLEST_BATCH.

    References:
      Li et al. 2025, "Predictable scale: part I, step law" (arXiv:2503.04715).
    """
    return max(SMALLEST_BATCH, 2 ** round(math.log2(max(1.0, 0.58 * tokens**0.571 / length))))


def steps(tokens: float | int, batch: int, length: int, flops_per_token: float | int, name: str) -> int:
    """Steps of a run.

    Args:
      tokens: Training tokens D.
      batch: Sequences of a batch.
      length: Tokens of a sequence.
      flops_per_token: Training FLOPs of a token.
      name: The run, for the message.

    Returns:
      The number of steps, rounded.

    Raises:
      InputError: The tokens are less than one step.
    """
    count = round(tokens / (batch * length))
    if count < 1:
        raise InputError(
            f"{name}: {tokens:,.0f} tokens, {tokens * flops_per_token:.3g} FLOPs, are less than one step of {batch} x {length} "
            f"tokens: raise the budget to at least {batch * length * flops_per_token:.3g} FLOPs, or lower data.seq_len"
        )
    return count


def learning_rate(n: float | int, d: float | int) -> float:
    """Peak learning rate of AdamW for a model.

    Args:
      n: Parameters N without embeddings.
      d: Training tokens D.

    Returns:
      1.79 N^-0.713 D^0.307.

    References:
      Li et al. 2025, "Predictable scale: part I, step law" (arXiv:2503.04715).
    """
    return 1.79 * n**-0.713 * d**0.307


def warmup(n: float | int, tokens_per_step: int, steps: int) -> int:
    """Steps of warm-up: at most LARGEST_WARMUP of all, and at most N tokens.

    Args:
      n: Parameters N.
      tokens_per_step: Tokens of a step.
      steps: Steps of the run.

    Returns:
      The number of steps.

    References:
      Porian et al. 2024, "Resolving discrepancies in compute-optimal scaling of language models": a warm-up that is longer than
      small models need shifts the exponent. The limit LARGEST_WARMUP is a choice of this package.
    """
    return int(min(LARGEST_WARMUP * steps, n / tokens_per_step))
