"""Pipelines: values and gradients equal those of the layers in sequence; the number of ticks is that of the schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import PartitionSpec

from hpnlp import measure
from hpnlp.model_interfaces.layer_report import LayerReport
from hpnlp.model_interfaces.model_parallel import NO_TENSOR_PARALLEL
from hpnlp.nn.attention import Context
from hpnlp.ops.attention.masks.patterns import Causal
from hpnlp.parallel import pipeline
from hpnlp.parallel.plan import Plan
from tests.contracts import once
from tests.messages import raises

LAYERS, B, T, D = 8, 16, 8, 16


def run(tensor_parallel, params, x, context, rng, chunk):
    """Layers that depend on their index and on positions, and report a sum."""

    def layer(x, slices):
        layer_params, index = slices
        y = jnp.tanh(
            x @ tensor_parallel.gather_parameters(layer_params, "all")["w"]
            + index.astype(jnp.float32)
            + 0.1 * context.positions[..., None]
        )
        return x + y, jnp.sum(y**2, axis=(0, 1))

    if tensor_parallel.regathers:
        layer = jax.checkpoint(layer, policy=tensor_parallel.remat_policy(None), prevent_cse=False)
    count = jax.tree.leaves(params)[0].shape[0]
    indices = jnp.asarray(chunk * count, jnp.uint32) + jnp.arange(count, dtype=jnp.uint32)
    x, squares = jax.lax.scan(layer, x, (params["all"], indices))
    return x, LayerReport(
        {"square": (squares.sum(), jnp.float32(x.shape[0] * len(indices)))}, {"all": {"squares": squares}}
    )


def arrays():
    draw = np.random.default_rng(0)
    w, x = draw.standard_normal((LAYERS, D, D)) / D, draw.standard_normal((B, T, D))
    positions = jnp.asarray(draw.integers(0, 5, (B, T)).astype(jnp.int32))
    return {"all": {"w": jnp.asarray(w, jnp.float32)}}, jnp.asarray(x, jnp.float32), Context(positions, None, Causal())


def with_gradients(run_all):
    def value(params, x, context):
        y, report = run_all(params, x, context)
        by_layer = jnp.arange(LAYERS, dtype=jnp.float32)[:, None]
        statistic = (report.statistics["all"]["squares"] * by_layer).sum()
        return (y**2).sum() + report.aux["square"][0] + statistic, (y, report)

    return jax.value_and_grad(value, (0, 1), has_aux=True)


def on_one_device(params, x, context):
    return run(NO_TENSOR_PARALLEL, params, x, context, None, 0)


@pytest.fixture(scope="module")
def expected_results():
    return once(with_gradients(on_one_device), *arrays())


def staged(plan, devices=8):
    layout = plan.layout({"layers": (LAYERS, "model.layers")}, jax.devices()[:devices])
    names = {"all": {"w": ("layers", "embed", "hidden")}}
    return lambda params, x, context: pipeline.run_layers(layout, names, run, params, x, context, {})


@pytest.mark.parametrize(
    "plan",
    [
        Plan("pipeline"),
        pytest.param(Plan("pipeline", microbatches=1), marks=pytest.mark.slow),
        pytest.param(Plan("pipeline", microbatches=16), marks=pytest.mark.slow),
        Plan("data", pipeline=4, microbatches=2),
        Plan("zero3", pipeline=2),
        pytest.param(Plan("data", pipeline=2, rounds=2), marks=pytest.mark.slow),
        Plan("data", pipeline=2, rounds=4, microbatches=2),
        Plan("data", pipeline=4, rounds=2, microbatches=4, recompute_stages=True),
        Plan("zero3", pipeline=2, rounds=2),
    ],
    ids=lambda plan: f"{plan.name} {plan.pipeline} {plan.microbatches} {plan.rounds}",
)
def test_stages_equal_the_layers_in_sequence(plan, expected_results):
    inputs = arrays()
    (expected, (y, report)), gradients = expected_results
    (value, (z, staged_report)), staged_gradients = once(with_gradients(staged(plan)), *inputs)
    pairs = (value, z, staged_gradients, staged_report.statistics), (expected, y, gradients, report.statistics)
    for a, b in zip(*map(jax.tree.leaves, pairs), strict=True):
        assert np.linalg.norm(a - b) <= 2e-6 * np.linalg.norm(b)
    total, weight = staged_report.aux["square"]
    assert float(total) == pytest.approx(float(report.aux["square"][0]), rel=1e-5) and float(weight) == B * LAYERS


@pytest.mark.parametrize(
    ("stages", "rounds", "count", "idle"),
    [(8, 1, 1, 7 / 8), (8, 1, 4, 7 / 11), (8, 1, 16, 7 / 23), (2, 2, 4, 1 / 9), (2, 4, 2, 1 / 9), (4, 2, 8, 3 / 19)],
)
def test_bubble_matches_the_formula(stages, rounds, count, idle):
    """(S - 1) / (R M + S - 1), forward and backward: the share of executed products that the model does not need."""
    params, x, context = arrays()
    run_all = staged(Plan("data", pipeline=stages, rounds=rounds, microbatches=count, data=1), stages)
    products = 2 * B * T * D * D * LAYERS
    executed = measure.count_flops(lambda *args: run_all(*args)[0], params, x, context)
    assert 1 - products / executed == pytest.approx(idle)
    gradients = jax.grad(lambda *args: run_all(*args)[0].sum(), (0, 1))
    executed = measure.count_flops(lambda *args: gradients(*args), *arrays())
    assert 1 - 3 * products / executed == pytest.approx(idle)


@pytest.mark.parametrize(("stages", "rounds"), [(2, 2), (4, 2), (2, 3), (4, 4), (3, 6), (4, 6)])
def test_chunks_are_sent_to_their_stages(stages, rounds):
    layout = Plan("pipeline").layout({}, jax.devices()[:stages])
    rows = jnp.arange(2 * stages * rounds, dtype=jnp.float32)
    redistribute = jax.shard_map(
        lambda held: pipeline._redistribute(held, rounds),
        mesh=layout.mesh,
        in_specs=PartitionSpec("pipeline"),
        out_specs=PartitionSpec(None, "pipeline"),
    )

    def there_and_back(rows):
        chunks, pull = jax.vjp(redistribute, rows)
        return chunks.ravel(), pull(chunks)[0]

    chunks, gradient = once(there_and_back, rows)
    np.testing.assert_array_equal(chunks, rows)
    np.testing.assert_array_equal(gradient, rows)


def kept(plan, devices=8):
    """Shapes of the arrays that one device keeps for the backward pass in every tick, stacked over ticks."""

    def loss(*args):
        return staged(plan, devices)(*args)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(*arrays()).jaxpr
    loops = [equation for equation in scans(jaxpr) if equation.params["reverse"]]
    bodies = [getattr(loop.params["jaxpr"], "jaxpr", loop.params["jaxpr"]) for loop in loops]
    stacked = [
        [x.aval.shape for x, slice_ in zip(loop.invars, body.invars, strict=True) if x.aval.ndim > slice_.aval.ndim]
        for loop, body in zip(loops, bodies, strict=True)
    ]
    return max(stacked, key=lambda shapes: max(map(len, shapes), default=0))


def scans(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        else:
            yield from (scan for inner in core.jaxprs_in_params(equation.params) for scan in scans(inner))


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("name", ["data", "zero3"])
def test_ticks_keep_no_parameters(name, rounds):
    """Parameters are the same in all ticks."""
    shapes = kept(Plan(name, pipeline=2, rounds=rounds, microbatches=2))
    assert shapes and not any(shape[-2:] in ((D, D), (D // 4, D)) for shape in shapes)


@pytest.mark.parametrize("rounds", [1, 2])
def test_recomputed_stages_keep_only_their_input(rounds):
    """All other arrays that are kept do not grow with the batch."""
    shapes = kept(Plan("data", pipeline=4, microbatches=4, rounds=rounds, recompute_stages=True))
    ticks = pipeline.ticks(4, 4, rounds)
    assert [shape for shape in shapes if len(shape) > 3] == [(ticks, B // 2 // 4, T, D)]
    more = kept(Plan("data", pipeline=4, microbatches=4, rounds=rounds))
    assert len([shape for shape in more if len(shape) > 3]) > 1


def test_number_of_microbatches():
    for plan, rows, expected in (
        (Plan("pipeline"), 16, 16),
        (Plan("pipeline"), 48, 24),
        (Plan("3d"), 32, 8),
        (Plan("3d"), 6, 3),
        (Plan("3d", rounds=2), 12, 6),
        (Plan(), 16, 1),
    ):
        assert pipeline.microbatches(plan.layout({"mlp": (64, "")}), rows) == expected


def test_indivisible_microbatches_raise():
    for fields, rows, message in (
        ({"microbatches": 3}, 16, "plan.microbatches=3 does not divide the 8 sequences that each device has"),
        ({"microbatches": 3, "rounds": 2}, 12, "plan.microbatches=3 is not a multiple of plan.pipeline=2"),
        ({"rounds": 2}, 10, "5 sequences per device and batch are not a multiple of plan.pipeline=2, as plan.rounds=2"),
    ):
        layout = Plan("3d", **fields).layout({"mlp": (64, "")})
        raises(message, pipeline.microbatches, layout, rows)
