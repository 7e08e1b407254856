"""Attention to chosen blocks: references with a dense mask, one query after the other in plain numpy-like code."""

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.ops.attention import Causal, reference

BLOCK, TOP, WINDOW = 4, 2, 6


def complete_blocks(segment_ids):
    """For each sequence the lists of tokens of its complete blocks; and for each token the tokens of its own block."""
    of_sequences, own = [], np.zeros((*segment_ids.shape, segment_ids.shape[1]), bool)
    for b, ids in enumerate(np.asarray(segment_ids)):
        blocks, start = [], 0
        for t in range(len(ids)):
            if ids[t] != ids[start] or t - start == BLOCK:
                start = t
            own[b, t, start : t + 1] = True
            if t - start == BLOCK - 1:
                blocks.append(list(range(start, t + 1)))
        of_sequences.append(blocks)
    return of_sequences, own


def means(x, blocks, weights=None):
    """`[M, heads, H]` for one sequence."""
    if not blocks:
        return jnp.zeros((0, *x.shape[1:]), x.dtype)
    weights = jnp.full((x.shape[1], BLOCK), 1 / BLOCK) if weights is None else weights
    return jnp.stack([jnp.einsum("skh,ks->kh", x[np.array(block)], weights) for block in blocks])


def selected_mask(scores, blocks, ids, own, top):
    """bool `[T, heads, T]` from scores `[T, heads, M]`, float32 of complete blocks."""
    length = own.shape[0]
    if not blocks:
        return jnp.broadcast_to(own[:, None], (length, scores.shape[1], length))
    ends = np.array([block[-1] for block in blocks])
    allowed = (ends[None] < np.arange(length)[:, None]) & (ids[ends][None] == ids[:, None])

    scores = jnp.where(allowed[:, None], scores, -jnp.inf)
    order = jnp.argsort(-scores, axis=2)[:, :, :top]
    chosen = jax.nn.one_hot(order, len(blocks), dtype=bool).any(axis=2) & allowed[:, None]
    members = np.zeros((len(blocks), length), bool)
    for number, block in enumerate(blocks):
        members[number, block] = True
    return (chosen[..., None] & members[None, None]).any(axis=2) | own[:, None]


def moba(mixing, arrays, params, mask, segment_ids):
    assert mask == Causal()
    q, k, v = (arrays[name] for name in "qkv")
    of_sequences, own = complete_blocks(mixing.segment_ids)
    masks = []
    for b, blocks in enumerate(of_sequences):
        summaries = jnp.repeat(means(k[b].astype(jnp.float32), blocks), 2, axis=1)
        scores = jax.lax.stop_gradient(jnp.einsum("tnh,mnh->tnm", q[b].astype(jnp.float32), summaries))
        masks.append(selected_mask(scores, blocks, np.asarray(mixing.segment_ids)[b], own[b], TOP))
    return reference(q, k, v, dense_mask=jnp.stack(masks).transpose(0, 2, 1, 3))


def nsa(mixing, arrays, params, mask, segment_ids):
    assert mask == Causal()
    x, q, k, v = (arrays[name] for name in "xqkv")
    params = params["params"]
    of_sequences, own = complete_blocks(mixing.segment_ids)
    masks, compressed, ids = [], [], np.asarray(mixing.segment_ids)
    for b, blocks in enumerate(of_sequences):
        weights = params.get("k_weights"), params.get("v_weights")
        ends, starts = (np.array([block[i] for block in blocks], np.int64) for i in (-1, 0))
        visible = (ends[None] <= np.arange(x.shape[1])[:, None]) & (ids[b][ends][None] == ids[b][:, None])
        summaries = [means(y[b].astype(jnp.float32), blocks, w) for y, w in zip((k, v), weights, strict=True)]
        keys, values = (jnp.repeat(y.astype(q.dtype), 2, axis=1) for y in summaries)
        of_blocks = (
            reference(q[b][None], keys[None], values[None], dense_mask=visible[None, None])[0] if blocks else None
        )
        compressed.append(jnp.zeros_like(q[b]) if of_blocks is None else of_blocks)
        scores = jnp.einsum("tnh,mnh->tnm", q[b].astype(jnp.float32), jnp.repeat(summaries[0], 2, axis=1)) * 8**-0.5
        scores = jnp.where(visible[:, None], scores, -1e9)
        summed = jax.nn.softmax(scores, axis=2).reshape(x.shape[1], 2, 2, -1).sum(axis=2)
        is_first = np.array([start == 0 or ids[b][start - 1] != ids[b][start] for start in starts])
        scores = jax.lax.stop_gradient(jnp.where(is_first[None, None], 10.0, summed))
        masks.append(jnp.repeat(selected_mask(scores, blocks, ids[b], own[b], TOP), 2, axis=1))
    selected = reference(q, k, v, dense_mask=jnp.stack(masks).transpose(0, 2, 1, 3))
    distance = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])[None]
    same = (ids[:, :, None] == ids[:, None]) & (distance >= 0) & (distance < WINDOW)
    window = reference(q, k, v, dense_mask=same[:, None])
    gates = jnp.einsum("btd,df->btf", x.astype(jnp.float32), params["gates"]["kernel"])
    gates = jax.nn.sigmoid(gates).reshape(*q.shape[:3], 3)
    branches = jnp.stack([y.astype(jnp.float32) for y in (jnp.stack(compressed), selected, window)], axis=-1)
    return jnp.einsum("btnhc,btnc->btnh", branches, gates).astype(q.dtype)


EXAMPLES = {
    "moba": (f"moba({BLOCK},{TOP})",),
    "nsa": (f"nsa({BLOCK},{TOP},{WINDOW},learned)", f"nsa({BLOCK},{TOP},{WINDOW})"),
}
REFERENCES = {"moba": moba, "nsa": nsa}
