"""Attention with random features: the specs in tests, and references with a matrix of all pairs."""

import jax
import jax.numpy as jnp

MIN_MEAN_WEIGHT = 0.02


def _quotient(arrays, weights, sums_of_weights):
    """Weighted means of the values of each query's key head; weights: [B, N, T, S]."""
    v = jnp.repeat(arrays["v"].astype(jnp.float32), weights.shape[1] // arrays["v"].shape[2], axis=2)
    o = jnp.einsum("bnts,bsnh->btnh", weights, v) / sums_of_weights.transpose(0, 2, 1)[..., None]
    return o.astype(arrays["v"].dtype)


def _visible(mask, segment_ids):
    length = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None]
    return (same & jnp.asarray(mask.to_dense(length, length))[None])[:, None]


def _heads(arrays):
    """q and k in float32, [B, N, T, H], with the keys of a group repeated."""
    q, k = (arrays[name].astype(jnp.float32).transpose(0, 2, 1, 3) for name in "qk")
    return q, jnp.repeat(k, q.shape[1] // k.shape[1], axis=1)


def performer(mixing, arrays, params, mask, segment_ids):
    """Products of the features of the papers' formulas, without anything against overflow."""
    w, kind = params["buffers"]["projections"], mixing.module.kind
    q, k = (x * x.shape[-1] ** -0.25 for x in _heads(arrays))
    factor, shift = 1.0, jnp.zeros((1, 1, 1, len(w)), jnp.float32)
    if kind == "optimal":
        gamma, h = params["buffers"]["gamma"], float(w.shape[1])
        rho = (jnp.sqrt((2 * gamma + h) ** 2 + 8 * h * gamma) - 2 * gamma - h) / (4 * gamma)
        a = (jnp.repeat((1 - 1 / rho) / 8, 2))[None, :, None, None]
        factor, shift = jnp.sqrt(1 - 4 * a), a * jnp.square(w).sum(axis=1)[None, None, None]

    def features(x):
        products = factor * jnp.einsum("bnth,mh->bntm", x, w) + shift
        if kind == "hyperbolic":
            products = jnp.concatenate([products, -products], axis=-1)
        return jnp.exp(products - jnp.square(x).sum(axis=-1, keepdims=True) / 2)

    weights = jnp.einsum("bntm,bnsm->bnts", features(q), features(k))
    weights = jnp.where(_visible(mask, segment_ids), weights, jnp.float32(0))
    return _quotient(arrays, weights, weights.sum(axis=-1))


def rfa(mixing, arrays, params, mask, segment_ids):
    """Cosines of the differences of the angles, times products of all gates between two tokens."""
    w, scale = params["buffers"]["projections"], params["params"]["scale"]
    scale = jnp.repeat(scale, 2, axis=0)[None, :, None]
    q, k = (scale * x / jnp.sqrt(jnp.square(x).sum(axis=-1, keepdims=True)) for x in _heads(arrays))
    angles = [jnp.einsum("bnth,mh->bntm", x, w) for x in (q, k)]
    weights = jnp.cos(angles[0][:, :, :, None] - angles[1][:, :, None]).mean(axis=-1)
    visible = _visible(mask, segment_ids)
    factors = jnp.ones((), jnp.float32)
    if mixing.module.gate:
        logits = arrays["gate"][..., 0].astype(jnp.float32)
        logits = jnp.repeat(logits + params["params"]["gate_bias"][None, None], 2, axis=2).transpose(0, 2, 1)
        gates, rates = jax.nn.sigmoid(logits), jax.nn.sigmoid(-logits)  # 1 - gates would be less exact
        length = gates.shape[2]
        # between[t, s, u]: s < u <= t
        order = jnp.arange(length)
        between = (order[None, :, None] < order[None, None]) & (order[None, None] <= order[:, None, None])
        decays = jnp.where(between[None, None], gates[:, :, None, None], jnp.float32(1)).prod(axis=-1)
        factors = decays * rates[:, :, None]
    factors = jnp.where(visible, factors, jnp.float32(0))
    weights = weights * factors
    least = MIN_MEAN_WEIGHT * factors.sum(axis=-1)
    return _quotient(arrays, weights, jnp.maximum(weights.sum(axis=-1), least))


EXAMPLES = {
    "performer": ("performer(6,optimal,redraw=2)", "performer(16)", "performer(8,hyperbolic,projections=iid)"),
    # With fewer features, sums of weights are often so close to 0 that differences in rounding are visible.
    "rfa": ("rfa(64)", "rfa(64,True,redraw=2)"),
}
REFERENCES = {"performer": performer, "rfa": rfa}
