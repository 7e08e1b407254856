"""Measures language models with the nearest hidden states of their training text (kNN-LM) on held-out text.

    python experiments/bench/knn_lm.py runs/bytes runs/words runs/lstm [--keys=1000000] [--index="ivf(cells=1024,probes=32)"]

For each run: builds a datastore of its training text, fits the mixtures on the last training documents, and scores the
held-out text with the model alone, with a weight of 0.25 (the published one for WikiText-103), with the fitted weight and
temperature, and with weights that depend on distances. Differences to the model alone have 95 % intervals over the held-out
sequences. Khandelwal et al. 2020 (arXiv 1911.00172) report a perplexity of 16.12 in place of 18.65 on WikiText-103.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from hpnlp import measure
from hpnlp.jobs.evaluate_run import RunEvaluation, evaluate_run
from hpnlp.jobs.retrieval import next_words
from hpnlp.retrieval import datastore
from hpnlp.retrieval.knn import Neighbours

ROOT = Path(__file__).parents[2]
ALONE = "model"

FLAGS = flags.FLAGS
flags.DEFINE_integer("keys", 1_000_000, "Largest number of positions that are stored.")
flags.DEFINE_string("index", "", "Kind of index; by default that of hpnlp index build.")
flags.DEFINE_integer("k", 32, "Number of neighbours.")
flags.DEFINE_integer("batches", 0, "Largest number of held-out batches; 0 for all.")
flags.DEFINE_string("store", "", "Directory to keep the datastores in; a temporary one by default.")
flags.DEFINE_string("out", str(ROOT / "experiments" / "results"), "Where the result goes.")


def main(argv: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(FLAGS.store or temporary)
        rows = [row for run in argv[1:] for row in measured(run, root / Path(run).name)]
    print(measure.write_result("knn_lm", rows, FLAGS.out))


def measured(run: str, directory: Path) -> list[dict[str, Any]]:
    """A row for each way in which a run is scored."""
    clock = time.perf_counter()
    source = next_words.load_source(run, next_words.IndexOptions(keys=FLAGS.keys), None)
    next_words.build_shard(source, directory)
    keys_seconds, clock = time.perf_counter() - clock, time.perf_counter()
    record = datastore.complete(directory, [directory], FLAGS.index)
    index_seconds, clock = time.perf_counter() - clock, time.perf_counter()
    fitted = next_words.fit_mixtures(source, directory, FLAGS.k)
    fit_seconds = time.perf_counter() - clock
    config = source.run.config
    about = {
        "task": config.task,
        "tokenizer": config.data.tokenizer,
        "layers": config.model.cells if config.task == "rnn_lm" else f"{config.model.mixer} x {config.model.layers}",
        "dim": record.dim,
        "keys": record.count,
        "index": record.index,
        "k": FLAGS.k,
        "bytes_per_key": sum(file.stat().st_size for file in directory.iterdir()) / record.count,
        "keys_seconds": keys_seconds,
        "index_seconds": index_seconds,
        "fit_seconds": fit_seconds,
    }
    temperature = math.exp(float(fitted["log_temperature"]))
    mixtures = {
        ALONE: "",
        "fixed weight 0.25": f"linear(weight=0.25,temperature={temperature!r})",
        "fitted weight and temperature": "tuned",
        "weight by distances": "learned",
    }
    rows, alone = [], None
    for name, mixture in mixtures.items():
        clock = time.perf_counter()
        neighbours = Neighbours(os.fspath(directory), mixture) if mixture else None
        found = evaluate_run(run, {}, FLAGS.batches or None, neighbours=neighbours)
        row = about | {"what": name, "seconds": time.perf_counter() - clock, "loss": found.scores["loss"]}
        row |= {"perplexity": math.exp(found.scores["loss"]), "bits_per_byte": found.scores.get("bits_per_byte")}
        alone = alone or found
        rows.append(row | difference(found, alone))
        print({key: value for key, value in rows[-1].items() if key not in about or key == "tokenizer"}, flush=True)
    return rows


def difference(found: RunEvaluation, alone: RunEvaluation) -> dict[str, Any]:
    """Difference of the losses to the model alone, in nats per token, with the half width of its 95 % interval."""
    change = found.scores["loss"] - alone.scores["loss"]
    if found is alone or found.examples is None or alone.examples is None:
        return {"loss_difference": change, "half_interval": None}
    error = found.examples.paired_error(alone.examples, "loss")
    return {"loss_difference": change, "half_interval": None if error is None else 1.96 * error}


if __name__ == "__main__":
    app.run(main)
