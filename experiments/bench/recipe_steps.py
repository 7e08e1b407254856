"""The steps of `recipes.py`: small models that are trained or compressed, inputs before what is made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from recipe_tasks import TASKS

TEACHER, CLASSIFIER = "words/teacher", "functions/dense-0"
# Training steps of each kind of run.
STEPS = {
    "teacher": 1000, "words": 250, "functions": 250, "digits": 400, "further_digits": 200, "selected": 200, "further": 100,
}  # fmt: skip
TINY = dict.fromkeys(STEPS, 4)


@dataclasses.dataclass(frozen=True)
class OfRun:
    """A value that depends on a run.

    Attributes:
      run: Name of the step.
      text: The value, with {path} for its directory and {share} for the share of its kernels' weights that are not 0.
    """

    run: str
    text: str = "{path}"


@dataclasses.dataclass(frozen=True)
class Step:
    """A training, or a compression of the result of another step.

    Attributes:
      name: Directory of the result, relative to the workdir; "-SEED" at its end.
      task: Key of TASKS.
      fields: Fields of the config that differ from the task's; of a compression, those of its further training.
      steps: Steps of the training, or of the further training of a compression; 0 for none.
      recipe: Recipe of a compression; "" for a training.
      source: Name of the step whose result is compressed.
      rewind: As of `hpnlp compress`.
      iterations: As of `hpnlp compress`.
    """

    name: str
    task: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 0
    recipe: str | OfRun = ""
    source: str = ""
    rewind: str | OfRun = ""
    iterations: int = 1

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the steps whose results it reads."""
        values = [self.recipe, self.rewind, *self.fields.values()]
        runs = [value.run for value in values if isinstance(value, OfRun)]
        words = [TEACHER] if self.task != "digits" and self.name != TEACHER else []  # which makes the tokenizer
        return tuple(dict.fromkeys([*([self.source] if self.source else []), *runs, *words]))

    @property
    def work(self) -> float:
        """Seconds of one core, roughly: an estimate for the progress display."""
        return TASKS[self.task].seconds * self.steps * self.iterations + 15


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row of the result: runs of a technique beside those of the same seeds without it.

    Attributes:
      technique: Name of the steps, without the seed.
      control: Those that they are compared with.
      text: The technique and its control, for the table.
      teacher: Name of a step whose score and size are shown beside; "" for none.
    """

    technique: str
    control: str
    text: str
    teacher: str = ""


Entry = Step | Comparison


def seeds_of(tiny: bool) -> tuple[int, ...]:
    return (0,) if tiny else (0, 1, 2)


class Catalogue:
    """Makes the steps of one scale.

    Attributes:
      count: Number of steps by kind of training.
      seeds: Seeds of each training.
    """

    def __init__(self, tiny: bool) -> None:
        self.count, self.seeds = (TINY if tiny else STEPS), seeds_of(tiny)

    def teacher(self) -> Step:
        """The encoder that predicts masked words."""
        return Step(TEACHER, "words", {"train.seed": 0}, self.count["teacher"])

    def classifiers(self) -> Iterator[Step]:
        """Classifiers of functions that start from it. The first one is the teacher of students."""
        for seed in self.seeds:
            yield self.functions(f"functions/dense-{seed}", seed, TEACHER)

    def words(self, name: str, seed: int, fields: Mapping[str, Any], kind: str = "words") -> Step:
        return Step(name, "words", {"train.seed": seed, **fields}, self.count[kind])

    def functions(
        self, name: str, seed: int, start: str = "", fields: Mapping[str, Any] | None = None, share: float = 1.0
    ) -> Step:
        """A training on functions from a run, or from random parameters; `share` is that of the usual steps."""
        first = {"train.init_from": OfRun(start)} if start else {}
        steps = round(share * self.count["functions"])
        return Step(name, "functions", {"train.seed": seed, **first, **(fields or {})}, steps)

    def digits(self, name: str, seed: int, blocks: str, fields: Mapping[str, Any], steps: int) -> Step:
        return Step(name, "digits", {"train.seed": seed, "model.blocks": blocks, **fields}, steps)

    # Distillation.

    def distilbert(self) -> Iterator[Entry]:
        """Half of the layers, from every second one of the teacher (Sanh et al. 2019)."""
        yield self.teacher()
        yield from self.classifiers()
        half = {"model.layers": 2}
        yield Step("distilbert/layers", "words", {}, 0, "layers('0 2')", TEACHER)
        losses = {"distill.losses": "logits(temperature=2, weight=5, tokens=all),labels(2),cosine()"}
        arms = {
            "student": {"distill.teacher": OfRun(TEACHER), "distill.init": "alternate", **losses},
            "alone": {"train.init_from": OfRun("distilbert/layers")},
            "random": {},
        }
        for seed in self.seeds:
            for arm, fields in arms.items():
                yield self.words(f"distilbert/{arm}-{seed}", seed, {**half, **fields})
                name = f"distilbert/{arm}_functions-{seed}"
                yield self.functions(name, seed, f"distilbert/{arm}-{seed}", half)
        for control, text in (("alone", "the same layers of the teacher, no teacher"), ("random", "random start")):
            yield Comparison(
                "distilbert/student", f"distilbert/{control}", f"DistilBERT, masked words; {text}", TEACHER
            )
            task = "DistilBERT, then functions"
            yield Comparison(
                "distilbert/student_functions", f"distilbert/{control}_functions", f"{task}; {text}", CLASSIFIER
            )

    def tinybert(self) -> Iterator[Entry]:
        """Layers, embeddings and attention of the teacher on words, then of its classifier on functions, then logits."""
        yield self.teacher()
        yield from self.classifiers()
        small = {"model.layers": 2, "model.dim": 40}
        general = {"distill.teacher": OfRun(TEACHER), "distill.losses": "tinybert_intermediate"}
        task = {"distill.teacher": OfRun(CLASSIFIER)}
        for seed in self.seeds:
            names = {part: f"tinybert/{part}-{seed}" for part in ("general", "task", "student", "words", "alone")}
            yield self.words(names["general"], seed, {**small, **general})
            middle = {**small, **task, "distill.losses": "tinybert_intermediate"}
            yield self.functions(names["task"], seed, names["general"], middle)
            last = {**small, **task, "distill.losses": "tinybert_prediction"}
            yield self.functions(names["student"], seed, names["task"], last, 0.5)
            yield self.words(names["words"], seed, small)
            yield self.functions(names["alone"], seed, names["words"], small, 1.5)
        text = "TinyBERT, functions; masked words and functions without a teacher"
        yield Comparison("tinybert/student", "tinybert/alone", text, CLASSIFIER)

    def mobilebert(self) -> Iterator[Entry]:
        """Bottlenecks, taught layer by layer on words, then trained on functions (Sun et al. 2020)."""
        yield self.teacher()
        yield from self.classifiers()
        small = {
            "model.block": "bottleneck(32, 2)",
            "model.norm_placement": "post",
            "model.embed_dim": 32,
            "model.trigram": True,
        }
        taught = {"distill.teacher": OfRun(TEACHER), "distill.losses": "mobilebert"}
        for seed in self.seeds:
            for arm, fields in {"student": taught, "alone": {}}.items():
                yield self.words(f"mobilebert/{arm}-{seed}", seed, {**small, **fields})
                name = f"mobilebert/{arm}_functions-{seed}"
                yield self.functions(name, seed, f"mobilebert/{arm}-{seed}", small)
        yield Comparison("mobilebert/student", "mobilebert/alone", "MobileBERT, masked words; no teacher", TEACHER)
        text = "MobileBERT, then functions; no teacher"
        yield Comparison("mobilebert/student_functions", "mobilebert/alone_functions", text, CLASSIFIER)

    def regression(self) -> Iterator[Entry]:
        """Logits by their squared distance, or as softened distributions (Ba and Caruana 2014; Hinton et al. 2015)."""
        yield self.teacher()
        yield next(self.classifiers())
        small = {"model.layers": 1, "model.dim": 64}
        losses = {"regression": "regression_only", "soft": "logits(temperature=2)", "alone": ""}
        for seed in self.seeds:
            for arm, terms in losses.items():
                taught = {"distill.teacher": OfRun(CLASSIFIER), "distill.losses": terms} if terms else {}
                yield self.functions(f"regression/{arm}-{seed}", seed, "", {**small, **taught})
        for arm, control, text in (
            ("regression", "soft", "squared distance of logits; soft targets"),
            ("regression", "alone", "squared distance of logits; labels alone"),
            ("soft", "alone", "soft targets; labels alone"),
        ):
            yield Comparison(f"regression/{arm}", f"regression/{control}", f"{text}", CLASSIFIER)

    # Weights.

    def q8bert(self) -> Iterator[Entry]:
        """8 bits in training, of the weights alone and of the inputs as well (Zafrir et al. 2019)."""
        yield self.teacher()
        yield from self.classifiers()
        arms = {"weights": "quantized(8)", "inputs": "quantized(8, inputs=True)"}
        for seed in self.seeds:
            yield Step(f"q8bert/after-{seed}", "functions", {}, 0, "int8", f"functions/dense-{seed}")
            for arm, weights in arms.items():
                run = f"q8bert/{arm}_run-{seed}"
                yield self.functions(run, seed, TEACHER, {"train.weights": weights})
                yield Step(f"q8bert/{arm}-{seed}", "functions", {}, 0, "int8", run)
        for arm, text in (
            ("after", "int8 after training"),
            ("weights", "weights of 8 bits in training, int8"),
            ("inputs", "Q8BERT: weights and inputs of 8 bits in training, int8"),
        ):
            yield Comparison(f"q8bert/{arm}", "functions/dense", f"{text}; float32", CLASSIFIER)
        yield Comparison("q8bert/inputs", "q8bert/after", "Q8BERT; int8 after training", CLASSIFIER)

    def movement(self) -> Iterator[Entry]:
        """Soft movement pruning, and other criteria with the share of weights that it keeps (Sanh et al. 2020)."""
        yield self.teacher()
        yield from self.classifiers()
        for seed in self.seeds:
            for soft, penalty in PENALTIES.items():
                weights: dict[str, Any] = {soft: f"soft_movement(penalty={penalty}, rate=60.0)"}
                run = f"movement/{soft}-{seed}"
                weights |= {f"{soft}_{n}": OfRun(run, f"{n}({{share:.4f}})") for n in ("magnitude", "movement")}
                for arm, value in weights.items():
                    yield self.functions(f"movement/{arm}-{seed}", seed, TEACHER, {"train.weights": value})
        for soft, penalty in PENALTIES.items():
            name, magnitude = f"soft movement pruning, penalty {penalty:g}", f"movement/{soft}_magnitude"
            text = f"{name}; magnitude, as many weights"
            yield Comparison(f"movement/{soft}", magnitude, text, CLASSIFIER)
            text = f"movement pruning, as many weights as {name}; magnitude"
            yield Comparison(f"movement/{soft}_movement", magnitude, text, CLASSIFIER)
            yield Comparison(f"movement/{soft}", "functions/dense", f"{name}; all weights", CLASSIFIER)

    def _selected(self, group: str, arms: Mapping[str, tuple[str, str]]) -> Iterator[Step]:
        """Trainings of the teacher with and without a penalty, and what is selected of them, trained further.

        Args:
          group: Directory.
          arms: Name -> (train.weights, recipe).
        """
        yield self.teacher()
        steps = self.count["further"]
        rate = {"optimizer.name": "adamw", "optimizer.learning_rate": 1e-3}
        for seed in self.seeds:
            for arm, (weights, recipe) in arms.items():
                run = f"{group}/{arm}_run-{seed}" if weights else f"words/longer-{seed}"
                fields = {"train.init_from": OfRun(TEACHER), "train.weights": weights, **rate}
                yield self.words(run, seed, fields, "selected")
                yield Step(f"{group}/{arm}-{seed}", "words", {}, steps, recipe, run)

    def group_lasso(self) -> Iterator[Entry]:
        """Half of the columns of the feed-forward networks: by a penalty in training, or selected afterwards."""
        arms = {
            "penalty": ("group_lasso(1.0)", "mlp(0.5, by=magnitude)"),
            "gradient": ("", "mlp(0.5)"),
            "magnitude": ("", "mlp(0.5, by=magnitude)"),
        }
        yield from self._selected("group_lasso", arms)
        for control, text in (("gradient", "|weight x gradient|"), ("magnitude", "magnitude")):
            text = f"half of the columns, group lasso in training; selected after it by {text}"
            yield Comparison("group_lasso/penalty", f"group_lasso/{control}", text, TEACHER)

    def lasso(self) -> Iterator[Entry]:
        """A tenth of the weights: by a penalty in training, or the largest ones after it."""
        arms = {"penalty": ("l1(0.5)", "magnitude(0.1)"), "after": ("", "magnitude(0.1)")}
        yield from self._selected("lasso", arms)
        text = "a tenth of the weights, lasso in training; the largest after it"
        yield Comparison("lasso/penalty", "lasso/after", text, TEACHER)

    # Convolutional networks.

    def tickets(self) -> Iterator[Entry]:
        """A twentieth of the weights of a network, from their first values and from others (Frankle and Carbin 2019)."""
        steps, recipe = self.count["digits"], "magnitude(0.05)"
        early = max(1, steps // 10)
        for seed in self.seeds:
            dense, ticket = f"tickets/dense-{seed}", f"tickets/ticket-{seed}"
            keep = {"train.checkpoint_every": early, "train.keep": 20}
            yield self.digits(dense, seed, NETWORKS["standard"], keep, steps)
            yield Step(ticket, "digits", {}, steps, recipe, dense, "initial", 3)
            rewound = OfRun(dense, f"{{path}}@{early}")
            yield Step(f"tickets/rewound-{seed}", "digits", {}, steps, recipe, dense, rewound, 3)
            yield Step(f"tickets/other_values-{seed}", "digits", {}, steps, recipe, ticket, "random")
            yield Step(
                f"tickets/random_mask-{seed}",
                "digits",
                {},
                steps,
                "magnitude(0.05, by=random)",
                dense,
                "initial",
            )
        for control, text in (
            ("other_values", "the same mask, other first values"),
            ("random_mask", "a random mask, the same first values"),
            ("dense", "all weights"),
        ):
            yield Comparison("tickets/ticket", f"tickets/{control}", f"ticket of 5 % of the weights; {text}")
        text = "rewound to a tenth of the steps; rewound to the first values"
        yield Comparison("tickets/rewound", "tickets/ticket", f"ticket of 5 % of the weights, {text}")

    def convnets(self) -> Iterator[Entry]:
        """Standard and depthwise-separable networks of equal width, compressed alike, with the same further steps."""
        steps, further = self.count["digits"], self.count["further_digits"]
        for seed in self.seeds:
            for network, blocks in NETWORKS.items():
                dense, start = f"convnets/{network}-{seed}", {"train.init_from": OfRun(f"convnets/{network}-{seed}")}
                yield self.digits(dense, seed, blocks, {}, steps)
                yield self.digits(f"convnets/{network}_longer-{seed}", seed, blocks, start, further)
                for arm, (recipe, _) in PRUNED.items():
                    yield Step(f"convnets/{network}_{arm}-{seed}", "digits", {}, further, recipe, dense)
                factors, low_rank = f"convnets/{network}_factors-{seed}", {**start, "train.weights": "low_rank(0.5)"}
                yield self.digits(factors, seed, blocks, low_rank, further)
                recipe = "factorize(parameters=0.5, by=weights)"  # finds the trained factors
                yield Step(f"convnets/{network}_low_rank-{seed}", "digits", {}, 0, recipe, factors)
                half = {"model.width": 0.5}
                yield self.digits(f"convnets/{network}_narrow-{seed}", seed, blocks, half, steps + further)
        for network in NETWORKS:
            for arm, (_, text) in {**PRUNED, "low_rank": ("", "low rank, half of the weights")}.items():
                yield Comparison(
                    f"convnets/{network}_{arm}", f"convnets/{network}_longer", f"{network} blocks, {text}; all of it"
                )
            text = f"{network} blocks, half of the filters removed; half the width from random parameters"
            yield Comparison(f"convnets/{network}_channels", f"convnets/{network}_narrow", text)


NETWORKS = {
    kind: f"conv(8),{kind}(16,stride=2),{kind}(16),{kind}(32,stride=2),{kind}(32)" for kind in ("conv", "separable")
}
NETWORKS = {"standard": NETWORKS["conv"], "separable": NETWORKS["separable"]}
# Penalties of soft movement pruning, on which the share of the weights that stays depends.
PENALTIES = {"soft": 6.0, "stronger": 20.0}
# Recipes for convolutional networks: name -> (recipe, description).
PRUNED = {
    "channels": ("channels(0.5)", "half of the filters, with the channels of the next block"),
    "shapes": ("shapes(0.34)", "a third of the positions of the windows"),
}
GROUPS: dict[str, Callable[[Catalogue], Iterator[Entry]]] = {
    "distilbert": Catalogue.distilbert,
    "tinybert": Catalogue.tinybert,
    "mobilebert": Catalogue.mobilebert,
    "regression": Catalogue.regression,
    "q8bert": Catalogue.q8bert,
    "movement": Catalogue.movement,
    "group_lasso": Catalogue.group_lasso,
    "lasso": Catalogue.lasso,
    "tickets": Catalogue.tickets,
    "convnets": Catalogue.convnets,
}


def entries(groups: list[str], tiny: bool) -> tuple[list[Step], dict[str, list[Comparison]]]:
    """The steps and the comparisons of some groups.

    Args:
      groups: Keys of GROUPS.
      tiny: Whether each training has a few steps, and one seed in place of three.

    Returns:
      `(steps, comparisons by group)`; steps that groups share occur once.
    """
    catalogue = Catalogue(tiny)
    steps: dict[str, Step] = {}
    comparisons: dict[str, list[Comparison]] = {}
    for group in groups:
        for entry in GROUPS[group](catalogue):
            if isinstance(entry, Step):
                steps.setdefault(entry.name, entry)
            else:
                comparisons.setdefault(group, []).append(entry)
    return list(steps.values()), comparisons
