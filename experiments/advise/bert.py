"""Measures the advice for a classifier in the layout of Hugging Face, beside torch and onnxruntime with the unchanged model.

    python experiments/advise/bert.py --workdir=runs/advise_bert
    python experiments/advise/bert.py --workdir=runs/trial --trial  # a few steps: checks that everything works

transformers trains a BertForSequenceClassification of 6 layers and 384 features on texts of 128 tokens and saves it. `hpnlp
advise` gets this directory and other texts, one at a time and 8 at a time, and may change what keeps 0.97 of the quality. Then
the recommended candidate, hpnlp's float32, torch and onnxruntime predict the same texts in paired rounds of one process, from
the text to the label. Finished steps are skipped when the script runs again. Needs transformers, torch and onnxruntime; some 40
minutes on two cores, which must do nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from planted_texts import CLASSES, LETTERS, write_labelled

from hpnlp import cli, measure, tasks
from hpnlp.advise.candidate import Candidate
from hpnlp.advise.report import FILES
from hpnlp.advise.verify import read_candidate
from hpnlp.advise.workload import Program, Workload, make_call
from hpnlp.cli.errors import run_script
from hpnlp.cost.paired_times import LOOKS, compare_times
from hpnlp.jobs.export import served_predict
from hpnlp.training import run_directory
from hpnlp.training.config import with_changes

TOKENS = 128
BATCHES = {1: "latency", 8: "throughput"}  # texts of a call -> goal

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", "runs/advise_bert", "Directory of the model, the texts and the reports.")
flags.DEFINE_integer("steps", 300, "Steps of the training, of 16 texts.", lower_bound=1)
flags.DEFINE_string("budget", "10min", "Time of each search.")
flags.DEFINE_string("train", "", "Time for trainings of each search; empty for none.")
flags.DEFINE_bool(
    "trial", False, "A small model and few steps, whose figures mean nothing; the result stays in --workdir."
)
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")


def write_texts(workdir: Path, count: int) -> tuple[Path, Path]:
    """Texts for the search and twice as many for the training, of TOKENS tokens, with their labels, as JSONL.

    They are letters with spaces between them, each of which is a token.
    """
    paths = workdir / "texts.jsonl", workdir / "training.jsonl"
    if not all(path.exists() for path in paths):
        workdir.mkdir(parents=True, exist_ok=True)
        plain = workdir / "plain.jsonl"
        write_labelled(plain, 3 * count, TOKENS - 2, TOKENS - 2)
        rows = [json.loads(line) for line in plain.read_text("utf-8").splitlines()]
        plain.unlink()
        lines = [json.dumps({"text": " ".join(row["text"]), "label": row["label"]}) + "\n" for row in rows]
        for path, part in zip(paths, (lines[:count], lines[count:]), strict=True):
            path.write_text("".join(part), "utf-8")
    return paths


def train_checkpoint(directory: Path, texts: Path) -> None:
    """Trains a classifier with transformers, and saves it with its tokenizer."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    if (directory / "config.json").exists():
        return
    torch.manual_seed(0)
    vocabulary = directory.with_suffix(".vocabulary")
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *CLASSES, *LETTERS]) + "\n")
    tokenizer = BertTokenizerFast(str(vocabulary))
    sizes = (32, 2, 2, 64) if FLAGS.trial else (384, 6, 12, 1536)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    labels = dict(enumerate(CLASSES))
    config = BertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=TOKENS, id2label=labels,
        label2id={label: i for i, label in labels.items()}, **dict(zip(names, sizes, strict=True)),
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    rows = [json.loads(line) for line in texts.read_text("utf-8").splitlines()]
    steps = 3 if FLAGS.trial else FLAGS.steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30) * (1 - step / steps))
    order = np.random.default_rng(0)
    for step in range(steps):
        batch = [rows[i] for i in order.integers(len(rows), size=16)]
        arrays = tokenizer([row["text"] for row in batch], return_tensors="pt")
        answers = torch.tensor([CLASSES.index(row["label"]) for row in batch])
        loss = model(**arrays, labels=answers).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step} of {steps}: loss {float(loss):.3f}", flush=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def advised(workdir: Path, size: int) -> Path:
    """The directory of the report on calls of some texts."""
    directory = workdir / f"advice-{size}"
    if not (directory / FILES[1]).exists():
        command = [
            sys.executable, "-m", "hpnlp", "advise", str(workdir / "checkpoint"), f"--data.path={workdir / 'texts.jsonl'}",
            "--data.heldout=0.9", "--data.heldout_examples=0", f"--goal={BATCHES[size]}", f"--batch_size={size}",
            f"--out={directory}", f"--budget={'60s' if FLAGS.trial else FLAGS.budget}",
        ]  # fmt: skip
        command += [f"--train={FLAGS.train}"] if FLAGS.train else []
        subprocess.run(command + ["--batches=4"] * FLAGS.trial, check=True)
    return directory


def peers(workdir: Path, converted: str, texts: list[str]) -> dict[str, Callable[[], Any]]:
    """Calls of torch and onnxruntime that predict the labels of texts."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.set_num_threads(measure.environment()["cores"])
    model = AutoModelForSequenceClassification.from_pretrained(workdir / "checkpoint").eval()
    tokenizer = AutoTokenizer.from_pretrained(workdir / "checkpoint")
    served = workdir / "served"
    if not served.exists():
        subprocess.run([sys.executable, "-m", "hpnlp", "export", converted, f"--to={served}"], check=True)
    exported = served_predict.Model(served)

    def predict() -> list[int]:
        with torch.inference_mode():
            return model(**tokenizer(texts, return_tensors="pt", padding=True)).logits.argmax(-1).tolist()

    return {"torch": predict, "onnxruntime": lambda: exported.predict(texts, len(texts))}


def measured(workdir: Path, size: int) -> dict[str, Any]:
    """The row of calls of some texts."""
    directory = advised(workdir, size)
    content = json.loads((directory / FILES[1]).read_text("utf-8"))
    converted, names = content["run"], content["recommended"]
    run = run_directory.load(converted)
    run_with_data = with_changes(run.config, content["settings"]["changes"])
    dataset = tasks.find(run.config.task).dataset(run_with_data.data, run.vocabulary)
    stored = dataset.stored["heldout"]  # type: ignore[attr-defined]
    texts = [text.decode() for (text,) in stored.texts(stored.spread(size).tolist())]
    candidates: Mapping[str, Candidate] = {"float32": Candidate()}
    finding: dict[str, Any] = {}
    if names:
        candidate, finding = read_candidate(directory, names)
        candidates = {**candidates, "recommended": candidate}
    workload = Workload(Program.PREDICT, size)
    calls = {
        name: make_call(workload, c.applied(run, dataset), dataset, texts).function for name, c in candidates.items()
    }
    functions = {**calls, **peers(workdir, converted, texts)}
    times = compare_times(functions.pop("float32"), functions, rounds=LOOKS[0] if FLAGS.trial else LOOKS[-1])
    ratios = {name: [p.wall.median, p.wall.low, p.wall.high] for name, p in times.programs.items()}
    row = {
        "what": f"predictions of {size}",
        "recommended": names,
        "over float32": ratios,
        "quality": finding.get("quality"),
    }
    print(row, flush=True)
    return row | {"ms": 1e3 * times.baseline, "heldout_examples": stored.count, "verdict": content["verdict"]}


def main(_: list[str]) -> None:
    cli.prepare_jax()
    workdir = Path(FLAGS.workdir).absolute() / ("trial" if FLAGS.trial else "full")
    _, training = write_texts(workdir, 400 if FLAGS.trial else 4000)
    train_checkpoint(workdir / "checkpoint", training)
    rows = [measured(workdir, size) for size in BATCHES]
    print(measure.write_result("advise_bert", rows, workdir if FLAGS.trial else FLAGS.out))


if __name__ == "__main__":
    run_script(main)
