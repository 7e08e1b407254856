"""The body of a function of the Python standard library, from the function's docstring.

    hpnlp train --config=dual_encoder/stdlib --workdir=runs/docstrings

The model has no layers: a text is a bag of parts of identifiers, whose weights depend on the token and on its position. On two
CPU cores the run takes about 2 minutes. Of 1,000 held-out bodies, the right one is among the 10 most similar for 85 % of the
docstrings, and the most similar one for 50 % (83 % and 49 % with train.seed=1). TF-IDF reaches 77 % and 41 % over words, and
85 % and 48 % over the model's own tokens (Python 3.11).
"""

from __future__ import annotations

from ml_collections import ConfigDict

from hpnlp.training.config import default


def get_config() -> ConfigDict:
    config = default("dual_encoder")
    config.data.path = "stdlib_docstrings"
    config.data.tokenizer = "bpe(2000, by=identifiers)"
    config.data.distinct = True
    config.data.seq_len = 64
    config.data.batch_size = 128
    config.model.layers = 0
    config.model.dim = 512
    config.model.position = "learned"
    config.model.pooling = "attention"
    config.model.dropout = 0.3
    config.optimizer.learning_rate = 3e-3
    config.train.steps = 150
    config.train.eval_every = 50
    config.train.eval_batches = 0
    return config
