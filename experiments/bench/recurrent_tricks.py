"""Measures tricks of recurrent language models one at a time against the plain model, and LSTMs against transformers by size.

    python experiments/bench/recurrent_tricks.py [--groups=gates,outputs,initial,layers,dropout] [--limit=S]
    python experiments/bench/recurrent_tricks.py --sizes [--limit=S]

Byte-level language models of the standard library's source, in nats per byte of held-out text, after equal numbers of steps and
after equal training time; `forms.py` has the rules and the flags. "gates": initial biases of gates, and LSTM against GRU of
equal size. "outputs": the sum of the outputs of three layers in place of the last one. "initial": learned initial states, of
batches that do not continue each other. "layers": one layer, and two or three narrow ones, of equal size. "dropout": dropout
within the recurrence, on 140 kB of docstrings and comments, which a run reads about 20 times: a model that reads no text
twice gains nothing from it.

With --sizes, the result recurrent_sizes has an LSTM and a transformer of as many parameters, in four sizes; in equal time, the
LSTM has the time of the transformer's steps. Each kind has one learning rate for all sizes, which is not tuned.

A run is planned for 60 to 90 seconds of one core; the largest size takes a few minutes.
"""

from __future__ import annotations

import math
from typing import Any

from absl import app, flags
from forms import Form, Groups, run

from hpnlp.data.reading.stdlib import write_corpus
from hpnlp.training.config import Config, default, resolve

FLAGS = flags.FLAGS
LENGTH, BATCH = 128, 16
BYTES = 256
SMALL = "c*.txt"  # files of the corpus docs that the group "dropout" reads
WIDTHS = {"size1": 48, "size2": 80, "size3": 136, "size4": 224}  # group -> width of the LSTM's two layers

flags.DEFINE_bool("sizes", False, "Measure LSTMs against transformers by size in place of the tricks.")

JOZEFOWICZ = "Jozefowicz et al. 2015"
GATES = {
    "LSTM, forget bias 0": ("lstm({}, forget_bias=0)*2", "", ""),
    "LSTM, forget bias 1": ("lstm({})*2", JOZEFOWICZ, "a bias of 1 closes the gap between LSTM and GRU"),
    "LSTM, forget bias 2": ("lstm({}, forget_bias=2)*2", JOZEFOWICZ, ""),
    "GRU, reset bias -1": ("gru({})*2", "Cho et al. 2014", ""),
    "GRU, reset bias 0": ("gru({}, reset_bias=0)*2", "Cho et al. 2014", ""),
}
# Form -> (fields, paper, published claim).
DROPOUT: dict[str, tuple[dict[str, Any], str, str]] = {
    "no dropout": ({}, "", ""),
    "dropout of inputs and outputs": (
        {"input_dropout": 0.2, "output_dropout": 0.2},
        "Zaremba et al. 2014",
        "Penn Treebank: perplexity 114.5 without, 82.7 (medium) and 78.4 (large) with",
    ),
    "variational dropout": (
        {"input_dropout": 0.2, "output_dropout": 0.2, "hidden_dropout": 0.2, "variational": True},
        "Gal and Ghahramani 2016",
        "Penn Treebank: perplexity 73.4, beside 78.4 of dropout outside the recurrence",
    ),
    "dropout of the hidden state": ({"hidden_dropout": 0.2}, "Gal and Ghahramani 2016", ""),
    "dropout of the candidate": (
        {"candidate_dropout": 0.2},
        "Semeniuta et al. 2016",
        "consistent improvements, also together with dropout outside the recurrence",
    ),
    "zoneout": (
        {"zoneout": 0.05, "zoneout_cell": 0.5},
        "Krueger et al. 2017",
        "Penn Treebank: 1.27 bits per character, beside 1.36 without",
    ),
    "weight drop": (
        {"weight_drop": 0.5},
        "Merity et al. 2018",
        "Penn Treebank: perplexity 57.3, and 68.9 without weight drop in the recipe",
    ),
}


def recurrent(cells: str, text: str = "stdlib", heldout: float = 0.02, **fields: Any) -> Config:
    """A recurrent language model. cells: as `model.cells`; heldout: share of the text; fields: other fields of the model."""
    values: Any = default("rnn_lm")
    values.data.update(path=text, heldout=heldout, heldout_bytes=60_000)
    values.data.update(order="stream", seq_len=LENGTH, batch_size=BATCH)
    values.model.cells = cells
    values.optimizer.learning_rate = 3e-3
    return finished(values, fields)


def finished(values: Any, fields: dict[str, Any]) -> Config:
    """The config with fields of the model, and with the learning rate of all forms."""
    values.model.update(fields)
    values.optimizer.update(schedule="constant", warmup=50, clip_norm=1.0)
    values.train.update(sample=0, baselines=False)
    values.plan.name = "single"
    if FLAGS.tiny:
        values.data.update(seq_len=16, heldout_bytes=2000)
    return resolve(values)


def scaled(width: int) -> int:
    return max(8, width // 16) if FLAGS.tiny else width


def cell_parameters(gates: int, width: int, layers: int) -> int:
    """Parameters of a model with a tied table of bytes."""
    return BYTES * width + layers * gates * width * (2 * width + 1)


def width_for(parameters: int, gates: int, layers: int) -> int:
    """The width with which a model has the nearest number of parameters."""
    return min(range(4, 1024), key=lambda width: abs(cell_parameters(gates, width, layers) - parameters))


def gates() -> list[Form]:
    """Initial biases, and both cells."""
    lstm = scaled(128)
    gru = width_for(cell_parameters(4, lstm, 2), 3, 2)
    return [
        Form(name, recurrent(cells.format(gru if cells.startswith("gru") else lstm)), paper, claim)
        for name, (cells, paper, claim) in GATES.items()
    ]


def outputs() -> list[Form]:
    """Three layers, whose last outputs or the sum of all outputs are read."""
    cells = f"lstm({scaled(104)})*3"
    claim = "connections from all layers to the output make deep networks easier to train; no figure"
    return [
        Form("last outputs", recurrent(cells)),
        Form("summed outputs", recurrent(cells, outputs="sum"), "Graves 2013", claim),
    ]


def initial() -> list[Form]:
    """Zeros and learned initial states, for sequences of 32 bytes in random order."""
    forms = []
    for name in ("zeros", "learned"):
        values: Any = default("rnn_lm")
        values.data.update(path="stdlib", seq_len=32, batch_size=4 * BATCH, heldout_bytes=60_000)
        values.model.cells = f"lstm({scaled(128)})*2"
        values.optimizer.learning_rate = 3e-3
        config = finished(values, {"initial": name})
        forms.append(Form(f"{name} initial state", config))
    return forms


def layers() -> list[Form]:
    """Numbers of layers with equal numbers of parameters."""
    parameters = cell_parameters(4, scaled(128), 2)
    forms = []
    for count, name in enumerate(("one layer", "two layers", "three layers"), 1):
        config = recurrent(f"lstm({width_for(parameters, 4, count)})*{count}")
        claim = "speech, 3.8M weights: phoneme errors from 23.0 % (one layer) to 18.6 % (three)" if count == 3 else ""
        forms.append(Form(name, config, "Graves et al. 2013" if claim else "", claim))
    return forms


def dropout() -> list[Form]:
    """Regularisation on little text."""
    text = write_corpus("docs").path.replace("*.txt", SMALL)
    cells = f"lstm({scaled(192)})"
    forms = []
    for name, (fields, paper, claim) in DROPOUT.items():
        config = recurrent(cells, text, 0.12, **fields)
        forms.append(Form(name, config, paper, claim))
    return forms


def transformer(parameters: int) -> Config:
    """A transformer of 4 layers with the nearest number of parameters, whose batches have as many bytes as an LSTM's."""
    values: Any = default("lm")
    values.data.update(path="stdlib", seq_len=LENGTH, batch_size=BATCH, heldout_bytes=60_000)
    dim = max(16, 16 * round(math.sqrt(parameters / 48) / 16))
    used = BYTES * dim + 4 * 4 * dim**2
    mlp_dim = max(8, 8 * round((parameters - used) / (4 * 2 * dim) / 8))
    values.optimizer.learning_rate = 2e-3
    fields = {"layers": 4, "dim": dim, "heads": max(1, dim // 32), "mlp": "gelu", "mlp_dim": mlp_dim}
    values.train.eval_stride = 8 if FLAGS.tiny else LENGTH // 2
    return finished(values, fields)


def size(width: int) -> list[Form]:
    """An LSTM and a transformer."""
    claim = "as good for early tokens of a context, behind transformers of equal size for later ones; no figure"
    return [
        Form("transformer", transformer(cell_parameters(4, scaled(width), 2))),
        Form("LSTM", recurrent(f"lstm({scaled(width)})*2"), "Kaplan et al. 2020, sec. 3.2.1", claim),
    ]


def tricks() -> Groups:
    return {"gates": gates(), "outputs": outputs(), "initial": initial(), "layers": layers(), "dropout": dropout()}


def main(_: list[str]) -> None:
    if FLAGS.sizes:
        run("recurrent_sizes", {name: size(width) for name, width in WIDTHS.items()})
    else:
        run("recurrent_tricks", tricks())


if __name__ == "__main__":
    app.run(main)
