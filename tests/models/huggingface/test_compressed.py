"""Compressed models as checkpoints: what transformers computes with them, and what no family can represent."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest

from hpnlp.compress.recipe import compress, parse_recipe
from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.huggingface import convert
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.ops.weight import dense_tree
from tests.messages import raises

LLAMA = LMConfig(dim=32, heads=4, layers=3, vocab=40, max_len=16, mlp_dim=64, tied=False, mlp="swiglu")
GROUPED = dataclasses.replace(LLAMA, kv_heads=2, heads=4)
GPT2 = LMConfig(
    dim=32, heads=4, layers=3, vocab=40, max_len=16, mlp_dim=64, tied=True, mlp="gelu", norm="layer", position="learned",
    qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
BERT = EncoderConfig(
    dim=32, heads=4, layers=2, vocab=40, max_len=16, mlp_dim=64, token_types=2, norm="layer", norm_eps=1e-12, tied=True,
    norm_placement="post", embed_norm=True, position="learned", qkv_bias=True, out_bias=True, mlp_bias=True, mlp="gelu_exact",
    transform="gelu_norm",
)  # fmt: skip

# A config and a recipe whose result transformers represents.
REPRESENTED = {
    "removed_units": (LLAMA, "layers(2),heads(0.5,by=magnitude),mlp(0.25,by=magnitude)"),
    "removed_groups": (GROUPED, 'layers("0 2"),heads(0.5,by=magnitude)'),
    "factors": (GPT2, "layers(2),mlp(0.5,by=magnitude),factorize(parameters=0.5,by=weights)"),
    "factors_int8": (LLAMA, "factorize(rank=8,by=weights),int8"),
    "int8": (BERT, "mlp(0.5,by=magnitude),int8"),
    "int4": (LLAMA, "int4(group=8)"),
    "bf16": (LLAMA, "bf16"),
    "fp8": (GPT2, "fp8"),
    "ternary": (BERT, "ternary"),
    "binary": (LLAMA, "binary"),
    "codebook": (LLAMA, "magnitude(0.5),codebook(bits=4)"),
    "two_four": (LLAMA, "two_four"),
    "blocks": (LLAMA, "blocks(0.5,block=16)"),
}


def compressed(config, recipe):
    """(config, weights) of a model with random weights after a recipe."""
    model = Encoder(config) if isinstance(config, EncoderConfig) else LM(config)
    batch = model.example_batch(1, 2) if isinstance(config, EncoderConfig) else example_batch(1, 2)
    shapes = jax.eval_shape(lambda: nn.meta.unbox(model.init(jax.random.key(0), batch)["params"]))
    draw = np.random.default_rng(0)
    weights = jax.tree.map(lambda leaf: jax.numpy.asarray(0.1 * draw.normal(size=leaf.shape), leaf.dtype), shapes)
    *_, (_, config, weights) = compress(config, weights, parse_recipe(recipe))
    return config, weights


@pytest.mark.oracle
@pytest.mark.parametrize("name", REPRESENTED)
def test_logits_of_compressed_checkpoints_match_transformers(name, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config, weights = compressed(*REPRESENTED[name])
    matrices = dense_tree(weights)
    convert.save(config, matrices, tmp_path / "model")
    tokens = np.random.default_rng(1).integers(0, config.vocab, (2, 12)).astype(np.int32)
    if isinstance(config, EncoderConfig):
        batch = Encoder(config).example_batch(*tokens.shape) | {"tokens": tokens}
        batch["positions"] = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        logits = Encoder(config).apply({"params": matrices}, batch, method="logits")
        theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "model")
    else:
        logits = LM(config).apply({"params": matrices}, tokens, method="logits")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["removed_units", "int8"])
def test_checkpoints_of_compressed_models_are_read_again(name, tmp_path):
    config, weights = compressed(*REPRESENTED[name])
    convert.save(config, dense_tree(weights), tmp_path / "model")
    again, params = convert.load(tmp_path / "model")
    assert again.layers == config.layers and again.mlp_size == config.mlp_size
    jax.tree.map(np.testing.assert_array_equal, params, dense_tree(weights))


@pytest.mark.parametrize(
    ("config", "recipe", "message"),
    [
        (LLAMA, "heads(0.6,by=magnitude,across_layers=True)", r"heads is \d in layers [\d ]+, \d in layers .*across_layers"),
        (LLAMA, "mlp(0.7,by=magnitude,across_layers=True)", r"mlp_dim is \d+ in layers [\d ]+, \d+ in layers .*same share"),
        (GPT2, "heads(0.5,by=magnitude)", r"dim / heads = 32 / 2 features, and those of this model 8: .*leave heads"),
        (BERT, "heads(0.5,by=magnitude)", r"of bert have dim / heads = 32 / 2 features, and those of this model 8"),
    ],
)  # fmt: skip
def test_models_that_no_family_represents_raise(config, recipe, message, tmp_path):
    config, weights = compressed(config, recipe)
    raises(message, lambda: convert.save(config, dense_tree(weights), tmp_path / "model"))
    assert not (tmp_path / "model").exists()
