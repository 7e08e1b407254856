"""Grouped products by the GPU kernels in Pallas' interpreter on the CPU, against loops in float64.

`test_pallas_gpu.py` runs these tests in a process of its own. Alone: python -m pytest -m slow PATH_OF_THIS_FILE
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hpnlp.ops.attention.kernels.mosaic import interpreter
from hpnlp.ops.moe.pallas_gpu import grouped_product

pytestmark = [
    pytest.mark.slow,  # the interpreter is slow
    pytest.mark.skipif(not hasattr(plgpu, "transpose_ref"), reason="transposed operands are replaced for jax 0.10"),
]
kernel, wgmma = plgpu.kernel, plgpu.wgmma


class Transposed:
    """A reference to a matrix in shared memory, read with its axes exchanged."""

    def __init__(self, ref, permutation):
        assert permutation == (1, 0)
        self.ref = ref


def product(sums, left, right):
    """The interpreter's products read no transposed operands: these are copied."""
    transposed = next((side for side in (left, right) if isinstance(side, Transposed)), None)
    if transposed is None:
        wgmma(sums, left, right)
        return

    def body(copy):
        copy[...] = transposed.ref[...].T
        wgmma(sums, *(copy if side is transposed else side for side in (left, right)))

    pl.run_scoped(body, plgpu.SMEM(transposed.ref.shape[::-1], transposed.ref.dtype))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Kernels run in the interpreter, on three processors in place of 132; it has no register layouts."""
    monkeypatch.setattr(plgpu, "kernel", lambda *a, **k: kernel(*a, interpret=interpreter(), **{**k, "grid": (3,)}))
    monkeypatch.setattr(plgpu, "transpose_ref", Transposed)
    monkeypatch.setattr(plgpu, "wgmma", product)
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, layout: x)


@pytest.mark.parametrize("counts", [(30, 0, 70), (0, 128, 0), (0, 0, 0)], ids=str)
def test_product_and_gradients_match_loops(monkeypatch, counts):
    draw, used = np.random.default_rng(0), sum(counts)
    x, stack, dy = (jnp.asarray(draw.standard_normal(s), "bfloat16") for s in ((128, 128), (3, 128, 64), (128, 64)))
    devices = jax.devices
    monkeypatch.setattr(jax, "devices", lambda *a: devices(*a) if a else [types.SimpleNamespace(core_count=3)])
    y, pull = jax.vjp(lambda *a: grouped_product(*a, jnp.asarray(counts, jnp.int32)), x, stack)
    dx, d_stack = pull(jnp.where(jnp.arange(128)[:, None] < used, dy, 0))
    expert = np.repeat(np.arange(3), counts)
    x, stack, dy = (np.asarray(array, np.float64) for array in (x, stack, dy))
    expected = np.zeros((128, 64)), np.zeros((128, 128)), np.zeros((3, 128, 64))
    for row, e in enumerate(expert):
        expected[0][row], expected[1][row] = x[row] @ stack[e], stack[e] @ dy[row]
        expected[2][e] += np.outer(x[row], dy[row])
    for a, b in zip((y, dx, d_stack), expected, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(a, np.float64), b, atol=1e-6, rtol=2**-7)
