"""Measures vectors of texts, from text to vector, against transformers' BertModel in torch, interleaved in one process.

    python experiments/bench/sentence_vectors.py [--model=DIR] [--rounds=7]

The model has the sizes of all-MiniLM-L6-v2, with random weights unless --model names a directory of sentence-transformers. Both
sides tokenise the texts, sort them by length, as sentence-transformers does, and encode batches of 64: the mean of the hidden
states, divided by its length. Both compute in float32, and in bfloat16. Unless the vectors agree, nothing is reported.
"""

from __future__ import annotations

import functools
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from absl import app, flags
from steps import FLAGS, prepare

import hpnlp
from hpnlp import measure
from hpnlp.jobs.predictor import Predictor

SIZES = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
BATCH, TEXTS, VOCAB = 64, 256, 30522
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}  # of the numbers of a vector
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LENGTHS = {
    "equal": (30, 30),
    "mixed": (3, 60),
}  # smallest and largest number of words of a text, without [CLS] and [SEP]

flags.DEFINE_string("model", "", "Directory of sentence-transformers whose pooling is the mean.")


def save_random(directory: Path) -> None:
    """Writes a BertModel with random weights, and a tokenizer with a token for each of VOCAB words."""
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(vocab_size=VOCAB, **SIZES)).save_pretrained(directory)
    words = [*SPECIAL, *(f"w{number}" for number in range(VOCAB - len(SPECIAL)))]
    (directory / "vocab.txt").write_text("\n".join(words) + "\n")
    transformers.BertTokenizerFast(str(directory / "vocab.txt"), model_max_length=256).save_pretrained(directory)


def texts_of(tokenizer: Any, least: int, most: int) -> list[str]:
    """Texts of words that are one token each."""
    draw = random.Random(0)
    words = sorted(word for word in tokenizer.get_vocab() if word.isalnum())
    return [" ".join(draw.choices(words, k=draw.randint(least, most))) for _ in range(TEXTS)]


@torch.inference_mode()
def torch_vectors(model: Any, tokenizer: Any, texts: Sequence[str]) -> np.ndarray:
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    vectors = np.empty((len(texts), model.config.hidden_size), np.float32)
    for start in range(0, len(order), BATCH):
        numbers = order[start : start + BATCH]
        batch = tokenizer([texts[number] for number in numbers], padding=True, truncation=True, return_tensors="pt")
        mask = batch["attention_mask"][..., None].float()
        pooled = (model(**batch).last_hidden_state.float() * mask).sum(1) / mask.sum(1)
        vectors[numbers] = torch.nn.functional.normalize(pooled, dim=1).numpy()
    return vectors


def bench(name: str, dtype: str, ours: Predictor, model: Any, tokenizer: Any, exact: Predictor) -> dict[str, Any]:
    texts = texts_of(tokenizer, *LENGTHS[name])
    functions = {
        "torch": functools.partial(torch_vectors, model, tokenizer, texts),
        "ours": functools.partial(ours.encode, texts, batch_size=BATCH),
    }
    other, vectors = (function() for function in functions.values())
    difference = float(np.abs(vectors - other).max())
    if difference > TOLERANCES[dtype]:
        sys.exit(f"{name}, {dtype}: vectors differ by {difference:.1e}: nothing is reported")
    times = measure.timeit(functions, rounds=FLAGS.rounds, warmup=2)
    ratio = times["torch"].over(times["ours"])
    low, high = times["torch"].interval(times["ours"])
    lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    row = {
        "lengths": name,
        "dtype": dtype,
        "mean_tokens": float(np.mean(lengths)),
        "most_tokens": max(lengths),
        "texts": TEXTS,
        "batch": BATCH,
        "threads": torch.get_num_threads(),
        **{f"{side}_per_second": TEXTS / timing.median for side, timing in times.items()},
        "speed_over_torch": ratio,
        "interval": [low, high],
        "largest_difference": difference,
        "least_cosine_to_float32": float((vectors * exact.encode(texts)).sum(axis=1).min()),
        "all_seconds": {side: list(timing.all) for side, timing in times.items()},
    }
    print(row, flush=True)
    return row


def main(_: Any) -> None:
    prepare()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(FLAGS.model or scratch, "" if FLAGS.model else "model")
        if not FLAGS.model:
            source.mkdir()
            save_random(source)
        run = Path(scratch, "run")
        subprocess.run([sys.executable, "-m", "hpnlp", "convert", str(source), f"--to={run}"], check=True)
        ours = {dtype: hpnlp.load(run, dtype=dtype) for dtype in TOLERANCES}
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        theirs = {dtype: transformers.AutoModel.from_pretrained(source).eval() for dtype in TOLERANCES}
        theirs["bfloat16"] = theirs["bfloat16"].to(torch.bfloat16)
        rows = [
            bench(name, dtype, ours[dtype], theirs[dtype], tokenizer, ours["float32"])
            for dtype in TOLERANCES
            for name in LENGTHS
        ]
    print(measure.write_result("sentence_vectors", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
