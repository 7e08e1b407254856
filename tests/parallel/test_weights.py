"""Weights of compressed models under tensor and pipeline plans: the loss of one device, or an error that names the fix."""

import jax
import numpy as np
import pytest

from hpnlp.compress.matrices import is_table, map_matrices
from hpnlp.compress.recipe import compress, parse_recipe
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.ops.weights import factorize, quantize
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError
from tests.drawn import drawn_params
from tests.messages import raises

MODEL = LM(LMConfig(dim=16, heads=2, layers=2, vocab=40, max_len=16, mlp_dim=24, tied=False))
PARAMS = drawn_params(MODEL, 0.25)
IDS = np.arange(65, dtype=np.int32) % 40
BATCH = {**example_batch(8, 8), "tokens": IDS[:-1].reshape(8, 8), "labels": IDS[1:].reshape(8, 8)}


def loss(weights, plan, devices):
    trainer = make_trainer(MODEL, OptimizerConfig(), plan, steps=1, devices=jax.devices()[:devices])
    total, count = trainer.evaluate(weights, jax.device_put(BATCH, trainer.batch_sharding))["loss"]
    return float(total / count)


def compressed(recipe):
    *_, (_, _, weights) = compress(MODEL.config, PARAMS, parse_recipe(recipe))
    return weights


def grouped(path, w):
    """Groups of 4 rows: 4 of the 16 rows of a kernel or 6 of 24, which two devices divide."""
    return quantize(w, 8, by_row=True) if is_table(path) else quantize(w, 4, group=4, integer_products=False)


def in_three_groups(path, w):
    return quantize(w, 4, group=8) if path.endswith("down/kernel") else w


def low_rank(path, w):
    return w if is_table(path) else factorize(w, 4)


KINDS = {
    "integers in groups": lambda: map_matrices(grouped, PARAMS),
    "low rank": lambda: map_matrices(low_rank, PARAMS),
    "int8": lambda: compressed("int8(integer_products=False)"),
    "fp8": lambda: compressed("fp8"),
    "codebook": lambda: compressed("codebook(bits=3)"),
    "ternary": lambda: compressed("ternary"),
    "balanced": lambda: compressed("balanced(0.25)"),
}


TENSOR, ZERO3 = Plan("tensor", tensor=2, data=4), Plan("zero3", tensor=2)
FAST = [("integers in groups", TENSOR)]
GATHERED = "ternary", "balanced"  # kinds that ZeRO-3 gathers, and that tensor parallelism does not divide
SLOW = [(kind, plan) for kind in KINDS for plan in (TENSOR, ZERO3) if (kind, plan) not in FAST and kind not in GATHERED]
SLOW.extend((kind, Plan("zero3")) for kind in GATHERED)
SLOW.append(("int8", Plan("zero3", pipeline=2)))


@pytest.mark.parametrize(("kind", "plan"), [*FAST, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)])
def test_losses_are_those_of_one_device(kind, plan):
    weights = KINDS[kind]()
    # Inputs of fp8 and ternary products are rounded, and a sum in another order may be rounded to another number.
    rtol = 2e-3 if kind in ("fp8", "ternary") else 1e-5
    np.testing.assert_allclose(loss(weights, plan, 8), loss(weights, Plan("single"), 1), rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        *((recipe, "PackedWeight") for recipe in ("ternary", "binary", "pow2", "int4(group=8)")),
        ("two_four", "TwoFourWeight"),
        ("blocks(0.5,block=8)", "BlockSparseWeight"),
        ("balanced(0.25)", "BalancedWeight"),
    ],
)
def test_weights_that_do_not_divide_raise(recipe, kind):
    weights, plan = compressed(recipe), Plan("tensor", tensor=2, data=1)
    raises(rf"plan.tensor=2 divides a matrix .* {kind} does not divide like that: set", loss, weights, plan, 2)


@pytest.mark.slow
def test_packed_tables_do_not_divide_over_stages():
    raises("plan.pipeline=2 divides a matrix of 40 x", lambda: loss(compressed("ternary"), Plan(pipeline=2, data=1), 2))


def test_groups_that_do_not_divide_raise():
    """A device would have the rows of one and a half groups."""
    with pytest.raises(InputError, match="a matrix of 24 x 16 .rows over 2 devices., and its IntegerWeight does not"):
        loss(map_matrices(in_three_groups, PARAMS), Plan("tensor", tensor=2, data=1), 2)
