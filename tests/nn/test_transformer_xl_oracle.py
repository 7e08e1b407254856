"""Transformer-XL against the relative attention of XLNet in `transformers`, with copied weights and a memory."""

import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.nn.attention import Attention, Context
from hpnlp.nn.mixers.transformer_xl import TransformerXLMixer
from hpnlp.ops.attention import Causal
from hpnlp.spec import parse_one

torch = pytest.importorskip("torch")
xlnet = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
pytestmark = pytest.mark.oracle

B, D, N, M = 2, 16, 4, 6
H = D // N
PARTS = ((0, 5), (5, 14), (14, 18))  # of a sequence


def copied(params):
    """The layer of XLNet with the weights of an Attention layer."""
    config = types.SimpleNamespace(d_model=D, n_head=N, d_head=H, dropout=0.0, layer_norm_eps=1e-6)
    layer = xlnet.XLNetRelativeAttention(config)
    relative = params["mixer"]["relative"]
    weights = {
        **{name: params[name]["kernel"].reshape(D, N, H) for name in "qkv"},
        "o": params["out"]["kernel"].T.reshape(D, N, H),
        "r": relative["kernel"].reshape(D, N, H),
        "r_w_bias": relative["content_bias"],
        "r_r_bias": relative["position_bias"],
    }
    with torch.no_grad():
        for name, weight in weights.items():
            getattr(layer, name).copy_(torch.tensor(np.array(weight)))
    return layer


def attended(layer, x, ids, memory):
    """Attention of `x [T, B, D]` to itself and to a memory of (states, segments), without residual and norm."""
    states, state_ids = torch.cat([memory[0], x]), torch.cat([memory[1], ids])
    heads = [
        torch.einsum("ibh,hnd->ibnd", y, getattr(layer, name)) for y, name in ((x, "q"), (states, "k"), (states, "v"))
    ]
    settings = types.SimpleNamespace(d_model=D, attn_type="bi", bi_data=False, clamp_len=-1)
    settings.positional_embedding = xlnet.XLNetModel.positional_embedding
    length, keys = x.shape[0], states.shape[0]
    positions = xlnet.XLNetModel.relative_positional_encoding(settings, length, keys, bsz=B)
    distance = torch.arange(length)[:, None] + keys - length - torch.arange(keys)[None]
    hidden = ((distance < 0) | (distance > M))[:, :, None] | (ids[:, None] != state_ids[None])
    by_position = torch.einsum("ibh,hnd->ibnd", positions, layer.r)
    o = layer.rel_attn_core(*heads, by_position, attn_mask=hidden[..., None].float())
    return torch.einsum("ibnd,hnd->ibh", o, layer.o), (states[-M:].detach(), state_ids[-M:])


def test_outputs_and_gradients_match_xlnet():
    """Three parts, whose documents cross their borders; gradients of each with the memory as a constant."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((B, 18, D)).astype(np.float32)
    ids = 1 + np.sort(rng.integers(0, 3, (B, 18)), axis=1).astype(np.int32)
    signs = rng.standard_normal((B, 18, D)).astype(np.float32)
    attention = Attention(N, N, H, parse_one(f"transformer_xl({M})", "mixer"))
    first = Context(jnp.zeros((B, 1), jnp.int32), jnp.asarray(ids[:, :1]), Causal())
    params = nn.meta.unbox(attention.init(jax.random.key(0), x[:, :1], first))["params"]
    params = jax.tree.map(lambda p: p + 0.3 * jax.random.normal(jax.random.key(p.size), p.shape), params)

    @jax.jit
    def step(params, x, ids, signs, carry):
        def score(params):
            context = Context(jnp.zeros_like(ids), ids, Causal(), carry=carry)
            y, _, report = attention.apply({"params": params}, x, context)
            return jnp.sum(y * signs), (y, report.carry)

        return jax.grad(score, has_aux=True)(params)

    layer, carry = copied(params), TransformerXLMixer(M).initial_carry(B, D, jnp.float32)
    memory = torch.zeros(M, B, D), torch.zeros(M, B, dtype=torch.int32)
    for start, end in PARTS:
        part = [array[:, start:end] for array in (x, ids, signs)]
        gradients, (y, carry) = step(params, *part, carry)
        layer.zero_grad()
        expected, memory = attended(layer, *(torch.tensor(array.swapaxes(0, 1)) for array in part[:2]), memory)
        np.testing.assert_allclose(y, expected.detach().numpy().swapaxes(0, 1), atol=5e-6, rtol=5e-6)
        (expected * torch.tensor(part[2].swapaxes(0, 1))).sum().backward()
        relative = gradients["mixer"]["relative"]
        for name, actual in (
            *((name, gradients[name]["kernel"]) for name in "qkv"),
            *(
                ("r", relative["kernel"]),
                ("r_w_bias", relative["content_bias"]),
                ("r_r_bias", relative["position_bias"]),
            ),
        ):
            reference = getattr(layer, name).grad.numpy()
            np.testing.assert_allclose(
                np.reshape(actual, reference.shape), reference, atol=3e-5, rtol=3e-5, err_msg=name
            )
