"""Compression of a finished run by a recipe, with bytes, time and scores before and after each stage."""

from __future__ import annotations

import dataclasses
import filecmp
import functools
import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp import measure, tasks
from hpnlp.atomic_file import replace_bytes
from hpnlp.compress.distilling.distill_config import DistillConfig
from hpnlp.compress.files import encoding_of, stored_bytes, write_weights
from hpnlp.compress.matrices import expert_numbers
from hpnlp.compress.recipe import STRUCTURE, Calibration, Stage, check_plain, parse_recipe
from hpnlp.compress.weights_file import WEIGHTS_FILE
from hpnlp.data.reading.files import Progress
from hpnlp.jobs.compression import iterations as pruning_iterations
from hpnlp.models import variables
from hpnlp.ops.weight import parameter_count
from hpnlp.parallel.plan import Plan
from hpnlp.spec import did_you_mean, parse_one
from hpnlp.tasks.reports.reporting import Outcome
from hpnlp.training import gradients, loop, run_directory
from hpnlp.training.config import Config, flat, to_json, with_changes
from hpnlp.training.config_file import write_config
from hpnlp.training.evaluation import Evaluation, evaluate
from hpnlp.training.files import evaluation_record
from hpnlp.training.files.checkpoint import CONVERTED_STEP
from hpnlp.training.files.contents import UNFINISHED_FILE, Contents, contents_of, has_checkpoints, locked
from hpnlp.training.files.example_scores import error_of_difference
from hpnlp.training.files.metrics import ProgressLines
from hpnlp.training.starts.rewind import check_source, rewound
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError

# Files of a run that the compressed model keeps.
COMPANIONS = ("tokenizer.json", "labels.json", "generation_config.json")
ORIGINAL = "original"
FINETUNE = "finetune"  # directory of the further training, or of one for each iteration
# Sections of a run's config that a compression can change: they leave the parameters as they are.
SECTIONS = ("data", "optimizer", "train", "distill")
FIXED = ("data.tokenizer", "train.init_from", "train.weights", "distill.init")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Size, time and scores of the model after a stage of a recipe.

    Attributes:
      stage: Spec of the stage; ORIGINAL for the model before.
      parameters: Elements of all arrays: factors, codes and scales. A byte that holds several codes counts as one.
      memory_bytes: Bytes of the arrays.
      disk_bytes: Bytes of the file.
      seconds: Time of the loss of a batch, by the number of sequences of the batch; the fastest of several measurements.
      scores: Held-out scores.
      error: Standard error of the difference of the primary score to the original's, over examples; None if it is unknown.
      noise: Of the original: the larger over the smaller time of two measurements of it, by the number of sequences. Times that
        differ by less may be equal.
    """

    stage: str
    parameters: int
    memory_bytes: int
    disk_bytes: int
    seconds: Mapping[int, float]
    scores: Mapping[str, float]
    error: float | None = None
    noise: Mapping[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Version:
    """The model after a stage."""

    stage: str
    config: Config
    model: Any
    params: Any


def compress_run(
    source: str | Path,
    target: str | Path,
    recipe: str,
    *,
    finetune: int = 0,
    rewind: str = "",
    iterations: int = 1,
    calibration_batches: int = 8,
    batch_sizes: Sequence[int] = (1, 8, 32),
    batches: int | None = None,
    rounds: int = 5,
    changes: Mapping[str, Any] | None = None,
    log: Callable[[str], None] = print,
    write_report: Callable[[list[Measurement]], None] | None = None,
) -> list[Measurement]:
    """Compresses the model of a run, and measures it after each stage.

    Args:
      source: Directory of the run.
      target: Directory of the compressed model: a new or empty one, or one with an unfinished compression.
      recipe: Stages, see `hpnlp.compress.recipe`.
      finetune: Steps of training after the last stage that removes units, before numbers get fewer bits.
      rewind: Values that the weights get before this training, see `rewind.rewound`; "" to keep them.
      iterations: Number of times that the last stage that removes units or weights removes a part of them, the same share of
        what is left, each time followed by `rewind` and `finetune`.
      calibration_batches: Training batches from which stages compute gradients.
      batch_sizes: Numbers of sequences at which the time is measured.
      batches: Largest number of held-out batches of a score; None for all.
      rounds: Measurements of each time, interleaved.
      changes: Fields of the run's config in SECTIONS and their values: other data, or other settings of the further training,
        such as {"distill.teacher": "runs/teacher"}.
      log: Called with lines on the progress.
      write_report: Called with the measurements before the last file of the model is written, so that no finished model lacks
        what it writes.

    Returns:
      The measurements, first that of the original.

    Raises:
      InputError: The recipe, a change or the run is invalid, `finetune` has no effect, or `target` holds a run, or the further
        training of another recipe that was interrupted.
      KeyboardInterrupt: A signal stopped the further training, which goes on from its checkpoint when the same compression is
        started again.
    """
    stages = parse_recipe(recipe)
    _check_recipe(recipe, stages, finetune, rewind)
    pruning_iterations.check(recipe, stages, finetune, iterations)
    source, target = Path(source), Path(target)
    _check_target(target)
    run = run_directory.load(source)
    run = dataclasses.replace(run, config=_changed(run.config, changes or {}))
    _check_changes(finetune, changes or {})
    if run.step == CONVERTED_STEP and run.vocabulary.labels is not None and "data.path" not in (changes or {}):
        raise InputError(
            f"{source} is a converted model, and has no data from which to score it: pass --data.path=PATH with "
            "labelled examples"
        )
    check_plain(run.params)
    check_source(run, rewind)
    with locked(target):
        _check_target(target)
        task = tasks.find(run.config.task)
        metric, _ = task.primary_metric(flat(run.config))
        dataset = task.dataset(run.config.data, run.vocabulary, ProgressLines(log))
        data = CalibrationData(run, dataset, calibration_batches)
        calibration = Calibration(data.gradients, data.squares)
        versions = [_Version(ORIGINAL, run.config, run.model, run.params)]
        last = max((i for i, stage in enumerate(stages) if stage.changes == STRUCTURE), default=-1)
        for index, stage in enumerate(stages):
            log(f"{stage.text}: stage {index + 1} of {len(stages)}")
            trainings = _Trainings(source, run, target, finetune, rewind, _is_masked(stages)) if index == last else None
            before = versions[-1]
            parts = pruning_iterations.divided(
                stage, iterations if trainings else 1, before.model.config, before.params
            )
            for number, part in enumerate(parts, 1):
                versions.append(_next(versions[-1], part, calibration, run))
                if trainings:
                    versions += trainings.after(versions[-1], number if iterations > 1 else 0)
        if (count := expert_numbers(versions[-1].params)) and any(stage.changes != STRUCTURE for stage in stages):
            log(f"the {count:,} numbers of the experts stay float32: factorize and mixed do not change them")
        _begin(target)
        for left in target.glob(f".{WEIGHTS_FILE}.*.part"):  # of a compression that was killed
            left.unlink()
        _copy_companions(source, target)
        evaluations = [_evaluation(version, dataset, batches, metric, log) for version in versions]
        log(f"measuring times at {', '.join(map(str, batch_sizes))} sequences")
        seconds = _seconds(versions, dataset, batch_sizes, rounds, ProgressLines(log, "measurements"))
        sizes = [_write(version, target / WEIGHTS_FILE, run.step) for version in versions]  # the last one stays
        measurements = [
            Measurement(
                version.stage,
                parameter_count(version.params),
                stored_bytes(version.params),
                size,
                {count: times[index] if index else min(times[0], times[-1]) for count, times in seconds.items()},
                evaluation.scores,
                error_of_difference(evaluation.examples, evaluations[0].examples, metric),
                {} if index else {count: _ratio(times[0], times[-1]) for count, times in seconds.items()},
            )
            for index, (version, size, evaluation) in enumerate(zip(versions, sizes, evaluations, strict=True))
        ]
        if write_report is not None:
            write_report(measurements)
        last, evaluation = versions[-1], evaluations[-1]
        if batches is None:
            outcome = Outcome(last.config, dataset, last.model, last.params, evaluation.sums)
            evaluation_record.write(target, outcome, evaluation, run.step)
        # The checkpoints stay until all else is written, so that an error before does not cost the trainings.
        for workdir in (target / FINETUNE, *(target / FINETUNE).glob("iteration-*")):
            _remove_checkpoints(workdir)
        # config.json comes last, because a directory without it is unfinished. The teacher of the further training is no part
        # of the model.
        write_config(target, dataclasses.replace(last.config, distill=DistillConfig()))
        (target / UNFINISHED_FILE).unlink()
        return measurements


def _check_recipe(recipe: str, stages: Sequence[Stage], finetune: int, rewind: str) -> None:
    """Raises InputError if `finetune` or `rewind` has no effect with the recipe."""
    if finetune and all(stage.changes != STRUCTURE for stage in stages):
        raise InputError(
            f"--finetune={finetune} trains after the stages that remove units or weights, and the recipe {recipe!r} has none: "
            "leave it out, or train with train.weights: low_rank(0.5) before factorize(parameters=0.5); masked, with "
            "train.init_from=RUN2, after two_four, balanced or blocks, and then apply the stage again"
        )
    if rewind and not _is_masked(stages):
        raise InputError(
            f"--rewind={rewind} keeps the zeros of magnitude, which the recipe {recipe!r} does not have: add it"
        )


def _is_masked(stages: Sequence[Stage]) -> bool:
    """Whether a recipe sets single weights to 0."""
    return any(parse_one(stage.text, "--recipe").name == "magnitude" for stage in stages)


def _check_changes(finetune: int, changes: Mapping[str, Any]) -> None:
    """Raises InputError if a change of the config has no effect."""
    unused = [name for name in changes if not finetune and not name.startswith("data.")]
    if unused:
        raise InputError(
            f"{', '.join(unused)}: settings of further training, of which there is none: add --finetune=STEPS"
        )
    if finetune and "train.steps" in changes:
        raise InputError(f"train.steps and --finetune={finetune} both set the steps: leave out train.steps")


@dataclasses.dataclass(frozen=True)
class CalibrationData:
    """The first training batches of a run, and gradients of a model's loss on them."""

    run: run_directory.Run
    dataset: Any
    batches: int

    def gradients(self, config: Any, weights: Any) -> Any:
        """The sum over batches of the gradients of the mean loss."""
        return self._sum(config, weights, lambda mean, params, batch: jax.grad(mean)(params, batch))

    def squares(self, config: Any, weights: Any) -> Any:
        """The sum over sequences or texts of the squared gradients of the mean loss of each."""

        def of_batch(mean: Any, params: Any, batch: Any) -> Any:
            def add(total: Any, example: Any) -> tuple[Any, None]:
                gradient = jax.grad(mean)(params, example)
                return jax.tree.map(lambda sums, g: sums + jnp.square(g), total, gradient), None

            examples = {name: array[:, None] for name, array in batch.items()}
            return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), examples)[0]

        return self._sum(config, weights, of_batch)

    def _sum(self, config: Any, weights: Any, of_batch: Callable[[Any, Any, Any], Any]) -> Any:
        """The sum over batches of a function of the mean loss of a batch, parameters and the batch."""
        model = self.run.model.clone(config=config)
        params, buffers = variables.split(weights)

        def mean(params: Any, batch: Any) -> Any:
            out = gradients.loss(model, variables.join(params, buffers), batch, None)
            return out.sum / jnp.maximum(out.weight, 1.0)

        summed = jax.jit(lambda params, batch: of_batch(mean, params, batch))
        total = None
        for batch in itertools.islice(self.dataset.train(seed=0), self.batches):
            new = summed(params, {name: jnp.asarray(batch[name]) for name in model.batch_axes()})
            total = new if total is None else jax.tree.map(jnp.add, total, new)
        return total


def _check_target(target: Path) -> None:
    """Raises InputError unless the directory of the compressed model is new, or holds an unfinished compression."""
    for path in (target, *target.parents):
        if path.is_file():
            raise InputError(f"{path} is a file: choose a directory for the compressed model")
    held = contents_of(target)
    if held not in (Contents.NOTHING, Contents.UNFINISHED):
        raise InputError(f"{target} already holds {held.value}: choose a new directory for the compressed model")


def _begin(target: Path) -> None:
    """Writes the record of an unfinished compression, without which no later command replaces or deletes files here."""
    target.mkdir(parents=True, exist_ok=True)
    replace_bytes(target / UNFINISHED_FILE, b"hpnlp compress has begun to write this directory\n")


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values of fields."""
    known = [name for name in flat(config) if name.partition(".")[0] in SECTIONS and name not in FIXED]
    for name, value in changes.items():
        if name not in known:
            similar = f": {did_you_mean(name, known)}" if name.partition(".")[0] in SECTIONS else ""
            raise InputError(
                f"{name}={value!r} would change the model that is compressed: leave it out; a compression can change fields of "
                f"the sections {', '.join(SECTIONS)}{similar}"
            )
    return with_changes(config, changes)


def _next(version: _Version, stage: Stage, calibration: Calibration, run: run_directory.Run) -> _Version:
    """The version after a stage."""
    old = version.model.config
    new, params = stage.compressor(old, version.params, calibration)
    changed = {
        f.name: getattr(new, f.name) for f in dataclasses.fields(new) if getattr(new, f.name) != getattr(old, f.name)
    }
    config = dataclasses.replace(version.config, model=dataclasses.replace(version.config.model, **changed))
    return _Version(stage.text, config, run_directory.make_model(config, run.vocabulary), params)


def _copy_companions(source: Path, target: Path) -> None:
    for name in COMPANIONS:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


@dataclasses.dataclass(frozen=True)
class _Trainings:
    """Rewinding and further training after a stage that removes units or weights.

    Attributes:
      source: Directory of the run.
      run: The run.
      target: Directory of the compressed model.
      finetune: Steps of the further training; 0 for none.
      rewind: Source of the weights before it; "" for none.
      is_masked: Whether weights that are 0 stay 0.
    """

    source: Path
    run: run_directory.Run
    target: Path
    finetune: int
    rewind: str
    is_masked: bool

    def after(self, version: _Version, number: int) -> list[_Version]:
        """The versions after rewinding and after training; `number` is that of the iteration, 0 for the only one."""
        versions = []
        if self.rewind:
            params = rewound(version.params, self.run, self.rewind)
            version = dataclasses.replace(version, stage=f"rewind({self.rewind})", params=params)
            versions.append(version)
        if self.finetune:
            _begin(self.target)
            workdir = self.target / FINETUNE / (f"iteration-{number}" if number else "")
            versions.append(self._trained(version, workdir))
        return versions

    def _trained(self, version: _Version, workdir: Path) -> _Version:
        """The version after further training, which goes on if it was interrupted and is not repeated if it is finished."""
        start, weights = workdir / "start", "masked" if self.is_masked else ""
        train = dataclasses.replace(version.config.train, steps=self.finetune, init_from=str(start), weights=weights)
        config = dataclasses.replace(version.config, train=train)
        start.mkdir(parents=True, exist_ok=True)
        first = start / f"new-{WEIGHTS_FILE}"
        write_weights(first, version.params, {"step": self.run.step})
        if not _can_resume(workdir, config, first, start / WEIGHTS_FILE):
            if has_checkpoints(workdir):
                first.unlink()
                raise InputError(
                    f"{workdir} holds checkpoints of an unfinished training with another recipe, run or setting: start the "
                    "command that began it again to finish it, or remove that directory"
                )
            _remove_checkpoints(workdir)
            for name in ("config.json", "metrics.jsonl"):
                (workdir / name).unlink(missing_ok=True)
            start.mkdir()
            write_weights(first, version.params, {"step": self.run.step})
        first.replace(start / WEIGHTS_FILE)
        write_config(start, dataclasses.replace(version.config, distill=DistillConfig()))
        _copy_companions(self.source, start)
        if loop.train(config, workdir, score=False).interrupted:  # `_evaluation` follows, for all versions
            raise KeyboardInterrupt
        trained = run_directory.load(workdir)
        return _Version(f"finetune({self.finetune})", version.config, trained.model, trained.params)


def _can_resume(workdir: Path, config: Config, new: Path, old: Path) -> bool:
    """Whether an earlier training in `workdir` has the same config and the same first weights, in two files."""
    try:
        is_same = (workdir / "config.json").read_text("utf-8") == to_json(config)
        return is_same and filecmp.cmp(new, old, shallow=False)
    except OSError:
        return False


def _remove_checkpoints(workdir: Path) -> None:
    """Removes the weights of a further training; its metrics and its config stay."""
    for name in ("checkpoints", "start"):
        shutil.rmtree(workdir / name, ignore_errors=True)


def _evaluation(
    version: _Version, dataset: Any, batches: int | None, metric: str, log: Callable[[str], None]
) -> Evaluation:
    """Held-out scores of a version, of which the one of the metric is logged."""
    config = version.config
    optimizer = config.optimizer.for_batch(config.data.batch_size)
    trainer = make_trainer(version.model, optimizer, Plan("single"), steps=1, batch_size=config.data.batch_size)
    evaluation = evaluate(trainer, version.params, dataset, config, batches, ProgressLines(log, "batches"))
    log(f"{version.stage}: held-out {metric} {evaluation.scores[metric]:.4f}")
    return evaluation


def _seconds(
    versions: Sequence[_Version], dataset: Any, batch_sizes: Sequence[int], rounds: int, progress: Progress
) -> dict[int, list[float]]:
    """Fastest time of the loss of a batch, by batch size and version, interleaved over versions; the first is the last, too."""
    batch = next(iter(dataset.train(seed=0)))
    result = {}
    for count in batch_sizes:
        functions = {}
        for index, version in enumerate([*versions, versions[0]]):
            names = version.model.batch_axes()
            rows = {name: jnp.asarray(np.resize(batch[name], (count, *batch[name].shape[1:]))) for name in names}
            forward = jax.jit(lambda params, rows, model=version.model: gradients.loss(model, params, rows, None).sum)
            functions[str(index)] = lambda f=forward, p=version.params, r=rows: f(p, r)
        report = functools.partial(progress, f"measuring times at {count} sequences")
        timings = measure.timeit(functions, rounds=rounds, min_seconds=0.05, progress=report)
        result[count] = [min(timings[str(index)].all) for index in range(len(functions))]
    return result


def _ratio(first: float, second: float) -> float:
    return max(first, second) / min(first, second)


def _write(version: _Version, path: Path, step: int) -> int:
    """Writes the file of a version, and returns its bytes."""
    write_weights(path, version.params, {"step": step}, encoding_of)
    return path.stat().st_size
