"""Compression of a finished run by a recipe, with bytes, time and scores before and after each stage."""

from __future__ import annotations

import dataclasses
import filecmp
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp import tasks
from hpnlp.atomic_file import replace_bytes
from hpnlp.compress.distilling.distill_config import DistillConfig
from hpnlp.compress.files import encoding_of, stored_bytes, write_weights
from hpnlp.compress.matrices import expert_numbers
from hpnlp.compress.recipe import STRUCTURE, Calibration, Stage, check_plain, parse_recipe
from hpnlp.compress.weights_file import WEIGHTS_FILE
from hpnlp.cost.paired_times import Ratio, TimeComparison, compare_times
from hpnlp.errors import plural
from hpnlp.jobs.compression import iterations as pruning_iterations
from hpnlp.jobs.compression.versions import ORIGINAL, CalibrationData, Version, after
from hpnlp.ops.weight import parameter_count
from hpnlp.parallel.plan import Plan
from hpnlp.report.paired_scores import paired_interval
from hpnlp.spec import did_you_mean
from hpnlp.tasks.reports.reporting import Outcome
from hpnlp.training import gradients, loop, run_directory
from hpnlp.training.config import Config, flat, to_json, with_changes
from hpnlp.training.config_file import write_config
from hpnlp.training.evaluation import Evaluation, evaluate
from hpnlp.training.files import evaluation_record
from hpnlp.training.files.checkpoint import CONVERTED_STEP
from hpnlp.training.files.contents import UNFINISHED_FILE, Contents, contents_of, has_checkpoints, locked
from hpnlp.training.files.metrics import ProgressLines
from hpnlp.training.starts.rewind import check_source, rewound
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError

# Files of a run that the compressed model keeps; the second has the roles of special tokens.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "labels.json",
    "generation_config.json",
)  # fmt: skip
TIME_LIMIT = 60.0  # seconds after which rounds end at the next look, for each batch size and four versions
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
      seconds: Median time of the loss of a batch, by the number of sequences of the batch.
      scores: Held-out scores.
      interval: Ends of the 95 % interval of the difference of the primary score to the original's, see `paired_interval`.
      wall: Ratio of wall times to the original in the same rounds, by the number of sequences; empty for the original.
      cpu: Ratio of CPU times, as `wall`.
    """

    stage: str
    parameters: int
    memory_bytes: int
    disk_bytes: int
    seconds: Mapping[int, float]
    scores: Mapping[str, float]
    interval: tuple[float, float] | None = None
    wall: Mapping[int, Ratio] = dataclasses.field(default_factory=dict)
    cpu: Mapping[int, Ratio] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class CompressionSettings:
    """Settings of a compression.

    Attributes:
      finetune: Steps of training after the last stage that removes units, before numbers get fewer bits.
      rewind: Values that the weights get before this training, see `rewind.rewound`; "" to keep them.
      iterations: Number of times that the last stage that removes units or weights removes a part of them, the same share of
        what is left, each time followed by `rewind` and `finetune`.
      calibration_batches: Training batches from which stages compute gradients.
      batch_sizes: Numbers of sequences at which the time is measured.
      batches: Largest number of held-out batches of a score; None for all.
      rounds: Most paired rounds of each time, up to 64, which end when all versions have a verdict, or at the first look after
        TIME_LIMIT seconds.
      changes: Fields of the run's config in SECTIONS and their values: other data, or other settings of the further training,
        such as {"distill.teacher": "runs/teacher"}.
    """

    finetune: int = 0
    rewind: str = ""
    iterations: int = 1
    calibration_batches: int = 8
    batch_sizes: Sequence[int] = (1, 8, 32)
    batches: int | None = None
    rounds: int = 64
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def compress_run(
    source: str | Path,
    target: str | Path,
    recipe: str,
    settings: CompressionSettings = CompressionSettings(),  # noqa: B008  (frozen)
    *,
    log: Callable[[str], None] = print,
    write_report: Callable[[list[Measurement]], None] | None = None,
) -> list[Measurement]:
    """Compresses the model of a run, and measures it after each stage.

    Args:
      source: Directory of the run.
      target: Directory of the compressed model: a new or empty one, or one with an unfinished compression.
      recipe: Stages, see `hpnlp.compress.recipe`.
      settings: See CompressionSettings.
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
    _check_recipe(recipe, stages, settings.finetune, settings.rewind)
    pruning_iterations.check(recipe, stages, settings.finetune, settings.iterations)
    source, target = Path(source), Path(target)
    check_target(target)
    run = _load(source, settings)
    with locked(target):
        check_target(target)
        dataset = tasks.find(run.config.task).dataset(run.config.data, run.vocabulary, ProgressLines(log))
        compression = _Compression(source, target, run, dataset, stages, settings, log)
        versions = compression.apply_stages()
        compression.begin_target()
        evaluations = [compression.evaluation(version) for version in versions]
        measurements = compression.measure(versions, evaluations)
        if write_report is not None:
            write_report(measurements)
        compression.finish_target(versions[-1], evaluations[-1])
        return measurements


def _load(source: Path, settings: CompressionSettings) -> run_directory.Run:
    """The run, with the changed config, after checks that a compression with these settings can use it."""
    run = run_directory.load(source)
    run = dataclasses.replace(run, config=_changed(run.config, settings.changes))
    _check_changes(settings.finetune, settings.changes)
    if run.step == CONVERTED_STEP and run.vocabulary.labels is not None and "data.path" not in settings.changes:
        raise InputError(
            f"{source} is a converted model, and has no data from which to score it: pass --data.path=PATH with "
            "labelled examples"
        )
    check_plain(run.params)
    check_source(run, settings.rewind)
    return run


@dataclasses.dataclass(frozen=True)
class _Compression:
    """A compression whose recipe, run and settings are checked, and its steps in the order in which they run.

    Attributes:
      source: Directory of the run.
      target: Directory of the compressed model.
      run: The run.
      dataset: Its data.
      stages: Stages of the recipe.
      settings: See CompressionSettings.
      log: Called with lines on the progress.
    """

    source: Path
    target: Path
    run: run_directory.Run
    dataset: Any
    stages: Sequence[Stage]
    settings: CompressionSettings
    log: Callable[[str], None]

    @property
    def metric(self) -> str:
        """Name of the primary score."""
        return tasks.find(self.run.config.task).primary_metric(flat(self.run.config))[0]

    def apply_stages(self) -> list[Version]:
        """The original, and the versions after each stage, rewinding and further training."""
        data = CalibrationData(self.run, self.dataset, self.settings.calibration_batches)
        calibration = Calibration(data.gradients, data.squares)
        versions = [Version(ORIGINAL, self.run.config, self.run.model, self.run.params)]
        last = max((i for i, stage in enumerate(self.stages) if stage.changes == STRUCTURE), default=-1)
        for index, stage in enumerate(self.stages):
            self.log(f"{stage.text}: stage {index + 1} of {len(self.stages)}")
            if index == last:
                versions += self._iterated(versions[-1], stage, calibration)
            else:
                versions.append(after(versions[-1], stage, calibration, self.run))
        if (count := expert_numbers(versions[-1].params)) and any(s.changes != STRUCTURE for s in self.stages):
            self.log(f"the {count:,} numbers of the experts stay float32: factorize and mixed do not change them")
        return versions

    def _iterated(self, before: Version, stage: Stage, calibration: Calibration) -> list[Version]:
        """Versions of the last stage that removes units or weights, with rewinding and training after each iteration."""
        iterations, versions = self.settings.iterations, [before]
        parts = pruning_iterations.divided(stage, iterations, before.model.config, before.params)
        for number, part in enumerate(parts, 1):
            versions.append(after(versions[-1], part, calibration, self.run))
            if source := self.settings.rewind:
                params = rewound(versions[-1].params, self.run, source)
                versions.append(dataclasses.replace(versions[-1], stage=f"rewind({source})", params=params))
            if self.settings.finetune:
                _begin(self.target)
                workdir = self.target / FINETUNE / (f"iteration-{number}" if iterations > 1 else "")
                versions.append(self._trained(versions[-1], workdir))
        return versions[1:]

    def _trained(self, version: Version, workdir: Path) -> Version:
        """The version after further training, which goes on if it was interrupted and is not repeated if it is finished."""
        start, weights = workdir / "start", "masked" if _is_masked(self.stages) else ""
        steps = self.settings.finetune
        train = dataclasses.replace(version.config.train, steps=steps, init_from=str(start), weights=weights)
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
        if loop.train(config, workdir, score=False).interrupted:  # `evaluation` follows, for all versions
            raise KeyboardInterrupt
        trained = run_directory.load(workdir)
        return Version(f"finetune({steps})", version.config, trained.model, trained.params)

    def begin_target(self) -> None:
        """Begins the directory, removes what a killed compression left there, and copies the files that stay as they are."""
        _begin(self.target)
        for left in self.target.glob(f".{WEIGHTS_FILE}.*.part"):  # of a compression that was killed
            left.unlink()
        _copy_companions(self.source, self.target)

    def evaluation(self, version: Version) -> Evaluation:
        """Held-out scores of a version, of which the primary one is logged."""
        config = version.config
        optimizer = config.optimizer.for_batch(config.data.batch_size)
        trainer = make_trainer(version.model, optimizer, Plan("single"), steps=1, batch_size=config.data.batch_size)
        progress = ProgressLines(self.log, "batches")
        evaluation = evaluate(trainer, version.params, self.dataset, config, self.settings.batches, progress)
        self.log(f"{version.stage}: held-out {self.metric} {evaluation.scores[self.metric]:.4f}")
        return evaluation

    def measure(self, versions: Sequence[Version], evaluations: Sequence[Evaluation]) -> list[Measurement]:
        """Sizes, times and scores of the versions; the file of the last one stays in the directory."""
        times = self._times(versions)
        sizes = [_write(version, self.target / WEIGHTS_FILE, self.run.step) for version in versions]
        return [
            Measurement(
                version.stage,
                parameter_count(version.params),
                stored_bytes(version.params),
                size,
                {n: c.programs[str(index)].seconds if index else c.baseline for n, c in times.items()},
                evaluation.scores,
                paired_interval(evaluation.examples, evaluations[0].examples, self.metric) if index else None,
                {n: c.programs[str(index)].wall for n, c in times.items()} if index else {},
                {n: c.programs[str(index)].cpu for n, c in times.items()} if index else {},
            )
            for index, (version, size, evaluation) in enumerate(zip(versions, sizes, evaluations, strict=True))
        ]

    def _times(self, versions: Sequence[Version]) -> dict[int, TimeComparison]:
        """Times of the loss of a batch in paired rounds with the first version, by batch size; programs are named by index."""
        counts = self.settings.batch_sizes
        self.log(f"measuring times at {', '.join(map(str, counts))} {plural(counts[-1], 'sequence')}")
        progress = ProgressLines(self.log, "measurements")
        batch = next(iter(self.dataset.train(seed=0)))
        result = {}
        for count in self.settings.batch_sizes:
            functions = {}
            for index, version in enumerate(versions):
                names = version.model.batch_axes()
                rows = {name: jnp.asarray(np.resize(batch[name], (count, *batch[name].shape[1:]))) for name in names}
                forward = jax.jit(
                    lambda params, rows, model=version.model: gradients.loss(model, params, rows, None).sum
                )
                functions[str(index)] = lambda f=forward, p=version.params, r=rows: f(p, r)
            original = functions.pop("0")
            at = f"at {count} {plural(count, 'sequence')}"
            report = functools.partial(progress, f"measuring times {at}")
            result[count] = compare_times(
                original, functions, rounds=self.settings.rounds, seconds=TIME_LIMIT, min_seconds=0.02, progress=report
            )
            if result[count].is_biased:
                self.log(f"{at}, equal programs differ by their place in a round: do not trust the times")
        return result

    def finish_target(self, last: Version, evaluation: Evaluation) -> None:
        """Writes the last files of the compressed model, and removes the checkpoints of the further trainings."""
        if self.settings.batches is None:
            outcome = Outcome(last.config, self.dataset, last.model, last.params, evaluation.sums)
            evaluation_record.write(self.target, outcome, evaluation, self.run.step)
        # The checkpoints stay until all else is written, so that an error before does not cost the trainings.
        for workdir in (self.target / FINETUNE, *(self.target / FINETUNE).glob("iteration-*")):
            _remove_checkpoints(workdir)
        # config.json comes last, because a directory without it is unfinished. The teacher of the further training is no part
        # of the model.
        write_config(self.target, dataclasses.replace(last.config, distill=DistillConfig()))
        (self.target / UNFINISHED_FILE).unlink()


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
    return any(stage.sets_zeros for stage in stages)


def _check_changes(finetune: int, changes: Mapping[str, Any]) -> None:
    """Raises InputError if a change of the config has no effect."""
    unused = [name for name in changes if not finetune and not name.startswith("data.")]
    if unused:
        raise InputError(
            f"{', '.join(unused)}: settings of further training, of which there is none: add --finetune=STEPS"
        )
    if finetune and "train.steps" in changes:
        raise InputError(f"train.steps and --finetune={finetune} both set the steps: leave out train.steps")


def check_target(target: Path) -> None:
    """Checks that the directory of a compressed model is new, or holds an unfinished compression.

    Args:
      target: The directory.

    Raises:
      InputError: It holds something else, or is a file.
    """
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


def _copy_companions(source: Path, target: Path) -> None:
    for name in COMPANIONS:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


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


def _ratio(first: float, second: float) -> float:
    return max(first, second) / min(first, second)


def _write(version: Version, path: Path, step: int) -> int:
    """Writes the file of a version, and returns its bytes."""
    write_weights(path, version.params, {"step": step}, encoding_of)
    return path.stat().st_size
