"""Order of layers in stacks against a list of layers."""

import jax
import numpy as np
import pytest

from hpnlp.ops.helpers.stacks import StackOrder, layer_count, single_stack


@pytest.mark.parametrize("names", ["a", "aa", "ab", "aab", "abca"])
@pytest.mark.parametrize("count", [4, 7, 8])
def test_layers_are_found_in_their_stacks(names, count):
    order = StackOrder(tuple(names))
    layers = [{"w": np.full(2, i)} for i in range(count)]
    stacks = {
        name: jax.tree.map(lambda *leaves: np.stack(leaves), *(layers[i] for i in order.members(name, count)))
        for name in order.stack_names
    }
    assert layer_count(stacks) == count
    periods, remaining = divmod(count, order.period)
    by_period = order.by_period(stacks, periods)
    last_order, last = order.remaining(stacks, periods, remaining)
    for i in range(count):
        period, form = divmod(i, order.period)
        np.testing.assert_array_equal(order.layer(stacks, i)["w"], layers[i]["w"])
        if period < periods:
            slices = jax.tree.map(lambda leaf, p=period: leaf[p], by_period)
            np.testing.assert_array_equal(order.layer_of_period(slices, form)["w"], layers[i]["w"])
            whole = order.period_of_layers([order.layer_of_period(slices, f) for f in range(order.period)])
            jax.tree.map(np.testing.assert_array_equal, whole, slices)
        else:
            np.testing.assert_array_equal(last_order.layer(last, form)["w"], layers[i]["w"])


def test_a_single_stack_has_no_name_in_the_tree():
    stack = {"w": np.zeros(3)}
    assert single_stack(2).split(stack) == {"all": stack} and single_stack(2).join({"all": stack}) is stack
    several = {"a": stack, "b": stack}
    assert StackOrder(("b", "a")).split(several) == several == StackOrder(("b", "a")).join(several)
