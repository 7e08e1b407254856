"""Trials in processes of their own, whose results stay in a directory so that an interrupted search goes on."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from hpnlp.advise.arm import SCORED, Arm
from hpnlp.advise.arm import SPEC as ARM_SPEC
from hpnlp.advise.trial import SPEC, Measured, Trial, TrialResult
from hpnlp.atomic_file import replace_bytes
from hpnlp.compress.weights_file import WEIGHTS_FILE, has_weights
from hpnlp.planner.compressed import saved_step
from hpnlp.training.config import Config
from hpnlp.training.files.example_scores import ExampleScores
from hpnlp.training.processes import signals
from hpnlp.types import InputError

LOG = "log.txt"
# Runs a command with environment variables and a file for its output, and returns the exit code.
Runner = Callable[[Sequence[str], dict[str, str], Path], int]


def run_process(command: Sequence[str], environment: dict[str, str], log: Path) -> int:
    """Runs a command.

    Args:
      command: Program and arguments.
      environment: Environment variables.
      log: File of its output.

    Returns:
      The exit code; negative after a signal.
    """
    with open(log, "ab") as output:
        return subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode


@dataclasses.dataclass(frozen=True)
class Trials:
    """Trials of a search.

    Attributes:
      directory: Their directory, with a folder for each.
      runner: Runs a process.
    """

    directory: Path
    runner: Runner = run_process

    def run(self, trial: Trial) -> TrialResult:
        """Runs a trial, or reads its result if it has been run.

        A process that ends without a result, as one that needs too much memory, is started again for each candidate alone: the
        one that ends it gets the error.

        Args:
          trial: The trial.

        Returns:
          The result.

        Raises:
          InputError: The baseline alone cannot be measured.
        """
        result, reason = self._run(trial)
        if result is not None:
            return result
        if not trial.candidates:
            raise InputError(f"{trial.baseline.name} cannot be measured: {reason}")
        if len(trial.candidates) == 1:
            alone = self.run(dataclasses.replace(trial, candidates=()))
            failed = Measured(trial.candidates[0].name, reason)
            result = dataclasses.replace(alone, models=(*alone.models, failed))
            result.write(self.directory / trial.digest())  # so that it does not fail again
            return result
        results = [self.run(dataclasses.replace(trial, candidates=(candidate,))) for candidate in trial.candidates]
        models = (results[0].models[0], *(result.models[1] for result in results))
        return dataclasses.replace(results[0], models=models, seconds=sum(result.seconds for result in results))

    def _run(self, trial: Trial) -> tuple[TrialResult | None, str]:
        """The result; or None and the last line of the process that failed."""
        directory = self.directory / trial.digest()
        if (result := TrialResult.read(directory)) is not None:
            return result, ""
        reason = self._process("hpnlp.advise.trial", directory, SPEC, trial.to_json())
        return TrialResult.read(directory), reason

    def train(self, arm: Arm) -> tuple[ExampleScores | None, str]:
        """Trains an arm, or reads its scores if it has been trained.

        Args:
          arm: The arm.

        Returns:
          The scores of held-out examples; or None and the last line of the process that failed.
        """
        directory = self.directory / f"arm-{arm.digest()}"
        if (scores := ExampleScores.read(directory / SCORED)) is not None:
            return scores, ""
        reason = self._process("hpnlp.advise.arm", directory, ARM_SPEC, arm.to_json())
        return ExampleScores.read(directory / SCORED), reason

    def _process(self, module: str, directory: Path, name: str, spec: str) -> str:
        """Runs a module on a directory with a spec, and returns the last line of its output."""
        directory.mkdir(parents=True, exist_ok=True)
        replace_bytes(directory / name, spec.encode())
        log = directory / LOG
        log.unlink(missing_ok=True)
        program = f"import pathlib, sys, {module} as module; module.main(pathlib.Path(sys.argv[1]))"
        code = self.runner([sys.executable, "-c", program, str(directory)], _environment(), log)
        if code < 0:
            return f"signal {-code}" + (", as for lack of memory" if -code == signal.SIGKILL else "")
        lines = log.read_text("utf-8", "replace").strip().splitlines() if log.exists() else []
        return lines[-1].removeprefix("error: ")[:300] if lines else f"exit code {code}"


def saved_weights(run: Path, config: Config) -> tuple[int | None, str]:
    """The step of the weights of a run, None of a compressed one, and the time at which they were saved.

    Args:
      run: Directory of the run.
      config: Its config.

    Returns:
      The step, and the time as text.
    """
    step = None if has_weights(run) else saved_step(run, config)
    path = run / WEIGHTS_FILE if step is None else run / "checkpoints" / str(step)
    return step, str(path.stat().st_mtime_ns) if path.exists() else ""


def _environment() -> dict[str, str]:
    """Environment of a process that ends with this one, and shares its cache of compiled programs."""
    values = jax.config.values
    environment = os.environ | {signals.PARENT: str(os.getpid())}
    if values["jax_compilation_cache_dir"]:
        environment["JAX_COMPILATION_CACHE_DIR"] = values["jax_compilation_cache_dir"]
        least = values["jax_persistent_cache_min_compile_time_secs"]
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = str(least)
    return environment
