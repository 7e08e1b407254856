"""Differential attention: the reference."""

import jax.numpy as jnp

from hpnlp.ops.attention import reference


def differential(mixing, arrays, params, mask, segment_ids):
    """Two attentions with a value of twice the width for each query head, one pair of query heads after the other."""
    q, k, v = (arrays[name].astype(jnp.float32) for name in "qkv")
    params, lambda_init = params["params"], 0.8
    first, second = (jnp.exp(params[f"lambda_q{i}"] @ params[f"lambda_k{i}"]) for i in (1, 2))
    pairs, kv_pairs = q.shape[2] // 2, k.shape[2] // 2
    outputs = []
    for pair in range(pairs):
        of = pair // (pairs // kv_pairs)
        value = jnp.concatenate([v[:, :, 2 * of], v[:, :, 2 * of + 1]], axis=-1)[:, :, None]
        both = [
            reference(q[:, :, [2 * pair + i]], k[:, :, [2 * of + i]], value, mask, segment_ids=segment_ids,
                      kv_segment_ids=segment_ids)[:, :, 0]
            for i in (0, 1)
        ]  # fmt: skip
        difference = both[0] - (first - second + lambda_init) * both[1]
        mean_square = jnp.mean(difference**2, axis=-1, keepdims=True)
        normed = difference / jnp.sqrt(mean_square + 1e-5) * params["norm"]["scale"][None, None]
        outputs += jnp.split(normed * (1 - lambda_init), 2, axis=-1)
    return jnp.stack(outputs, axis=2).astype(arrays["q"].dtype)


EXAMPLES = {}
REFERENCES = {"differential": differential}
