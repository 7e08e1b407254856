"""Layers of different forms against transformers and torch."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from hpnlp.models.huggingface import convert
from hpnlp.models.lm import LM
from tests.models.test_lm import logits_of, make

pytestmark = pytest.mark.oracle


def test_logits_equal_smollm3(tmp_path):
    """Every third layer has no positions, and three layers follow the last complete period."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(
        "smollm3",
        vocab_size=48,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        no_rope_layer_interval=3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="eager",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "hidden_act")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "rope_theta": 10000.0} | {name: stored[name] for name in kept})
    )
    llama, params = convert.load(tmp_path)
    ours = LM(dataclasses.replace(llama, form="block*2,block(position=none)"))
    tokens = np.random.default_rng(1).integers(0, 48, (2, 20))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    actual = logits_of(ours, params, tokens.astype(np.int32))
    np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-4)
    assert np.abs(np.asarray(logits_of(LM(llama), params, tokens.astype(np.int32))) - expected).max() > 0.1


def test_logits_equal_torch_layers():
    """Convolutions, and attention with different heads and widths."""
    torch = pytest.importorskip("torch")
    nn = torch.nn.functional
    form = "block,block(mlp=relu),block,block(heads=2,mlp_dim=40,norm_eps=0.1)"
    model, params = make(mixer="conv(3),full", form=form, layers=7, position="none", mlp="gelu")
    places = [("0_conv", 0), ("1_full", 0), ("0_conv", 1), ("3_full", 0), ("0_conv", 2), ("1_full", 1), ("0_conv", 3)]
    weights = jax.tree.map(lambda leaf: torch.from_numpy(np.array(leaf)), params)
    tokens = np.random.default_rng(1).integers(0, model.config.vocab, (2, 11))
    table = weights["embed"]["table"]

    def norm(x, scale, eps=1e-6):
        return nn.rms_norm(x, scale.shape, scale, eps)

    def convolve(layer, x, heads):
        taps = layer["mixer"]["taps"].flip(0).T[:, None]
        return nn.conv1d(nn.pad(x.mT, (2, 0)), taps, groups=x.shape[-1]).mT

    def attend(layer, x, heads):
        q, k, v = ((x @ layer[name]["kernel"]).unflatten(-1, (heads, -1)).transpose(1, 2) for name in "qkv")
        o = nn.scaled_dot_product_attention(q, k, v, is_causal=True)
        return o.transpose(1, 2).flatten(2) @ layer["out"]["kernel"]

    x = table[tokens]
    for index, (stack, place) in enumerate(places):
        layer = jax.tree.map(lambda leaf, place=place: leaf[place], weights["layers"][stack])
        mix, heads = (attend if index % 2 else convolve), (2 if stack == "3_full" else 4)
        eps = 0.1 if stack == "3_full" else 1e-6
        x = x + mix(layer["attention"], norm(x, layer["mix_norm"]["scale"], eps), heads)
        inner = norm(x, layer["feed_norm"]["scale"], eps) @ layer["mlp"]["up"]["kernel"]
        inner = nn.relu(inner) if stack == "1_full" else nn.gelu(inner, approximate="tanh")
        x = x + inner @ layer["mlp"]["down"]["kernel"]
    expected = (norm(x, weights["final_norm"]["scale"]) @ table.T).numpy()
    actual = logits_of(model, params, tokens.astype(np.int32))
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=1e-5)
