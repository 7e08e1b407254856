"""The differential mixer against the attention layer of DiffLlama in transformers, with the same weights."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.nn.attention import Attention, Context
from hpnlp.ops.attention import Causal
from hpnlp.spec import parse_one
from tests.contracts import assert_close, once

pytestmark = pytest.mark.oracle
B, T, D, N, K, H = 2, 9, 16, 8, 4, 4
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def torch_layer(params, lambda_init):
    import torch
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

    config = DiffLlamaConfig(
        hidden_size=D,
        num_attention_heads=N,
        num_key_value_heads=K,
        head_dim=H,
        rms_norm_eps=1e-5,
        attention_dropout=0.0,
    )
    config._attn_implementation = "eager"
    layer = DiffLlamaAttention(config, layer_idx=0)
    layer.lambda_init = lambda_init
    with torch.no_grad():
        for name in "qkv":
            # DiffLlama pairs head i with head i + n / 2, and this library neighbours.
            kernel = np.asarray(params[name]["kernel"]).reshape(D, -1, 2, H).swapaxes(1, 2).reshape(D, -1)
            getattr(layer, f"{name}_proj").weight.copy_(torch.tensor(kernel.T))
        layer.o_proj.weight.copy_(torch.tensor(np.asarray(params["out"]["kernel"]).T))
        for name in LAMBDAS:
            getattr(layer, name).copy_(torch.tensor(np.asarray(params["mixer"][name])))
    return layer


def test_values_and_gradients_match_diffllama():
    import torch

    rng = np.random.default_rng(0)
    x, signs = (rng.standard_normal((B, T, D)).astype(np.float32) for _ in range(2))
    lambda_init = 0.2
    attention = Attention(N, K, H, parse_one(f"differential({lambda_init})", "mixer"))
    context = Context(jnp.tile(jnp.arange(T, dtype=jnp.int32)[None], (B, 1)), None, Causal())
    params = nn.meta.unbox(attention.init(jax.random.key(0), x, context))["params"]

    def score(params, x):
        y = attention.apply({"params": params}, x, context)[0]
        return jnp.sum(y * signs), y

    (by_params, by_x), y = once(jax.grad(score, (0, 1), has_aux=True), params, jnp.asarray(x))
    layer, x_torch = torch_layer(params, lambda_init), torch.tensor(x, requires_grad=True)
    mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
    rotation = torch.ones(1, T, H), torch.zeros(1, T, H)
    y_torch = layer(x_torch, rotation, mask)[0]
    (y_torch * torch.tensor(signs)).sum().backward()
    expected = [y_torch, x_torch.grad, *(getattr(layer, name).grad for name in LAMBDAS), layer.o_proj.weight.grad.T]
    actual = [y, by_x, *(by_params["mixer"][name] for name in LAMBDAS), by_params["out"]["kernel"]]
    assert_close(actual, [np.asarray(a.detach()) for a in expected])
