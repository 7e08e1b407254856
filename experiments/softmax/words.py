"""A sweep of the output layers over large vocabularies: words of the Python standard library, one small model.

    hpnlp sweep --config=softmax/words:docs --workdir=runs/docs
    hpnlp compare runs/docs --out=runs/docs.png

The name after the colon is a corpus of `hpnlp.data.reading.stdlib`: docs (12,000 words, the default), code (110,000),
whitespace (400,000). The rarest words are not in the vocabulary, so that `<unk>` is learned: 2 %, 2 % and 19 % of the held-out
words do not occur in the training text. docs compares all layers; the others compare a choice of layers with probabilities,
with full last, because a step of it takes seconds. A checkpoint of whitespace has 1.2 GB.

Layers that look up some rows of their table update only these (`optimizer.rows`); with the larger vocabularies all layers
except full update the embedding in this way, too.

Expected held-out perplexities relative to full, over docs: sampled 1.01, nce 1.04, adaptive 1.01, class 1.06, hierarchical
1.16, binary_ecc(2048), a softmax with an error-correcting code, 1.10. negative_sampling, margin and vmf have no perplexity.

`docs-time` trains this choice of layers on docs for the time of 400 steps of full. The numbers of steps follow from earlier
measurements:

    python experiments/softmax/steps.py --only=docs
    hpnlp sweep --config=softmax/words:docs-time --workdir=runs/docs-time
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from hpnlp.data.reading.stdlib import write_corpus
from hpnlp.spec import lookup
from hpnlp.training.config import default
from hpnlp.types import InputError

# Every member of docs-time trains for the time that this number of steps of full takes.
BUDGET = 400
# corpus -> (size of the vocabulary, fraction of the files that is held out, steps)
SIZES = {"docs": (12_000, 0.05, 1000), "code": (110_000, 0.02, 400), "whitespace": (400_000, 0.02, 200)}
LAYERS = (
    "full", "sampled(1024)", "nce(1024,unigram)", "adaptive(div_value=2)", "class(by=mass)", "hierarchical",
    "binary_hybrid(2048)", "binary_ecc(2048)", "importance(1024)", "binary", "binary_ecc", "negative_sampling(64)", "margin",
    "vmf", "class(by=similar)", "hierarchical(similar)",
)  # fmt: skip
LARGE = (
    "sampled(1024)", "nce(1024,unigram)", "adaptive(div_value=2)", "class(by=similar)", "hierarchical(similar)",
    "binary_hybrid(2048)", "binary_ecc(2048)", "full",
)  # fmt: skip
BY_ROWS = ("sampled", "importance", "nce", "negative_sampling", "margin", "hierarchical")
TIMES = Path(__file__).parents[1] / "results" / "softmax_steps_{}-cpu.json"


def get_config(which: str = "docs") -> ConfigDict:
    corpus = which.removesuffix("-time")
    cap, heldout, steps = lookup(SIZES, corpus, "corpus")
    steps = steps if corpus == which else BUDGET
    config = default()
    config.data.path = write_corpus(corpus).path
    config.data.tokenizer = f"words({cap}, by=whitespace)"
    config.data.seq_len = 64
    config.data.batch_size = 32
    config.data.heldout = heldout
    config.data.heldout_bytes = 300_000
    config.model.layers = 2
    config.model.dim = 128
    config.model.heads = 4
    config.model.mlp = "gelu"
    config.model.tied = False  # tables whose rows are not words cannot be shared
    config.optimizer.learning_rate = 3e-3
    config.optimizer.final = 0.0
    config.train.steps = steps
    config.train.checkpoint_every = 0
    config.train.keep = 1
    config.train.sample = 0
    return config


def get_sweep(which: str = "docs") -> list[dict[str, Any]]:
    corpus = which.removesuffix("-time")
    lookup(SIZES, corpus, "corpus")
    if corpus == which:
        return [member(layer, corpus) for layer in (LAYERS if corpus == "docs" else LARGE)]
    ratios = times_over_full(corpus)
    layers = [layer for layer in LAYERS if layer in LARGE]
    return [member(layer, corpus) | {"train.steps": round(BUDGET / ratios[layer])} for layer in layers]


def member(layer: str, corpus: str = "docs") -> dict[str, Any]:
    """The overrides that select an output layer."""
    if layer == "vmf":  # does not train its table: the embedding's rows carry meaning, an untrained table would not
        return {"model.output": layer, "model.tied": True}
    rows = layer.partition("(")[0] in BY_ROWS if corpus == "docs" else layer != "full"
    return {"model.output": layer, "optimizer.rows": rows}


def times_over_full(corpus: str) -> dict[str, float]:
    """Layer -> time of its step relative to full, as measured by `steps.py`."""
    path = Path(str(TIMES).format(corpus))
    try:
        rows = json.loads(path.read_text())["rows"]
    except FileNotFoundError:
        raise InputError(f"found no {path}: run python experiments/softmax/steps.py --only={corpus} first") from None
    return {row["output"]: row["ratios"]["time over full"] for row in rows}
