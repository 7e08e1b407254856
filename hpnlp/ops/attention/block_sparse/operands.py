"""Records of the block-sparse executor, and how they follow from the `Operands` of a call."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from hpnlp.ops.attention.masks.base import Mask
from hpnlp.ops.attention.operands import Operands, as_flags
from hpnlp.ops.attention.pair_bias import BiasArrays, is_pair_bias
from hpnlp.ops.dropout import seed_words
from hpnlp.types import AnyArray


class Form(enum.Enum):
    """Forms of the executor. By default it chooses among them by size and estimated cost."""

    UNROLLED = "unrolled"
    """A Python loop over query blocks, each against one span of keys."""
    SCAN = "scan"
    """One scan over the schedule of the whole mask."""
    PERMUTED = "permuted"
    """A scan for each sub-mask that can run over permuted tokens, and one for the remaining pairs."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Static settings of the executor.

    Attributes:
      mask: The pattern.
      scale: Factor of the scores.
      soft_cap: Scores become soft_cap * tanh(score / soft_cap); None for no cap.
      dropout_rate: Probability that a weight is dropped.
      block_size: Queries and keys in a block, one number or two; None for the executor's choice.
      bias_jaxpr: Jaxpr of a bias function of (head, query position, key position); None for arrays or no bias.
      form: The form that is forced; None for the executor's choice.
      tests_positions: Positions are compared with the indices at run time: if they are equal, the tiles follow from the mask.
        Run-time positions rule out few tiles of a mask that is not relative, because they are known as bounds of a block only.
    """

    mask: Mask
    scale: float
    soft_cap: float | None = None
    dropout_rate: float = 0.0
    block_size: int | tuple[int, int] | None = None
    bias_jaxpr: Any = None
    form: Form | None = None
    tests_positions: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenInfo:
    """Properties of the queries or of the keys of a call, a block or a tile: arrays [..., r] for r tokens.

    For a call of `attend` the leading axis is B, or 1 where all examples share the property. Arrays are numpy where they are
    known while tracing.

    Attributes:
      index: int32, index in the sequence; -1 for padding.
      position: int32, position at which dropout and bias functions are evaluated; None where it is the index.
      mask_position: int32, position at which the mask is evaluated; None where it is `position_or_index`.
      segment: int32, segment id; None without segments.
      is_global: bool, the token sees all tokens and is seen by all; None without global tokens.
    """

    index: Any
    position: Any = None
    mask_position: Any = None
    segment: Any = None
    is_global: Any = None

    @property
    def position_or_index(self) -> Any:
        """Position for dropout and bias functions."""
        return self.index if self.position is None else self.position

    @property
    def position_in_mask(self) -> Any:
        """Position for the mask."""
        return self.position_or_index if self.mask_position is None else self.mask_position


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExecutorOperands:
    """The run-time operands of a call in the form that tiles are cut from; None for absent ones.

    Attributes:
      queries: Properties of the queries, [B or 1, T] each.
      keys: Properties of the keys, [B or 1, S] each.
      lengths: int32 [B]; keys at indices from lengths[b] on are hidden.
      seed: uint32 [words], the words of the dropout key.
      streams: int32 [B, N], a number for each (batch, head), for dropout.
      heads: int32 [1, N], the numbers that a bias function receives.
      dense: bool [B, N, T, S], any axis may be 1; False hides.
      bias: A PairBias, or the arrays that a bias function closes over.
    """

    queries: Any  # a TokenInfo; None in cotangents
    keys: Any  # as `queries`
    lengths: Any = None
    seed: Any = None
    streams: Any = None
    heads: Any = None
    dense: Any = None
    bias: Any = None

    @property
    def mask_is_static(self) -> bool:
        """True if the mask and the indices decide which pairs the mask allows: there are no positions or global tokens."""
        return self.queries.position is None and self.queries.is_global is None

    def positions_are_indices(self) -> Array:
        """Whether all queries and keys are at the positions of their indices, bool []; for operands with positions."""
        same = [jnp.all(tokens.position == tokens.index) for tokens in (self.queries, self.keys)]
        return same[0] & same[1]

    def without_positions(self) -> ExecutorOperands:
        """The operands, with indices in place of positions."""
        queries, keys = (dataclasses.replace(tokens, position=None) for tokens in (self.queries, self.keys))
        return dataclasses.replace(self, queries=queries, keys=keys)


def executor_records(
    inputs: tuple[Array, Array, Array, Operands],
    mask: Mask,
    heads: tuple[tuple[int, ...], int],
    block_size: int | tuple[int, int] | None,
    form: Form | None,
    has_schedule: bool,
) -> tuple[Options, ExecutorOperands]:
    """Options and operands of the executor from those of a call.

    Args:
      inputs: Queries, keys, values and operands of `attend`, whose scale is a number or None, and whose sinks are ignored.
      mask: Pattern of all these heads.
      heads: Numbers of the N heads, and the number of heads of the call of `attend`.
      block_size: Queries and keys in a block, one number or two; or None.
      form: The form that is forced, or None.
      has_schedule: The schedule does not follow from the mask.

    Returns:
      The static and the run-time part.
    """
    q, k, _, operands = inputs
    (b, t), s, (numbers, count) = q.shape[:2], k.shape[1], heads
    jaxpr, bias = _bias_operand(operands.bias)
    # Python floats, which are part of the key of jax.jit's cache; callers may pass arrays of one number.
    scale = q.shape[-1] ** -0.5 if operands.scale is None else float(operands.scale)
    soft_cap = None if operands.soft_cap is None else float(operands.soft_cap)
    tests_positions = not (has_schedule or mask.relative or operands.positions is None)
    rate = float(operands.dropout_rate)
    options = Options(mask, scale, soft_cap, rate, block_size, jaxpr, form, tests_positions)
    rng: Any = operands.rng if operands.dropout_rate > 0 else None
    seed = None if rng is None else seed_words(rng)
    head_numbers = jnp.asarray(numbers, jnp.int32)
    streams = None if rng is None else operands.streams
    if rng is not None and streams is None:
        streams = jnp.arange(b, dtype=jnp.int32)[:, None] * count + head_numbers[None]
    is_global = None if operands.global_tokens is None else as_flags(operands.global_tokens, t)
    return options, ExecutorOperands(
        TokenInfo(_indices(t), _int32(operands.positions), None, _int32(operands.segment_ids), is_global),
        TokenInfo(_indices(s), _int32(operands.kv_positions), None, _int32(operands.kv_segment_ids), is_global),
        _int32(operands.kv_lengths),
        seed,
        _int32(streams),
        head_numbers[None] if jaxpr is not None else None,
        _four_axes(operands.dense_mask),
        bias,
    )


def _bias_operand(bias: Any) -> tuple[Any, Any]:
    """(None, PairBias or None), or the jaxpr of a bias function and the arrays that the function closes over."""
    if bias is None or callable(bias):
        return (None, None) if bias is None else _trace(bias)
    return None, bias if is_pair_bias(bias) else BiasArrays((_four_axes(bias),), (None,))


def _trace(function: Callable[..., Any]) -> tuple[Any, tuple[Any, ...]]:
    """The jaxpr of a function of three int32 scalars, and the arrays that the function closes over."""
    closed = jax.make_jaxpr(function)(*(jnp.int32(0),) * 3)
    return closed.jaxpr, tuple(closed.consts)


def _indices(length: int) -> Array:
    return jnp.arange(length, dtype=jnp.int32)[None]


def _int32(x: ArrayLike | None) -> Any:
    return None if x is None else jnp.asarray(x, jnp.int32)


def _four_axes(x: AnyArray | None) -> Any:
    """An array that broadcasts to [B, N, T, S] with leading axes of 1 up to four."""
    return None if x is None else jnp.asarray(x).reshape((1,) * (4 - x.ndim) + x.shape)
