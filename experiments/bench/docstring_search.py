"""Measures the search of a function's code by its docstring, with and without pretrained weights.

    python experiments/bench/docstring_search.py --model=DIR --workdir=runs/docstring_search [--steps=130] [--scratch_steps=650]

DIR is a directory of sentence-transformers, such as all-MiniLM-L6-v2. Rows: its model as it is ("pretrained"), after training
on the pairs of `stdlib_docstrings` ("fine-tuned"), and the same architecture and tokenizer trained on these pairs from random
weights ("from scratch"), beside TF-IDF of words and of the model's tokens, as reports of dual encoders have it. Each has
recall@1 and recall@10 of the held-out pairs, which are of other files than the training pairs, with a 95 % interval; and its
difference to "from scratch" with a paired interval over the pairs. Intervals treat the pairs as independent. `seq_len` is the
number of tokens at which texts are cut; TF-IDF reads them whole. The training data of all-MiniLM-L6-v2 hold docstrings and code
of GitHub (Code Search), perhaps with these files: "pretrained" is no figure of unseen text. Finished trainings of the directory
are not trained again, and an interrupted one goes on from its checkpoint.

The two trainings alone, without intervals, are:

    hpnlp convert DIR --to=runs/sentences
    hpnlp train --config=lm/finetune:runs/sentences --workdir=runs/tuned --data.path=stdlib_docstrings \\
        --data.seq_len=128 --data.batch_size=64 --optimizer.learning_rate=5e-5 --train.steps=130
    hpnlp train --config=lm/finetune:runs/sentences --workdir=runs/scratch --data.path=stdlib_docstrings \\
        --data.seq_len=128 --data.batch_size=64 --optimizer.learning_rate=3e-4 --train.steps=650 --train.init_from=
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import small_runs
from absl import flags

from hpnlp import cli, measure
from hpnlp.cli import experiment
from hpnlp.cli.errors import run_script
from hpnlp.data.examples.baselines import tfidf_ranks
from hpnlp.jobs.predictor import Predictor
from hpnlp.tasks import TASKS
from hpnlp.tasks.reports.dual_encoder_report import TFIDF, TOP, partner_ranks
from hpnlp.training import loop
from hpnlp.training.config import Config, resolve
from hpnlp.training.processes import signals

ROOT = Path(__file__).parents[2]
SCRATCH = "from scratch"

FLAGS = flags.FLAGS
flags.DEFINE_string("model", None, "Directory of sentence-transformers.", required=True)
flags.DEFINE_string("workdir", None, "Directory of the converted model and of the trainings.", required=True)
flags.DEFINE_integer("steps", 130, "Steps of fine-tuning; 64 are an epoch of batches of 64.")
flags.DEFINE_integer("scratch_steps", 650, "Steps of the training from scratch.")
flags.DEFINE_float("rate", 5e-5, "Learning rate of fine-tuning.")
flags.DEFINE_float("scratch_rate", 3e-4, "Learning rate of the training from scratch.")
flags.DEFINE_integer("batch", 64, "Pairs of a step.")
flags.DEFINE_integer("seq_len", 128, "Tokens at which texts are cut.")
flags.DEFINE_integer("pairs", 1000, "Largest number of held-out pairs, the first ones.")
flags.DEFINE_integer("seed", 0, "Seed of the order of the pairs, and of random weights.")
flags.DEFINE_string("out", str(ROOT / "experiments" / "results"), "Where the result goes.")


def config_of(run: Path, steps: int, rate: float, pretrained: bool) -> Config:
    """The resolved config of a training.

    Args:
      run: The converted run.
      steps: Number of steps.
      rate: Learning rate.
      pretrained: Whether weights are those of the run; otherwise they are random.

    Returns:
      The config.
    """
    config = experiment.load(str(ROOT / "experiments" / "lm" / "finetune.py"), "config").get_config(str(run))
    config.train.init_from = str(run) if pretrained else ""
    config.data.update(path="stdlib_docstrings", seq_len=FLAGS.seq_len, batch_size=FLAGS.batch)
    config.optimizer.update(learning_rate=rate, warmup=max(1, steps // 10))
    config.train.update(steps=steps, eval_every=steps, eval_batches=1, seed=FLAGS.seed)
    return resolve(config)


def model_ranks(predictor: Predictor, texts: list[tuple[str, str]]) -> np.ndarray:
    """Rank of the code of each docstring among all, by the vectors of a model."""
    docstrings, codes = (predictor.encode([row[part] for row in texts]) for part in range(2))
    return partner_ranks(docstrings @ codes.T)


def interval(values: np.ndarray) -> list[float]:
    """95 % interval of the mean of values, by their standard error."""
    error = 1.96 * values.std(ddof=1) / np.sqrt(len(values))
    return [float(values.mean() - error), float(values.mean() + error)]


def row_of(name: str, ranks: np.ndarray, reference: np.ndarray) -> dict[str, Any]:
    """Recall of a method, and its difference to the reference."""
    row: dict[str, Any] = {"method": name, "pairs": len(ranks)}
    for k in TOP:
        hits, others = (np.asarray(x <= k, np.float64) for x in (ranks, reference))
        row |= {
            f"recall_at_{k}": float(hits.mean()),
            f"recall_at_{k}_interval": interval(hits),
            f"recall_at_{k}_over_scratch": float((hits - others).mean()),
            f"recall_at_{k}_over_scratch_interval": interval(hits - others),
        }
    return row


def converted(workdir: Path) -> Path:
    """The converted model, as a run."""
    run = workdir / "converted"
    if not small_runs.is_finished(run):
        shutil.rmtree(run, ignore_errors=True)  # of an interrupted conversion
        subprocess.run([sys.executable, "-m", "hpnlp", "convert", FLAGS.model, f"--to={run}"], check=True)
        small_runs.write(run, {})
    return run


def train(config: Config, workdir: Path) -> None:
    """Trains what is not finished. Exits if a signal stops it."""
    if small_runs.is_finished(workdir):
        return
    result = loop.train(config, workdir, score=False)
    if result.interrupted:
        sys.exit(signals.INTERRUPTED)
    small_runs.write(workdir, {"minutes": sum(result.seconds.values()) / 60})


def main(_: list[str]) -> None:
    cli.prepare_jax()
    workdir = Path(FLAGS.workdir).absolute()
    run = converted(workdir)
    trainings = {
        "fine-tuned": config_of(run, FLAGS.steps, FLAGS.rate, pretrained=True),
        SCRATCH: config_of(run, FLAGS.scratch_steps, FLAGS.scratch_rate, pretrained=False),
    }
    task = TASKS["dual_encoder"]
    dataset = task.dataset(trainings[SCRATCH].data, task.load_vocabulary(run))
    stored = dataset.stored["heldout"]
    count = min(stored.count, FLAGS.pairs)
    texts = [(a.decode(), b.decode()) for a, b in stored.texts(range(count))]
    pretrained = Predictor(run)
    ranks = {"pretrained": model_ranks(pretrained, texts)}
    about: dict[str, dict[str, Any]] = {"pretrained": {"seq_len": pretrained.run.config.data.seq_len}}
    for name, config in trainings.items():
        target = workdir / name.replace(" ", "_")
        train(config, target)
        about[name] = {
            "seq_len": FLAGS.seq_len, "steps": config.train.steps, "batch": FLAGS.batch,
            "learning_rate": config.optimizer.learning_rate, **small_runs.read(target),
        }  # fmt: skip
        ranks[name] = model_ranks(Predictor(target), texts)
    for by in TFIDF.values():
        of_words = tfidf_ranks(dataset, limit=count, by=by)
        assert of_words is not None, "the training pairs have words"
        ranks[f"TF-IDF of {by}"] = of_words
    shared = {"seed": FLAGS.seed, "train_pairs": dataset.train_examples}
    rows = [row_of(name, of_method, ranks[SCRATCH]) | shared | about.get(name, {}) for name, of_method in ranks.items()]
    for row in rows:
        print(row, flush=True)
    print(measure.write_result("docstring_search", rows, FLAGS.out))


if __name__ == "__main__":
    run_script(main)
