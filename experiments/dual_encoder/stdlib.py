"""The body of a function of the Python standard library, from the function's docstring.

    hpnlp train --config=experiments/dual_encoder/stdlib.py --workdir=runs/docstrings

On two CPU cores the run takes about 2 minutes. Of 1,000 held-out bodies, the right one is among the 10 most similar for 56 %
of the docstrings, and the most similar one for 24 % (one seed). TF-IDF over words is better: 76 % and 39 %. The 4,088
training pairs are learned almost by heart after 100 steps, and identifiers that a docstring and its code have in common need
no training to match.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from hpnlp.training.config import default


def get_config() -> ConfigDict:
    config = default("dual_encoder")
    config.data.path = "stdlib_docstrings"
    config.data.tokenizer = "bpe(8000)"
    config.data.seq_len = 128
    config.data.batch_size = 64
    config.model.layers = 1
    config.model.dim = 256
    config.model.heads = 4
    config.model.mlp = "gelu"
    config.model.pooling = "attention"
    # Random vectors of length 1 dominate the first hidden states, so that texts with tokens in common begin as similar.
    config.model.embed_norm = True
    config.model.dropout = 0.3
    config.optimizer.learning_rate = 5e-4
    config.train.steps = 250
    config.train.eval_every = 50
    config.train.eval_batches = 0
    return config
