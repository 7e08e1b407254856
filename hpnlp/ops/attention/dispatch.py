"""Choice of the implementation of an attention call.

Each kernel module declares `SUPPORTS`, the operands that it supports, and a function `limits` for everything that depends on
shapes, dtypes, the mask or the device. This module derives from both the reasons against a kernel. "xla" and "reference"
support every call.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array

from hpnlp.ops.attention.masks.base import Mask
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.ops.attention.operands import Operands
from hpnlp.types import InputError

# Implementation -> the platform that it needs, or None, from the fastest to the slowest: "auto" takes the first that can.
PLATFORMS: dict[str, str | None] = {"splash": "tpu", "cudnn": "gpu", "pallas": "gpu", "xla": None, "reference": None}
# Implementation -> module in `kernels`, imported when it is first needed; the kernel is its function of the same name.
KERNELS = {"splash": "splash_tpu", "cudnn": "cudnn", "pallas": "pallas_gpu"}


@functools.cache
def only_by_name(impl: str) -> str:
    """The reason why "auto" never takes an implementation, "" where it may."""
    if impl == "reference":
        return "dense and slow: only by its name"
    if impl == "pallas" and importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "compared with CUDA 13 only, and some compilers of CUDA 12 are wrong: only by its name"
    return ""


def kernel_module(impl: str) -> Any:
    """The module of a kernel.

    Args:
      impl: A key of `KERNELS`.

    Returns:
      The module, which has `SUPPORTS`, `limits` and a function named `impl`.
    """
    return importlib.import_module(f"hpnlp.ops.attention.kernels.{KERNELS[impl]}")


def unsupported(impl: str, q: Array, k: Array, v: Array, mask: Mask | PerHead, operands: Operands) -> list[str]:
    """Names of the operands and properties of a call that an implementation does not support.

    Args:
      impl: A key of `PLATFORMS`.
      q: [B, T, N, H].
      k: [B, S, K, H].
      v: [B, S, K, Hv].
      mask: Mask of the attention.
      operands: Operands of `attend`.

    Returns:
      Names and short descriptions, empty where the implementation can compute the call. Always empty for "pallas" without
      a GPU, where the import of its module would be wasted.
    """
    if impl not in KERNELS or (impl == "pallas" and jax.default_backend() != "gpu"):
        return []
    module = kernel_module(impl)
    return sorted(operands.features() - module.SUPPORTS) + module.limits(q, k, v, mask, operands)


def resolve(
    impl: str, block_size: int | None, q: Array, k: Array, v: Array, mask: Mask | PerHead, operands: Operands
) -> str:
    """Name of the implementation that computes a call.

    Args:
      impl: A key of `PLATFORMS`, or "auto". With a block_size, "auto" is "xla".
      block_size: Block size of "xla", or None for its choice.
      q: [B, T, N, H].
      k: [B, S, K, H].
      v: [B, S, K, Hv].
      mask: Mask of the attention.
      operands: Operands of `attend`.

    Returns:
      A key of `PLATFORMS`.

    Raises:
      InputError: `impl` is unknown, runs on another platform, or does not support the call; or block_size is not positive or
        is for another implementation than "xla".
    """
    platform = jax.default_backend()
    if impl == "auto":
        impl = "xla" if block_size is not None else choose(platform, lambda x: unsupported(x, q, k, v, mask, operands))
    elif impl not in PLATFORMS:
        raise InputError(f"impl {impl!r}: expected auto, {', '.join(PLATFORMS)}")
    elif PLATFORMS[impl] not in (None, platform):
        raise InputError(f"impl {impl!r} needs platform {PLATFORMS[impl]}, found {platform}: pass impl='xla'")
    else:
        require_supported(impl, q, k, v, mask, operands)
    if block_size is not None and (impl != "xla" or block_size < 1):
        raise InputError(f"block_size {block_size} with impl {impl!r}: expected a positive number with impl='xla' only")
    return impl


def require_supported(impl: str, q: Array, k: Array, v: Array, mask: Mask | PerHead, operands: Operands) -> None:
    """Raises unless an implementation can compute a call on its platform.

    Args:
      impl: A key of `PLATFORMS`.
      q: [B, T, N, H].
      k: [B, S, K, H].
      v: [B, S, K, Hv].
      mask: Mask of the attention.
      operands: Operands of `attend`.

    Raises:
      InputError: The call has operands or properties that `unsupported` lists.
    """
    reasons = unsupported(impl, q, k, v, mask, operands)
    if reasons:
        raise InputError(f"impl {impl!r} does not support {', '.join(reasons)}: remove it, or pass impl='xla'")


def choose(platform: str, unsupported_by: Callable[[str], Sequence[str]]) -> str:
    """The implementation that "auto" takes: the first of `PLATFORMS` that runs on a platform and can compute the call.

    Args:
      platform: As `jax.default_backend()` returns it.
      unsupported_by: Function that maps an implementation to the operands and properties that it does not support.

    Returns:
      A key of `PLATFORMS`. There always is one, because "xla" supports every call on every platform.
    """
    return next(
        impl
        for impl, needed in PLATFORMS.items()
        if needed in (None, platform) and not only_by_name(impl) and not unsupported_by(impl)
    )


def explain_choice(platform: str, unsupported_by: Callable[[str], Sequence[str]]) -> str:
    """The implementation that "auto" takes and the reasons against the others.

    Args:
      platform: As for `choose`.
      unsupported_by: As for `choose`.

    Returns:
      One line for each implementation, in the order of `PLATFORMS`.
    """
    chosen = choose(platform, unsupported_by)
    width = max(map(len, PLATFORMS))
    lines = []
    for impl, needed in PLATFORMS.items():
        reasons = [reason] if (reason := only_by_name(impl)) else []
        if needed not in (None, platform):
            reasons.append(f"needs platform {needed}, found {platform}")
        if names := unsupported_by(impl):
            reasons.append(f"does not support {', '.join(names)}")
        verdict = "chosen" if impl == chosen else "; ".join(reasons) or f"supported, but {chosen} comes first"
        lines.append(f"{impl:<{width}}  {verdict}")
    return "\n".join(lines)
