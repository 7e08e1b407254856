"""Word vectors of the standard library's docstrings and comments, by skip-gram or CBOW with any output layer.

    hpnlp train --config=embeddings/words --workdir=runs/words
    hpnlp neighbours runs/words list "open - close + start" --draw=words.png
    hpnlp sweep --config=embeddings/words:all --workdir=runs/word_outputs

The name after the colon is "skip_gram" (the default), "cbow", or "all", a sweep of both with the output layers of word2vec:
negative sampling, hierarchical softmax over a Huffman tree, and binary codes. A step updates the rows of the words of its batch
only, except with binary codes, which have no table. word2vec.py trains the same vectors many times faster, with negative
sampling only.

Two CPU cores: one to two minutes for a run. In 65 % of cases, adjacent words of held-out text are more similar than words from
different places (skip-gram with negative sampling; Python 3.11; one seed). The neighbours of "list" begin with "tuple".
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from hpnlp.data.reading.stdlib import write_corpus
from hpnlp.spec import lookup
from hpnlp.training.config import default

OUTPUTS = ("negative_sampling(64, sampler=unigram, negatives=5)", "hierarchical", "binary")
# Name after the colon -> objectives
OBJECTIVES = {"skip_gram": ("skip_gram",), "cbow": ("cbow",), "all": ("skip_gram", "cbow")}


def get_config(which: str = "skip_gram") -> ConfigDict:
    objective = lookup(OBJECTIVES, which, "objective")[0]
    config = default("word_embeddings")
    config.data.path = write_corpus("docs").path
    config.data.tokenizer = "words(12000, by=whitespace)"
    config.data.seq_len = 256
    config.data.batch_size = 16
    config.data.heldout = 0.05
    config.model.objective = objective
    config.model.output = OUTPUTS[0]
    config.model.dim = 128
    config.optimizer.learning_rate = 2e-3
    config.optimizer.rows = True
    config.optimizer.weight_decay = 0.0
    config.train.steps = 1000
    config.train.eval_every = 250
    return config


def get_sweep(which: str = "skip_gram") -> list[dict[str, Any]]:
    return [
        {"model.objective": objective, "model.output": output}
        for objective in lookup(OBJECTIVES, which, "objective")
        for output in OUTPUTS
    ]
