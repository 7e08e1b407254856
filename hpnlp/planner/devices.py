"""Peak rates and memory of accelerators, from their makers' data sheets."""

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
    """An accelerator and its links."""

    flops: Mapping[str, float]  #: FLOP/s of dense products by dtype; float32 as XLA multiplies it by default
    memory: float  #: bytes of device memory
    memory_bandwidth: float  #: bytes per second from and to device memory
    fast_domain: int  #: number of devices that fast links join
    link_bandwidth: float  #: bytes per second to the neighbour in a ring within the fast domain
    network_bandwidth: float  #: bytes per second to devices outside the fast domain
    host_bandwidth: float  #: bytes per second from and to host memory
    fuses_attention: bool = True  #: whether attention is one kernel
    depth: str = "compiled"  #: value of `hpnlp plan --depth` that compiles for this device or the most similar one
    #: Largest measured excess of compiled over planned temporaries, relative to those planned
    #: (experiments/results/plan-cpu.json, plan_tpu-cpu.json).
    temporaries_error: float = 0.2

    def seconds(self, collective: Collective, sizes: Mapping[str, int]) -> float:
        """Lower bound of the time of a collective, whose messages are sent one after the other.

        Args:
          collective: The collective, with all its runs.
          sizes: Number of devices of each mesh axis.

        Returns:
          Seconds in a step.
        """
        return collective.bytes / self.collective_bandwidth(collective.axes, sizes)

    def collective_bandwidth(self, axes: tuple[str, ...], sizes: Mapping[str, int]) -> float:
        """Bytes per second that each device sends along mesh axes; neighbours along the last axis of a mesh are adjacent.

        Where a ring leaves the fast links, as many rings run side by side as it has devices within them, and each uses
        another device's network card (as NCCL does).

        Args:
          axes: Mesh axes of the collective.
          sizes: Number of devices of each mesh axis.

        Returns:
          At most the bandwidth of a fast link.
        """
        innermost = max(AXES.index(axis) for axis in axes)
        stride = math.prod(sizes[axis] for axis in AXES[innermost + 1 :])
        span = math.prod(sizes[axis] for axis in axes) * stride
        if span <= self.fast_domain:
            return self.link_bandwidth
        return min(self.link_bandwidth, self.network_bandwidth * max(1, self.fast_domain // stride))


def _gpu(bf16: float, memory: float, memory_bandwidth: float, link: float, network: float, host: float) -> Device:
    # XLA multiplies float32 on NVIDIA GPUs in TF32, at half the rate of bfloat16.
    flops = {"bfloat16": bf16, "float16": bf16, "float32": bf16 / 2}
    return Device(flops, memory, memory_bandwidth, 8, link, network, host)


def _tpu(bf16: float, memory: float, memory_bandwidth: float, chips: int, link: float, network: float) -> Device:
    # XLA rounds the float32 operands of products to bfloat16 on TPUs.
    flops: dict[str, float] = dict.fromkeys(("bfloat16", "float16", "float32"), bf16)
    return Device(
        flops, memory, memory_bandwidth, chips, link, network, host_bandwidth=16e9, depth="tpu", temporaries_error=0.65
    )


# NVIDIA's data sheets: SXM boards, dense products, NVLink in one direction; one network card of 400 Gbit/s per GPU (A100: 200
# Gbit/s), as in HGX and DGX machines. Google Cloud's TPU version pages: a ring along one axis of the torus uses two of a chip's
# links, of which v5e has 4 and v5p 6; the data center network of a v5e pod is divided by its 256 chips. Host memory over PCIe
# 5.0 x16, A100 4.0 x16; TPUs are taken to have 3.0 x16.
DEVICES: dict[str, Device] = {
    "a100": _gpu(312e12, 80e9, 2.039e12, 300e9, 25e9, 32e9),
    "h100": _gpu(989.4e12, 80e9, 3.35e12, 450e9, 50e9, 64e9),
    "h200": _gpu(989.4e12, 141e9, 4.8e12, 450e9, 50e9, 64e9),
    "v5e": _tpu(197e12, 16e9, 819e9, 256, 100e9, 3.1e9),
    "v5p": _tpu(459e12, 95e9, 2.765e12, 6144, 200e9, 6.2e9),
}
# Share of a device's memory that arrays can use; the runtime, workspaces of libraries and fragmentation take the remainder.
USABLE = 0.92


def this_cpu(devices: int) -> Device:
    """One simulated device of this machine, measured with products of 1024 x 1024 and a copy of 64 MB.

    Args:
      devices: Number of simulated devices that share the machine.

    Returns:
      A device with a share of the machine's memory and rates.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        a, b = jnp.ones((1024, 1024)), jnp.ones((16 << 20,))
        product = jax.jit(lambda a: jnp.dot(a, a, preferred_element_type=jnp.float32))
        seconds = {dtype: _fastest(product, a.astype(dtype)) for dtype in ("float32", "bfloat16")}
        copy_seconds = _fastest(jax.jit(lambda b: b + 1.0), b)
    flops = {dtype: 2 * 1024**3 / s / devices for dtype, s in seconds.items()}
    bandwidth = 2 * b.nbytes / copy_seconds / devices
    return Device(
        flops | {"float16": flops["float32"]},
        measure.machine_bytes() / devices,
        memory_bandwidth=bandwidth,
        fast_domain=1 << 20,
        link_bandwidth=bandwidth,
        network_bandwidth=bandwidth,
        host_bandwidth=bandwidth,
        fuses_attention=False,
    )


def _fastest(function: Callable[..., jax.Array], x: jax.Array, times: int = 5) -> float:
    """Seconds of the fastest of several calls, after one to compile."""
    jax.block_until_ready(function(x))
    fastest = math.inf
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(function(x))
        fastest = min(fastest, time.perf_counter() - start)
    return fastest
