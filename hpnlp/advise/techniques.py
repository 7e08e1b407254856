"""The table of techniques, most of them by rule from the tables of mixers, output layers, optimizers and compressors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hpnlp.advise.advice import AdviseSettings
from hpnlp.advise.technique import Goal, Needs, Technique
from hpnlp.compress.recipe import COMPRESSORS, CONVERSIONS, parse_recipe
from hpnlp.compress.stages import STRUCTURE
from hpnlp.lra.mixers import all_specs
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.output import OUTPUTS
from hpnlp.spec import parse_one, unknown_name
from hpnlp.training.optim import OPTIMIZERS
from hpnlp.types import InputError

# Stages of `hpnlp compress` that remove units or weights -> (at most three examples of it, parts that become smaller).
REMOVED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "heads": (("heads(0.75)", "heads(0.5)"), ("projections", "mixing")),
    "mlp": (("mlp(0.5)", "mlp(0.25)"), ("feed_forward",)),
    "experts": (("experts(0.5)",), ("feed_forward",)),
    "filters": (("filters(0.5)",), ("feed_forward",)),
    "channels": (("channels(0.5)",), ("feed_forward", "norms")),
    "hidden": (("hidden(0.5)",), ("feed_forward",)),
    "shapes": (("shapes(0.5)",), ("feed_forward",)),
    "factorize": (("factorize(0.5)",), ("projections", "feed_forward", "output")),
}
# Stages that only make the file smaller.
STORED = {"magnitude(0.3)": Needs.NOTHING, "mixed(4)": Needs.BATCHES}
# Formats whose arguments have no default.
FORMATS = {"blocks": "blocks(0.5)", "balanced": "balanced(0.25)"}
# Output layers with arguments; others are taken with their defaults.
OUTPUT_SPECS = {"sampled": "sampled(1024)", "importance": "importance(1024)", "nce": "nce(1024)"}

# What a change of the config does, where no entry of a table says it.
DESCRIPTIONS = {
    "model.dtype=bfloat16": "Computes in 16 bits, with the weights in float32.",
    "model.unroll=0": "One program for all layers in place of a loop: longer compilation.",
    "data.packing=fit": "Several texts in a row of the batch, none of them cut, in place of padding.",
    "data.buckets=4": "Batches of texts of similar lengths, padded to one of four widths.",
    "plan.remat=names(mixed)": "Keeps the outputs of the mixers for the backward pass, and computes the rest again.",
    "plan.remat=full": "Keeps the inputs of the layers for the backward pass, and computes the rest again.",
    "optimizer.accumulate=4": "Four parts of a batch in turn, with the gradients added up.",
    "optimizer.rows=True": "Updates only the rows of tables that a batch has read.",
    "optimizer.name=adamw": "Adam with decoupled weight decay.",
    "optimizer.name=lion": "The sign of a momentum: one moment in place of two.",
    "optimizer.name=adafactor": "Second moments as products of a row and a column.",
    "optimizer.name=adagrad": "Rates that fall with the sum of the squared gradients.",
    "optimizer.name=lamb": "Adam with a rate for each matrix, for large batches.",
    "optimizer.name=lars": "Momentum with a rate for each matrix, for large batches.",
    "optimizer.name=sgd": "Gradient descent with momentum.",
}
TABLES: dict[str, Mapping[str, object]] = {
    "model.mixer": MIXERS,
    "model.output": OUTPUTS,
    "optimizer.name": OPTIMIZERS,
}


def described(technique: Technique) -> str:
    """Describes a technique in a sentence.

    Args:
      technique: The technique.

    Returns:
      The first sentence of the documentation of the table's entry, without references to code; "" where there is none.
    """
    if technique.name in DESCRIPTIONS:
        return DESCRIPTIONS[technique.name]
    if technique.is_recipe:
        entry: object = type(parse_recipe(technique.name)[0])
    else:
        (field, value), *_ = technique.changes.items()
        table = TABLES.get(field, {})
        entry = table.get(parse_one(str(value), field).name) if table else None
    lines = (entry.__doc__ or "").strip().splitlines() if entry is not None else []
    sentence = lines[0].partition(". ")[0] if lines else ""
    sentence = re.sub(r": see `.*|,? ?\(`[^)]*\)|^Entry of [A-Z]+: ", "", sentence).replace("`", "").rstrip(".")
    return f"{sentence[:1].upper()}{sentence[1:]}." if sentence else ""


def techniques(layers: int = 4) -> list[Technique]:
    """All techniques.

    Args:
      layers: Number of layers of the model, of which half may be removed.

    Returns:
      The techniques, with distinct names.
    """
    return [*_exact(), *_formats(), *_removed(layers), *_mixers(), *_outputs(), *_optimizers()]


def wanted(settings: AdviseSettings, layers: int) -> list[Technique]:
    """The techniques for the goal of a search, without those that the user has left out.

    Args:
      settings: The settings.
      layers: Number of layers of the model.

    Returns:
      The techniques.

    Raises:
      InputError: The settings name an unknown technique, or leave none.
    """
    table = settings.table or techniques(layers)
    known = {name for t in table for name in (t.name, t.group)}
    for argument, names in (("only", settings.only), ("exclude", settings.exclude)):
        if unknown := [name for name in names if name not in known]:
            raise InputError(f"--{argument}: {unknown_name(unknown[0], known, 'technique')}")
    listed = [
        t
        for t in table
        if settings.goal in t.goals
        and not (settings.only and {t.name, t.group}.isdisjoint(settings.only))
        and {t.name, t.group}.isdisjoint(settings.exclude)
    ]
    if not listed:
        raise InputError(
            f"no technique with --goal={settings.goal} is left of --only={','.join(settings.only)}, "
            f"--exclude={','.join(settings.exclude)}: see hpnlp techniques --goal={settings.goal}"
        )
    return listed


def _exact() -> Iterator[Technique]:
    """Changes of the program that leave the model as it is, but for rounding."""
    every = (Goal.LATENCY, Goal.THROUGHPUT, Goal.TRAINING, Goal.MEMORY)
    for changes, goals, page in (
        ({"model.dtype": "bfloat16"}, every, "speed_tricks.md"),
        ({"model.unroll": 0}, (Goal.TRAINING,), "layouts.md"),
        ({"data.packing": "fit"}, (Goal.TRAINING,), "data.md"),
        ({"data.buckets": 4}, (Goal.TRAINING,), "own_data.md"),
        ({"plan.remat": "names(mixed)"}, (Goal.MEMORY,), "layouts.md"),
        ({"plan.remat": "full"}, (Goal.MEMORY,), "layouts.md"),
        ({"optimizer.accumulate": 4}, (Goal.MEMORY,), "layouts.md"),
    ):
        yield Technique(_name(changes), "The same model", goals, Needs.NOTHING, changes=changes, page=page)
    yield Technique(
        "optimizer.rows=True", "The same model", (Goal.TRAINING,), Needs.TRAINING, ("optimizer", "output", "embedding"),
        {"optimizer.rows": True}, "output_layers.md",
    )  # fmt: skip


def _formats() -> Iterator[Technique]:
    """Formats of the numbers of a trained model."""
    goals = (Goal.DISK, Goal.LATENCY, Goal.THROUGHPUT)
    for name in CONVERSIONS:
        yield Technique(FORMATS.get(name, name), "Fewer bits or numbers", goals, Needs.NOTHING, page="compression.md")
    for recipe, needs in STORED.items():
        yield Technique(recipe, "Fewer bits or numbers", (Goal.DISK,), needs, page="compression.md")


def _removed(layers: int) -> Iterator[Technique]:
    """Units that are removed from a trained model, mostly followed by training."""
    goals = (Goal.LATENCY, Goal.THROUGHPUT, Goal.DISK)
    shortened = ("projections", "mixing", "feed_forward", "norms")
    yield Technique(
        f"layers({max(1, layers // 2)})", "Fewer units", goals, Needs.TRAINING, shortened, page="compression.md"
    )
    for name in COMPRESSORS:
        examples, shortened = REMOVED.get(name, ((), ()))
        for recipe in examples:
            is_trained = parse_recipe(recipe)[0].changes == STRUCTURE  # factors of matrices are not trained further
            needs = Needs.TRAINING if is_trained else Needs.BATCHES
            yield Technique(recipe, "Fewer units", goals, needs, shortened, page="compression.md")


def _mixers() -> Iterator[Technique]:
    """Other mixers, causal ones and those of encoders, with which a new model is trained."""
    goals = (Goal.LATENCY, Goal.THROUGHPUT, Goal.TRAINING, Goal.MEMORY)
    for spec in dict.fromkeys([*all_specs(causal=True)[0], *all_specs()[0]]):
        changes = {"model.mixer": spec}
        yield Technique(
            _name(changes), "Another mixer", goals, Needs.TRAINING, ("mixing", "projections"), changes, "mixers.md"
        )


def _outputs() -> Iterator[Technique]:
    """Other output layers, with which a new model is trained."""
    for name in OUTPUTS:
        changes = {"model.output": OUTPUT_SPECS.get(name, name)}
        yield Technique(
            _name(changes), "Another output layer", (Goal.TRAINING,), Needs.TRAINING, ("output", "optimizer"), changes,
            "output_layers.md",
        )  # fmt: skip


def _optimizers() -> Iterator[Technique]:
    """Other optimizers, with learning rates of their own."""
    for name in OPTIMIZERS:
        changes = {"optimizer.name": name}
        yield Technique(
            _name(changes), "Another optimizer", (Goal.TRAINING, Goal.MEMORY), Needs.TRAINING, ("optimizer",), changes,
            "training.md",
        )  # fmt: skip


def _name(changes: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())
