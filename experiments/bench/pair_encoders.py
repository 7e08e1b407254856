"""Measures the quality and the cost of a cross-encoder and of a dual encoder on the same candidates.

    python experiments/bench/pair_encoders.py --workdir=runs/pairs --start=runs/recipes/words/teacher [--tiny]

The texts are docstrings of the standard library, and the bodies of their functions. Both models have the same layers, steps and
examples of a batch: the dual encoder contrasts the bodies of a batch; the cross-encoder classifies docstring and body in one
sequence, half of them with a body of another function. Both begin with the encoder of --start, a model of masked words, such as
the teacher of recipes.py, which has not seen the files that are held out here. Without it, both begin with random parameters,
from which a cross-encoder learns nothing in so few steps.

Each held-out docstring has --candidates bodies: its own, and others drawn at random. The score is the share of docstrings whose
own body comes first, and differences are paired over docstrings. The cost is the time from text to order for each docstring:
with stored vectors of all bodies for the dual encoder, and that of encoding the bodies once beside it.

Reimers and Gurevych 2019, "Sentence-BERT", compare both forms; the cost of all pairs of 10,000 sentences is in nearest_pair.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import small_runs
from absl import flags

import hpnlp
from hpnlp import cli, measure
from hpnlp.cli.errors import run_script
from hpnlp.data.examples.generated.standard_library import docstrings
from hpnlp.data.reading import sources
from hpnlp.data.reading.split import hash_fraction
from hpnlp.jobs.predictor import Predictor
from hpnlp.models.backbone import BackboneConfig
from hpnlp.training.config import Config, default, resolve
from hpnlp.training.config_file import load_config

HELDOUT = 0.35  # share of the files, by the hash of their names that all tasks use
FORMS = {"dual encoder": "dual_encoder", "cross-encoder": "classification"}  # form -> task
BATCH = 32
TRAIN, HELD = "train", "heldout"

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", None, "Directory of the runs.", required=True)
flags.DEFINE_string("start", "", "A run of masked words that both models start from, with its tokenizer.")
flags.DEFINE_integer("steps", 600, "Steps of each training.", lower_bound=1)
flags.DEFINE_integer("queries", 500, "Held-out docstrings.", lower_bound=2)
flags.DEFINE_integer("candidates", 20, "Bodies that are ordered for each docstring.", lower_bound=2)
flags.DEFINE_integer("timed", 20, "Docstrings of a measurement of time.", lower_bound=1)
flags.DEFINE_integer("rounds", 5, "Measurements of each time.", lower_bound=1)
flags.DEFINE_bool(
    "tiny", False, "A few steps of tiny models, whose figures mean nothing; the result stays in --workdir."
)
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")

Pair = tuple[str, str]


def read_pairs() -> dict[str, list[Pair]]:
    """Docstrings and bodies of the files to train on, and of those that are held out."""
    (source,) = sources.find("stdlib", "data.path")
    files = source.files[::20] if FLAGS.tiny else source.files
    pairs: dict[str, list[Pair]] = {TRAIN: [], HELD: []}
    for record in docstrings(files):
        part = HELD if hash_fraction(record["group"]) < HELDOUT else TRAIN
        pairs[part].append((record["text"], record["pair"]))
    return pairs


def write_data(workdir: Path, pairs: dict[str, list[Pair]]) -> None:
    """Writes the records of both tasks. Each record of the cross-encoder is followed by one with another body."""
    draw = np.random.default_rng(0)
    for part, members in pairs.items():
        records: dict[str, list[dict[str, str]]] = {form: [] for form in FORMS.values()}
        for (text, body), other in zip(members, _others(len(members), draw), strict=True):
            records["dual_encoder"].append({"text": text, "pair": body})
            records["classification"].append({"text": text, "pair": body, "label": "1"})
            records["classification"].append({"text": text, "pair": members[other][1], "label": "0"})
        for task, of_task in records.items():
            text = "".join(f"{json.dumps(record)}\n" for record in of_task)
            (workdir / f"{task}-{part}.jsonl").write_text(text, "utf-8")


def _others(count: int, draw: np.random.Generator) -> np.ndarray:
    """For each number, another one."""
    return (np.arange(count) + draw.integers(1, count, count)) % count


def config_of(form: str, seed: int, workdir: Path) -> Config:
    """The config of a training."""
    task = FORMS[form]
    values: Any = default(task)
    values.data.update(path=str(workdir / f"{task}-{TRAIN}.jsonl"), heldout_path=str(workdir / f"{task}-{HELD}.jsonl"))
    values.data.update(tokenizer="bytes" if FLAGS.tiny else "bpe(2400)", batch_size=BATCH)
    values.data.seq_len = 64 if task == "dual_encoder" else 128  # of one text, and of both
    values.model.update(layers=2, dim=128, heads=4, mlp="gelu", vocab=2408)
    values.optimizer.update(learning_rate=1e-3, warmup=50, final=0.0)
    values.train.update(steps=FLAGS.steps, seed=seed, checkpoint_every=0, baselines=False)
    values.plan.name = "single"
    if task == "classification":
        values.data.pair_field = "pair"
        values.model.token_types = 2
    if FLAGS.tiny:
        values.model.update(layers=1, dim=32, heads=2)
        values.data.update(batch_size=4, seq_len=32)
        values.train.steps = 4
    if FLAGS.start:
        source = load_config(FLAGS.start).model
        values.model.update({f.name: getattr(source, f.name) for f in dataclasses.fields(BackboneConfig)})
        values.data.tokenizer = str(Path(FLAGS.start).absolute() / "tokenizer.json")
        values.train.init_from = str(Path(FLAGS.start).absolute())
    values.model.update(dropout=0.1, pooling="mean")
    return resolve(values)


def seeds() -> tuple[int, ...]:
    return (0,) if FLAGS.tiny else (0, 1, 2)


def directory(form: str, seed: int, workdir: Path) -> Path:
    return workdir / f"{FORMS[form]}-{seed}"


def train_all(workdir: Path) -> None:
    """Trains what is not finished."""
    runs = [(form, seed) for seed in seeds() for form in FORMS]
    missing = [key for key in runs if not small_runs.is_finished(directory(*key, workdir))]
    work = 0.5 * FLAGS.steps + 30
    progress = small_runs.Progress(len(missing) * work)
    for form, seed in missing:
        progress.begin(f"{form}, seed {seed}")
        target = directory(form, seed, workdir)
        with (workdir / "log.txt").open("a") as log, contextlib.redirect_stdout(log):
            result = small_runs.train(config_of(form, seed, workdir), target)
        small_runs.write(target, {"accuracy": result.heldout["accuracy"]})
        progress.end(work, f"held-out accuracy {result.heldout['accuracy']:.4f}")


def candidates_of(held: list[Pair], queries: int, candidates: int) -> tuple[list[str], list[list[str]]]:
    """Docstrings, and the bodies that are ordered for each: first its own."""
    draw = np.random.default_rng(1)
    chosen = draw.permutation(len(held))[:queries]
    others = [[i for i in draw.permutation(len(held)) if i != q][: candidates - 1] for q in chosen]
    return [held[q][0] for q in chosen], [
        [held[i][1] for i in (q, *more)] for q, more in zip(chosen, others, strict=True)
    ]


def similarities(model: Predictor, form: str, texts: list[str], bodies: list[list[str]]) -> np.ndarray:
    """The similarity of each docstring to its candidates, float32 [docstrings, candidates]."""
    if form == "dual encoder":
        vectors = model.encode(texts, BATCH)
        of_bodies = model.encode([body for members in bodies for body in members], BATCH, partners=True)
        return np.einsum("qd,qcd->qc", vectors, of_bodies.reshape(len(texts), -1, vectors.shape[-1]))
    pairs = [(text, body) for text, members in zip(texts, bodies, strict=True) for body in members]
    found: list[Any] = model.predict(pairs, BATCH)
    return np.array([each.probabilities["1"] for each in found], np.float32).reshape(len(texts), -1)


def is_first(values: np.ndarray) -> np.ndarray:
    """Whether the first candidate is above all others, float64 [docstrings]. Equal similarities are errors."""
    return (values[:, 0] > values[:, 1:].max(axis=1)).astype(np.float64)


def time_rows(models: dict[str, Predictor], texts: list[str], bodies: list[list[str]]) -> list[dict[str, Any]]:
    """Time from text to order for a docstring, of each form, and that of the vector of a body."""
    dual, count = models["dual encoder"], len(texts)
    stored = [dual.encode(members, BATCH, partners=True) for members in bodies]

    def order() -> None:
        for vector, members in zip(dual.encode(texts, BATCH), stored, strict=True):
            np.argsort(members @ vector)

    first = [members[0] for members in bodies]
    times = measure.timeit(
        {
            "dual encoder": order,
            "cross-encoder": lambda: similarities(models["cross-encoder"], "cross-encoder", texts, bodies),
            "body": lambda: dual.encode(first, BATCH, partners=True),
        },
        rounds=FLAGS.rounds,
    )
    cross, two = times["cross-encoder"], times["dual encoder"]
    about = {"table": "time", "candidates": len(bodies[0])}
    return [
        {**about, "what": "dual encoder", "seconds": two.median / count, "body_seconds": times["body"].median / count},
        {
            **about,
            "what": "cross-encoder",
            "seconds": cross.median / count,
            "over_dual_encoder": cross.over(two),
            "interval": list(cross.interval(two)),
        },
    ]


def quality_rows(correct: dict[str, np.ndarray], candidates: int) -> list[dict[str, Any]]:
    """Scores of both forms, [seeds, docstrings], and their paired difference."""
    rows: list[dict[str, Any]] = []
    for form, values in correct.items():
        scores = values.mean(axis=1).tolist()
        rows.append({"table": "quality", "what": form, "score": statistics.mean(scores), "scores": scores})
        rows[-1] |= {"queries": values.shape[1], "candidates": candidates, "steps": FLAGS.steps}
    change = correct["cross-encoder"] - correct["dual encoder"]
    of_texts = float(change.mean(axis=0).var(ddof=1)) / change.shape[1]
    of_seeds = float(change.mean(axis=1).var(ddof=1)) / len(change) if len(change) > 1 else 0.0
    half = 1.96 * math.sqrt(of_texts + of_seeds)  # as `small_runs.paired`
    return [rows[0], rows[1] | {"difference": float(change.mean()), "half_interval": half}]


def main(_: list[str]) -> None:
    cli.prepare_jax()
    workdir = Path(FLAGS.workdir).absolute()
    workdir.mkdir(parents=True, exist_ok=True)
    pairs = read_pairs()
    queries, count = (6, 4) if FLAGS.tiny else (FLAGS.queries, FLAGS.candidates)
    if len(pairs[HELD]) < max(queries, count):
        sys.exit(f"--queries={queries}, --candidates={count}: {len(pairs[HELD])} docstrings are held out")
    write_data(workdir, pairs)
    train_all(workdir)
    texts, bodies = candidates_of(pairs[HELD], queries, count)
    correct: dict[str, list[np.ndarray]] = {form: [] for form in FORMS}
    for seed in seeds():
        for form, of_form in correct.items():
            model = hpnlp.load(directory(form, seed, workdir))
            of_form.append(is_first(similarities(model, form, texts, bodies)))
            print(f"{form}, seed {seed}: {of_form[-1].mean():.4f}", flush=True)
    rows = quality_rows({form: np.stack(values) for form, values in correct.items()}, count)
    models = {form: hpnlp.load(directory(form, 0, workdir)) for form in FORMS}
    rows += time_rows(models, texts[: FLAGS.timed], bodies[: FLAGS.timed])
    for row in rows:
        print(row, flush=True)
    print(measure.write_result("pair_encoders", rows, str(workdir) if FLAGS.tiny else FLAGS.out))


if __name__ == "__main__":
    run_script(main)
