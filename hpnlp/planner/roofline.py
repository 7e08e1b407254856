"""Operations of a program, and the least time that they take on a device (roofline model)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Operation:
    """A kernel of a program, on one device."""

    flops: float  #: floating-point operations of matrix products, per run
    bytes: float  #: bytes read from and written to memory, per run
    in_attention: bool = False  #: whether accelerators fuse it into an attention kernel, which stores no scores
    on_host: bool = False  #: whether the bytes come from or go to host memory
    runs: int = 1  #: number of times that it runs in a step
    dtype: str = "float32"  #: dtype of the products' operands
    part: str = ""  #: entry of `parts.PARTS`, "" outside of all parts


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """Memory and work of a program on one device."""

    peak: int  #: peak bytes of temporary buffers
    operations: tuple[Operation, ...]  #: kernels of the program

    @property
    def flops(self) -> float:
        """FLOPs of all runs of all operations."""
        return sum((operation.flops * operation.runs for operation in self.operations), 0.0)

    @property
    def flops_by_dtype(self) -> dict[str, float]:
        """FLOPs by the dtype of their operands, largest first."""
        flops: dict[str, float] = {}
        for operation in self.operations:
            flops[operation.dtype] = flops.get(operation.dtype, 0.0) + operation.flops * operation.runs
        return {dtype: flops[dtype] for dtype in sorted(flops, key=lambda dtype: -flops[dtype]) if flops[dtype]}

    def by_part(self) -> dict[str, ProgramCost]:
        """The operations of each part.

        Returns:
          Entry of `parts.PARTS`, or "" for those outside of all parts -> cost with these operations, and without a peak.
        """
        names = dict.fromkeys(operation.part for operation in self.operations)
        return {
            name: ProgramCost(0, tuple(operation for operation in self.operations if operation.part == name))
            for name in names
        }

    @property
    def bytes(self) -> float:
        """Bytes that all runs of all operations read and write."""
        return sum((operation.bytes * operation.runs for operation in self.operations), 0.0)

    def moved_bytes(self, fuses_attention: bool) -> float:
        """Bytes that all runs of all operations read from and write to device memory.

        Args:
          fuses_attention: Whether attention is one kernel, whose intermediate results cost no memory traffic.

        Returns:
          Bytes, without transfers from and to the host.
        """
        return sum(
            (
                operation.bytes * operation.runs
                for operation in self.operations
                if not operation.on_host and not (fuses_attention and operation.in_attention)
            ),
            0.0,
        )

    @property
    def host_bytes(self) -> float:
        """Bytes moved from and to host memory."""
        return sum((operation.bytes * operation.runs for operation in self.operations if operation.on_host), 0.0)

    def seconds(self, flops: Mapping[str, float], memory_bandwidth: float, fuses_attention: bool) -> float:
        """Lower bound of the time of all operations but transfers from and to the host.

        An operation takes the time of its products or of its memory traffic, whichever is longer.

        Args:
          flops: FLOP/s by dtype; dtypes that are not in it run at the rate of float32.
          memory_bandwidth: Bytes per second from and to device memory.
          fuses_attention: Whether attention is one kernel, whose intermediate results cost no memory traffic.

        Returns:
          Seconds.

        References:
          Williams et al. 2009, "Roofline: an insightful visual performance model for multicore architectures".
        """
        return sum(
            (
                operation.runs
                * max(
                    operation.flops / flops.get(operation.dtype, flops["float32"]),
                    0.0 if fuses_attention and operation.in_attention else operation.bytes / memory_bandwidth,
                )
                for operation in self.operations
                if not operation.on_host
            ),
            0.0,
        )
