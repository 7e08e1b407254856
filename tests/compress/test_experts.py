"""Stages of recipes on models with experts."""

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.compress.matrices import expert_numbers
from hpnlp.compress.recipe import compress, parse_recipe
from hpnlp.models.lm import LM, LMConfig
from hpnlp.ops.weight import is_weight
from tests.contracts import ONCE
from tests.drawn import drawn_params

CONFIG = LMConfig(
    dim=16, heads=2, layers=2, vocab=24, max_len=16, mlp_dim=32, mlp="top_k(4,2)", form="block(mlp='swiglu'),block"
)


def test_experts_lose_columns_and_keep_their_numbers():
    weights = drawn_params(LM(CONFIG), 0.1)
    assert expert_numbers(weights) == 3 * 4 * 16 * 32
    recipe = parse_recipe("heads(0.5,by=magnitude),mlp(0.5,by=magnitude),int8")
    *_, (_, config, smaller) = compress(CONFIG, weights, recipe)
    (first, second) = smaller["layers"].values()
    assert {form.mlp_size for form in config.forms()} == {16}
    assert second["mlp"]["up"].shape == (1, 4, 16, 16)
    assert is_weight(first["mlp"]["up"]["kernel"]) and is_weight(second["attention"]["q"]["kernel"])
    tokens = np.arange(8, dtype=np.int32)[None]
    run = jax.jit(
        lambda w: LM(config).apply({"params": w}, jnp.asarray(tokens), method="logits"), compiler_options=ONCE
    )
    assert np.isfinite(run(smaller)).all()
