"""Layers in stages: the same function, its gradients, and the ticks that the schedule promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import PartitionSpec

from hpnlp import measure
from hpnlp.nn.attention import Context
from hpnlp.ops.attention.masks.patterns import Causal
from hpnlp.parallel import pipeline
from hpnlp.parallel.plan import Plan
from hpnlp.types import NO_TENSOR_PARALLEL, InputError
from tests.contracts import once

LAYERS, B, T, D = 8, 16, 8, 16


def run(tensor_parallel, params, x, context, rng, first):
    """Layers that know their number, report, and differ with the row's positions."""

    def layer(x, slices):
        own, number = slices
        y = jnp.tanh(
            x @ tensor_parallel.gather_parameters(own)["w"]
            + number.astype(jnp.float32)
            + 0.1 * context.positions[..., None]
        )
        return x + y, jnp.sum(y**2)

    if tensor_parallel.regathers:
        layer = jax.checkpoint(layer, policy=tensor_parallel.remat_policy(None), prevent_cse=False)
    numbers = first + jnp.arange(jax.tree.leaves(params)[0].shape[0], dtype=jnp.uint32)
    x, squares = jax.lax.scan(layer, x, (params, numbers))
    return x, {"square": (squares.sum(), jnp.float32(x.shape[0] * len(numbers)))}


def arrays():
    draw = np.random.default_rng(0)
    w, x = draw.standard_normal((LAYERS, D, D)) / D, draw.standard_normal((B, T, D))
    positions = jnp.asarray(draw.integers(0, 5, (B, T)), jnp.int32)
    return {"w": jnp.asarray(w, jnp.float32)}, jnp.asarray(x, jnp.float32), Context(positions, None, Causal())


def with_gradients(through):
    def value(params, x, context):
        y, aux = through(params, x, context)
        return (y**2).sum() + aux["square"][0], (y, aux)

    return jax.value_and_grad(value, (0, 1), has_aux=True)


def staged(plan, devices=8):
    layout = plan.layout({"layers": (LAYERS, "model.layers")}, jax.devices()[:devices])
    names = {"w": ("layers", "embed", "hidden")}
    return lambda params, x, context: pipeline.through(layout, names, run, params, x, context, None)


@pytest.mark.parametrize(
    "plan",
    [
        Plan("pipeline"),
        Plan("pipeline", microbatches=1),
        Plan("pipeline", microbatches=16),
        Plan("data", pipeline=4, microbatches=2),
        Plan("zero3", pipeline=2),
        Plan("data", pipeline=2, rounds=2),
        Plan("data", pipeline=2, rounds=4, microbatches=2),
        Plan("data", pipeline=4, rounds=2, microbatches=4, recompute_stages=True),
        Plan("zero3", pipeline=2, rounds=2),
    ],
    ids=lambda plan: f"{plan.name} {plan.pipeline} {plan.microbatches} {plan.rounds}",
)
def test_stages_are_the_layers(plan):
    given = arrays()
    alone = lambda params, x, context: run(NO_TENSOR_PARALLEL, params, x, context, None, jnp.uint32(0))  # noqa: E731
    (expected, (y, aux)), gradients = once(with_gradients(alone), *given)
    (found, (z, reports)), others = once(with_gradients(staged(plan)), *given)
    for a, b in zip(jax.tree.leaves((found, z, others)), jax.tree.leaves((expected, y, gradients)), strict=True):
        assert np.linalg.norm(a - b) <= 2e-6 * np.linalg.norm(b)
    total, weight = reports["square"]
    assert float(total) == pytest.approx(float(aux["square"][0]), rel=1e-5) and float(weight) == B * LAYERS


@pytest.mark.parametrize(
    ("stages", "rounds", "count", "idle"),
    [(8, 1, 1, 7 / 8), (8, 1, 4, 7 / 11), (8, 1, 16, 7 / 23), (2, 2, 4, 1 / 9), (2, 4, 2, 1 / 9), (4, 2, 8, 3 / 19)],
)
def test_the_idle_part_of_a_pass_is_as_the_schedule_says(stages, rounds, count, idle):
    """(S - 1) / (R M + S - 1), forward and backward: of products that are made, those that are not of the model."""
    params, x, context = arrays()
    through = staged(Plan("data", pipeline=stages, rounds=rounds, microbatches=count, data=1), stages)
    products = 2 * B * T * D * D * LAYERS
    made = measure.count_flops(lambda *given: through(*given)[0], params, x, context)
    assert 1 - products / made == pytest.approx(idle)
    both = measure.count_flops(lambda *given: jax.grad(lambda *g: through(*g)[0].sum(), (0, 1))(*given), *arrays())
    assert 1 - 3 * products / both == pytest.approx(idle)


@pytest.mark.parametrize(("stages", "rounds"), [(2, 2), (4, 2), (2, 3), (4, 4), (3, 6), (4, 6)])
def test_chunks_are_dealt_to_their_stages(stages, rounds):
    layout = Plan("pipeline").layout({}, jax.devices()[:stages])
    rows = jnp.arange(2 * stages * rounds, dtype=jnp.float32)
    of = PartitionSpec("pipeline")
    dealt = jax.shard_map(
        lambda held: pipeline._dealt(held, rounds),
        mesh=layout.mesh,
        in_specs=of,
        out_specs=PartitionSpec(None, "pipeline"),
    )
    given, back = jax.vjp(dealt, rows)
    np.testing.assert_array_equal(given.ravel(), rows)
    np.testing.assert_array_equal(back(given)[0], rows)


def kept(plan, devices=8):
    """Shapes of what one device keeps for the backward pass, tick by tick."""
    loss = lambda *given: staged(plan, devices)(*given)[0].sum()  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(loss))(*arrays()).jaxpr
    loops = [equation for equation in scans(jaxpr) if equation.params["reverse"]]
    bodies = [getattr(loop.params["jaxpr"], "jaxpr", loop.params["jaxpr"]) for loop in loops]
    stacked = [
        [x.aval.shape for x, own in zip(loop.invars, body.invars, strict=True) if x.aval.ndim > own.aval.ndim]
        for loop, body in zip(loops, bodies, strict=True)
    ]
    return max(stacked, key=lambda shapes: max(map(len, shapes), default=0))


def scans(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        else:
            yield from (found for inner in core.jaxprs_in_params(equation.params) for found in scans(inner))


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("name", ["data", "zero3"])
def test_no_tick_keeps_parameters(name, rounds):
    """Which are the same in all of them."""
    shapes = kept(Plan(name, pipeline=2, rounds=rounds, microbatches=2))
    assert shapes and not any(shape[-2:] in ((D, D), (D // 4, D)) for shape in shapes)


@pytest.mark.parametrize("rounds", [1, 2])
def test_stages_that_are_run_again_keep_their_input(rounds):
    """And what does not grow with rows."""
    shapes = kept(Plan("data", pipeline=4, microbatches=4, rounds=rounds, recompute_stages=True))
    lasting = pipeline.ticks(4, 4, rounds)
    assert [shape for shape in shapes if len(shape) > 3] == [(lasting, B // 2 // 4, T, D)]
    more = kept(Plan("data", pipeline=4, microbatches=4, rounds=rounds))
    assert len([shape for shape in more if len(shape) > 3]) > 1


@pytest.mark.parametrize(
    ("plan", "rows", "expected"),
    [
        (Plan("pipeline"), 16, 16),
        (Plan("pipeline"), 48, 24),
        (Plan("3d"), 32, 8),
        (Plan("3d"), 6, 3),
        (Plan("3d", rounds=2), 12, 6),
        (Plan(), 16, 1),
    ],
)
def test_microbatches_that_are_chosen(plan, rows, expected):
    assert pipeline.microbatches(plan.layout({"mlp": (64, "")}), rows) == expected


@pytest.mark.parametrize(
    ("fields", "rows", "message"),
    [
        ({"microbatches": 3}, 16, "plan.microbatches=3 do not divide the 8 rows that a device has"),
        ({"microbatches": 3, "rounds": 2}, 12, "plan.microbatches=3 are not a multiple of plan.pipeline=2, by which"),
        ({"rounds": 2}, 10, "the 5 rows that a device has of a batch are not a multiple of plan.pipeline=2, by which"),
    ],
)
def test_microbatches_that_do_not_divide(fields, rows, message):
    layout = Plan("3d", **fields).layout({"mlp": (64, "")})
    with pytest.raises(InputError, match=message):
        pipeline.microbatches(layout, rows)
