"""Invalid masks and operands of `attend` raise errors that name the fix."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from hpnlp.ops.attention import (
    Causal,
    GlobalAt,
    Mask,
    PerHead,
    Strided,
    Where,
    Window,
    alibi,
    attend,
    bigbird,
    longformer,
    sparse_transformer_fixed,
)
from hpnlp.ops.attention.pair_bias import BiasArrays
from tests.messages import raises
from tests.ops.attention.forms import arrays

pytestmark = pytest.mark.usefixtures("symbolic_sizes")  # a type checker would raise first


def test_invalid_arguments_raise():
    for mask, options, message in (
        (PerHead((Causal(),) * 3), {}, "4 query heads"),
        (Causal(), {"dense_mask": jnp.ones((37, 37))}, "bias"),
        (Causal(), {"dense_mask": jnp.ones((36, 37), bool)}, "broadcasts"),
        (Causal(), {"bias": jnp.ones((3, 37, 37))}, "broadcasts"),
        (Causal(), {"bias": alibi(8)}, "for 8 heads, expected 4 heads"),
        (Causal(), {"bias": jnp.ones((37, 37), bool)}, "dense_mask"),
        (Causal(), {"bias": BiasArrays((jnp.ones((37, 37)),), (None,))}, "expected 4 axes"),
        (Causal(), {"soft_cap": 0.0}, "soft_cap"),
        (Causal(), {"soft_cap": float("inf")}, "soft_cap inf: expected a finite number"),
        (Where(lambda i, j: 0 <= i - j < 3), {}, "truth value.* write function"),
        (Where(lambda i: i > 3), {}, "positional argument.* write function"),
        (Where(lambda i, j: jnp.ones((3, 4), bool)), {}, "write function"),
        (Causal(), {"global_tokens": jnp.ones((2, 37))}, "global_tokens"),
        (Causal(), {"global_tokens": jnp.ones((2, 30), bool)}, "global_tokens"),
        (Causal() & ~GlobalAt((3, 37)), {}, "holds 37, but there are 37 tokens"),
        (PerHead((GlobalAt((40,)),) * 4), {}, "holds 40"),
        (jnp.ones((37, 37)), {}, "dense_mask"),
        (Causal(), {"sinks": jnp.ones(3)}, "sinks"),
    ):
        raises(message, attend, *arrays(), mask, **options)


@dataclasses.dataclass(frozen=True)
class Listed(Mask):
    places: list

    def at(self, q, k):
        return k < self.places[0]


def test_invalid_masks_raise():
    for make, message in (
        (lambda: Window(jnp.ones(3, jnp.int32)), "operand of the call"),
        (lambda: Window(2.5), "whole number"),
        (lambda: Causal().shift(0.5), "Shift.keys=0.5: expected a whole number"),
        (lambda: Strided(True), "whole number"),
        (lambda: sparse_transformer_fixed(4, 5), "Fixed.columns=5"),
        (lambda: longformer(7), "even"),
        (lambda: bigbird(4), "among"),
        (lambda: bigbird(4, 2), "odd"),
        (lambda: bigbird(4, -3, random=0), "odd"),
        (lambda: bigbird(4, 10**9 + 1, random=0), "at most 129"),
        (lambda: sparse_transformer_fixed(4, 2, heads=10**9), "at most 16384"),
        (lambda: PerHead(()), "PerHead"),
        (lambda: PerHead((Causal(),)) & PerHead((Causal(),) * 2), "as many"),
        (lambda: Where(lambda i, j: i * j).to_dense(4), "bool"),
        (lambda: Causal() and Window(3), "write & | ~"),
        (lambda: not PerHead((Causal(),)), "write & | ~"),
        (lambda: longformer(-4), "from 0 on"),
        (
            lambda: jax.jit(lambda n: attend(*arrays(), Where(lambda i, j: i - j < n)))(3),
            "that is traced: .* dense_mask",
        ),
        (lambda: attend(*arrays()[:2], jnp.ones((2, 37, 2, 0))), "at least one feature"),
        (
            lambda: attend(*arrays(), type("Plain", (Mask,), {"at": lambda self, i, j: i >= j})()),
            "Plain is not a frozen",
        ),
        (lambda: attend(*arrays(), Causal() & Listed([3])), r"Listed cannot be a key .*unhashable.* tuples"),
    ):
        raises(message, make)
