"""Stand-ins for the kernels of `impl="pallas"` of experts, which run on a Hopper GPU only."""

import jax.numpy as jnp
from jax import lax

from hpnlp.ops.moe import pallas_gpu

KERNELS = "jax.experimental.pallas.ops.gpu"
COLUMNS_OF_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def replace_kernels(monkeypatch):
    """`impl="pallas"` accepts every call, and computes it by `lax.ragged_dot`."""
    monkeypatch.setattr(pallas_gpu, "limits", lambda *_: [])
    monkeypatch.setattr(f"{KERNELS}.ragged_dot_mgpu.ragged_dot", rows)
    monkeypatch.setattr(f"{KERNELS}.transposed_ragged_dot_mgpu.transposed_ragged_dot", sums)


def rows(x, stack, *, group_sizes, transpose_rhs, block_m, **_):
    """The kernel does not write rows of no expert: they are NaN here."""
    assert len(x) % block_m == 0
    y = lax.ragged_dot(x, stack.swapaxes(1, 2) if transpose_rhs else stack, group_sizes)
    return jnp.where(jnp.arange(len(x))[:, None] < jnp.sum(group_sizes), y, jnp.nan)


def sums(x, dy, *, group_sizes, **_):
    """The kernel multiplies rows of no expert by 0, which is NaN for those that are not finite."""
    return lax.ragged_dot_general(x, dy, group_sizes, COLUMNS_OF_ROWS) + 0 * jnp.sum(dy)
