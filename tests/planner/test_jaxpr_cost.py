"""Peak memory, operations and roofline of small programs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from hpnlp.planner.jaxpr.jaxpr_cost import program_cost


def cost_of(function, *shapes, **options):
    arguments = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return program_cost(jax.jit(function).trace(*arguments).jaxpr, **options)


def test_elementwise_results_take_no_memory():
    cost = cost_of(lambda x, w: jnp.sin(x @ w + 1.0) @ w, (8, 4), (4, 4))
    assert cost.peak == 2 * 8 * 4 * 4  # the sine takes the buffer of the first product
    assert cost.flops == 2 * 2 * 8 * 4 * 4
    assert cost_of(lambda x: x * 2 + 1, (8,)).peak == 8 * 4
    assert cost_of(lambda x: x * 2 + 1, (8,), donated=True).peak == 0


def test_loops_store_their_stacks_and_carry():
    def run(x, w):
        return lax.scan(lambda x, _: (x @ w, x), x, None, length=10)

    cost = cost_of(run, (8, 4), (4, 4))
    assert cost.flops == 10 * 2 * 8 * 4 * 4
    assert cost.peak == pytest.approx((10 + 2) * 8 * 4 * 4, rel=0.1)


def test_operations_of_nested_loops_count_with_both_lengths():
    def run(x, w):
        return lax.fori_loop(0, 3, lambda _, x: lax.fori_loop(0, 5, lambda _, x: x @ w, x), x)

    assert cost_of(run, (8, 4), (4, 4)).flops == 3 * 5 * 2 * 8 * 4 * 4


def test_cond_counts_its_most_expensive_branch():
    cost = cost_of(lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x), (4, 4))
    assert cost.flops == 2 * 2 * 4**3


def test_unrolled_loops_store_no_stacks():
    """The outputs of an iteration that another loop reads are stored once, with all that is computed from them."""

    def run(x, w, unroll):
        x, stacks = lax.scan(lambda x, _: (x @ w, (x, jnp.cos(x) * 2, x + 1)), x, None, length=10, unroll=unroll)
        return lax.scan(lambda y, xs: (y @ w + sum(xs), None), x, stacks, length=10, unroll=unroll, reverse=True)[0]

    rolled, unrolled = (cost_of(functools.partial(run, unroll=unroll), (64, 4), (4, 4)) for unroll in (1, 10))
    assert unrolled.flops == rolled.flops
    size = 64 * 4 * 4
    assert rolled.peak >= 30 * size
    assert 10 * size <= unrolled.peak <= 14 * size


def test_time_is_the_roofline_of_each_operation():
    cost = cost_of(lambda x, w: x @ w, (8, 4), (4, 4))
    moved = (8 * 4 + 4 * 4 + 8 * 4) * 4
    assert cost.seconds({"float32": 1.0}, 1e9, False) == 2 * 8 * 4 * 4
    assert cost.seconds({"float32": 1e9}, 1.0, False) == moved


def test_products_run_at_the_rate_of_their_dtype():
    half, single = jax.ShapeDtypeStruct((4, 4), "bfloat16"), jax.ShapeDtypeStruct((4, 4), "float32")
    cost = program_cost(jax.jit(lambda x, y: (x @ x, y @ y @ y)).trace(half, single).jaxpr)
    assert cost.flops_by_dtype == {"float32": 2 * 2 * 4**3, "bfloat16": 2 * 4**3}
    assert cost.seconds({"float32": 1.0, "bfloat16": 2.0}, 1e9, False) == 2 * 2 * 4**3 + 4**3
