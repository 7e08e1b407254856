"""FLOPs of a training step by part of the model: hand formulas, also under rematerialisation and custom derivatives."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpnlp.cost.flop_count import count_flops, flops_by_part
from hpnlp.cost.parts import OTHER, PARTS, operation_part, part, percentages, shares
from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.rnn import RNN, RNNConfig
from hpnlp.parallel.plan import Plan
from hpnlp.planner.collectives import trace
from hpnlp.planner.jaxpr.jaxpr_cost import program_cost
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from tests.messages import raises

B, T, D, V, F, LAYERS = 2, 16, 32, 264, 48, 3
SIZES = {"layers": LAYERS, "dim": D, "heads": 4, "kv_heads": 2, "mlp_dim": F, "vocab": V, "unroll": 1}
# Products of a training step: one forward, two backward.
OUTPUT = 3 * 2 * B * T * D * V
PROJECTIONS = LAYERS * 3 * 2 * B * T * (2 * D * D + 2 * D * D // 2)
FEED_FORWARD = LAYERS * 3 * 2 * B * T * 3 * D * F


def trainer_of(remat="none", optimizer="adamw", **fields):
    config = LMConfig(**{**SIZES, **fields})
    optimizer = OptimizerConfig(name=optimizer)
    return make_trainer(LM(config), optimizer, Plan("single", remat=remat), steps=10, devices=1)


def test_parts_of_a_training_step_have_the_flops_of_the_formulas():
    """The layers run in a loop, so that gradients are the transposed body of another loop."""
    trainer = trainer_of()
    flops = trainer.flops_by_part(B, T)
    assert (flops["output"], flops["projections"], flops["feed_forward"]) == (OUTPUT, PROJECTIONS, FEED_FORWARD)
    # Scores and sums of values, which may be computed for whole blocks of queries and keys.
    assert flops["mixing"] >= LAYERS * 3 * 2 * 2 * B * T * T * D
    assert flops["norms"] == (2 * LAYERS + 1) * 2 * B * T * D  # gradients of scales are sums over tokens, as products
    assert flops.keys() <= PARTS.keys()  # nothing is outside of all parts
    assert sum(flops.values()) == trainer.flops(B, T)
    assert trainer_of(unroll=0).flops_by_part(B, T) == flops
    of_muon = trainer_of(optimizer="muon").flops_by_part(B, T)
    assert of_muon.pop("optimizer") > 0 and of_muon == flops


@pytest.mark.parametrize(
    ("fields", "feed_forward"),
    [
        ({"remat": "full"}, FEED_FORWARD * 11 // 9),  # the down projection's result is not needed again
        ({"residual": "reversible"}, FEED_FORWARD * 4 // 3),
    ],
    ids=["rematerialised", "reversible"],
)
def test_recomputation_counts_with_the_part_that_is_recomputed(fields, feed_forward):
    flops = trainer_of(**fields).flops_by_part(B, T)
    assert flops["feed_forward"] == feed_forward
    assert flops["projections"] == PROJECTIONS * 4 // 3
    assert flops["output"] == OUTPUT and flops.keys() <= PARTS.keys()


@pytest.mark.parametrize("mixer", ["window(4)", "gated_delta,full"])
def test_plan_and_count_agree_by_part(mixer):
    trainer = trainer_of(mixer=mixer, layers=2)
    program = program_cost(trace(trainer, B, T).jaxpr, donated=True)
    planned = {name: cost.flops for name, cost in program.by_part().items() if cost.flops}
    assert planned == {name: count for name, count in trainer.flops_by_part(B, T).items() if count}
    parameters = sum(x.size for x in jax.tree.leaves(trainer.state_shapes.params))
    # AdamW reads parameters, gradients and two moments, and writes all but the gradients; the norm reads the gradients. The
    # plan counts what several results are computed from once for each of them.
    assert 8 <= program.by_part()["optimizer"].bytes / (4 * parameters) <= 16
    assert sum(cost.bytes for cost in program.by_part().values()) == pytest.approx(program.bytes)


def test_recurrent_layers_are_mixing():
    config = RNNConfig(cells="lstm(32)", vocab=V, embed_dim=D)
    trainer = make_trainer(RNN(config), OptimizerConfig(), Plan("single"), steps=10, devices=1)
    flops = trainer.flops_by_part(B, T)
    assert flops["output"] == OUTPUT and flops["mixing"] == 3 * 2 * B * T * 4 * 32 * (D + 32)
    assert flops.keys() <= PARTS.keys()


def test_innermost_scope_counts_also_in_derivatives_and_calls():
    @jax.custom_vjp
    def product(x):
        return x @ x

    product.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))

    @jax.jit
    def inner(x):
        with part("norms"):
            return product(x)

    def function(x):
        with part("output"):
            y = x @ x
            return jnp.sum(inner(y))

    x, size = jnp.ones((4, 4)), 2 * 4**3
    assert flops_by_part(jax.grad(function), x) == {"output": 3 * size, "norms": 3 * size}
    assert flops_by_part(lambda x: inner(x) @ x, x) == {"norms": size, "": size}
    looped = lambda x: jax.lax.fori_loop(0, 5, lambda _, x: inner(x) @ x, x)  # noqa: E731
    with part("mixing"):
        assert flops_by_part(lambda x: part("optimizer")(looped)(x), x) == {"norms": 5 * size, "optimizer": 5 * size}
    assert count_flops(looped, x) == 10 * size
    assert str(jax.make_jaxpr(looped)(x)) == str(jax.make_jaxpr(part("output")(looped))(x))


def test_operations_of_compiled_programs_have_the_names():
    assert operation_part("jit(step)/transpose(jvp(part_output))/dot_general") == "output"
    assert operation_part("jit(step)/part_projections/part_norms/mul") == "norms"
    assert operation_part("jit(step)/part_of_speech/counterpart_norms/mul") == ""
    function = jax.jit(jax.grad(lambda x: jnp.sum(part("feed_forward")(jnp.matmul)(x, x))))
    text = function.lower(jnp.ones((4, 4))).compile().as_text()
    assert any(operation_part(line) == "feed_forward" for line in text.splitlines() if " dot(" in line)
    raises("part 'attention': expected one of embedding, ", part, "attention")


@given(st.dictionaries(st.sampled_from([*PARTS, ""]), st.floats(0, 1e18), max_size=8))
def test_shares_sum_to_all(amounts):
    by_part = shares(amounts)
    assert list(by_part) == [*PARTS, OTHER]
    total = 1 if any(amounts.values()) else 0
    assert sum(by_part.values()) == pytest.approx(total)
    rounded = percentages(by_part)
    assert sum(rounded.values()) == pytest.approx(100 * total)
    assert all(abs(rounded[name] - 100 * share) < 0.1 + 1e-6 for name, share in by_part.items())
