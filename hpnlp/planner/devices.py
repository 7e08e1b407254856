"""What accelerators can do at best, by their makers' data sheets."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from hpnlp import measure
from hpnlp.parallel.plan import AXES
from hpnlp.planner.collectives import Collective


@dataclasses.dataclass(frozen=True)
class Device:
    """flops: FLOP/s of dense products by dtype, float32 as XLA multiplies it unless it is told otherwise. memory: bytes.
    rate: bytes a second to and from memory. near: devices that fast links join. link: bytes a second that a device sends to its
    neighbour in a ring of these; network: to devices beyond. host: from and to the host's memory. fuses: whether attention is
    one kernel. depth: of `hpnlp plan`, that compiles for it, or for what comes nearest. unplanned: so many more temporaries
    than planned, in parts of these, were found in steps compiled so, at most (experiments/results/plan-cpu.json,
    plan_tpu-cpu.json).
    """

    flops: Mapping[str, float]
    memory: float
    rate: float
    near: int
    link: float
    network: float
    host: float
    fuses: bool = True
    depth: str = "compiled"
    unplanned: float = 0.2

    def seconds(self, sent: Collective, sizes: Mapping[str, int]) -> float:
        """What a collective of a mesh of these sizes takes at least, its messages taking turns."""
        return sent.bytes / self.bandwidth(sent.axes, sizes)

    def bandwidth(self, axes: tuple[str, ...], sizes: Mapping[str, int]) -> float:
        """Bytes a second that each device sends along these axes of a mesh whose last axes are neighbours.

        Where a ring leaves the fast links, as many rings run side by side as it has devices within them, each over another
        device's network (as NCCL does).
        """
        innermost = max(AXES.index(axis) for axis in axes)
        stride = math.prod(sizes[axis] for axis in AXES[innermost + 1 :])
        span = math.prod(sizes[axis] for axis in axes) * stride
        if span <= self.near:
            return self.link
        return min(self.link, self.network * max(1, self.near // stride))


def _gpu(bf16: float, memory: float, rate: float, link: float, network: float, host: float) -> Device:
    # XLA multiplies float32 on these with TF32 products, which are half as many.
    return Device({"bfloat16": bf16, "float16": bf16, "float32": bf16 / 2}, memory, rate, 8, link, network, host)


def _tpu(bf16: float, memory: float, rate: float, near: int, link: float, network: float) -> Device:
    # XLA rounds float32 operands to bfloat16 on these.
    flops: dict[str, float] = dict.fromkeys(("bfloat16", "float16", "float32"), bf16)
    return Device(flops, memory, rate, near, link, network, host=16e9, depth="tpu", unplanned=0.65)


# NVIDIA's data sheets (SXM boards, dense products; NVLink one way), with a 400 or, A100, a 200 Gbit/s network card a GPU as in
# HGX and DGX machines. Google Cloud's TPU version pages: a ring along one axis of the torus uses two of a chip's links, 4 in
# v5e and 6 in v5p; data center network a chip: v5e's of a pod over its 256. Hosts by PCIe: 5.0 x16,
# A100 4.0 x16, TPUs taken as 3.0 x16.
DEVICES: dict[str, Device] = {
    "a100": _gpu(312e12, 80e9, 2.039e12, 300e9, 25e9, 32e9),
    "h100": _gpu(989.4e12, 80e9, 3.35e12, 450e9, 50e9, 64e9),
    "h200": _gpu(989.4e12, 141e9, 4.8e12, 450e9, 50e9, 64e9),
    "v5e": _tpu(197e12, 16e9, 819e9, 256, 100e9, 3.1e9),
    "v5p": _tpu(459e12, 95e9, 2.765e12, 6144, 200e9, 6.2e9),
}
# Of what is free, after the runtime, the libraries' workspaces and what lies between arrays.
USABLE = 0.92


def this_cpu(devices: int) -> Device:
    """One of so many pretended devices of this machine, as measured at once: a product of 1024 x 1024 and a copy of 64 MB."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        a, b = jnp.ones((1024, 1024)), jnp.ones((16 << 20,))
        product = _fastest(jax.jit(lambda a: a @ a), a)
        copied = _fastest(jax.jit(lambda b: b + 1.0), b)
    flops, rate = 2 * 1024**3 / product / devices, 2 * b.nbytes / copied / devices
    return Device(
        dict.fromkeys(("bfloat16", "float16", "float32"), flops),
        measure.machine_bytes() / devices,
        rate,
        1 << 20,
        rate,
        rate,
        rate,
        fuses=False,
    )


def _fastest(function: Callable[..., jax.Array], x: jax.Array, times: int = 5) -> float:
    jax.block_until_ready(function(x))
    best = math.inf
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(function(x))
        best = min(best, time.perf_counter() - start)
    return best
