"""Experts that start as copies of the MLPs of a dense model."""

import dataclasses
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.data.tokenizers import ByteTokenizer
from hpnlp.models import variables
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training.starts import upcycling, warm_start
from hpnlp.types import InputError
from tests.contracts import ONCE
from tests.drawn import drawn_params

DENSE = LMConfig(dim=16, heads=2, layers=3, vocab=24, max_len=16, mlp_dim=24, unroll=1)
TOKENS = np.random.default_rng(0).integers(0, 24, (2, 12)).astype(np.int32)


def source(config=DENSE):
    return warm_start.StartSource(Path("source"), "lm", config, Vocabulary(ByteTokenizer()), "bytes", is_run=True)


def logits(config, weights):
    run = jax.jit(
        lambda w: LM(config).apply(variables.collections(w), jnp.asarray(TOKENS), method="logits"),
        compiler_options=ONCE,
    )
    return run(weights)


@pytest.fixture(scope="module")
def dense():
    """(weights of the dense model, its logits)."""
    weights = drawn_params(LM(DENSE), 0.3)
    return weights, logits(DENSE, weights)


@pytest.mark.parametrize(
    "changes",
    [
        {"mlp": "top_k(4,2)"},
        {"mlp": "top_k(4,3,gates='softmax',normalize=True)", "form": "block(mlp='swiglu'),block"},
        {"mlp": "bias_balanced(4,2,groups=2)"},
        pytest.param({"mlp": "noisy_top_k(4,2)", "form": "block(mlp='swiglu'),block*2"}, marks=pytest.mark.slow),
        pytest.param({"mlp": "hash(4)"}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: changes["mlp"],
)
def test_first_logits_equal_those_of_the_dense_model(changes, dense):
    config = dataclasses.replace(DENSE, **changes)
    assert source().check_model(config) == ""
    layers = upcycling.upcycled_layers(config, DENSE)
    assert len(layers) == (3 if "form" not in changes else config.form.count("*2") + 1)
    initial = nn.meta.unbox(jax.jit(LM(config).init)(jax.random.key(0), example_batch(1, 2)))
    first = variables.join(initial["params"], initial.get("buffers"))
    weights = upcycling.upcycled(dense[0], first, config, DENSE, layers)
    np.testing.assert_allclose(logits(config, weights), dense[1], atol=2e-6)


def test_experts_that_cannot_start_from_the_mlps_raise():
    for changes, message in (
        ({"mlp": "top_k(4,2)", "mlp_dim": 32}, "experts of 32 columns, and layer 0 .* of 24: set model.mlp_dim=24"),
        ({"mlp": "top_k(4,2,kind='relu')"}, "experts of kind='relu', and layer 0 .* MLP of kind 'swiglu'"),
        ({"mlp": "top_k(4,2,gates='softmax')"}, "do not sum to 1, so that the output of the MLP is scaled: use gates"),
        ({"mlp": "bias_balanced(4,2,scale=2.5)"}, "the output of the MLP is scaled"),
        ({"mlp": "top_k(4,2,shared=1)"}, "shared experts are added to the output of the MLP"),
        ({"mlp": "top_k(4,2)", "heads": 4}, "model.heads is 4, in the source 2"),
        ({"mlp": "top_k(4,2)", "form": "block,block(qk_norm=True)"}, "has another model"),
    ):
        with pytest.raises(InputError, match=message):
            source().check_model(dataclasses.replace(DENSE, **changes))


def test_scaled_outputs_are_accepted_with_accept_changes():
    config = dataclasses.replace(DENSE, mlp="switch(4,kind='swiglu')")
    accepted = source().check_model(config, accept_changes=True)
    assert accepted.endswith("do not sum to 1, so that the output of the MLP is scaled")
