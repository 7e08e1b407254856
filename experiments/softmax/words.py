"""Every output layer over a large vocabulary, on the same small trunk and for the same steps: words of Python's own library.

    hpnlp sweep --config=experiments/softmax/words.py:docs --workdir=runs/docs
    hpnlp compare runs/docs --out=runs/docs.png

After the colon stands a corpus of `hpnlp.data.stdlib`: docs (12,000 words, the default), code (110,000), whitespace (400,000).
The rarest words stay out of the vocabulary, so that there is an `<unk>` to learn: of the held-out words, 2 %, 2 % and 19 % are
none that the training text has. docs compares all layers; the others those that have probabilities and promise something,
and the full one, last, because a step of it takes seconds. A checkpoint of whitespace has 1.2 GB.

Layers that look up some rows of their table train these alone (`optimizer.rows`); over the larger vocabularies all but full
train the embedding so, too.

What is hoped for is test perplexity over that of full: sampled 1.02, nce 1.05, adaptive 1.02, class 1.05, hierarchical 1.15,
binary_ecc(2048), which is a softmax and a code that corrects errors, 1.10. negative_sampling, margin and vmf have none.

`docs-time` gives those that the others compare the time of 400 steps of full, and so other numbers of steps, by what this has
measured before:

    python experiments/softmax/steps.py --only=docs
    hpnlp sweep --config=experiments/softmax/words.py:docs-time --workdir=runs/docs-time
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from hpnlp.data.stdlib import write_corpus
from hpnlp.spec import lookup
from hpnlp.training.config import default
from hpnlp.types import InputError

# How many steps of full every member of docs-time has the time of.
BUDGET = 400
# corpus -> (ids of the tokenizer, share of the files that is held out, steps)
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
    config.model.tied = False  # where rows are no words, there is nothing to share
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
    """The overrides that choose a layer."""
    if layer == "vmf":  # leaves its table as it is: the embedding's rows say something of the words, its own would not
        return {"model.output": layer, "model.tied": True}
    rows = layer.partition("(")[0] in BY_ROWS if corpus == "docs" else layer != "full"
    return {"model.output": layer, "optimizer.rows": rows}


def times_over_full(corpus: str) -> dict[str, float]:
    """layer -> the time of its step over full's, as `steps.py` has measured it."""
    path = Path(str(TIMES).format(corpus))
    try:
        rows = json.loads(path.read_text())["rows"]
    except FileNotFoundError:
        raise InputError(f"there is no {path}: run python experiments/softmax/steps.py --only={corpus} first") from None
    return {row["output"]: row["ratios"]["time over full"] for row in rows}
