"""Checkpoints of mixtures of experts: fields, tensors and errors, without transformers."""

import json

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file

from hpnlp.models.huggingface import convert, families
from hpnlp.models.lm import LMConfig
from hpnlp.parallel.plan import Plan
from hpnlp.types import InputError
from tests.models.huggingface.checkpoints import assert_raises, assert_same, edit, make

DENSE = "block(mlp='swiglu', mlp_dim=40)"
QWEN2 = {"mlp": "top_k(4, 3, gates='softmax', shared=2, shared_gate=True)", "qkv_bias": True, "tied": False}
BALANCED = {"mlp": "bias_balanced(4, 2, shared=1, groups=2, scale=2.5)", "qk_norm": True, "tied": False}

# name -> (fields of the model, model_type)
MODELS = {
    "mixtral": ({"mlp": "top_k(4, 2)", "mixer": "window(4,0)"}, "mixtral"),
    "normalized_softmax": ({"mlp": "top_k(4, 2, gates='softmax', normalize=True, impl='batched')"}, "mixtral"),
    "geglu": ({"mlp": "top_k(4, 2, kind='geglu')"}, "mixtral"),
    "qwen2": (QWEN2, "qwen2_moe"),
    "qwen2_dense_last": (QWEN2 | {"layers": 4, "form": f"block*3,{DENSE}"}, "qwen2_moe"),
    "qwen3_first_dense_then_every_second": (
        {"mlp": "top_k(4, 2)", "qk_norm": True, "layers": 5, "form": f"{DENSE}*2,block,{DENSE},block"},
        "qwen3_moe",
    ),
    "qwen3_experts_in_the_form": (
        {"mlp": "swiglu", "mlp_dim": 40, "qk_norm": True, "form": "block,block(mlp='top_k(4, 2)', mlp_dim=24)"},
        "qwen3_moe",
    ),
    "olmoe": ({"mlp": "top_k(4, 3, gates='softmax')", "joint_qk_norm": True, "kv_heads": 1}, "olmoe"),
    "dots1": (BALANCED | {"layers": 3, "form": f"{DENSE},block*2"}, "dots1"),
    "dots1_windows": (BALANCED | {"mixer": "full,window(4,0)"}, "dots1"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_with_experts_are_written_and_read_again(name, tmp_path):
    fields, model_type = MODELS[name]
    config, params = make(**fields)
    convert.save(config, params, tmp_path / "a")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["model_type"] == model_type
    loaded, same = convert.load(tmp_path / "a")
    assert flatten_dict(params, sep="/").keys() == flatten_dict(same, sep="/").keys()
    assert_same(params, same)
    convert.save(loaded, same, tmp_path / "b")
    files = [load_file(tmp_path / x / "model.safetensors") for x in "ab"]
    assert files[0].keys() == files[1].keys()
    assert all(files[0][key].tobytes() == files[1][key].tobytes() for key in files[0])


def test_experts_are_read_from_several_files_in_the_order_of_the_files(tmp_path, monkeypatch):
    config, params = make(**BALANCED)
    convert.save(config, params, tmp_path / "a", dtype="bfloat16", shard_bytes=1000)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 5
    read, order = convert.StoredTensor.read, []
    monkeypatch.setattr(convert.StoredTensor, "read", lambda tensor: order.append(tensor.path) or read(tensor))
    _, loaded = convert.load(tmp_path / "a")
    assert order == sorted(order)
    np.testing.assert_allclose(loaded["layers"]["mlp"]["gate"], params["layers"]["mlp"]["gate"], rtol=1e-2)
    # The bias decides between scores that may differ by less than the rounding of bfloat16.
    assert_same(loaded["buffers"], params["buffers"])


def test_biases_are_stored_in_float32(tmp_path):
    config, params = make(**BALANCED)
    convert.save(config, params, tmp_path / "a", dtype="bfloat16")
    stored = load_file(tmp_path / "a" / "model.safetensors")
    bias = stored["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == np.float32
    np.testing.assert_array_equal(bias, params["buffers"]["layers"]["mlp"]["bias"][1])
    np.testing.assert_array_equal(
        stored["model.layers.1.mlp.experts.3.up_proj.weight"].astype(np.float32),
        params["layers"]["mlp"]["up"][1, 3].T.astype(stored["model.norm.weight"].dtype).astype(np.float32),
    )


QWEN_JSON = families.config_json(LMConfig(dim=8, heads=2, layers=3, vocab=12, max_len=16, mlp_dim=16, **QWEN2))


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({"mlp_only_layers": [0], "intermediate_size": 40}, f"{DENSE},block*2"),
        ({"decoder_sparse_step": 2, "intermediate_size": 40}, f"{DENSE},block"),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 3, "intermediate_size": 40}, f"{DENSE}*2,block"),
        ({"mlp_only_layers": None}, "block"),
    ],
)
def test_layers_without_experts_become_forms(changes, form):
    fields = families.config_fields(QWEN_JSON | changes, "config.json")
    assert (fields["form"], fields["mlp_dim"]) == (form, 16)
    assert LMConfig(**fields).forms()[0].mlp_size == (40 if form.startswith(DENSE) else 16)


def test_arguments_for_training_only_do_not_hinder_the_export(tmp_path):
    sizes = {"dim": 8, "heads": 2, "layers": 1, "vocab": 12, "max_len": 16}
    written = [
        families.config_json(LMConfig(**sizes, mlp=f"top_k(4, 2{extra})"))
        for extra in ("", ", exchange_capacity=2.0, impl=dense")
    ]
    assert written[0] == written[1]


def test_coefficient_of_the_balance_loss_is_divided_by_k():
    assert "balance=0.003" in families.config_fields(QWEN_JSON | {"router_aux_loss_coef": 0.001}, "config.json")["mlp"]
    config = LMConfig(dim=8, heads=2, layers=1, vocab=12, max_len=16, mlp="top_k(4, 2, balance=0.03)")
    assert families.config_json(config)["router_aux_loss_coef"] == 0.015


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_expert_intermediate_size": 36}, "shared_expert_intermediate_size is 36, no multiple of moe_interm"),
        ({"num_experts": "4"}, "num_experts is '4': expected a whole number"),
        ({"num_experts_per_tok": 5}, "k=5 of 4 experts"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, "config.json: k=1 with gates='softmax_k'"),
        ({"mlp_only_layers": 1}, "mlp_only_layers is 1: expected a list of indices"),
        ({"router_aux_loss_coef": -1}, "router_aux_loss_coef is -1: expected a number of at least 0"),
        ({"use_sliding_window": True}, "use_sliding_window=true is not supported"),
        ({"model_type": "deepseek_v3"}, r"'deepseek_v3' is not supported \(its attention .*MLA.*dots1.*\): choose"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ({"model_type": "dots1"}, "norm_topk_prob=false is not supported"),
    ],
)
def test_unsupported_settings_of_experts_raise(changes, message, tmp_path):
    convert.save(*make(**QWEN2), tmp_path / "a")
    edit(tmp_path / "a", **changes)
    assert_raises(message, convert.load_config, tmp_path / "a")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mlp": "top_k(4, 2, capacity=1.25)"}, r"in mixtral, .*mlp is 'top_k\(4, 2\)', not"),
        ({"mlp": "switch(4)"}, r"mlp is .*, not 'switch\(4, 1\)'"),
        ({"mlp": "top_k(4, 2, shared=1)"}, "not 'top_k.4, 2, shared=1.'"),
        ({"mlp": "top_k(4, 2)", "form": "block,block(mlp_dim=40)"}, "mlp_dim is 24 in layers 0, 40 in layers 1"),
        (BALANCED | {"layers": 3, "form": f"block*2,{DENSE}"}, "form is 'block', not"),
        ({"mlp": "top_k(4, 2)", "form": f"{DENSE},block"}, "form is 'block', not|qk_norm is True, not False"),
    ],
)
def test_experts_of_no_family_raise(fields, message, tmp_path):
    assert_raises(message, convert.save, *make(**fields), tmp_path / "a")


def test_joint_norms_of_divided_heads_raise():
    config = LMConfig(dim=8, heads=2, layers=1, vocab=12, max_len=16, joint_qk_norm=True)
    with pytest.raises(InputError, match="plan.tensor=2 divides the heads, and model.joint_qk_norm=True"):
        config.check_layout(Plan("tensor", tensor=2, data=1).layout(config.sizes(), 2))
