"""Trainings within the process of a benchmark: each is finished once, and compared on the same held-out examples.

A finished directory has RESULT, and the scores of its held-out examples. An interrupted training goes on from its checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp.atomic_file import replace_bytes
from hpnlp.training import loop
from hpnlp.training.config import Config
from hpnlp.training.files.example_scores import ExampleScores
from hpnlp.training.files.result import RunResult
from hpnlp.training.processes import signals

RESULT = "result.json"
STEP = 8  # batches of `largest_batch` are multiples of it


def is_finished(directory: Path) -> bool:
    return (directory / RESULT).exists()


def read(directory: Path) -> dict[str, Any]:
    return json.loads((directory / RESULT).read_text("utf-8"))


def write(directory: Path, content: Mapping[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    replace_bytes(directory / RESULT, (json.dumps(content) + "\n").encode())


def train(config: Config, directory: Path) -> RunResult:
    """Trains, or goes on, and writes the scores of the held-out examples if there are some. Exits if a signal stops it.

    Args:
      config: The config.
      directory: The run directory.

    Returns:
      The result of the training; `write` then marks it as finished.
    """
    result = loop.train(config, directory)
    if result.interrupted:
        sys.exit(signals.INTERRUPTED)
    if result.examples is not None:
        result.examples.write(directory)
    return result


class Progress:
    """Prints the time that remains, from that of the work that is done.

    Attributes:
      remaining: Expected seconds of what is to be done.
    """

    def __init__(self, remaining: float) -> None:
        self.remaining, self._spent, self._done = remaining, 0.0, 0.0
        self._start = time.perf_counter()

    def begin(self, name: str) -> None:
        factor = self._spent / self._done if self._done else 1.0
        print(f"{name}; about {math.ceil(self.remaining * factor / 60)} min remain", flush=True)
        self._start = time.perf_counter()

    def end(self, work: float, outcome: str) -> None:
        """Counts a part; `work` is its share of the expected seconds."""
        seconds = time.perf_counter() - self._start
        self._spent, self._done, self.remaining = self._spent + seconds, self._done + work, self.remaining - work
        print(f"  {seconds:.0f} s, {outcome}", flush=True)


def scores(directory: Path) -> ExampleScores:
    """The scores of the held-out examples of a finished run."""
    found = ExampleScores.read(directory)
    if found is None:
        sys.exit(f"{directory} has no scores of single examples: remove it, and train it again")
    return found


def paired(ours: Sequence[ExampleScores], theirs: Sequence[ExampleScores], name: str) -> dict[str, Any]:
    """The difference of a score between runs of the same seeds, with its 95 % interval.

    Args:
      ours: Scores of the held-out examples, one for each seed.
      theirs: The same of the runs that these are compared with.
      name: Name of the score.

    Returns:
      `difference`, the mean over seeds; `differences` of single seeds; and `half_interval`, by the sum of two variances:
      that of the mean over examples of the difference of an example, averaged over seeds; and that of the mean over seeds.
    """
    weight = ours[0].sums[name][1]
    totals = []
    for first, second in zip(ours, theirs, strict=True):
        if first.paired_error(second, name) is None:
            sys.exit("two runs were scored on different held-out examples: start with a new --workdir")
        totals.append(first.sums[name][0] - second.sums[name][0])
    differences = [float(total.sum() / weight.sum()) for total in totals]
    mean = dataclasses.replace(ours[0], sums={name: (np.mean(totals, axis=0), weight)})
    of_examples = mean.standard_error(name)
    assert of_examples is not None
    of_seeds = statistics.variance(differences) / len(differences) if len(differences) > 1 else 0.0
    half = 1.96 * math.sqrt(of_examples**2 + of_seeds)
    return {"difference": statistics.mean(differences), "differences": differences, "half_interval": half}


def largest_batch(peak: Callable[[int], int], limit: int) -> tuple[int, int]:
    """The largest multiple of STEP whose program fits into a memory.

    Args:
      peak: Bytes of the program for a number of sequences.
      limit: Bytes.

    Returns:
      `(sequences, bytes)`; 0 sequences where STEP do not fit. The search assumes that the bytes grow with the batch.
    """
    low, of_low, high = 0, 0, STEP
    while (size := peak(high)) <= limit:
        low, of_low, high = high, size, 2 * high
    while high - low > STEP:
        middle = (low + high) // (2 * STEP) * STEP
        size = peak(middle)
        low, of_low, high = (middle, size, high) if size <= limit else (low, of_low, middle)
    return low, of_low
