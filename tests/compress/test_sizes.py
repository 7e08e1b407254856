"""Planned sizes of compressed models against the arrays and files of the models themselves."""

import jax
import numpy as np
import pytest

from hpnlp.compress.container import Container
from hpnlp.compress.files import encoding_of, stages_of, write_weights
from hpnlp.compress.recipe import COMPRESSORS, Calibration, compress, parse_recipe
from hpnlp.compress.sizes import ORIGINAL, file_sizes, planned_sizes
from hpnlp.ops.weight import is_weight, parameter_count
from hpnlp.types import InputError
from tests.compress.test_recipe import CONFIG, WEIGHTS, gradients

# Recipes with each stage of COMPRESSORS whose result has sizes that do not depend on the weights, and names of their Weights.
RECIPES = {
    'layers("0 2"),heads(0.5),mlp(0.25),magnitude(0.5),factorize(parameters=0.5),int8': "factorize int8",
    "layers(2),factorize(rank=3,by=weights),int4(group=1)": "factorize int4 int8",
    "int4(group=8)": "int4 int8",
    "mixed(4)": "int8",
    "fp8": "fp8",
    "bf16": "bf16",
    "fp16": "fp16",
    "ternary": "ternary",
    "ternary(packed=False)": "int8",
    "binary": "binary int8",
    "pow2": "pow2",
    "codebook(bits=4)": "codebook",
    "two_four": "two_four",
    "factorize(rank=3),int4(group=1,by=inputs,scaled=True)": "factorize int4 int8",
    "int8(smooth=0.5,by=inputs)": "int8",
    "balanced(0.25)": "balanced",
    "blocks(0.5,block=8)": "blocks",
}


FAST = ("int4(group=8)", "ternary", "binary", "codebook(bits=4)", "two_four")  # with the first, each kind of arrays


@pytest.mark.parametrize(
    "recipe", [r if i == 0 or r in FAST else pytest.param(r, marks=pytest.mark.slow) for i, r in enumerate(RECIPES)]
)
def test_planned_sizes_are_those_of_arrays_and_files(recipe, tmp_path):
    stages = parse_recipe(recipe)
    planned = list(planned_sizes(CONFIG, jax.eval_shape(lambda: WEIGHTS), stages, step=12))
    models = [
        (ORIGINAL, WEIGHTS),
        *((s.text, w) for s, _, w in compress(CONFIG, WEIGHTS, stages, Calibration(gradients))),
    ]
    assert [size.stage for size in planned] == [stage for stage, _ in models]
    for size, (stage, weights) in zip(planned, models, strict=True):
        leaves = jax.tree.leaves(weights)
        assert size.parameters == parameter_count(weights), stage
        assert size.memory_bytes == sum(leaf.on_device_size_in_bytes() for leaf in leaves), stage
        write_weights(tmp_path / "model", weights, {"step": 12}, encoding_of)
        actual = file_sizes(tmp_path / "model", stage)
        assert (actual.parameters, actual.memory_bytes) == (size.parameters, size.memory_bytes), stage
        entries = Container(tmp_path / "model").entries.values()
        kinds = {entry.encoding.kind for entry in entries}
        assert size.is_bound or kinds <= {"raw", "packed"}, stage
        if size.is_bound:
            assert actual.disk_bytes <= size.disk_bytes, stage
        else:
            assert abs(actual.disk_bytes - size.disk_bytes) <= 16 * len(leaves), (
                stage
            )  # values of 4 bits that do not occur
    nodes = jax.tree.leaves(models[-1][1], is_leaf=is_weight)
    assert " ".join(sorted(set().union(*map(stages_of, nodes)))) == RECIPES[recipe]


def test_bounds_hold_for_codes_of_maximal_entropy(tmp_path):
    draw = np.random.default_rng(0)
    for count in (1, 100, 513, 4096, 70_000):
        leaves = {"codes": draw.integers(-128, 128, count).astype(np.int8)}
        write_weights(tmp_path / "model", leaves, {"step": 0}, encoding_of)
        (size,) = planned_sizes(None, leaves, [])
        actual = (tmp_path / "model").stat().st_size
        assert actual <= size.disk_bytes and size.disk_bytes - actual < 650 + 0.01 * count
        # Just enough zeros to be stored as gaps.
        write_weights(
            tmp_path / "model", {"codes": leaves["codes"] * (draw.random(count) < 0.49)}, {"step": 0}, encoding_of
        )
        assert (tmp_path / "model").stat().st_size <= size.disk_bytes


def test_recipes_cover_all_stages():
    stages = {stage.text.split("(")[0] for recipe in RECIPES for stage in parse_recipe(recipe)}
    assert stages | {"filters", "channels", "hidden", "shapes", "experts"} == set(COMPRESSORS)  # in tests of their own


def test_sizes_that_depend_on_weights_raise():
    for recipe, message in (
        ("heads(0.5,across_layers=True)", "the weights decide on the widths: plan without across_layers"),
        ("factorize(energy=0.9)", "the weights decide on its ranks: plan with parameters or rank"),
        ("layers(9)", "the model has 3 layers"),
    ):
        with pytest.raises(InputError, match=message):
            list(planned_sizes(CONFIG, WEIGHTS, parse_recipe(recipe)))
