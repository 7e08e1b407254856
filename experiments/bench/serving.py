"""Measures the way from a CSV file to served predictions, the latency of `predict`, int8 in onnxruntime, and the first step.

    python experiments/bench/serving.py [--parts=file,latency,int8,text]

"file": 500 docstrings with their package, as CSV, are trained on, exported and predicted from the export. "latency":
`Predictor.predict` of one text over the compiled function of the same text's ids, and the wall time of `hpnlp predict`, for the
encoder of "int8". "int8": that encoder, 4 layers of width 256, exported in float32 and compressed to int8, for 8 held-out texts
with their own lengths and for a single one. "text": seconds from the start of `hpnlp train` to its first step on 76 MB of text
that was never read before. Needs onnxruntime. About ten minutes on two quiet cores.
"""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import hpnlp
from hpnlp import cli, measure
from hpnlp.data.examples.generated import standard_library
from hpnlp.data.reading import sources
from hpnlp.jobs.export import served_predict
from hpnlp.jobs.held_out import framed_ids, heldout_texts
from hpnlp.jobs.predictor import Predictor

RESULTS = Path(__file__).parents[1] / "results"
PARTS = ("file", "latency", "int8", "text")
RECORDS, PACKAGES = 500, 5
TEXT_BYTES = 76_000_000

FLAGS = flags.FLAGS
flags.DEFINE_list("parts", list(PARTS), "Parts to measure.")
flags.DEFINE_integer("rounds", 15, "Measurements of each time.", lower_bound=1)
flags.DEFINE_integer("steps", 60, "Training steps of the encoder.", lower_bound=1)
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def run(*command: str) -> float:
    """Runs a command of hpnlp, and returns its seconds."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "hpnlp", *command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"hpnlp {' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    seconds = time.perf_counter() - start
    print(f"{seconds:7.1f} s  hpnlp {' '.join(command)}", flush=True)
    return seconds


def write_docstrings(path: Path) -> None:
    """Writes docstrings of the standard library with their package, of those with the most docstrings."""
    by_package: dict[str, list[str]] = {}
    for file in (file for source in sources.find("stdlib", "data.path") for file in source.files):
        package, slash, _ = file.name.partition("/")
        if slash:
            by_package.setdefault(package, []).extend(record["text"] for record in standard_library.docstrings([file]))
    largest = sorted(by_package, key=lambda package: len(by_package[package]))[-PACKAGES:]
    records = [(text, package) for package in largest for text in by_package[package]]
    chosen = np.random.default_rng(0).permutation(len(records))[:RECORDS]
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerows([("text", "label"), *(records[index] for index in chosen)])


def file_row(root: Path) -> dict[str, Any]:
    """Commands and seconds from a CSV file to a prediction of the exported directory."""
    write_docstrings(root / "docstrings.csv")
    trained, served = str(root / "docstrings"), str(root / "served")
    seconds = {
        "train": run(
            "train", "--task=classification", f"--data.path={root / 'docstrings.csv'}", f"--workdir={trained}"
        ),
        "export": run("export", trained, f"--to={served}"),
    }
    start = time.perf_counter()
    script = [sys.executable, f"{served}/predict.py", "Return a list of all threads that are alive."]
    print(subprocess.run(script, check=True, capture_output=True, text=True).stdout, flush=True)
    seconds["predict.py"] = time.perf_counter() - start
    return {
        "what": f"CSV of {RECORDS} texts to a served prediction",
        "seconds": seconds,
        "total_seconds": sum(seconds.values()),
    }


def train_encoder(root: Path) -> str:
    """Trains an encoder of 4 layers of width 256 on functions; speed does not depend on how well it is trained."""
    directory = str(root / "encoder")
    fields = ("--model.layers=4", "--model.dim=256", "--model.heads=8", "--data.buckets=4", "--train.eval_every=0")
    run("train", "--config=classification/stdlib", f"--workdir={directory}", f"--train.steps={FLAGS.steps}", *fields)
    return directory


def latency_rows(directory: str) -> list[dict[str, Any]]:
    """Times of `predict` of one text over the compiled function of its ids, and of the command."""
    predictor = hpnlp.load(directory)
    model, params = predictor.run.model, jax.tree.map(jnp.asarray, predictor.run.params)
    logits = jax.jit(lambda params, batch: model.apply({"params": params}, batch, method="logits"))
    rows = []
    for text in single_texts(predictor):
        ids = token_ids(predictor, text)
        batch = {
            "tokens": ids,
            "segment_ids": np.ones_like(ids),
            "positions": np.arange(ids.size, dtype=np.int32)[None],
        }
        calls = {
            "predict": lambda text=text: predictor.predict([text]),
            "bare": lambda batch=batch: np.asarray(logits(params, batch)),
        }
        row = timed(f"predict of one text of {ids.size} tokens over the bare function", calls, "predict", "bare")
        rows.append(row)
    seconds = [run("predict", directory, "def f(x): return x") for _ in range(5)]
    rows.append({"what": "hpnlp predict, from start to end", "seconds": seconds, "total_seconds": np.median(seconds)})
    return rows


def single_texts(predictor: Predictor) -> list[str]:
    """Held-out texts of about 16, 32, 64 and 128 tokens, whose lengths are not those of the programs of `predict`."""
    texts = [text for (text,) in heldout_texts(predictor.run)]
    sizes = [token_ids(predictor, text).size for text in texts]
    return [texts[int(np.argmin([abs(size - length) for size in sizes]))] for length in (17, 33, 65, 129)]


def token_ids(predictor: Predictor, text: str) -> np.ndarray:
    """Ids of a text as the model reads them, `[1, T]`."""
    ((ids, _),) = framed_ids(predictor.run, predictor.kind, [(text,)])
    return np.array([ids], np.int32)


def int8_rows(root: Path, directory: str) -> list[dict[str, Any]]:
    """Times of exported models in onnxruntime, int8 over float32."""
    compressed = str(root / "encoder-int8")
    run("compress", directory, f"--to={compressed}", "--recipe=int8")
    models = {}
    for name, source in {"float32": directory, "int8": compressed}.items():
        run("export", source, f"--to={root / name}")
        models[name] = served_predict.Model(root / name)
    texts = [text for (text,) in heldout_texts(hpnlp.load(directory).run)]
    labels = {name: [row["label"] for row in model.predict(texts)] for name, model in models.items()}
    agreement = np.mean([first == second for first, second in zip(*labels.values(), strict=True)])
    rows = []
    for count in (8, 1):
        calls = {
            name: lambda model=model, count=count: model.predict(texts[:count], count) for name, model in models.items()
        }
        sizes = [len(models["int8"].tokenizer.encode(text).ids) for text in texts[:count]]
        row = timed(f"exported encoder in onnxruntime, B {count}, int8 over float32", calls, "int8", "float32")
        rows.append(row | {"tokens": sizes, "equal_labels": float(agreement)})
    return rows


def timed(what: str, calls: Mapping[str, Callable[[], Any]], first: str, second: str) -> dict[str, Any]:
    """The median ratio of two calls with its interval."""
    times = measure.timeit(calls, rounds=FLAGS.rounds, min_seconds=0.3)
    ratio, interval = times[first].over(times[second]), times[first].interval(times[second])
    print(f"{what}: {ratio:.3f}, {interval[0]:.3f} to {interval[1]:.3f}", flush=True)
    seconds = {name: list(time.all) for name, time in times.items()}
    return {"what": what, "ratio": ratio, "interval": interval, "seconds": seconds}


def text_row(root: Path, tokenizer: str) -> dict[str, Any]:
    """Seconds to the first training step on text that was not read before."""
    path = root / "large.txt"
    if not path.exists():
        text = b"\n".join(sorted(text_of_library()))
        path.write_bytes((text * (TEXT_BYTES // len(text) + 1))[:TEXT_BYTES])
    workdir = root / f"lines-{tokenizer[:3]}"
    fields = (
        f"--data.path={path}",
        f"--data.cache={root / 'data'}",
        "--train.log_every=1",
        f"--data.tokenizer={tokenizer}",
    )
    start = time.perf_counter()
    command = [sys.executable, "-m", "hpnlp", "train", "--config=lm/bytes", f"--workdir={workdir}", *fields]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        seconds = None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step "):
                seconds = time.perf_counter() - start
                break
        process.send_signal(signal.SIGKILL)
    if seconds is None:
        sys.exit(f"hpnlp train ended before its first step:\n{''.join(lines[-5:])}")
    print(f"first step on {TEXT_BYTES / 1e6:.0f} MB with {tokenizer}: {seconds:.1f} s", flush=True)
    return {"what": f"first step on {TEXT_BYTES / 1e6:.0f} MB of new text, {tokenizer}", "total_seconds": seconds}


def text_of_library() -> Iterator[bytes]:
    """Sources of the standard library, its tests included."""
    for source in sources.find("stdlib+tests", "data.path"):
        for file in source.files:
            yield Path(file.path).read_bytes().decode("utf-8", "replace").encode()


def main(_: Any) -> None:
    cli.prepare_jax()
    parts = set(FLAGS.parts)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        if "file" in parts:
            rows.append(file_row(root))
        if parts & {"latency", "int8"}:
            encoder = train_encoder(root)
            rows += latency_rows(encoder) if "latency" in parts else []
            rows += int8_rows(root, encoder) if "int8" in parts else []
        if "text" in parts:
            rows += [text_row(root, tokenizer) for tokenizer in ("bytes", "bpe(8192)")]
    print(json.dumps(rows, indent=1))
    print(measure.write_result("serving", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
