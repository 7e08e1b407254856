"""The AWD-LSTM recipe on words of the standard library's documentation, and a sweep with one of its parts off at a time.

hpnlp train --config=lm/awd_lstm --workdir=runs/awd_lstm
hpnlp train --config=lm/awd_lstm:plain --workdir=runs/plain_lstm
hpnlp sweep --config=lm/awd_lstm --workdir=runs/awd_lstm_parts
hpnlp compare runs/awd_lstm_parts --out=runs/awd_lstm_parts.png

Merity, Keskar and Socher 2018, "Regularizing and optimizing LSTM language models": weight drop, variational dropout, embedding
dropout, activation penalties, tied tables, random lengths of truncated back-propagation and NT-ASGD. `:sgd` trains by SGD with
the paper's clipping; the others take Adam, which needs fewer steps here. The text has about 48,000 words, so that an LSTM
without the recipe overfits after a few epochs: `:plain` stops there.

A second phase of the recipe averages from its first step on:

hpnlp train --config=lm/awd_lstm:tuned --workdir=runs/awd_lstm_tuned --train.init_from=runs/awd_lstm

A continuous cache of the recipe's states, and the mean of its last checkpoints:

hpnlp evaluate runs/awd_lstm --cache="continuous(size=500, theta=0.3, weight=0.1)"
hpnlp evaluate runs/awd_lstm@last2

On two CPU cores the recipe takes about two minutes, `:plain` one, and the sweep 15 minutes. Perplexities of held-out text are
256 with the recipe, 320 without it, and 188 with the cache (Python 3.11; one seed).
"""

from typing import Any

from ml_collections import ConfigDict

from hpnlp.data.reading.stdlib import write_corpus
from hpnlp.spec import lookup
from hpnlp.training.config import default

FILES = "[cp]*.txt"  # of the corpus docs
LENGTH = 35

# Fields of the recipe.
RECIPE = {
    "model.variational": True,
    "model.input_dropout": 0.4,
    "model.layer_dropout": 0.25,
    "model.output_dropout": 0.4,
    "model.embedding_dropout": 0.1,
    "model.weight_drop": 0.4,
    "model.activation_penalty": 2.0,
    "model.temporal_penalty": 1.0,
    "data.length_deviation": 4.0,
    "optimizer.base_length": LENGTH,
    "optimizer.average": "ntasgd(2)",
}
# Part of the recipe -> the fields that switch it off.
PARTS = {
    "weight drop": {"model.weight_drop": 0.0},
    "dropout of inputs, layers and outputs": {
        "model.input_dropout": 0.0,
        "model.layer_dropout": 0.0,
        "model.output_dropout": 0.0,
        "model.variational": False,
    },
    "one mask for a sequence": {"model.variational": False},
    "embedding dropout": {"model.embedding_dropout": 0.0},
    "activation penalties": {"model.activation_penalty": 0.0, "model.temporal_penalty": 0.0},
    "tied tables": {"model.tied": False},
    "random lengths": {"data.length_deviation": 0.0, "optimizer.base_length": 0},
    "averaging": {"optimizer.average": ""},
}
SGD = {
    "optimizer.name": "sgd",
    "optimizer.momentum": 0.0,
    "optimizer.learning_rate": 20.0,
    "optimizer.clip_norm": 0.25,
    "optimizer.average": "ntasgd(5)",
}
FORMS: dict[str, dict[str, Any]] = {
    "recipe": RECIPE,
    "plain": {"train.patience": 5},
    "sgd": RECIPE | SGD,
    "tuned": RECIPE | {"optimizer.average": "uniform", "optimizer.learning_rate": 5e-4, "train.steps": 600},
}


def get_config(which: str = "recipe") -> ConfigDict:
    form = lookup(FORMS, which, "form")
    config = default("rnn_lm")
    config.data.path = write_corpus("docs").path.replace("*.txt", FILES)
    config.data.tokenizer = "words(3000, by=whitespace)"
    config.data.order = "stream"
    config.data.seq_len = LENGTH
    config.data.batch_size = 20
    config.data.heldout = 0.1
    config.data.heldout_bytes = 0
    config.model.cells = "lstm(256)*2"
    config.optimizer.learning_rate = 3e-3
    config.optimizer.schedule = "constant"
    config.optimizer.warmup = 0
    config.optimizer.weight_decay = 0.0
    config.train.steps = 2100
    config.train.eval_every = 75
    config.train.eval_batches = 0
    config.train.checkpoint_every = 300
    config.train.sample = 0
    config.update_from_flattened_dict(form)
    return config


def get_sweep(which: str = "recipe") -> list[dict[str, Any]]:
    """The recipe, and the recipe without each of its parts."""
    return [{}, *PARTS.values()]
