"""Walk over the equations of a jaxpr that records buffers and operations of the program."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jax.extend import core

from hpnlp.cost.flop_count import PRODUCTS
from hpnlp.cost.parts import operation_part
from hpnlp.ops.attention.block_sparse.flash import SCOPE
from hpnlp.planner.jaxpr.jaxprs import device_bytes, needed_equations
from hpnlp.planner.jaxpr.liveness import Step, Value
from hpnlp.planner.roofline import Operation, ProgramCost
from hpnlp.types import Equation

if TYPE_CHECKING:
    from jax.core import AbstractValue


@dataclasses.dataclass
class Scope:
    """The variables of a jaxpr while it is walked."""

    values: dict[Any, Value]  #: results of the equations walked so far
    uses: collections.Counter[Any]  #: number of equations and results that read a variable
    rounded: dict[Any, Any]  #: products that are converted at once, and the abstract value of the converted result


class Walker:
    """Walks jaxprs and records the steps and operations of the program that they make.

    Attributes:
      handle: Accounts for an equation: records its kernels and returns the values of its results.
      per_device: Whether shapes are those of one device, as inside `shard_map`.
      steps: Steps recorded so far, with the buffers that they read and write.
      operations: Kernels recorded so far.
      slices: Slices of stacked operands that have been copied, by the stack and the index of the iteration.
      scope: Variables of the jaxpr that is being walked.
      in_attention: Whether the equation that is being walked is part of attention.
      part: Part of the model that this equation belongs to, see `hpnlp.cost.parts`.
    """

    def __init__(self, handle: Handler, per_device: bool) -> None:
        self.handle = handle
        self.per_device = per_device
        self.steps: list[Step] = []
        self.operations: list[Operation] = []
        self.slices: dict[tuple[Value, int], Value] = {}
        self.scope = Scope({}, collections.Counter(), {})
        self.in_attention = False
        self.part = ""

    def shards(self, operands: Sequence[Value]) -> int:
        """Number of devices that the result of an equation is divided over.

        Args:
          operands: Operands of the equation.

        Returns:
          The most shards of any operand; 1 inside `shard_map`.
        """
        return 1 if self.per_device else max((operand.shards for operand in operands), default=1)

    def buffer(self, aval: AbstractValue, shards: int = 1, *, external: bool = False) -> Value:
        """A value in a new buffer.

        Args:
          aval: Abstract value of the array.
          shards: Number of devices that the array is divided over.
          external: Whether the buffer belongs to the caller.

        Returns:
          The value.
        """
        shards = 1 if self.per_device else shards
        buffer = Value(device_bytes(aval) // shards, shards, frozenset(), external)
        buffer.sources = frozenset((buffer,))
        return buffer

    def value(self, atom: core.Var | core.Literal) -> Value:
        """The value of an operand.

        Args:
          atom: A variable or a literal.

        Returns:
          The value.
        """
        return self.buffer(atom.aval, external=True) if isinstance(atom, core.Literal) else self.scope.values[atom]

    def materialize(self, value: Value, aval: AbstractValue) -> Value:
        """Puts a value into a buffer.

        Args:
          value: A value; one without a buffer is written to a new one by a fused operation.
          aval: Abstract value of the array.

        Returns:
          A value with a buffer.
        """
        if value.has_buffer:
            return value
        buffer = self.buffer(aval, value.shards)
        sources = list(value.sources)
        if value.sliced:  # accelerators read the slice in place, so that the copy takes no time
            self.steps.append(Step(sources, [buffer]))
        else:
            aliases = [(source, buffer) for source in sources]
            self.record(sources, [buffer], aliases=aliases, part=value.part or self.part)
        return buffer

    def materialize_operands(self, equation: Equation, operands: Sequence[Value]) -> list[Value]:
        """Puts the operands of an equation into buffers, which later readers of the same variables share.

        Args:
          equation: The equation.
          operands: Values of the operands.

        Returns:
          Values with buffers.
        """
        reads = [self.materialize(value, atom.aval) for value, atom in zip(operands, equation.invars, strict=True)]
        for atom, read in zip(equation.invars, reads, strict=True):
            if not isinstance(atom, core.Literal):
                self.scope.values[atom] = read
        return reads

    def record(
        self,
        reads: Sequence[Value],
        writes: Sequence[Value],
        flops: float = 0.0,
        aliases: Sequence[tuple[Value, Value]] = (),
        *,
        on_host: bool = False,
        dtype: str = "float32",
        part: str = "",
    ) -> None:
        """Records a kernel.

        Args:
          reads: Buffers that the kernel reads.
          writes: Buffers that the kernel writes.
          flops: Floating-point operations of the kernel's products.
          aliases: (input, output) pairs that may share a buffer.
          on_host: Whether the kernel moves bytes from or to host memory.
          dtype: Dtype of the products' operands.
          part: Part of the model; "" for that of the equation.
        """
        self.steps.append(Step(reads, writes, aliases=aliases))
        size = float(sum(buffer.size for buffer in (*reads, *writes)))
        operation = Operation(flops, size, self.in_attention, on_host, dtype=dtype, part=part or self.part)
        self.operations.append(operation)

    def record_body(
        self,
        reads: Sequence[Value],
        writes: Sequence[Value],
        body: ProgramCost,
        scratch: int,
        aliases: Sequence[tuple[Value, Value]] = (),
        runs: int = 1,
    ) -> None:
        """Records a loop or a branch with the operations of its body.

        Args:
          reads: Buffers that the loop or branch reads.
          writes: Buffers that the loop or branch writes.
          body: Cost of one run of the body.
          scratch: Bytes that the body needs besides these buffers; negative numbers count as 0.
          aliases: (input, output) pairs that may share a buffer.
          runs: Number of times that the body runs.
        """
        self.steps.append(Step(reads, writes, max(0, scratch), aliases))
        self.operations += [
            dataclasses.replace(
                operation,
                runs=operation.runs * runs,
                in_attention=operation.in_attention or self.in_attention,
                part=operation.part or self.part,
            )
            for operation in body.operations
        ]

    def walk(self, jaxpr: core.Jaxpr, arguments: Sequence[Value]) -> list[Value]:
        """Records the equations of a jaxpr in order.

        Args:
          jaxpr: An open jaxpr.
          arguments: Values of its arguments.

        Returns:
          Values of its results.
        """
        caller_scope, caller_in_attention, caller_part = self.scope, self.in_attention, self.part
        equations = needed_equations(jaxpr)
        self.scope = self._open_scope(jaxpr, equations, arguments)
        for equation in equations:
            operands = [self.value(atom) for atom in equation.invars]
            stack = str(equation.source_info.name_stack)
            self.in_attention, self.part = caller_in_attention or SCOPE in stack, operation_part(stack) or caller_part
            values = self.handle(self, equation, operands)
            for value in values:
                value.part = value.part or self.part
            self.scope.values.update(zip(equation.outvars, values, strict=True))
        results = [self.value(atom) for atom in jaxpr.outvars]
        self.scope, self.in_attention, self.part = caller_scope, caller_in_attention, caller_part
        return results

    def _open_scope(self, jaxpr: core.Jaxpr, equations: Sequence[Any], arguments: Sequence[Value]) -> Scope:
        """The variables of a jaxpr before its first equation."""
        values: dict[Any, Value] = dict(zip(jaxpr.invars, arguments, strict=True))
        values.update((var, self.buffer(var.aval, external=True)) for var in jaxpr.constvars)
        reads = [*(atom for equation in equations for atom in equation.invars), *jaxpr.outvars]
        uses = collections.Counter(atom for atom in reads if not isinstance(atom, core.Literal))
        products = {equation.outvars[0] for equation in equations if equation.primitive.name in PRODUCTS}
        rounded = {
            equation.invars[0]: equation.outvars[0].aval
            for equation in equations
            if equation.primitive.name == "convert_element_type"
            and uses[equation.invars[0]] == 1
            and equation.invars[0] in products
        }
        # A slice that several equations read is copied once; the only reader of another reads the stack itself.
        for var in jaxpr.invars:
            if values[var].sliced and uses[var] > 1:
                values[var] = self.materialize(values[var], var.aval)
        return Scope(values, uses, rounded)


Handler = Callable[[Walker, Any, Sequence[Value]], list[Value]]  # (walker, equation, operands) -> results
