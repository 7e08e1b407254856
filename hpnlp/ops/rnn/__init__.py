"""Recurrent layers over sequences: LSTM, gated recurrent units, and elementwise recurrences."""

from hpnlp.ops.rnn.elementwise import POOLINGS, linear_recurrence, qrnn, sru
from hpnlp.ops.rnn.gru import gru, minimal_gated_unit
from hpnlp.ops.rnn.lstm import LSTMNorms, lstm
from hpnlp.ops.rnn.masks import StepMasks, drop_weights, dropout_factors, segment_resets, zoneout_shares
from hpnlp.ops.rnn.reference import RNNWeights, reference_rnn
from hpnlp.ops.rnn.sequence import Sequences

__all__ = [
    "LSTMNorms", "POOLINGS", "RNNWeights", "Sequences", "StepMasks", "drop_weights", "dropout_factors", "gru",
    "linear_recurrence", "lstm", "minimal_gated_unit", "qrnn", "reference_rnn", "segment_resets", "sru", "zoneout_shares",
]  # fmt: skip
