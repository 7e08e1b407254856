"""Calls of the recurrent layers with numpy arrays, for `test_numpy.py`."""

import numpy as np

from hpnlp.ops import rnn

RNG = np.random.default_rng(0)
B, T, D, H = 2, 3, 5, 4


def x(*shape):
    return RNG.standard_normal(shape)


X, U = x(B, T, D), x(H, 4 * H)
W = x(D, 4 * H)
NORMS = rnn.LSTMNorms(*(x(4 * H) for _ in range(4)), x(H), x(H))
MASKS = rnn.StepMasks(x(B, 1, H), x(B, T, H), x(B, T, H), x(B, T, H))
RESET, LENGTHS, KEY = RNG.random((B, T)) < 0.5, np.array([3, 1]), np.array([0, 7], np.uint32)
STATE = x(B, H), x(B, H)
GRU = X, W[:, : 3 * H], U[:, : 3 * H], x(3 * H)
MINIMAL = X, W[:, : 2 * H], U[:, : 2 * H], x(2 * H)
EVERYTHING = {"masks": MASKS, "reset": RESET, "lengths": LENGTHS}
WITHOUT_CELL = {**EVERYTHING, "masks": rnn.StepMasks(MASKS.hidden, MASKS.candidate, MASKS.hold_h)}
IDS = np.arange(B * T).reshape(B, T)

CALLS = {
    "rnn.lstm.lstm": (
        (rnn.lstm, (X, W, U, x(4 * H))),
        (lambda *a: rnn.lstm(*a[:5], norms=a[5], **a[6]), (X, W, U, x(4 * H), STATE, NORMS, EVERYTHING)),
    ),
    "rnn.gru.gru": (
        (lambda *a: rnn.gru(*a[:5], **a[5]), (*GRU, x(H), WITHOUT_CELL)),
        (lambda *a: rnn.gru(*a, form="original"), GRU),
    ),
    "rnn.gru.minimal_gated_unit": (
        (rnn.minimal_gated_unit, MINIMAL),
        (lambda *a: rnn.minimal_gated_unit(*a, form="cudnn"), (*MINIMAL, x(H))),
    ),
    "rnn.elementwise.linear_recurrence": (
        (rnn.linear_recurrence, (x(B, T, H), x(B, T, H), x(B, H))),
        (lambda *a: rnn.linear_recurrence(*a, impl="loop"), (x(B, T, H), x(B, T, H))),
    ),
    "rnn.elementwise.qrnn": (
        (
            lambda *a: rnn.qrnn(*a[:4], width=2, hold=a[4], reset=a[5], lengths=a[6]),
            (X, x(2 * D, 3 * H), x(3 * H), (x(B, H), x(B, 1, D)), x(B, T, H), RESET, LENGTHS),
        ),
    ),
    "rnn.elementwise.sru": (
        (lambda *a: rnn.sru(*a[:4], reset=a[4], lengths=a[5]), (X, W, x(2 * H), x(B, H), RESET, LENGTHS)),
    ),
    "rnn.masks.segment_resets": ((rnn.segment_resets, (IDS, IDS[:, 0])),),
    "rnn.masks.dropout_factors": ((lambda k, i: rnn.dropout_factors(k, i, H, 0.5), (KEY, IDS)),),
    "rnn.masks.zoneout_shares": ((lambda k, i: rnn.zoneout_shares(k, i, H, 0.5, False), (KEY, IDS)),),
    "rnn.masks.drop_weights": ((lambda w, k: rnn.drop_weights(w, k, 0.5), (U, KEY)),),
    "rnn.reference.reference_rnn": (
        (
            lambda x, *a: rnn.reference_rnn("lstm", x, rnn.RNNWeights(*a[:3], norms=a[3]), rnn.Sequences(**a[4])),
            (X, W, U, x(4 * H), NORMS, EVERYTHING),
        ),
    ),
}
INTERNAL = {f"rnn.{name}" for name in ("cells", "cudnn", "recurrence", "sequence")}
