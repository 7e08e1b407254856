"""Devices that kernels need."""

from __future__ import annotations

import jax


def hopper_limits() -> list[str]:
    """Reasons why kernels for NVIDIA Hopper GPUs do not run on the default device.

    Returns:
      Short descriptions, empty where there are none.
    """
    device = jax.devices()[0]
    if device.platform != "gpu":
        return [f"platform {device.platform}"]
    capability = getattr(device, "compute_capability", "")
    # Only Hopper has wgmma, which computes the products: neither older nor newer chips do.
    return [] if capability.startswith("9.") else [f"compute capability {capability or 'unknown'}"]
