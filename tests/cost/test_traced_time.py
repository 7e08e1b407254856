"""Time by part: nested and parallel operations by hand, names of a compiled program, and a traced program with a known part."""

import jax
import jax.numpy as jnp
import pytest

from hpnlp.cost.parts import OTHER, part
from hpnlp.cost.traced_time import COPIES, Span, divide, exclusive, operation_parts, trace
from hpnlp.types import InputError


def test_a_loop_has_the_time_that_its_operations_leave():
    spans = [Span(0, 10, "while"), Span(1, 3, "a"), Span(3, 4, "b"), Span(6, 9, "a"), Span(12, 13, "b")]
    assert exclusive(reversed(spans)) == [
        Span(0, 1, "while"), Span(1, 3, "a"), Span(3, 4, "b"), Span(4, 6, "while"), Span(6, 9, "a"), Span(9, 10, "while"),
        Span(12, 13, "b"),
    ]  # fmt: skip


def test_times_of_threads_side_by_side_are_shared_and_sum_to_the_whole():
    parts = {"a": "mixing", "b": "output", "c": "mixing"}
    threads = [[Span(0, 4, "a"), Span(6, 7, "c")], [Span(2, 6, "b"), Span(0, 100, "end: a")]]
    time = divide(threads, parts, calls=2)
    assert time.seconds == {"mixing": (2 + 1 + 1) / 2, "output": (1 + 2) / 2}
    assert time.together == {"mixing": 3 / 2, "output": 2 / 2, "mixing+output": 2 / 2} and time.idle == 0
    assert time.total == 7 / 2 and time.coverage == 1
    assert time.bound("mixing") == pytest.approx(7 / 4) and time.bound("norms") == 1
    assert time.bound("mixing", "output") == float("inf")
    gap = divide([[Span(0, 1, "a"), Span(3, 4, "a")]], parts)
    assert gap.idle == 2 and gap.coverage == 0.5


def test_operations_have_the_part_of_their_name_or_of_their_fusion():
    text = """
%fused (p: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %x = f32[] add(%p, %p), metadata={op_name="jit(f)/part_mixing/add"}
  ROOT %y = f32[] add(%x, %p), metadata={op_name="jit(f)/part_mixing/part_norms/add"}
  %z = f32[] add(%x, %p), metadata={op_name="jit(f)/part_mixing/mul"}
}

ENTRY %main (a: f32[]) -> f32[] {
  %a = f32[] parameter(0), metadata={op_name="params"}
  %copy.1 = f32[] copy(%a)
  ROOT %fusion.3 = f32[] fusion(%copy.1), kind=kLoop, calls=%fused
}
"""
    parts = operation_parts(text)
    assert (parts["a"], parts["copy.1"], parts["fusion.3"], parts["y"]) == (OTHER, COPIES, "mixing", "norms")


def test_a_trace_finds_the_part_that_takes_the_time():
    def program(x):
        with part("feed_forward"):
            y = x @ x @ x @ x
        with part("norms"):
            return y / jnp.sum(y)

    x = jnp.ones((512, 512))
    compiled = jax.jit(program).lower(x).compile()
    time = trace(lambda: compiled(x), compiled.as_text(), calls=3)
    assert max(time.seconds, key=time.seconds.__getitem__) == "feed_forward" and 0 < time.coverage <= 1
    with pytest.raises(InputError, match="holds no operation of the program"):
        trace(lambda: compiled(x), "")
