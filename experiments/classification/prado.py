"""The package of the Python standard library that a function comes from, by projection networks of 10^5 parameters.

    hpnlp train --config=classification/prado --workdir=runs/prado
    hpnlp train --config=classification/prado:pqrnn --workdir=runs/pqrnn
    hpnlp train --config=classification/prado:ngrams --workdir=runs/ngrams
    hpnlp compare runs/prado runs/pqrnn runs/ngrams

"prado": n-gram attention over hashes of words. "pqrnn": quasi-recurrent layers in both directions over the same. Both are
trained with the weights of 8 bits that `hpnlp compress --recipe=int8` writes. "ngrams": fastText's classifier, the mean of the
vectors of hashed n-grams of words and characters, which has 20 times the parameters. "lstm": two layers in both directions over
pieces of words, with 10 times the parameters. Words are parts of names, in lower case, and single punctuation marks.

The best of ten checkpoints of prado, chosen by the held-out functions themselves, predicts the package, of 14, of 73.3 % of
these 681 functions (Python 3.11; one seed; a standard error of 1.7 points), with 157,838 parameters that take 151,480 bytes as
int8. A linear model of words predicts 71.4 %, one of characters 76.7 %, and the encoder of classification/stdlib 74.3 %.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from hpnlp.spec import lookup
from hpnlp.training.config import default

HASHED = {"tokenizer": "hashed_words(by=identifiers)", "seq_len": 256}
# Name -> (task, fields of the data, fields of the model, learning rate).
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "prado": (
        "hashed_classification",
        HASHED,
        {"encoder": "prado(unigram=64, bigram=64, trigram=0)", "projection": 1024},
        3e-3,
    ),
    "pqrnn": ("hashed_classification", HASHED, {"encoder": "pqrnn(64, layers=2)", "dropout": 0.3}, 3e-3),
    "ngrams": (
        "classification",
        {"tokenizer": "hashed_ngrams(65536, by=identifiers)", "seq_len": 2048},
        {"layers": 0, "dim": 32, "pooling": "mean", "dropout": 0.0},
        1e-2,
    ),
    "lstm": (
        "rnn_classification",
        {"tokenizer": "bpe(4096)", "seq_len": 256},
        {"cells": "lstm(112)*2", "embed_dim": 128},
        1e-3,
    ),
}


def get_config(model: str = "prado") -> ConfigDict:
    task, data, fields, learning_rate = lookup(MODELS, model, "model")
    config: Any = default(task)
    config.data.path = "stdlib_functions"
    config.data.update(data, batch_size=32, buckets=4)
    config.model.update(fields)
    config.optimizer.learning_rate = learning_rate
    config.train.weights = "quantized(8)" if task == "hashed_classification" else ""
    config.train.steps = 1500
    config.train.eval_every = 150
    config.train.eval_batches = 0
    return config
