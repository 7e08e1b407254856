"""Iterations of a stage that removes units or weights: as much is left as after the stage at once."""

import numpy as np
import pytest

from hpnlp.compress.recipe import compress, parse_recipe
from hpnlp.jobs.compression.iterations import divided
from hpnlp.models.lm import LM, LMConfig
from hpnlp.types import InputError
from tests.compress import test_convolutions
from tests.drawn import drawn_params

CONFIG = LMConfig(dim=16, heads=4, layers=2, vocab=24, max_len=16, mlp_dim=21)


def after(recipe, iterations):
    """Units of the layers after each iteration."""
    config, weights, left = CONFIG, drawn_params(LM(CONFIG), 0.1), []
    (stage,) = parse_recipe(recipe)
    for part in divided(stage, iterations, config, weights):
        *_, (_, config, weights) = compress(config, weights, [part])
        left.append(tuple((form.heads, form.mlp_size) for form in config.forms()))
    return left


def test_as_many_units_are_left_as_after_one_stage():
    heads = [units[0][0] for units in after("heads(0.5, by=magnitude)", 5)]
    assert heads == [3, 3, 3, 2, 2]  # 4 x 0.5^(n / 5); a share of 0.87 of the units left would keep 3 in each iteration
    assert after("mlp(0.3, by=magnitude)", 4)[-1] == after("mlp(0.3, by=magnitude)", 1)[-1]
    across = after("mlp(share=0.3, by=magnitude, across_layers=True)", 3)[-1]
    assert sum(size for _, size in across) == round(0.3 * 42) == 13


def test_shares_of_weights_fall_to_the_share_of_the_stage():
    (stage,) = parse_recipe("magnitude(0.25, by=random)")
    assert [part.text for part in divided(stage, 2, None, None)] == [
        f"magnitude({x}, by='random')" for x in (0.5, 0.25)
    ]
    repeated = parse_recipe("layers(1)*2")
    assert [part.text for part in repeated] == ["layers(1)"] * 2


def test_filters_have_the_units_of_their_stage():
    config, weights = test_convolutions.make()
    (stage,) = parse_recipe("hidden(0.5, by=magnitude)")  # of 12, 10 and 7 channels
    parts = divided(stage, 2, config, weights)
    np.testing.assert_allclose([float(part.text[7:].split(",")[0]) for part in parts], [20 / 29, 15 / 20], rtol=1e-5)


def test_models_without_units_and_too_small_shares_raise():
    for recipe, message in (
        ("hidden(0.5)", "has no convolutions"),
        ("heads(0.1)", "expected a share of at least 0.25"),
    ):
        (stage,) = parse_recipe(recipe)
        with pytest.raises(InputError, match=message):
            divided(stage, 2, CONFIG, drawn_params(LM(CONFIG), 0.1))
