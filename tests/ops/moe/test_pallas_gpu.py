"""Experts on Hopper GPUs: limits, FLOPs, programs lowered for a GPU, and the kernels in Pallas' interpreter on the CPU."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp import measure
from hpnlp.ops import moe
from hpnlp.ops.moe import pallas_gpu
from tests.messages import raises
from tests.ops.interpreted import run_interpreted

HOPPER = types.SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)


def expert_gradients(x, logits, experts, impl="auto"):
    routing = moe.route(logits, 2, moe.Gates(), jnp.ones(len(x), bool))
    loss = lambda x, experts: jnp.sum(moe.expert_mlp(x, routing, experts, jax.nn.silu, impl))  # noqa: E731
    return jax.value_and_grad(loss, (0, 1))(x, experts)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [(), (2,)], ids=["", "vmap"])
def test_gradient_lowers_for_a_gpu_with_nine_kernels_and_the_flops_of_its_assignments(monkeypatch, batch):
    rows, dim, hidden, experts = 100, 192, 128, 4
    x = jax.ShapeDtypeStruct((*batch, rows, dim), jnp.bfloat16)
    logits = jax.ShapeDtypeStruct((*batch, rows, experts), jnp.float32)
    up, down = (jax.ShapeDtypeStruct((experts, *shape), jnp.float32) for shape in ((dim, hidden), (hidden, dim)))
    stacks = {"up": up, "gate": up, "down": down}
    gradients = jax.vmap(expert_gradients, (0, 0, None)) if batch else expert_gradients
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        patch.setattr(jax, "devices", lambda *_: [HOPPER])
        traced = jax.jit(gradients).trace(x, logits, stacks)
        flops = measure.count_flops(gradients, x, logits, stacks)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.custom_call @mosaic_gpu_v2") == 9
    assert flops == math.prod(batch) * 9 * 2 * 256 * dim * hidden  # the rows are padded to a multiple of 128


def test_unsupported_calls_are_named(monkeypatch):
    assert pallas_gpu.limits(8, 4, (64, 64), jnp.bfloat16.dtype) == ["platform cpu"]
    x, stacks = jnp.ones((8, 64)), {"up": jnp.ones((4, 64, 72)), "down": jnp.ones((4, 72, 64))}
    raises(r"support platform cpu, dtype float32, size 72", expert_gradients, x, jnp.zeros((8, 4)), stacks, "pallas")
    for device, reasons in ((HOPPER, []), (types.SimpleNamespace(platform="gpu"), ["compute capability unknown"])):
        monkeypatch.setattr(jax, "devices", lambda *_, device=device: [device])
        assert pallas_gpu.limits(8, 4, (64, 640), jnp.float16.dtype) == reasons
    monkeypatch.setattr(jax, "devices", lambda *_: [HOPPER])
    assert pallas_gpu.limits(0, 129, (64,), np.dtype("bfloat16")) == ["129 experts, at most 128", "0 assignments"]


@pytest.mark.slow
def test_interpreted_kernels_match_loops():
    run_interpreted(__file__)
