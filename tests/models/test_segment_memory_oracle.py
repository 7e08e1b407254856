"""Segment memory against PyTorch: scaled_dot_product_attention over concatenated hidden states, with copied weights."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.variables import collections

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

V, D, N, K, L, M, B = 13, 16, 4, 2, 2, 6, 3
LENGTHS = (5, 9, 4)  # of the parts of a sequence
CONFIG = LMConfig(
    vocab=V, dim=D, heads=N, kv_heads=K, layers=L, mlp="gelu", mlp_dim=24, position="none", mixer=f"segment_memory({M})"
)


def parts():
    """Batches that follow one another; documents cross their borders."""
    rng = np.random.default_rng(0)
    total = sum(LENGTHS)
    tokens = rng.integers(0, V, (B, total + 1)).astype(np.int32)
    ids = 1 + np.sort(rng.integers(0, 3, (B, total)), axis=1).astype(np.int32)
    for end in np.cumsum(LENGTHS):
        own = slice(end - LENGTHS[list(np.cumsum(LENGTHS)).index(end)], end)
        yield {
            "tokens": tokens[:, :-1][:, own],
            "labels": tokens[:, 1:][:, own],
            "segment_ids": ids[:, own],
            "positions": np.zeros_like(ids[:, own]),
            "weights": np.ones(ids[:, own].shape, np.float32),
        }


def rms_norm(x, scale):
    return torch.nn.functional.rms_norm(x, (D,), scale, CONFIG.norm_eps)


def torch_layer(params, x, ids, memory):
    """One Block: `(x, memory)`, where a memory is (hidden states, segment ids) of the last M tokens."""
    attention = params["attention"]
    h = rms_norm(x, params["mix_norm"]["scale"])
    states, state_ids = torch.cat([memory[0].detach(), h], 1), torch.cat([memory[1], ids], 1)

    def heads(y, name, count):
        return (y @ attention[name]["kernel"]).reshape(B, -1, count, D // N).transpose(1, 2)

    q, k, v = heads(h, "q", N), heads(states, "k", K), heads(states, "v", K)
    distance = torch.arange(h.shape[1])[:, None] + states.shape[1] - h.shape[1] - torch.arange(states.shape[1])[None]
    visible = ((distance >= 0) & (distance <= M))[None] & (ids[:, :, None] == state_ids[:, None])
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], enable_gqa=True)
    x = x + o.transpose(1, 2).reshape(B, -1, D) @ attention["out"]["kernel"]
    h = rms_norm(x, params["feed_norm"]["scale"])
    x = (
        x
        + torch.nn.functional.gelu(h @ params["mlp"]["up"]["kernel"], approximate="tanh")
        @ params["mlp"]["down"]["kernel"]
    )
    return x, (states[:, -M:], state_ids[:, -M:])


def torch_loss(params, batch, memories):
    """`(sum of the losses, memories)` of one part."""
    tokens, labels, ids = (torch.tensor(batch[name], dtype=torch.int64) for name in ("tokens", "labels", "segment_ids"))
    x, new = params["embed"]["table"][tokens], []
    for layer, memory in enumerate(memories):
        x, memory = torch_layer(jax.tree.map(lambda leaf, i=layer: leaf[i], params["layers"]), x, ids, memory)
        new.append(memory)
    logits = rms_norm(x, params["final_norm"]["scale"]) @ params["embed"]["table"].T
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, V), labels.reshape(-1), reduction="sum")
    return loss, new


def test_losses_and_gradients_match_torch():
    """Three parts: the loss of each, and its gradient with the memory as a constant."""
    model, batches = LM(CONFIG), list(parts())
    params = nn.meta.unbox(model.init(jax.random.key(0), batches[0]))["params"]
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)

    @jax.jit
    def step(params, batch, carry):
        def loss(params):
            out = model.apply(collections(params, carry), batch, method="loss")
            return out.sum, out.carry

        return jax.value_and_grad(loss, has_aux=True)(params)

    carry = model.initial_carry(B)
    memories = [(torch.zeros(B, M, D), torch.zeros(B, M, dtype=torch.int64))] * L
    for batch in batches:
        (loss, carry), grads = step(params, batch, carry)
        leaves = jax.tree.map(lambda x: torch.tensor(np.array(x), requires_grad=True), params)
        expected, memories = torch_loss(leaves, batch, memories)
        expected.backward()
        np.testing.assert_allclose(loss, expected.item(), rtol=2e-6)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(leaves), strict=True):
            assert np.linalg.norm(a - b.grad.numpy()) <= 1e-5 * np.linalg.norm(b.grad.numpy()), path
    for layer, (states, ids) in enumerate(memories):
        np.testing.assert_allclose(carry["layers"].states[layer], states.detach().numpy(), atol=1e-5)
        np.testing.assert_array_equal(carry["layers"].segment_ids[layer], ids.numpy())
    assert jnp.abs(carry["layers"].states).max() > 0.1
