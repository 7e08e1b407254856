"""Alternating sliding windows and full attention against Qwen 2 of transformers: logits, and greedy ids decoded with its own
rolling cache."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from hpnlp.models.decode import Generation
from hpnlp.models.huggingface import convert
from hpnlp.models.lm import LM

pytestmark = pytest.mark.oracle

LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
V, TOKENS = 48, 20
PROMPTS = [
    np.random.default_rng(i).integers(0, V, n) for i, n in enumerate((3, 24))
]  # shorter and much longer than the window


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """`(model of transformers, ours, its parameters)`."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(
        "qwen2",
        vocab_size=V,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=len(LAYERS),
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_sliding_window=True,
        sliding_window=6,  # including the token itself
        layer_types=LAYERS,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    # Otherwise the weights, and so the rounding, would depend on the tests that ran before.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    directory = tmp_path_factory.mktemp("qwen2")
    model.save_pretrained(directory)
    stored = json.loads((directory / "config.json").read_text())
    stored |= {"use_sliding_window": False, "layer_types": None}
    (directory / "config.json").write_text(json.dumps(stored))
    ours, params = convert.load(directory)
    return model, LM(dataclasses.replace(ours, mixer="window(5,0)*2,full", unroll=1)), params


def test_logits_match_transformers(models):
    import torch

    model, lm, params = models
    tokens = np.random.default_rng(2).integers(0, V, (2, 24)).astype(np.int32)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    ours = jax.jit(lambda p, t: lm.apply({"params": p}, t, method=LM.logits))(params, tokens)
    np.testing.assert_allclose(ours, expected, atol=2e-5, rtol=2e-5)
    full = LM(dataclasses.replace(lm.config, mixer="full"))
    assert (
        np.abs(jax.jit(lambda p, t: full.apply({"params": p}, t, method=LM.logits))(params, tokens) - expected).max()
        > 1
    )


def test_greedy_ids_match_transformers(models):
    import torch

    model, lm, params = models
    ids = np.concatenate(list(Generation(lm, params, PROMPTS, tokens=TOKENS, temperature=0.0)), axis=1)
    for row, prompt in zip(ids, PROMPTS, strict=True):
        expected = model.generate(torch.from_numpy(prompt)[None], max_new_tokens=TOKENS, do_sample=False)
        np.testing.assert_array_equal(row, expected[0, len(prompt) :].numpy())
    assert len(set(ids.ravel().tolist())) > 8
