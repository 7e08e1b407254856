"""The commands of `bert.py`: pretraining, teachers, and each technique of compression, inputs before what is made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TASKS = ("classification", "tagging")
SEEDS = (0, 1, 2)
STUDENT_LAYERS = 2  # of 4: 42 % fewer parameters
STUDENT = "distilled student"
ALONE = "student without a teacher"

# Representations of a trained model: technique -> recipe.
NUMBERS = {
    "int8": "int8",
    "int4": "int4(group=32)",
    "int4, limits of least error": "int4(group=32,limits=mse)",
    "mixed precision": "mixed(4)",
    "fp8": "fp8",
    "bf16": "bf16",
    "ternary": "ternary",
    "binary": "binary",
    "powers of two": "pow2",
    "codebook": "codebook(bits=4)",
    "2:4": "two_four",
    "blocks": "blocks(0.25)",
    "low rank": "factorize(parameters=0.5)",
    "magnitude, half": "magnitude(0.5)",
}
# Recipes with training after the stages that remove units.
FINETUNED = {
    "layers": f"layers({STUDENT_LAYERS})",
    "heads": "heads(0.5)",
    "feed-forward columns": "mlp(0.5)",
    "heads and columns": "heads(0.5),mlp(0.5)",
    "magnitude": "magnitude(0.1)",
    "Deep Compression": "magnitude(0.1),codebook(bits=5, table_bits=5)",
    "stack": f"layers({STUDENT_LAYERS}),heads(0.5),mlp(0.5),int8",
    "stack of one layer": "layers(1),heads(0.5),mlp(0.25),int8",
}
# Training with other weights: technique -> (train.weights, recipe that stores the result, further config fields).
TRAINED: dict[str, tuple[str, str, dict[str, str]]] = {
    "int8 in training": ("quantized(8)", "int8", {}),
    "int4 in training": ("quantized(4,group=32)", "int4(group=32)", {}),
    "ternary in training": ("ternary", "ternary", {}),
    "ternary in training, distilled": ("ternary", "ternary", {"distill.losses": "attention(),hidden(),logits()"}),
    "binary in training": ("binary", "binary", {}),
    "magnitude in training": ("magnitude(0.1)", "magnitude(0.1)", {}),
    "movement": ("movement(0.1)", "magnitude(0.1)", {}),
}
# The same, from the pretrained model on and with the steps of a teacher: pruning while the task is learnt (Sanh et al. 2020).
LEARNT: dict[str, tuple[str, str, dict[str, str]]] = {
    f"{name} while learning, {100 * keep:.0f} %": (f"{name}({keep})", f"magnitude({keep})", {})
    for keep in (0.1, 0.03)
    for name in ("magnitude", "movement")
}
# Results of compression that are trained further, with the same zeros or shared values: technique -> (train.weights, the
# format, which is applied again afterwards). The part before the comma names where the training starts.
CONTINUED = {
    "2:4, fine-tuned": ("masked", "two_four"),
    "blocks, fine-tuned": ("masked", "blocks(0.25)"),
    "Deep Compression, values trained": ("shared", "codebook(bits=5, table_bits=5)"),
}
DISTILLATION = "logits(temperature=2, weight=0.7),labels(0.3)"
MASKED_WORDS = "masked words"
PRUNED = "heads and columns"
# Fields of the model that PRUNED leaves.
PRUNED_FIELDS = {"model.heads": "2", "model.head_dim": "64", "model.mlp_dim": "512"}

# Training steps of each kind of run.
STEPS = {"pretrained": 1000, "students": 200, "classification": 1000, "tagging": 600, "finetune": 300, "weights": 600}
# Steps and held-out data with which each command runs in seconds; the scores mean nothing.
TRIAL_STEPS = dict.fromkeys(STEPS, 3)
TRIAL_DATA = {True: {"data.heldout_bytes": 20_000}, False: {"data.heldout_examples": 64}}


@dataclasses.dataclass(frozen=True)
class Step:
    """A command of `hpnlp`.

    Attributes:
      name: Directory of the result, relative to the workdir.
      arguments: Arguments of `hpnlp`.
      result: File in the directory that the command writes last.
      inputs: Names of the steps whose results the command reads.
      work: Seconds that it takes on two cores, roughly: an estimate for the progress display.
      row: The result in the table: technique, task and recipe; `like`, the name of a compression with the same shapes, if the
        command itself measures no time, and `is_original` if the shapes are those before it; `original`, the name of a
        compression of the teacher, if bytes are compared with the teacher's; `after`, the name of a compression
        from the teacher to the shapes that this one starts from, if these are not the teacher's. Empty for steps without a row.
    """

    name: str
    arguments: tuple[str, ...]
    result: str
    inputs: tuple[str, ...]
    work: float
    row: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of all steps.

    Attributes:
      workdir: Directory of all results.
      budget: Factor of the numbers of training steps.
      trial: A few steps and held-out examples.
      tasks: Tasks, of TASKS.
    """

    workdir: Path
    budget: float = 1.0
    trial: bool = False
    tasks: tuple[str, ...] = TASKS

    def count(self, kind: str) -> int:
        """Training steps of a kind of run, of STEPS."""
        return TRIAL_STEPS[kind] if self.trial else max(1, round(self.budget * STEPS[kind]))

    def train(
        self, name: str, config: str, kind: str, fields: Mapping[str, Any], row: Mapping[str, Any] | None = None
    ) -> Step:
        """A training step.

        Args:
          name: See `Step`.
          config: Experiment file beside this one, with its argument.
          kind: Kind of the run, of STEPS.
          fields: Fields of the config.
          row: See `Step`.

        Returns:
          The step.
        """
        steps = self.count(kind)
        values = {"train.steps": steps, **(TRIAL_DATA[config == "pretrain.py"] if self.trial else {}), **fields}
        if name != "pretrained":  # which makes the tokenizer
            values["data.tokenizer"] = self.workdir / "pretrained" / "tokenizer.json"
        flags = [f"--{field}={value}" for field, value in values.items()]
        arguments = ("train", f"--config={HERE / config}", f"--workdir={self.workdir / name}", *flags)
        inputs = self.names(fields.get("train.init_from"), fields.get("distill.teacher"))
        inputs = inputs or (() if name == "pretrained" else ("pretrained",))  # which makes the tokenizer
        seconds = steps * (0.45 if config == "pretrain.py" else 0.25)
        return Step(name, arguments, "report.json", inputs, seconds + 20, row or {})

    def names(self, *directories: Path | None) -> tuple[str, ...]:
        """Names of the steps that make directories."""
        return tuple(path.relative_to(self.workdir).as_posix() for path in directories if path is not None)

    def compress(
        self,
        name: str,
        source: str,
        recipe: str,
        row: Mapping[str, Any] | None = None,
        finetune: bool = False,
        fields: Mapping[str, Any] | None = None,
    ) -> Step:
        """A step of compression.

        Args:
          name: See `Step`.
          source: Name of the step whose result is compressed.
          recipe: The recipe.
          row: See `Step`.
          finetune: Whether to train after stages that remove units or weights.
          fields: Fields of the config that differ from those of the source.

        Returns:
          The step.
        """
        flags = [str(self.workdir / source), f"--to={self.workdir / name}", f"--recipe={recipe}"]
        steps = self.count("finetune") if finetune else 0
        flags += [f"--finetune={steps}"] if finetune else []
        flags += ["--batches=1", "--rounds=1", "--batch_sizes=1", "--calibration=1"] if self.trial else []
        flags += [f"--{field}={value}" for field, value in (fields or {}).items()]
        inputs = (source, *self.names((fields or {}).get("distill.teacher")))
        return Step(name, ("compress", *flags), "compress.json", inputs, 20 + 0.15 * steps, row or {})


def slug(text: str) -> str:
    """A name of a directory: letters, digits and underscores of a text."""
    return "_".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def all_steps(settings: Settings) -> list[Step]:
    """All commands, each after those that make its inputs.

    Args:
      settings: Settings of the commands.

    Returns:
      The steps.
    """
    row = {"task": MASKED_WORDS, "technique": "teacher", "recipe": "", "like": "start", "is_original": True}
    steps = [settings.train("pretrained", "pretrain.py", "pretrained", {}, row)]
    steps += teachers(settings)
    for task in settings.tasks:
        steps += recipes(settings, f"{task}/teacher", task, task)
        steps += weight_trainings(settings, task)
    steps.append(settings.compress("start", "pretrained", f"layers({STUDENT_LAYERS})"))
    steps += masked_students(settings)
    for task in settings.tasks:
        steps += students(settings, task)
    if "classification" in settings.tasks:
        steps += exchange(settings)
        steps += scratch(settings)
    return steps


def teachers(settings: Settings) -> Iterator[Step]:
    """The teacher of each task, and the same models without pretraining."""
    start = {"train.init_from": settings.workdir / "pretrained"}
    for name, technique, fields in (("teacher", "teacher", start), ("no_pretraining", "without pretraining", {})):
        for task in settings.tasks:
            row = {"task": task, "technique": technique, "recipe": "", "like": f"{task}/int8", "is_original": True}
            yield settings.train(f"{task}/{name}", f"finetune.py:{task}", task, fields, row)


def recipes(
    settings: Settings,
    source: str,
    directory: str,
    task: str,
    data: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
) -> Iterator[Step]:
    """All recipes of NUMBERS and FINETUNED for one model, with fields of the config that its run does not have."""
    for finetune, entries in ((False, NUMBERS), (True, FINETUNED)):
        fields = {**(data or {}), **(training or {} if finetune else {})}
        for technique, recipe in entries.items():
            row = {"technique": technique, "task": task, "recipe": recipe}
            yield settings.compress(f"{directory}/{slug(technique)}", source, recipe, row, finetune, fields)


def weight_trainings(settings: Settings, task: str) -> Iterator[Step]:
    """Training with other weights, and its result in the file that these weights allow."""
    teacher, original = settings.workdir / task / "teacher", f"{task}/int8"
    starts = ((TRAINED, teacher, "weights"), (LEARNT, settings.workdir / "pretrained", task))
    entries = [(entry, start, kind) for entries, start, kind in starts for entry in entries.items()]
    for (technique, (weights, recipe, further)), start, kind in entries:
        name = f"{task}/{slug(technique)}"
        fields = {"train.weights": weights, "train.init_from": start, **further}
        fields |= {"distill.teacher": teacher} if further else {}
        yield settings.train(f"{name}_run", f"finetune.py:{task}", kind, fields)
        row = {
            "technique": technique,
            "task": task,
            "recipe": f"train.weights={weights}, {recipe}",
            "original": original,
        }
        yield settings.compress(name, f"{name}_run", recipe, row)
    for technique, (weights, recipe) in CONTINUED.items():
        name, start = f"{task}/{slug(technique)}", settings.workdir / task / slug(technique.partition(",")[0])
        fields = {"train.weights": weights, "train.init_from": start}
        yield settings.train(f"{name}_run", f"finetune.py:{task}", "weights", fields)
        first = {**NUMBERS, **FINETUNED}[technique.partition(",")[0]]
        row = {"technique": technique, "task": task, "recipe": f"{first}, train.weights={weights}, {recipe}"}
        row["original"] = original
        yield settings.compress(name, f"{name}_run", recipe, row)


def students(settings: Settings, task: str) -> Iterator[Step]:
    """Students with and without a teacher, from the same layers of the pretrained model, and the first of them compressed."""
    like = f"{task}/layers"
    teaching = {"distill.teacher": settings.workdir / task / "teacher", "distill.losses": DISTILLATION}
    for seed in SEEDS:
        for technique in (STUDENT, ALONE):
            fields = {
                "model.layers": STUDENT_LAYERS,
                "train.init_from": settings.workdir / "start",
                "train.seed": seed,
            }
            fields |= teaching if technique == STUDENT else {}
            row = {
                "task": task,
                "technique": technique,
                "recipe": f"layers({STUDENT_LAYERS})",
                "seed": seed,
                "like": like,
            }
            yield settings.train(f"{task}/{slug(technique)}_{seed}", f"finetune.py:{task}", task, fields, row)
    recipe = "heads(0.5),mlp(0.5),int8"
    row = {"technique": "distilled, pruned, int8", "task": task, "recipe": f"{STUDENT}, {recipe}", "after": like}
    yield settings.compress(f"{task}/stacked_student", f"{task}/{slug(STUDENT)}_0", recipe, row, True, teaching)


def masked_students(settings: Settings) -> Iterator[Step]:
    """Students of the pretraining, from layers of the pretrained model, as DistilBERT begins (Sanh et al. 2019).

    A teacher shortens their training: after 300 steps, students without one predict more words than their teacher.
    """
    teaching = {"distill.teacher": settings.workdir / "pretrained", "distill.losses": "logits(weight=0.5),labels(0.5)"}
    row = {"task": MASKED_WORDS, "recipe": f"layers({STUDENT_LAYERS})", "like": "start"}
    for seed in SEEDS:
        for technique, further in ((STUDENT, teaching), (ALONE, {})):
            fields = {"model.layers": STUDENT_LAYERS, "train.init_from": settings.workdir / "start", "train.seed": seed}
            yield settings.train(
                f"masked_words/{slug(technique)}_{seed}",
                "pretrain.py",
                "students",
                {**fields, **further},
                {**row, "technique": technique, "seed": seed},
            )


def exchange(settings: Settings) -> Iterator[Step]:
    """A classifier with the layers of BERT as a checkpoint in Hugging Face's layout, and all recipes on the run of that."""
    w, task = settings.workdir / "huggingface", "classification, Hugging Face checkpoint"
    row = {"technique": "teacher", "task": task, "recipe": "", "like": "huggingface/int8", "is_original": True}
    yield settings.train("huggingface/classifier", "finetune.py:bert", "classification", {}, row)
    to = ("convert", str(w / "classifier"), f"--to={w / 'checkpoint'}")
    back = ("convert", str(w / "checkpoint"), f"--to={w / 'run'}")
    yield Step("huggingface/checkpoint", to, "config.json", ("huggingface/classifier",), 15)
    yield Step("huggingface/run", back, "config.json", ("huggingface/checkpoint",), 15)
    # The checkpoint holds no data and no settings of training.
    data = {"data.seq_len": 128, **(TRIAL_DATA[False] if settings.trial else {})}
    training = {"optimizer.learning_rate": 5e-4, "optimizer.final": 0.0}
    yield from recipes(settings, "huggingface/run", "huggingface", task, data, training)


def scratch(settings: Settings) -> Iterator[Step]:
    """The architecture of PRUNED, pretrained and fine-tuned from random parameters (Liu et al. 2019)."""
    yield settings.train("pruned_pretrained", "pretrain.py", "pretrained", PRUNED_FIELDS)
    for task in settings.tasks:
        fields = {**PRUNED_FIELDS, "train.init_from": settings.workdir / "pruned_pretrained"}
        row = {"technique": f"{PRUNED}, from scratch", "task": task, "recipe": "", "like": f"{task}/{slug(PRUNED)}"}
        yield settings.train(f"{task}/pruned_from_scratch", f"finetune.py:{task}", task, fields, row)
