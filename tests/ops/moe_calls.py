"""Calls of mixtures of experts with numpy arrays, for `test_numpy.py`."""

import jax
import numpy as np

from hpnlp.ops import moe
from hpnlp.ops.moe.experts import token_gates

RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((6, 4))
REAL = np.arange(6) < 5
PLACES = np.zeros(6, np.int32), np.full(6, 5)
SUMS = {name: RNG.random(4 if name in moe.VECTORS else ()) for name in moe.SUMS}
STACKS = {"up": RNG.standard_normal((4, 3, 5)), "down": RNG.standard_normal((4, 5, 3))}
SOFTMAX = moe.Gates("softmax", normalize=True)


def route(logits):
    return moe.route(logits, 2, SOFTMAX, REAL)


def mlp(function):
    return lambda x, logits, stacks: function(x, route(logits), stacks, jax.nn.relu)


CALLS = {
    "moe.assignment.balanced_assignment": ((moe.balanced_assignment, (LOGITS, REAL)),),
    "moe.assignment.hashed_experts": ((lambda tokens: moe.hashed_experts(tokens, 2, 4), (RNG.integers(0, 9, 6),)),),
    "moe.routing.route": (
        (route, (LOGITS,)),
        (lambda x, b: moe.route(x, 2, SOFTMAX, REAL, bias=b, groups=2), (LOGITS, RNG.standard_normal(4))),
    ),
    "moe.routing.token_scores": ((lambda x: moe.token_scores(x, SOFTMAX), (LOGITS,)),),
    "moe.routing.normalized_scores": ((lambda x: moe.normalized_scores(x, SOFTMAX), (LOGITS,)),),
    "moe.routing.noisy_logits": ((moe.noisy_logits, (LOGITS, LOGITS, LOGITS)),),
    "moe.routing.choice_probability": ((lambda *x: moe.choice_probability(*x, 2), (LOGITS, LOGITS + 0.1, LOGITS**2)),),
    "moe.routing.drop_second_choice": (
        (lambda x, u: moe.drop_second_choice(route(x), u, 0.5, 4), (LOGITS, RNG.random(6))),
    ),
    "moe.routing.route_by_expert": ((lambda x: moe.route_by_expert(x, 2, 1.0, REAL[None]), (LOGITS[None],)),),
    "moe.routing.within_capacity": (
        (lambda x, groups, counts: moe.within_capacity(route(x), groups, counts, 6, 2, 1.0, 4), (LOGITS, *PLACES)),
    ),
    "moe.balance.expert_counts": ((lambda e: moe.expert_counts(e, 4), (np.arange(6) % 5,)),),
    "moe.balance.load_sums": ((lambda x: moe.load_sums(REAL, route(x), route(x), 4), (LOGITS,)),),
    "moe.balance.routing_sums": (
        (lambda x, scores: moe.routing_sums(x, scores, REAL, route(x), route(x)), (LOGITS, np.full((6, 4), 0.25))),
    ),
    "moe.balance.moved_bias": ((lambda b, load: moe.moved_bias(b, load, 0.1), (SUMS["load"], SUMS["load"])),),
    "moe.balance.squared_variation": ((moe.squared_variation, (SUMS["load"],)),),
    **{
        f"moe.balance.{function.__name__}": ((function, (SUMS,)),)
        for function in (moe.balance_loss, moe.z_loss, moe.load_metrics, moe.router_metrics)
    },
    **{
        f"moe.experts.{function.__name__}": ((mlp(function), (RNG.standard_normal((6, 3)), LOGITS, STACKS)),)
        for function in (moe.expert_mlp, moe.reference_expert_mlp)
    },
    "moe.experts.token_gates": ((lambda x: token_gates(route(x), 6, 4), (LOGITS,)),),
}
