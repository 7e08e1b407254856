"""Trains a classifier on few labelled texts from the body of a masked language model, and from scratch.

    python experiments/bench/pretrained_body.py --workdir=runs/pretrained_body [--seeds=3] [--tiny]
    python experiments/bench/pretrained_body.py --workdir=runs/pretrained_subwords --tokenizer="bpe(4096)" --length=128 \
        --pretraining=2500 --steps=300 --heldout=0.3 --name=pretrained_subwords

The masked language model reads the Python standard library but for a share of its files, as bytes or as tokens of --tokenizer.
The classifier predicts the package of a function, from PER_CLASS labelled functions of each package, which each seed draws anew
from the files that the masked language model has read, and is scored on the functions of the other files. Both classifiers have
the same model, steps, examples and learning rate; there is one evaluation, at the end. Finished runs of the directory are not
trained again, so that the same command goes on after an interruption. The interval of the difference is over the files
of the held-out functions, paired by function, and over seeds. `--tiny` runs everything once in a size that learns nothing.

Howard and Ruder 2018 (ULMFiT, section 5): on IMDb, a classifier from a pretrained language model with 100 labelled texts has
the error of one from scratch with 10 times as many.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from hpnlp import cli, measure, report
from hpnlp.data.examples.generated import standard_library
from hpnlp.data.reading import sources
from hpnlp.data.reading.split import hash_fraction
from hpnlp.training.files.example_scores import ExampleScores

PER_CLASS = 30
MODEL = {"layers": 4, "dim": 128, "heads": 4}
TINY_MODEL = {"layers": 1, "dim": 16, "heads": 2}
SCRATCH = "a classifier from scratch"
ARMS = {"a classifier from the masked language model": "body", SCRATCH: "scratch"}
LINEAR = {"linear model of words": "words_accuracy", "linear model of characters": "characters_accuracy"}

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", "runs/pretrained_body", "Directory of the runs and of the labelled texts.")
flags.DEFINE_integer("seeds", 3, "Classifiers of each kind, with the seeds 0, 1, ...", lower_bound=1)
flags.DEFINE_integer("pretraining", 500, "Steps of the masked language model.")
flags.DEFINE_integer("steps", 120, "Steps of each classifier.")
flags.DEFINE_string("tokenizer", "bytes", "Tokenizer of all models, trained by the masked language model.")
flags.DEFINE_float("heldout", 0.1, "Share of the files that no training reads, by a hash of their names.")
flags.DEFINE_integer("length", 256, "Tokens of a sequence.")
flags.DEFINE_string("name", "pretrained_body", "Name of the result.")
flags.DEFINE_bool("tiny", False, "A smoke test, whose result is written to the workdir.")
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Where the result goes.")


def write_examples(workdir: Path, seeds: int) -> None:
    """Writes the held-out functions, and for each seed the labelled ones to train on."""
    if all((workdir / name).exists() for name in ("heldout.jsonl", *(f"train-{seed}.jsonl" for seed in range(seeds)))):
        return
    workdir.mkdir(parents=True, exist_ok=True)
    by_label, heldout = collections.defaultdict(list), []
    for example in standard_library.functions(sources.find("stdlib", "data.path")[0].files):
        is_heldout = hash_fraction(example["group"]) < FLAGS.heldout
        (heldout if is_heldout else by_label[example["label"]]).append(example)
    for seed in range(seeds):
        draw, count = random.Random(seed), 2 if FLAGS.tiny else PER_CLASS
        drawn = [example for label in sorted(by_label) for example in draw.sample(by_label[label], count)]
        _write(workdir / f"train-{seed}.jsonl", drawn)
    _write(workdir / "heldout.jsonl", heldout[:40] if FLAGS.tiny else heldout)


def _write(path: Path, examples: Sequence[dict[str, Any]]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{json.dumps(example)}\n" for example in examples))
    partial.rename(path)


def trained(experiment: str, name: str, fields: dict[str, Any]) -> Path:
    """The directory of a finished run."""
    workdir = Path(FLAGS.workdir, name)
    if not (workdir / "report.json").exists():
        fields = {"plan.name": "single", "data.seq_len": 32 if FLAGS.tiny else FLAGS.length} | fields
        command = [sys.executable, "-m", "hpnlp", "train", f"--config={experiment}", f"--workdir={workdir}"]
        subprocess.run([*command, *(f"--{field}={value}" for field, value in fields.items())], check=True)
    return workdir


def pretrained() -> Path:
    """The run of the masked language model."""
    model = {f"model.{name}": value for name, value in (TINY_MODEL if FLAGS.tiny else MODEL).items()}
    steps = {"train.steps": 2 if FLAGS.tiny else FLAGS.pretraining, "train.eval_every": 0}
    steps |= {"data.tokenizer": FLAGS.tokenizer}
    size = {"data.heldout": FLAGS.heldout, "data.heldout_bytes": 2_000 if FLAGS.tiny else 100_000}
    return trained("masked_lm/bytes", "masked", model | steps | size)


def classifier(arm: str, seed: int, source: Path) -> Path:
    """The run of a classifier, of the same model with and without a source."""
    workdir = Path(FLAGS.workdir)
    fields = {
        "data.path": workdir / f"train-{seed}.jsonl",
        "data.heldout_path": workdir / "heldout.jsonl",
        "train.seed": seed,
        "train.steps": 2 if FLAGS.tiny else FLAGS.steps,
        "train.eval_every": 0,
        "optimizer.warmup": 1 if FLAGS.tiny else 20,
        "optimizer.final": 0.0,
    }
    if arm == "body":
        return trained("classification/stdlib", f"{arm}-{seed}", fields | {"train.init_from": source})
    names = ("model.layers", "model.dim", "model.heads", "model.vocab")  # the last with the id of hidden tokens
    config = report.read_report(workdir / f"body-{seed}")["config"]
    same = {name: config[name] for name in names} | {"data.tokenizer": FLAGS.tokenizer}
    if (source / "tokenizer.json").exists():
        same["data.tokenizer"] = source / "tokenizer.json"
    return trained("classification/stdlib", f"{arm}-{seed}", fields | same)


def row_of(name: str, runs: Sequence[Path], others: Sequence[Path]) -> dict[str, Any]:
    """A row of the result: accuracies, and their paired differences to the classifiers of `others`."""
    reports = [report.read_report(run) for run in runs]
    accuracies = [content["heldout_accuracy"] for content in reports]
    lines = Path(FLAGS.workdir, "heldout.jsonl").read_text("utf-8").splitlines()
    files = np.unique([json.loads(line)["group"] for line in lines], return_inverse=True)[1]
    differences, errors = [], []
    for run, other, accuracy in zip(runs, others, accuracies, strict=True):
        scores, of_other = ExampleScores.read(run), ExampleScores.read(other)
        if scores is None or of_other is None:
            sys.exit(f"{run} or {other} has no scores of single examples: train them again")
        differences.append(accuracy - report.read_report(other)["heldout_accuracy"])
        scores = dataclasses.replace(scores, documents=files)
        errors.append(scores.paired_error(of_other, "accuracy") or 0.0)
    # All seeds have the same held-out functions, so that more seeds reduce only the variance between seeds.
    variance = statistics.mean(error * error for error in errors)
    variance += statistics.variance(differences) / len(runs) if len(runs) > 1 else 0.0
    return {
        "what": name,
        "seeds": len(runs),
        "steps": reports[0]["steps"],
        "parameters": reports[0]["parameters"],
        "labelled_examples": sum(1 for _ in Path(FLAGS.workdir, "train-0.jsonl").open()),
        "heldout_examples": reports[0]["heldout_examples"],
        "accuracy": statistics.mean(accuracies),
        "accuracies": accuracies,
        "difference": statistics.mean(differences),
        "differences": differences,
        "half_interval": 1.96 * math.sqrt(variance) if runs != others else None,
    }


def main(_: list[str]) -> None:
    cli.prepare_jax()
    seeds = 1 if FLAGS.tiny else FLAGS.seeds
    write_examples(Path(FLAGS.workdir), seeds)
    source = pretrained()
    runs = {name: [classifier(arm, seed, source) for seed in range(seeds)] for name, arm in ARMS.items()}
    first, second = (report.read_report(of_arm[0]) for of_arm in runs.values())
    if first["parameters"] != second["parameters"]:
        sys.exit(
            f"the classifiers have {first['parameters']} and {second['parameters']} parameters: expected equal models"
        )
    rows = [row_of(name, of_arm, runs[SCRATCH]) for name, of_arm in runs.items()]
    of_scratch = [report.read_report(run) for run in runs[SCRATCH]]
    for name, field in LINEAR.items():
        values = [content[field] for content in of_scratch if content.get(field) is not None]
        rows += [{"what": name, "accuracy": statistics.mean(values), "accuracies": values}] if values else []
    masked = report.read_report(source)
    rows.append(
        {
            "what": "masked language model",
            "steps": masked["steps"],
            "accuracy": masked["heldout_accuracy"],
            "seconds": masked["seconds"],
        }
    )
    for row in rows:
        print(row)
    print(measure.write_result(FLAGS.name, rows, FLAGS.workdir if FLAGS.tiny else FLAGS.out))


if __name__ == "__main__":
    app.run(main)
