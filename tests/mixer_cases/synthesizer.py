"""Synthesizers: the reference, a dense softmax of scores that are computed by the paper's formulas."""

import jax
import jax.numpy as jnp

from hpnlp.ops.attention import reference


def hidden(arrays, params, term):
    return jax.nn.relu(arrays["q"].astype(jnp.float32) + params[f"{term}_hidden"])


def dense(mixing, arrays, params, length):
    scores = jnp.einsum("btnh,nsh->bnts", hidden(arrays, params, "dense"), params["dense"][:, :length])
    return scores + params["dense_bias"][None, :, None, :length]


def random(mixing, arrays, params, length):
    return params["random"][None, :, :length, :length]


def factorized_dense(mixing, arrays, params, length):
    states = hidden(arrays, params, "factorized_dense")
    within, blocks = (jnp.einsum("btnh,nhc->bntc", states, params[name]) for name in ("within", "blocks"))
    key = jnp.arange(length)
    return within[..., key % within.shape[-1]] * blocks[..., key // within.shape[-1]]


def factorized_random(mixing, arrays, params, length):
    queries, keys = (params[f"factor_{side}"][:, :length] for side in ("queries", "keys"))
    return jnp.einsum("ntr,nsr->nts", queries, keys)[None]


def dot(mixing, arrays, params, length):
    q, k = arrays["q"].astype(jnp.float32), jnp.repeat(arrays["k"].astype(jnp.float32), 2, axis=2)
    return jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5


TERMS = {
    "dense": dense,
    "random": random,
    "factorized_dense": factorized_dense,
    "factorized_random": factorized_random,
    "dot": dot,
}


def synthesizer(mixing, arrays, params, mask, segment_ids):
    params, v, terms = params["params"], arrays["v"], mixing.module.terms
    weights = jax.nn.softmax(params["mixture"]) if len(terms) > 1 else [1.0]
    with jax.numpy_rank_promotion("allow"):
        scores = sum(
            weight * TERMS[term](mixing, arrays, params, v.shape[1])
            for weight, term in zip(weights, terms, strict=True)
        )
    shape = (*v.shape[:2], 4, 1)
    operands = {"segment_ids": segment_ids, "kv_segment_ids": segment_ids}
    zeros = jnp.zeros(shape, v.dtype)
    return reference(zeros, zeros[:, :, : v.shape[2]], v, mask, bias=scores, **operands)


NAMES = ("synthesizer_dense", "synthesizer_random", "synthesizer_factorized_dense", "synthesizer_factorized_random")
EXAMPLES = {
    "mixture": ("mixture(dense,factorized_random,rank=3)", "mixture", "mixture(factorized_dense,block=3)"),
    "synthesizer_factorized_random": ("synthesizer_factorized_random(3)",),
    "synthesizer_factorized_dense": ("synthesizer_factorized_dense", "synthesizer_factorized_dense(3)"),
}
REFERENCES = {name: synthesizer for name in (*NAMES, "mixture")}
