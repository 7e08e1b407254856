"""Calls of the losses of distillation with numpy arrays, for `test_numpy.py`."""

import numpy as np

from hpnlp.ops import distillation as ops
from hpnlp.ops.attention import Causal

RNG = np.random.default_rng(0)
STATES = RNG.standard_normal((4, 6)), RNG.standard_normal((4, 6))
SCORES = RNG.standard_normal((2, 2, 5, 5)), RNG.standard_normal((2, 2, 5, 5)), RNG.random((2, 2, 5, 5)) < 0.7
QK = RNG.standard_normal((2, 5, 4, 8)), RNG.standard_normal((2, 5, 2, 8))
PLACES = np.broadcast_to(np.arange(5), (2, 5))
TOP = STATES[0], RNG.standard_normal((4, 2)), RNG.integers(0, 6, (4, 2))

CALLS = {
    "distillation.logit_divergence": ((lambda s, t: ops.logit_divergence(s, t, 2.0), STATES),),
    "distillation.top_logit_divergence": ((ops.top_logit_divergence, TOP),),
    **{
        f"distillation.{function.__name__}": ((function, STATES),)
        for function in (ops.logit_regression, ops.cosine_distance, ops.squared_error, ops.feature_map_error)
    },
    "distillation.attention_scores": (
        (lambda q, k: ops.attention_scores(q, k), QK),
        (lambda q, k, s, p: ops.attention_scores(q, k, Causal(), s, p, soft_cap=3.0), (*QK, PLACES // 3, PLACES)),
    ),
    "distillation.score_error": ((ops.score_error, SCORES),),
    "distillation.attention_divergence": ((ops.attention_divergence, SCORES),),
}
