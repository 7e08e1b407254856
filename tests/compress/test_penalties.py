"""Lasso and group lasso: proximal steps against their definitions, layouts, and removal of what became 0."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.compress.recipe import Calibration, compress, parse_recipe
from hpnlp.compress.weight_training import with_weight_training
from hpnlp.models import variables
from hpnlp.models.lm import LM, LMConfig
from hpnlp.parallel.plan import Plan
from hpnlp.types import InputError
from tests.compress.test_weight_training import BATCH, MODEL, loss_of, trained
from tests.messages import raises

RNG = np.random.default_rng(0)
RATE, STRENGTH = 0.1, 2.0
MIXED = LM(
    LMConfig(dim=16, heads=4, kv_heads=2, layers=4, vocab=40, max_len=16, mlp_dim=24, form="block,block(mlp_dim=8)")
)


@functools.cache
def drawn(model):
    """`(params, updates)` of random numbers."""
    shapes = variables.split(variables.axes_and_shapes(model)[1])[0]
    params, updates = (jax.tree.map(lambda x: RNG.normal(size=x.shape).astype(np.float32), shapes) for _ in range(2))
    return params, jax.tree.map(lambda x: 0.1 * x, updates)


def moved(model, text):
    params, updates = drawn(model)
    new = jax.jit(with_weight_training(model, text, 10).allowed_updates)(params, updates, jnp.float32(RATE))
    return jax.tree.map(lambda w, u: w + np.asarray(u), params, new), jax.tree.map(np.add, params, updates)


def shrunk(x, size, strength):
    """The proximal operator of strength * sqrt(size) * |x|, of groups along the first axis."""
    norms = np.linalg.norm(np.float64(x).reshape(len(x), -1), axis=1)
    factors = np.maximum(0, 1 - RATE * strength * np.sqrt(size) / norms)
    return factors.reshape(-1, *[1] * (x.ndim - 1)) * x


def test_lasso_moves_each_weight_of_the_kernels():
    after, plain = moved(MODEL, f"l1({STRENGTH})")
    w, expected = after["layers"]["mlp"]["up"]["kernel"], plain["layers"]["mlp"]["up"]["kernel"]
    np.testing.assert_allclose(w, np.sign(expected) * np.maximum(np.abs(expected) - RATE * STRENGTH, 0), atol=1e-6)
    assert 0.1 < (w == 0).mean() < 0.3
    scale = after["final_norm"]["scale"]
    np.testing.assert_allclose(scale, plain["final_norm"]["scale"], rtol=1e-6)


def test_columns_of_feed_forward_networks_are_groups_of_all_their_kernels():
    after, plain = moved(MODEL, "group_lasso(9.0)")
    for layer in range(2):
        mlp = {name: np.asarray(tree["kernel"][layer]) for name, tree in plain["layers"]["mlp"].items()}
        columns = np.concatenate([mlp.get("gate", mlp["up"][:0]).T, mlp["up"].T, mlp["down"]], axis=1)
        expected = shrunk(columns, columns.shape[1], 9.0)
        np.testing.assert_allclose(after["layers"]["mlp"]["down"]["kernel"][layer], expected[:, -16:], atol=1e-5)
        np.testing.assert_array_equal(
            (after["layers"]["mlp"]["up"]["kernel"][layer] == 0).all(0), (expected == 0).all(1)
        )
    np.testing.assert_allclose(
        after["layers"]["attention"]["q"]["kernel"], plain["layers"]["attention"]["q"]["kernel"], rtol=1e-6
    )


def test_heads_are_groups_with_the_key_head_that_they_share():
    after, plain = moved(MIXED, "group_lasso(9.0, groups=heads)")
    stacks = plain["layers"]
    stack = next(iter(stacks))
    own = {key: np.asarray(tree["kernel"]) for key, tree in stacks[stack]["attention"].items() if "kernel" in tree}
    layer = 1
    by_head = np.concatenate(
        [own[key][layer].reshape(16, 2, -1).transpose(1, 0, 2).reshape(2, -1) for key in "qkv"]
        + [own["out"][layer].reshape(2, -1)],
        axis=1,
    )
    expected = shrunk(by_head, by_head.shape[1], 9.0)[:, -own["out"][layer].size // 2 :]
    np.testing.assert_allclose(
        after["layers"][stack]["attention"]["out"]["kernel"][layer].reshape(2, -1), expected, atol=1e-5
    )


@pytest.mark.parametrize(("groups", "axis"), [("columns", 1), ("rows", 0)])
def test_columns_and_rows_of_each_kernel_are_groups(groups, axis):
    after, plain = moved(MODEL, f"group_lasso(9.0, groups={groups})")
    kernel = np.moveaxis(np.asarray(plain["layers"]["mlp"]["down"]["kernel"][1]), axis, 0)
    expected = np.moveaxis(shrunk(kernel, kernel.shape[1], 9.0), 0, axis)
    np.testing.assert_allclose(after["layers"]["mlp"]["down"]["kernel"][1], expected, atol=1e-5)


def test_layers_are_groups():
    after, plain = moved(MIXED, "group_lasso(8.0, groups=layers)")
    stack = next(iter(plain["layers"]))
    kernels = [
        (path, np.asarray(x[1]).ravel())
        for path, x in jax.tree_util.tree_leaves_with_path(plain["layers"][stack])
        if path[-1].key == "kernel"
    ]
    whole = np.concatenate([x for _, x in kernels])
    expected = shrunk(whole[None], whole.size, 8.0)[0]
    actual = np.concatenate(
        [
            np.asarray(x[1]).ravel()
            for path, x in jax.tree_util.tree_leaves_with_path(after["layers"][stack])
            if path[-1].key == "kernel"
        ]
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_vanished_units_are_removed_and_the_model_stays():
    model, weights, losses = trained("group_lasso(3.6)", Plan("single"), steps=12)
    plain = jax.jit(model.finished)(jax.tree.map(jnp.asarray, weights))
    columns = (np.asarray(plain["layers"]["mlp"]["down"]["kernel"]) != 0).any(axis=2).sum(axis=1)
    assert 0 < columns.sum() < 48 and losses[-1] < losses[0]
    *_, (_, config, smaller) = compress(MODEL.config, plain, parse_recipe("mlp(nonzero)"))
    assert [form.mlp_size for form in config.forms()][: len(columns)] == [max(1, n) for n in columns] or len(
        set(columns)
    ) == 1
    np.testing.assert_allclose(loss_of(LM(config))(smaller), loss_of(MODEL)(plain), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["l1(0.5)", "group_lasso(0.6)", "group_lasso(0.5, groups=heads)"])
def test_layouts_match_one_device(text):
    plan = Plan("zero3", tensor=2)
    np.testing.assert_allclose(trained(text, plan)[2], trained(text, Plan("single"))[2], rtol=2e-5)


def test_invalid_shares_and_unknown_widths_raise():
    raises("or nonzero", parse_recipe, "mlp(zeros)")
    params = drawn(MODEL)[0]
    outline = Calibration(lambda config, weights: weights, is_outline=True)
    for recipe in ("mlp(nonzero)", "layers(nonzero)"):
        with pytest.raises(InputError, match="plan with a number"):
            list(compress(MODEL.config, params, parse_recipe(recipe), outline))


def test_layers_without_weights_are_removed():
    params = drawn(MODEL)[0]
    zeroed = jax.tree.map(lambda x: x * (np.arange(2) == 1).reshape(2, *[1] * (x.ndim - 1)), params["layers"])
    *_, (_, config, smaller) = compress(MODEL.config, {**params, "layers": zeroed}, parse_recipe("layers(nonzero)"))
    assert config.layers == 1
    np.testing.assert_array_equal(
        smaller["layers"]["mlp"]["up"]["kernel"][0], params["layers"]["mlp"]["up"]["kernel"][1]
    )
    assert BATCH["tokens"].shape == (8, 8)


def test_units_without_kernels_are_removed_with_their_biases():
    model = LM(LMConfig(dim=16, heads=2, layers=2, vocab=40, max_len=16, mlp_dim=24, mlp="gelu", mlp_bias=True))
    params = drawn(model)[0]
    mlp, kept = params["layers"]["mlp"], np.arange(24) % 3 == 0
    up = {**mlp["up"], "kernel": mlp["up"]["kernel"] * kept}
    down = {**mlp["down"], "kernel": mlp["down"]["kernel"] * kept[:, None]}
    sparse = {**params, "layers": {**params["layers"], "mlp": {"up": up, "down": down}}}
    *_, (_, config, smaller) = compress(model.config, sparse, parse_recipe("mlp(nonzero)"))
    assert config.mlp_dim == 8
    np.testing.assert_allclose(loss_of(LM(config))(smaller), loss_of(model)(sparse), rtol=1e-5)


def test_matrices_of_experts_count_as_weights():
    fields = {"dim": 16, "heads": 2, "layers": 2, "vocab": 24, "max_len": 16, "mlp": "top_k(4,2)"}
    config = LMConfig(**fields, mlp_dim=12)
    params = drawn(LM(config))[0]
    mlp, kept = params["layers"]["mlp"], np.arange(12) % 3 == 0
    sparse = {name: mlp[name] * kept for name in ("gate", "up")} | {"down": mlp["down"] * kept[:, None]}
    weights = {**params, "layers": {**params["layers"], "mlp": {**mlp, **sparse}}}
    *_, (_, smaller, arrays) = compress(config, weights, parse_recipe("mlp(nonzero)"))
    assert smaller.mlp_dim == 4
    np.testing.assert_array_equal(arrays["layers"]["mlp"]["up"], mlp["up"][..., kept])
    without_kernels = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0 if path[-1].key == "kernel" else x, params["layers"]
    )
    *_, (_, same, _) = compress(config, {**params, "layers": without_kernels}, parse_recipe("layers(nonzero)"))
    assert same.layers == 2  # experts add to the residual stream
