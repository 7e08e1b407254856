"""Stages of recipes on models with experts."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.compress.matrices import expert_numbers
from hpnlp.compress.recipe import compress, parse_recipe
from hpnlp.compress.sizes import planned_sizes
from hpnlp.compress.stages import Calibration
from hpnlp.compress.stages.experts import with_fewer_experts
from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.variables import BUFFERS, collections, join, split
from hpnlp.ops.weight import dense, dense_tree, is_weight, parameter_count
from hpnlp.types import InputError
from tests.contracts import ONCE
from tests.drawn import drawn_params
from tests.ops.moe_kernels import replace_kernels

CONFIG = LMConfig(
    dim=16, heads=2, layers=2, vocab=24, max_len=16, mlp_dim=32, mlp="top_k(4,2)", form="block(mlp='swiglu'),block"
)


def test_experts_lose_columns():
    weights = drawn_params(LM(CONFIG), 0.1)
    assert expert_numbers(weights) == 3 * 4 * 16 * 32
    recipe = parse_recipe("heads(0.5,by=magnitude),mlp(0.5,by=magnitude),int8")
    *_, (_, config, smaller) = compress(CONFIG, weights, recipe)
    (first, second) = smaller["layers"].values()
    assert {form.mlp_size for form in config.forms()} == {16}
    assert dense(second["mlp"]["up"]).shape == (1, 4, 16, 16)
    assert is_weight(first["mlp"]["up"]["kernel"]) and is_weight(second["attention"]["q"]["kernel"])
    tokens = np.arange(8, dtype=np.int32)[None]
    run = jax.jit(
        lambda w: LM(config).apply({"params": w}, jnp.asarray(tokens), method="logits"), compiler_options=ONCE
    )
    assert np.isfinite(run(smaller)).all()


def model_of(mlp: str, form: str = "block"):
    """Config, weights and a function of weights to logits, of one layer with experts."""
    config = LMConfig(dim=16, heads=2, layers=1, vocab=24, max_len=16, mlp_dim=32, mlp=mlp, form=form)
    tokens = jnp.asarray(np.arange(8, dtype=np.int32)[None])
    weights = drawn_params(LM(config), 0.3)

    def logits(config, weights) -> Any:
        return LM(config).apply(collections(weights), tokens, method="logits")

    return config, weights, logits


@pytest.mark.parametrize(
    "recipe", ["int8", "int8(integer_products=False)", "int4(group=8)", "bf16", "ternary", "blocks(0.5,block=8)"]
)
def test_experts_of_fewer_bits_compute_as_their_dense_matrices(recipe):
    """Matrices are converted expert by expert; the file has no arrays of floats of their size."""
    config, weights, logits = model_of("top_k(4, 2, shared=1)")
    *_, (_, _, small) = compress(config, weights, parse_recipe(recipe))
    assert expert_numbers(small) == 0
    for name in ("up", "gate", "down"):
        stack, matrices = small["layers"]["mlp"][name], weights["layers"]["mlp"][name]
        _, _, one = compress(config, {"kernel": matrices[0, 1]}, parse_recipe(recipe)).__next__()
        np.testing.assert_array_equal(dense(stack)[0, 1], dense(one["kernel"]))
    expected = logits(config, dense_tree(small))
    tolerance = 0.05 if recipe in ("int8", "int4(group=8)", "ternary", "bf16") else 1e-5  # these round inputs as well
    assert np.linalg.norm(logits(config, small) - expected) < tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("impl", ["loops", "batched", "ragged", "pallas", "dense"])
def test_implementations_read_quantized_experts(monkeypatch, impl):
    if impl == "pallas":
        replace_kernels(monkeypatch)
    config, weights, logits = model_of(f"top_k(4, 2, impl={impl!r})")
    *_, (_, _, small) = compress(config, weights, parse_recipe("int8(integer_products=False)"))
    expected = logits(config, dense_tree(small))
    np.testing.assert_allclose(logits(config, small), expected, atol=1e-5)


def test_removing_experts_that_no_token_uses_changes_nothing():
    config, weights, logits = model_of("bias_balanced(6, 2)")
    bias = jnp.asarray([[0.0, -1e3, 0.0, -1e3, -1e3, 0.0]])
    weights[BUFFERS] = {"layers": {"mlp": {"bias": bias}}}

    def gradients(config, weights):
        params, buffers = split(weights)
        return jax.grad(lambda p: jnp.sum(logits(config, join(p, buffers)) ** 2))(params)

    *_, (_, smaller, pruned) = compress(config, weights, parse_recipe("experts(0.5)"), Calibration(gradients))
    assert smaller.mlp == "bias_balanced(3, 2)" and pruned["layers"]["mlp"]["up"].shape == (1, 3, 16, 32)
    assert pruned[BUFFERS]["layers"]["mlp"]["bias"].shape == (1, 3)
    np.testing.assert_allclose(logits(smaller, pruned), logits(config, weights), atol=1e-6)


def test_planned_sizes_are_those_of_the_arrays():
    config, weights, _ = model_of("top_k(4, 2)")
    recipe = parse_recipe("experts(0.5, merge=True)")
    planned = [size.parameters for size in planned_sizes(config, jax.eval_shape(lambda: weights), recipe)]
    slopes = Calibration(lambda config, weights: jax.tree.map(jnp.ones_like, weights))
    *_, (_, _, smaller) = compress(config, weights, recipe, slopes)
    assert planned == [parameter_count(tree) for tree in (weights, smaller)]


def test_merged_copies_are_the_expert():
    """Experts 2 and 3 are experts 0 and 1 with permuted columns, and join them."""
    config, weights, _ = model_of("top_k(4, 1, gates='softmax')")
    mlp = weights["layers"]["mlp"]
    order = np.random.default_rng(0).permutation(32)
    for name in ("up", "gate"):
        mlp[name] = mlp[name].at[:, 2:].set(mlp[name][:, :2][..., order])
    mlp["down"] = mlp["down"].at[:, 2:].set(mlp["down"][:, :2][:, :, order] * 0.5)  # so that 0 and 1 stay
    mlp["router"] = mlp["router"].at[..., 2:].set(2.0 * mlp["router"][..., :2])
    recipe = parse_recipe("experts(0.5, by=magnitude, merge=True)")
    *_, (_, smaller, merged) = compress(config, weights, recipe)
    assert smaller.mlp == "top_k(2, 1, gates='softmax')"
    for name in ("up", "gate"):
        np.testing.assert_allclose(merged["layers"]["mlp"][name], mlp[name][:, :2], rtol=1e-5)
    kept = merged["layers"]["mlp"]["down"] / mlp["down"][:, :2]
    assert ((kept > 0.5) & (kept < 1.0)).all() and np.ptp(kept, axis=(0, 2, 3)).max() < 1e-5


def test_layers_may_keep_different_numbers_of_experts():
    config, weights, logits = model_of("top_k(4, 2)", form="block*2")
    config = dataclasses.replace(config, layers=2)
    weights = drawn_params(LM(config), 0.3)
    weights["layers"]["mlp"]["up"] = weights["layers"]["mlp"]["up"].at[1, 1:].multiply(1e-3)
    recipe = parse_recipe("experts(0.75, by=magnitude, across_layers=True)")
    *_, (_, smaller, pruned) = compress(config, weights, recipe)
    counts = [form.expert_count for form in smaller.forms()]
    assert sum(counts) == 6 and counts[0] == 4
    assert np.isfinite(logits(smaller, pruned)).all()


def test_arguments_of_the_router_are_kept():
    for mlp, expected in (
        ("top_k(8, 2, 'gelu')", "top_k(3, 2, 'gelu')"),
        ("top_k(k=1, gates='softmax')", "top_k(k=1, gates='softmax', experts=3)"),
    ):
        form = LMConfig(dim=16, heads=2, layers=1, mlp=mlp).forms()[0]
        assert with_fewer_experts(form, 3).mlp == expected


def test_experts_that_cannot_be_removed_raise():
    for mlp, recipe, message in (
        ("swiglu", "experts(0.5)", "the model's layers have no experts: leave the stage out"),
        ("hash(4)", "experts(0.5, by=magnitude)", "a hash of another number of experts gives all words other experts"),
        ("bias_balanced(4, 2, groups=2)", "experts(0.5, by=magnitude)", "the 2 groups are of equal size: leave"),
        ("top_k(4, 2)", "experts(0.25, by=magnitude)", "k=2 of 1 experts"),
        ("top_k(4, 2)", "experts(0.01, by=magnitude)", "experts would stay in a layer"),
    ):
        config, weights, _ = model_of(mlp)
        with pytest.raises(InputError, match=re.escape(message)):
            list(compress(config, weights, parse_recipe(recipe)))
