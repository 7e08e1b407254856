"""Layers of different forms against transformers and torch."""

import dataclasses
import json

import numpy as np
import pytest

from hpnlp.models.huggingface import convert
from hpnlp.models.lm import LM
from tests.models.test_lm import logits_of

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
