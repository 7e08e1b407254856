"""Checkpoints written by transformers, and its logits and gradients."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hpnlp.models import decode
from hpnlp.models.huggingface import convert
from hpnlp.models.huggingface.families import FAMILIES
from hpnlp.models.lm import LM
from hpnlp.models.variables import collections

pytestmark = pytest.mark.oracle

B, T, V = 2, 24, 48
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 90.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN_WITH_ALL_ARGUMENTS = YARN | {"beta_fast": 2.0, "beta_slow": 0.5, "truncate": False, "attention_factor": 1.3}
LLAMA = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}

# name -> (model_type, settings of config.json, the family that `save` writes)
CASES = {
    "llama": ("llama", {"num_key_value_heads": 2, "rms_norm_eps": 1e-3, "rope_theta": 300.0}, "llama"),
    "llama_biases": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 90.0, "factor": 3.0},
        },
        "llama",
    ),
    "llama_head_dim": ("llama", {"head_dim": 12, "num_key_value_heads": 1, "rope_parameters": LLAMA3}, "llama"),
    "llama_yarn": ("llama", {"rope_parameters": YARN_WITH_ALL_ARGUMENTS}, "llama"),
    "gpt2": ("gpt2", {}, "gpt2"),
    "gpt2_wide": (
        "gpt2",
        {
            "n_inner": 72,
            "layer_norm_epsilon": 1e-3,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
            "reorder_and_upcast_attn": True,
        },
        "gpt2",
    ),
    "mistral": ("mistral", {"sliding_window": None, "num_key_value_heads": 2}, "llama"),
    "qwen2": ("qwen2", {"num_key_value_heads": 2, "rope_parameters": YARN}, "qwen2"),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}, "qwen3"),
    "mistral_window": ("mistral", {"sliding_window": 5, "num_key_value_heads": 2}, "mistral"),
    "qwen2_window": (
        "qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        "qwen2",
    ),
    "qwen3_window": (
        "qwen3",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "qwen3",
    ),
    "llama_gelu": ("llama", {"hidden_act": "gelu", "num_key_value_heads": 2}, "llama"),
    "llama_gelu_tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 2}, "llama"),
    "gemma": ("gemma", {"head_dim": 12, "num_key_value_heads": 1}, "gemma"),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 12,
            "num_key_value_heads": 2,
            "sliding_window": 5,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 0.7,
            "final_logit_softcapping": 2.0,
        },
        "gemma2",
    ),
    "gemma2_plain": (
        "gemma2",
        {
            "head_dim": 16,
            "hidden_activation": "gelu",  # the exact one, as Gemma 1 alone reads it otherwise
            "num_key_value_heads": 2,
            "query_pre_attn_scalar": 16,
            "layer_types": ["full_attention", "full_attention"],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        "gemma2",
    ),
    "llama_dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 90.0, "factor": 3.0}, "num_key_value_heads": 2},
        "llama",
    ),
}
EXPERTS = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "num_hidden_layers": 3,
        "decoder_sparse_step": 2,
        "head_dim": 12,
    },
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 16},
    "dots1": {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "head_dim": 12,
    },
}
CASES |= {name: (name, {"num_key_value_heads": 2} | changes, name) for name, changes in EXPERTS.items()}
WITH_GRADIENTS = ("llama", "llama_biases", "llama_head_dim", "gpt2", "gpt2_wide")
LIKE_LLAMA = tuple(name for name in CASES if name not in WITH_GRADIENTS)

# These programs run once, so LLVM's optimizations take longer than they save.
ONCE = {"xla_backend_optimization_level": 0}


@pytest.fixture(scope="module")
def transformers():
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)


@pytest.fixture(scope="module", params=CASES)
def case(request, transformers, tmp_path_factory):
    """(model of transformers with random parameters, directory of its checkpoint, family that `save` writes)."""
    import torch

    model_type, changes, written = CASES[request.param]
    defaults = GPT2 if model_type == "gpt2" else LLAMA
    config = transformers.AutoConfig.for_model(
        model_type, **defaults | changes, bos_token_id=None, eos_token_id=None, attn_implementation="eager"
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # transformers initialises biases to 0 and norms to 1, which would hide mistakes.
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # some scores with it are below 0
                buffer += torch.randn(buffer.shape, generator=generator) - 1.0
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return model, directory, written


def logits_of(model, tokens):
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


def gradients_of(model, tokens, like, directory):
    """(loss, gradients by the parameters of hpnlp) of transformers.

    The gradients are saved like the checkpoint in `like`, so that `convert.load` maps them to parameters.
    """
    import torch

    model.zero_grad()
    ids = torch.from_numpy(tokens.astype(np.int64))
    logits = model(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, V), ids[:, 1:].reshape(-1), reduction="sum")
    loss.backward()
    stored = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert stored.keys() == load_file(like / "model.safetensors").keys()
    save_file(stored, directory / "model.safetensors")
    shutil.copy(like / "config.json", directory)
    return loss.item(), convert.load(directory)[1]


@pytest.mark.parametrize("case", LIKE_LLAMA, indirect=True)
def test_logits_match_transformers(case, tokens):
    """Families with the tensors of Llama, whose gradients are tested for Llama."""
    model, directory, _ = case
    config, params = convert.load(directory)
    lm = LM(dataclasses.replace(config, unroll=1))
    logits = jax.jit(lambda p, t: lm.apply(collections(p), t, method=LM.logits), compiler_options=ONCE)(params, tokens)
    np.testing.assert_allclose(logits, logits_of(model, tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", WITH_GRADIENTS, indirect=True)
def test_logits_loss_and_gradients_match_transformers(case, tokens, tmp_path):
    model, directory, _ = case
    config, params = convert.load(directory)
    lm = LM(dataclasses.replace(config, unroll=1))
    positions = jnp.broadcast_to(jnp.arange(T - 1, dtype=jnp.int32)[None], (B, T - 1))
    batch = {
        "tokens": jnp.asarray(tokens[:, :-1]),
        "labels": jnp.asarray(tokens[:, 1:]),
        "positions": positions,
        "segment_ids": jnp.ones_like(positions),
        "weights": jnp.ones(positions.shape, jnp.float32),
    }

    def loss(params):
        logits = lm.apply({"params": params}, jnp.asarray(tokens), method=LM.logits)
        return lm.apply({"params": params}, batch, method=LM.loss).sum, logits

    (loss_sum, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=ONCE)(params)
    np.testing.assert_allclose(logits, logits_of(model, tokens), atol=1e-5, rtol=1e-5)
    expected_loss, expected = gradients_of(model, tokens, directory, tmp_path)
    np.testing.assert_allclose(loss_sum, expected_loss, rtol=1e-6)
    # Relative to the largest gradient: the gradient of a key's bias is 0 up to rounding.
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, atol=1e-6 * largest, rtol=1e-5), grads, expected)


@pytest.mark.parametrize("case", EXPERTS, indirect=True)
def test_greedy_continuations_of_experts_match_transformers(case):
    import torch

    model, directory, _ = case
    config, params = convert.load(directory)
    prompts = [np.arange(5) * 7 % V, np.arange(9) * 5 % V + 1]
    generation = decode.Generation(LM(config), params, prompts, tokens=32, sampling=decode.GREEDY)
    continued = np.concatenate(list(generation), axis=1)
    for prompt, ids in zip(prompts, continued, strict=True):
        inputs = {"input_ids": torch.from_numpy(prompt[None]), "attention_mask": torch.ones(1, len(prompt))}
        output = model.generate(**inputs, do_sample=False, max_new_tokens=32)
        np.testing.assert_array_equal(ids, output[0, len(prompt) :].numpy())
    assert len(np.unique(continued)) > 3  # fewer ids would not reveal a wrong token


def test_saved_checkpoint_loads_in_transformers(case, transformers, tokens, tmp_path):
    import torch

    model, directory, written = case
    config, params = convert.load(directory)
    convert.save(config, params, tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert back.config.model_type == written
    assert back.config.eos_token_id is None
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in back.state_dict().items())
    # Not bit for bit: the rounding of torch's products depends on the alignment of tensors in memory.
    np.testing.assert_allclose(logits_of(back, tokens), logits_of(model, tokens), atol=1e-5, rtol=1e-5)

    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].tobytes() == after[name].tobytes(), name


@pytest.mark.parametrize("case", ["llama", "gpt2_wide"], indirect=True)
def test_bfloat16_and_shards_are_read_by_both(case, transformers, tokens, tmp_path):
    model, directory, _ = case
    config, params = convert.load(directory)
    convert.save(config, params, tmp_path / "bf16", dtype="bfloat16", shard_bytes=10_000)
    assert len(json.loads((tmp_path / "bf16" / convert.INDEX).read_text())["weight_map"]) > 10
    assert len(list((tmp_path / "bf16").glob("*.safetensors"))) > 2
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", attn_implementation="eager")
    assert str(back.dtype) == "torch.bfloat16"

    # Conversely, shards of bfloat16 by transformers are read exactly.
    back.save_pretrained(tmp_path / "transformers", max_shard_size="10KB")
    assert (tmp_path / "transformers" / convert.INDEX).exists()
    _, written = convert.load(tmp_path / "bf16")
    loaded_config, loaded = convert.load(tmp_path / "transformers")
    assert loaded_config == config
    jax.tree.map(np.testing.assert_array_equal, written, loaded)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b).astype(jnp.bfloat16)), written, params)


@pytest.mark.parametrize("case", ["llama_biases", "llama_head_dim", "llama_yarn", "qwen2"], indirect=True)
def test_both_spellings_of_rope_are_read(case, tmp_path):
    """Checkpoints of transformers 5 have rope_parameters, older ones rope_theta and rope_scaling."""
    _, directory, _ = case
    raw = json.loads((directory / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    raw["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    assert convert.load(tmp_path)[0] == convert.load(directory)[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_the_configuration_class(name):
    transformers = pytest.importorskip("transformers")
    family = FAMILIES[name]
    theirs = transformers.AutoConfig.for_model(family.model_type).to_dict()
    derived = {"num_key_value_heads": theirs.get("num_attention_heads")}
    for key, ours in family.defaults.items():
        expected = theirs.get(key)
        if isinstance(expected, int | float | str) and key != "head_dim":
            assert (derived.get(key) if ours is None else ours) == expected, key
