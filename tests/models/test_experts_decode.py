"""Decoding of models with experts."""

import re

import jax
import numpy as np
import pytest

from hpnlp.models import decode
from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.variables import collections
from tests.contracts import ONCE
from tests.drawn import drawn_params

SIZES = {"dim": 16, "heads": 2, "layers": 3, "vocab": 24, "max_len": 32, "mlp_dim": 20}


@pytest.mark.parametrize("mlp", ["top_k(6,2)", pytest.param("hash(6)", marks=pytest.mark.slow)])
def test_decoding_continues_as_the_full_pass_and_copies_no_experts(mlp):
    model = LM(LMConfig(**SIZES, mlp=mlp, form="block(mlp='swiglu'),block*2"))
    weights = drawn_params(model, 0.3)
    generation = decode.Generation(model, weights, [[3, 1, 4], [1, 5]], tokens=8, sampling=decode.GREEDY)
    ids = np.concatenate(list(generation), axis=1)
    tokens = np.concatenate([[[3, 1, 4]], ids[:1]], axis=1)
    run = jax.jit(lambda w, t: model.apply(collections(w), t, method="logits"), compiler_options=ONCE)
    np.testing.assert_array_equal(np.argmax(run(weights, tokens)[0, 2:-1], axis=1), ids[0])
    # Neither all matrices of a layer's experts, nor those of each token's experts.
    stacks = r"= f32\[\d+,(16,20|20,16)\]\S* (copy|gather|transpose|fusion)\("
    assert re.findall(stacks, generation.programs["decode"].as_text()) == []
