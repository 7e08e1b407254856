"""A byte-level recurrent language model of the Python standard library's source, with the state carried from batch to batch.

hpnlp train --config=lm/rnn --workdir=runs/rnn

Zaremba et al. 2014, "Recurrent neural network regularization": dropout of the parts that are not recurrent.

Two CPU cores: five to six minutes, since the two layers alone take 0.32 s of a step (experiments/results/recurrent-cpu.json).
`--model.cells="lstm(128)*2"` is a first try of a minute.
"""

from hpnlp.training.config import default


def get_config():
    config = default("rnn_lm")
    config.data.path = "stdlib"
    config.data.order = "stream"
    config.data.seq_len = 128
    config.data.batch_size = 32
    config.model.cells = "lstm(512)*2"
    config.model.layer_dropout = 0.1
    config.model.output_dropout = 0.1
    config.optimizer.learning_rate = 0.003
    config.optimizer.clip_norm = 1.0
    config.train.steps = 800
    config.train.checkpoint_every = 200
    return config
