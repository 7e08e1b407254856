"""Recipes: their stages, the models that they give, and errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.compress.files import read_weights, stored_bytes, write_weights
from hpnlp.compress.recipe import Calibration, compress, parse_recipe
from hpnlp.compress.stages.sensitivity import choose_bits, mean_curvature
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.ops.weights import (
    BalancedWeight,
    BinaryProductWeight,
    BlockSparseWeight,
    CodebookWeight,
    FloatWeight,
    IntegerWeight,
    LowRankWeight,
    PackedWeight,
    TwoFourWeight,
    dense_tree,
    is_weight,
)
from hpnlp.types import InputError
from tests.contracts import ONCE
from tests.drawn import drawn_params
from tests.messages import raises

CONFIG = LMConfig(dim=16, heads=4, layers=3, vocab=40, max_len=16, mlp_dim=16, tied=False)
WEIGHTS = drawn_params(LM(CONFIG), 0.25)
IDS = np.arange(17, dtype=np.int32)
BATCH = {
    **example_batch(2, 8),
    "tokens": jnp.asarray(IDS[:-1].reshape(2, 8)),
    "labels": jnp.asarray(IDS[1:].reshape(2, 8)),
}


@functools.cache
def programs(config):
    """Compiled `(weights -> loss, weights -> gradients)`; the latter may be differentiated again."""

    def total(weights):
        return LM(config).apply({"params": weights}, BATCH, method="loss").sum

    return jax.jit(total, compiler_options=ONCE), jax.jit(jax.grad(total))


def gradients(config, weights):
    return programs(config)[1](weights)


def result(recipe):
    *_, (_, config, weights) = compress(CONFIG, WEIGHTS, parse_recipe(recipe), Calibration(gradients))
    return config, weights


def loss(config, weights):
    return float(programs(config)[0](weights))


@pytest.mark.slow
def test_stages_follow_each_other():
    config, weights = result(
        "layers(2),heads(0.5,by=magnitude),mlp(0.25,across_layers=True),factorize(parameters=0.5),int8"
    )
    assert (config.layers, config.heads, config.head_dim) == (2, 2, 4)
    forms = config.forms()
    assert sum(form.mlp_size for form in forms) * (2 // len(forms)) == 8
    assert np.isfinite(loss(config, weights))
    kernel = weights["head"]
    assert kernel.codes.dtype == jnp.int8
    assert stored_bytes(weights) < stored_bytes(WEIGHTS) / 5
    np.testing.assert_allclose(loss(config, weights), loss(config, dense_tree(weights)), rtol=0.01)


@pytest.mark.parametrize("recipe", ["int8", "factorize(energy=1.0)", "heads(1.0)"])
def test_mild_stages_change_little(recipe):
    if recipe.startswith("factorize"):
        raises("as many parameters as the kernels", result, recipe)
        return
    np.testing.assert_allclose(loss(*result(recipe)), loss(CONFIG, WEIGHTS), rtol=0.01)


@pytest.mark.parametrize(
    ("recipe", "kind", "bits"),
    [
        ("fp8(e5m2,round_inputs=True)", FloatWeight, 8),
        ("bf16", FloatWeight, 16),
        ("ternary", PackedWeight, 2),
        ("ternary(packed=False)", IntegerWeight, 8),
        ("binary", PackedWeight, 1),
        ("binary(inputs=True)", BinaryProductWeight, 2),  # 16 rows fill half of each word
        pytest.param("pow2", PackedWeight, 4, marks=pytest.mark.slow),
        ("codebook(bits=3)", CodebookWeight, 8),
        ("two_four", TwoFourWeight, 17),
        ("blocks(0.5,block=8)", BlockSparseWeight, 16),
        ("balanced(0.25)", BalancedWeight, 8),
        ("int4(group=8,limits=mse)", PackedWeight, 4),
        ("int8(limits=percentile)", IntegerWeight, 8),
    ],
)
def test_kinds_of_kernels(recipe, kind, bits, tmp_path):
    config, weights = result(recipe)
    kernel = weights["layers"]["mlp"]["up"]["kernel"]
    assert type(kernel) is kind
    assert kernel.shape == (16, 16)
    leaf = jax.tree.leaves(kernel)[0]
    assert stored_bytes(leaf) + (stored_bytes(kernel.positions) if bits == 17 else 0) == 3 * 16 * 16 * bits // 8
    if kind in (PackedWeight, TwoFourWeight) and bits in (1, 17):  # tests/ops/weights has products with all kinds
        np.testing.assert_allclose(loss(config, weights), loss(config, dense_tree(weights)), rtol=0.02)
    write_weights(tmp_path / "weights", weights)
    read, _ = read_weights(tmp_path / "weights")
    assert jax.tree.structure(read) == jax.tree.structure(weights)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.dtype == b.dtype and (a == b).all(), read, weights)))


def test_pruned_weights_stay_zero_in_a_codebook():
    _, pruned = result("magnitude(0.25)")
    _, shared = result("magnitude(0.25),codebook(bits=3)")
    up = [np.asarray(dense_tree(weights)["layers"]["mlp"]["up"]["kernel"]) for weights in (pruned, shared)]
    np.testing.assert_array_equal(up[0] == 0, up[1] == 0)


def test_random_masks_differ_by_layer_and_have_the_share():
    _, weights = result("magnitude(0.25, by=random)")
    kept = np.asarray(weights["layers"]["mlp"]["up"]["kernel"]) != 0
    assert (kept.mean((1, 2)) == 0.25).all() and (kept[0] != kept[1]).any()


def test_magnitude_and_energy():
    _, weights = result("magnitude(0.25)")
    up = np.asarray(weights["layers"]["mlp"]["up"]["kernel"])
    assert (up != 0).mean() == 0.25
    assert np.abs(up[up != 0]).min() >= np.sort(np.abs(WEIGHTS["layers"]["mlp"]["up"]["kernel"]).ravel())[-up.size // 2]
    _, weights = result("factorize(energy=0.5)")
    assert isinstance(weights["layers"]["mlp"]["up"]["kernel"], LowRankWeight)


def test_equal_magnitudes_are_pruned_to_the_share():
    up = WEIGHTS["layers"]["mlp"]["up"]["kernel"]
    signs = {"layers": {"mlp": {"up": {"kernel": jnp.sign(up)}}}}
    *_, (_, _, pruned) = compress(CONFIG, signs, parse_recipe("magnitude(0.25)"))
    assert ((np.asarray(pruned["layers"]["mlp"]["up"]["kernel"]) != 0).mean((1, 2)) == 0.25).all()


def test_weights_that_are_not_finite_raise():
    broken = {"layers": {"kernel": np.ones((2, 3, 4), np.float32)}, "head": np.float32([[1, np.nan]])}
    raises("head of the model has numbers that are not", lambda: list(compress(CONFIG, broken, parse_recipe("int8"))))


def test_least_important_units_go_first():
    quiet = jax.tree.map(lambda x: x, WEIGHTS)
    quiet["layers"]["mlp"] = jax.tree.map(lambda x: x, quiet["layers"]["mlp"])
    down = quiet["layers"]["mlp"]["down"]
    quiet["layers"]["mlp"]["down"] = {"kernel": down["kernel"].at[:, ::2].set(0.0)}
    *_, (_, config, weights) = compress(CONFIG, quiet, parse_recipe("mlp(0.5)"), Calibration(gradients))
    np.testing.assert_allclose(loss(config, weights), loss(CONFIG, quiet), rtol=1e-6)


def test_invalid_recipes_raise():
    for recipe, message in (
        ("", "the recipe is empty: name stages, of layers"),
        ("head(0.5)", "did you mean 'heads'"),
        ("heads(0)", "share=0: expected more than 0 and at most 1, or nonzero"),
        ("layers(0)", "keep=0: expected a number of at least 1"),
        ("layers('2 1')", "ascending indices"),
        ("layers(9)", "the model has 3 layers, 0 to 2"),
        ("int8,heads(0.5)", r"put it before int8"),
        ("mixed(1)", "bits=1: expected 2 to 8, the fewest and the most bits of its choices"),
        ("mlp(0.001)", r"mlp\(0.001\): 0.0\d+ of \d+ mlp would stay in a layer: expected a share of at least 0.\d+"),
        ("magnitude(0.5),layers(2),magnitude(0.2)", "both are shares of all weights, so that only the smaller one has"),
        ("mixed(choices='8 4')", "ascending numbers of bits"),
        ("factorize()", "factorize takes one of"),
        ("int4(group=7)", "does not divide the 16 rows"),
        ("binary(packed=False,inputs=True)", "need packed bits: leave out packed=False or inputs=True"),
        ("blocks(0.5,block=5)", "does not divide layers/.* of 16 x 16"),
        ("factorize(rank=2),two_four", "has 2 rows: expected a multiple of 4"),
        ("two_four,int8", "leave out one of them"),
    ):
        raises(message, result, recipe)


def test_compressed_models_and_absent_calibration_raise():
    raises("compressed already", lambda: list(compress(CONFIG, result("int8")[1], parse_recipe("int8"))))
    raises("needs calibration data", lambda: list(compress(CONFIG, WEIGHTS, parse_recipe("heads(0.5)"))))


def test_factors_fit_the_inputs_of_each_kernel():
    """Inputs of the second product of each layer lie in few directions, which factors of that rank keep exactly."""
    weights = jax.tree.map(lambda x: x, WEIGHTS)
    mlp = {name: dict(child) for name, child in weights["layers"]["mlp"].items()}
    for name in ("up", "gate"):
        mlp[name]["kernel"] = mlp[name]["kernel"].at[..., 6:].set(0.0)
    weights["layers"] = {**weights["layers"], "mlp": mlp}
    by = {}
    for kind in ("inputs", "weights"):
        recipe = parse_recipe(f"factorize(rank=7, by={kind})")
        *_, (_, _, by[kind]) = compress(CONFIG, weights, recipe, Calibration(gradients))
    down = {kind: np.asarray(dense_tree(tree)["layers"]["mlp"]["down"]["kernel"]) for kind, tree in by.items()}
    exact = np.asarray(mlp["down"]["kernel"])
    np.testing.assert_allclose(down["inputs"][:, :6], exact[:, :6], atol=2e-3)
    assert np.abs(down["weights"][:, :6] - exact[:, :6]).max() > 0.02


@pytest.mark.slow
def test_bits_go_where_the_loss_is_curved():
    config, weights = result("mixed(4.5)")
    assert config == CONFIG
    kernels = [w for w in jax.tree.leaves(weights, is_leaf=is_weight) if is_weight(w)]
    codes = [w.codes[i] for w in kernels if w.codes.ndim == 3 for i in range(3)]
    bits = [int(np.log2(2 * int(np.abs(c).max()) + 2)) for c in codes]
    assert set(bits) <= {2, 4, 8} and len(set(bits)) > 1
    assert np.average(bits, weights=[c.size for c in codes]) <= 4.5
    np.testing.assert_allclose(loss(config, weights), loss(CONFIG, WEIGHTS), rtol=0.05)


def test_curvature_is_the_mean_of_the_hessians_diagonal():
    diagonal = np.arange(1.0, 13.0, dtype=np.float32).reshape(3, 4)

    def gradient(params):
        return jax.grad(lambda p: 0.5 * (diagonal * p["a"] ** 2).sum() + 3 * p["b"][0, 0] * p["b"][1, 1])(params)

    found = mean_curvature(jax.jit(gradient), {"a": jnp.ones((3, 4)), "b": jnp.ones((2, 2))}, draws=200)
    np.testing.assert_allclose(found["a"], diagonal.mean(), rtol=1e-5)  # exact for a diagonal Hessian
    assert found["b"] < 4 * 3 / 2 / np.sqrt(200)  # zero within four standard errors: the diagonal of b is 0


def test_bits_are_spent_by_gain():
    matrices = {name: jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32) for name in "ab"}
    assert choose_bits(matrices, {"a": 1.0, "b": 100.0}, 3.0, [2, 4, 8]) == {"a": 2, "b": 4}
    assert choose_bits(matrices, {"a": 1.0, "b": 1.0}, 8.0, [2, 4, 8]) == {"a": 8, "b": 8}
    assert choose_bits(matrices, {"a": 1.0, "b": 1.0}, 2.0, [2, 4, 8]) == {"a": 2, "b": 2}


def test_numbers_beyond_float16_raise():
    mlp = WEIGHTS["layers"]["mlp"]
    large = {**mlp, "up": {"kernel": mlp["up"]["kernel"].at[1, 0, 0].set(1e5)}}
    weights = {**WEIGHTS, "layers": {**WEIGHTS["layers"], "mlp": large}}
    raises("fp16: layers/mlp/up/kernel has numbers", lambda: list(compress(CONFIG, weights, parse_recipe("fp16"))))
    config = dataclasses.replace(CONFIG, mlp="top_k(4,2)")
    weights = drawn_params(LM(config), 0.1)
    weights["layers"]["mlp"]["down"] = weights["layers"]["mlp"]["down"].at[1, 0, 2, 3].set(-1e5)
    raises("fp16: layers/mlp/down has numbers beyond", lambda: list(compress(config, weights, parse_recipe("fp16"))))


def test_stages_that_read_inputs_need_data():
    for recipe in ("int4(by=inputs)", "int8(smooth=0.5)", "magnitude(0.5,by=inputs)", "magnitude(0.5,by=fisher)"):
        with pytest.raises(InputError, match="needs calibration data"):
            list(compress(CONFIG, WEIGHTS, parse_recipe(recipe)))


def test_zeros_by_fisher_are_the_weights_of_the_smallest_squares():
    squares = jax.tree.map(lambda w: jnp.abs(w) + 0.1, WEIGHTS)
    *_, (_, _, weights) = compress(
        CONFIG,
        WEIGHTS,
        parse_recipe("magnitude(0.5, by=fisher)"),
        Calibration(gradients, lambda config, weights: squares),
    )
    w, pruned = (np.asarray(tree["layers"]["mlp"]["down"]["kernel"][2]) for tree in (WEIGHTS, weights))
    rank = w**2 * (np.abs(w) + np.float32(0.1))
    np.testing.assert_array_equal(pruned, np.where(rank >= np.sort(rank.ravel())[rank.size // 2], w, 0))
    nothing = Calibration(gradients, lambda config, weights: jax.tree.map(jnp.zeros_like, weights))
    with pytest.raises(InputError, match="as of contrastive losses"):
        list(compress(CONFIG, WEIGHTS, parse_recipe("magnitude(0.5, by=fisher)"), nothing))


def test_smoothed_kernels_are_the_kernels_up_to_rounding():
    _, plain = result("int8")
    _, smoothed = result("int8(smooth=0.5)")
    for tree in (plain, smoothed):
        kernel = dense_tree(tree)["layers"]["mlp"]["up"]["kernel"]
        np.testing.assert_allclose(kernel, WEIGHTS["layers"]["mlp"]["up"]["kernel"], atol=0.02)
    assert abs(loss(CONFIG, smoothed) - loss(CONFIG, WEIGHTS)) < 0.02 * loss(CONFIG, WEIGHTS)
