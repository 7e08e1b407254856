"""The decoder against BART's decoder of transformers: hidden states, and gradients of all parameters and of the memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.shared.decoder import Decoder, DecoderConfig
from hpnlp.nn.attention import Context, Memory
from tests.contracts import ONCE
from tests.models.test_encoder_oracle import (
    BIASES,
    assert_trees_close,
    dense,
    gradients_of,
    norm,
    randomize,
    stacked,
    torch,  # noqa: F401  (fixture)
    values_of,
)

pytestmark = pytest.mark.oracle

B, T, S, V, D, L = 3, 9, 7, 40, 32, 2
LENGTHS, MEMORY_LENGTHS = np.array([9, 5, 1]), np.array([4, 7, 2])


def params_of(get):
    """Parameters of a Decoder from those of BartDecoder, or gradients from gradients. get: name -> array."""

    def attention(name):
        projections = {n: dense(get, f"{name}.{n}_proj") for n in "qkv"}
        return projections | {"out": dense(get, f"{name}.out_proj")}

    def layer(i):
        name = f"layers.{i}"
        return {
            "attention": attention(f"{name}.self_attn"),
            "mix_norm": norm(get, f"{name}.self_attn_layer_norm"),
            "cross_attention": attention(f"{name}.encoder_attn"),
            "read_norm": norm(get, f"{name}.encoder_attn_layer_norm"),
            "mlp": {"up": dense(get, f"{name}.fc1"), "down": dense(get, f"{name}.fc2")},
            "feed_norm": norm(get, f"{name}.final_layer_norm"),
        }

    return {
        "embed": {"table": get("embed_tokens.weight")},
        "positions": {"table": get("embed_positions.weight")[2:]},  # BART's positions begin at 2
        "embed_norm": norm(get, "layernorm_embedding"),
        "layers": stacked([layer(i) for i in range(L)]),
    }


def test_decoder_matches_bart(torch):  # noqa: F811
    transformers = pytest.importorskip("transformers")
    from transformers.models.bart.modeling_bart import BartDecoder

    config = transformers.BartConfig(
        vocab_size=V, d_model=D, decoder_layers=L, decoder_attention_heads=4, decoder_ffn_dim=56, dropout=0.0,
        max_position_embeddings=16, activation_function="gelu", attn_implementation="eager",
    )  # fmt: skip
    module = randomize(torch, BartDecoder(config))
    rng = np.random.default_rng(0)
    real = np.arange(T)[None] < LENGTHS[:, None]
    memory_real = np.arange(S)[None] < MEMORY_LENGTHS[:, None]
    tokens = np.where(real, rng.integers(2, V, (B, T)), 1)  # 1 is BART's padding
    states = rng.standard_normal((B, S, D)).astype(np.float32)
    direction = (rng.standard_normal((B, T, D)) * real[..., None]).astype(np.float32)
    memory = torch.from_numpy(states).requires_grad_()
    theirs = module(
        input_ids=torch.from_numpy(tokens),
        attention_mask=torch.from_numpy(real.astype(np.int64)),
        encoder_hidden_states=memory,
        encoder_attention_mask=torch.from_numpy(memory_real.astype(np.int64)),
        use_cache=False,
    ).last_hidden_state
    (theirs * torch.from_numpy(direction)).sum().backward()

    model = Decoder(
        DecoderConfig(
            dim=D, heads=4, layers=L, mlp_dim=56, vocab=V, max_len=16, memory_dim=D, norm="layer", norm_eps=1e-5,
            norm_placement="post", embed_norm=True, position="learned", mlp="gelu_exact", **BIASES,
        )
    )  # fmt: skip
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))

    def run(params, states):
        memory = Memory(states, jnp.asarray(memory_real, jnp.int32))
        context = Context(positions, jnp.asarray(real, jnp.int32), model.config.mask, memory=memory)
        h = model.apply({"params": params}, jnp.asarray(tokens, jnp.int32), context, method="hidden")[0]
        return (h * direction).sum(), h

    program = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True), compiler_options=ONCE)
    (_, h), (by_params, by_states) = program(params_of(values_of(module)), states)
    np.testing.assert_allclose(np.asarray(h)[real], theirs.detach().numpy()[real], atol=2e-5, rtol=2e-5)
    assert_trees_close(by_params, params_of(gradients_of(module)))
    np.testing.assert_allclose(by_states, memory.grad, atol=2e-5, rtol=2e-5)
