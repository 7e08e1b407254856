"""Devices of a machine as environment variables and device files show them."""

from __future__ import annotations

import glob
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence

from hpnlp.errors import InputError


def simulated(environment: Mapping[str, str]) -> int:
    """Number of CPU devices that JAX simulates in a process.

    Args:
      environment: Environment variables.

    Returns:
      The number; 0 if they are not set.
    """
    devices = re.findall(r"--xla_force_host_platform_device_count=(\d+)", environment.get("XLA_FLAGS", ""))[-1:]
    devices += re.findall(r"^\d+$", environment.get("JAX_NUM_CPU_DEVICES", ""))
    return max(map(int, devices), default=0)


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """NVIDIA GPUs that processes of this machine may use.

    Args:
      environment: Environment variables.

    Returns:
      Values for CUDA_VISIBLE_DEVICES; empty without GPUs, or where JAX_PLATFORMS leaves them out.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [name for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    return sorted((path.removeprefix("/dev/nvidia") for path in glob.glob("/dev/nvidia[0-9]*")), key=int)


def share(gpus: Sequence[str], process: int, processes: int) -> dict[str, str]:
    """Environment variables by which a process sees its part of the GPUs.

    Args:
      gpus: All GPUs, see `visible_gpus`.
      process: Index of the process.
      processes: Number of processes, which divides that of the GPUs.

    Returns:
      The variables; empty without GPUs.

    Raises:
      InputError: The GPUs cannot be divided equally.
    """
    if len(gpus) % processes:
        raise InputError(
            f"--processes={processes} does not divide the {len(gpus)} GPUs {','.join(gpus)}: choose a divisor, or set "
            "CUDA_VISIBLE_DEVICES"
        )
    count = len(gpus) // processes
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[process * count : (process + 1) * count])} if gpus else {}


def gpu_processes(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> set[int]:
    """Ids of the processes that hold memory of GPUs.

    Args:
      run: Function that runs nvidia-smi.

    Returns:
      The ids; empty where nvidia-smi is absent.
    """
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        shown = run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return {int(line) for line in shown.split() if line.isdecimal()}
