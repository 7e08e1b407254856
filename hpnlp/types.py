"""Records and protocols that the packages of hpnlp exchange.

Everything here is an error, a small record of arrays (a pytree) or a protocol. A module that honours one of these
contracts needs no import from the modules on its other side.

Shape letters: B batch, T query length, S key length, N query heads, K key heads, H head size, D model size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import ge, gt, le, lt
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from hpnlp.errors import InputError as InputError
from hpnlp.errors import RangeError
from hpnlp.tokenizer import Tokenizer as Tokenizer
from hpnlp.tokenizer import WordStats as WordStats

Array = jax.Array
JSONValue = str | int | float | bool | Sequence[Any] | Mapping[str, Any] | None
AnyArray = jax.Array | np.ndarray  # where both are accepted
T = TypeVar("T")

# Auxiliary results of a layer: name -> (sum, weight) or their shapes. Names that end in `_loss` are added to the training loss.
Aux = Mapping[str, tuple[Any, Any]]

# Sums over tokens: name -> float32 array; or a tree of these, by layer stack.
Statistics = Mapping[str, Any]


REQUIRED: Any = dataclasses.MISSING  # the default of a field without one


def option(
    default: T,
    help: str,
    *,
    least: float | int | None = None,
    most: float | int | None = None,
    above: float | int | None = None,
    below: float | int | None = None,
    among: Collection[Any] | None = None,
    rule: tuple[str, Callable[[Any], bool]] | None = None,
) -> T:
    """A field of a config or of an entry of a table, with the help that `--help` and the documentation print.

    `check_options` checks the values of the fields that declare a range.

    Args:
      default: Default value, or REQUIRED.
      help: Meaning of the field, with units and special values.
      least: Least value.
      most: Largest value.
      above: Bound that the value exceeds.
      below: Bound that the value stays below.
      among: All values.
      rule: Another condition, in words that follow "expected", and as a function of the value.

    Returns:
      The dataclass field; typed as its value, for type checkers.
    """
    bounds = {"least": least, "most": most, "above": above, "below": below, "among": among, "rule": rule}
    metadata = {"help": help} | {name: bound for name, bound in bounds.items() if bound is not None}
    field: Any = dataclasses.field(default=default, metadata=metadata)
    return field


def keyword_only(field: T, compare: bool = True) -> T:
    """The field, which only keyword arguments set.

    Args:
      field: A field of `option`.
      compare: Whether equality and hashes depend on it.

    Returns:
      The field.
    """
    declared: Any = field
    declared.kw_only, declared.compare = True, compare
    return field


_BOUNDS = {"least": ("at least", ge), "above": ("more than", gt), "most": ("at most", le), "below": ("less than", lt)}


def check_options(entry: Any, section: str = "") -> None:
    """Checks the fields of a dataclass against the ranges that `option` declares. A default of None is always allowed.

    Args:
      entry: An instance of a dataclass.
      section: Section of a config, for the message; "" for the name of the class.

    Raises:
      RangeError: A value is out of its range.
    """
    for name, default, limits in _limited_fields(type(entry)):
        value = getattr(entry, name)
        if not (value is None and default is None or _is_within(value, limits)):
            expected = _expected(value, default, limits)
            raise RangeError(section or type(entry).__name__, f"{name}={value!r:.80}: expected {expected}")


def limits_in_words(limits: Mapping[str, Any]) -> str:
    """The range of a field, from its metadata, as in "at least 1, at most 8"; "" without a range."""
    if "among" in limits:
        return f"one of {', '.join(map(str, limits['among']))}"
    words = [f"{word} {limits[name]}" for name, (word, _) in _BOUNDS.items() if name in limits]
    return ", ".join(words + ([limits["rule"][0]] if "rule" in limits else []))


def _expected(value: Any, default: Any, limits: Mapping[str, Any]) -> str:
    words = [limits_in_words(limits)]
    if "among" not in limits:
        words = ["a finite number"] * (not _is_finite(value)) + words
        words += [] if default in (None, REQUIRED) else [f"such as {default}"]
    return ", ".join(words)


@functools.cache
def _limited_fields(entry: type) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """Names, defaults and limits of fields. A field that a subclass declares again without limits keeps those that it had."""
    fields: dict[str, tuple[str, Any, Mapping[str, Any]]] = {}
    for base in reversed(entry.__mro__):
        for name, field in base.__dict__.get("__dataclass_fields__", {}).items():
            inherits = len(field.metadata) < 2 and name in fields
            fields[name] = name, field.default, fields[name][2] if inherits else field.metadata
    return [field for field in fields.values() if len(field[2]) > 1]


def _is_within(value: Any, limits: Mapping[str, Any]) -> bool:
    if "among" in limits:
        return value in limits["among"]
    bounds = (compare(value, limits[name]) for name, (_, compare) in _BOUNDS.items() if name in limits)
    return _is_finite(value) and all(bounds) and ("rule" not in limits or limits["rule"][1](value))


def _is_finite(value: Any) -> bool:
    """False for a number that is not finite, and for an integer beyond the range of floats."""
    try:
        return isinstance(value, str) or math.isfinite(value)
    except OverflowError:
        return False


@runtime_checkable
class Equation(Protocol):
    """An equation of a jaxpr, `jax.extend.core.JaxprEqn`, whose variables and literals are of arrays."""

    @property
    def primitive(self) -> Any: ...

    @property
    def params(self) -> Mapping[str, Any]: ...

    @property
    def invars(self) -> Sequence[Any]: ...

    @property
    def outvars(self) -> Sequence[Any]: ...

    @property
    def source_info(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Projection:
    """A projection of the hidden states into heads, which `nn.attention.Attention` computes for a mixer.

    Attributes:
      axis: Logical name of the axis of heads: "heads" for the N query heads, "kv_heads" for the K key heads.
      width: Features per head; 0 for the head size H.
      norm: True if `model.qk_norm` or `model.joint_qk_norm` normalises the heads, as those of queries and keys.
      rope: True if `model.position="rope"` rotates the heads, as those of queries and keys.
      source: "x" for a projection of the hidden states; "memory" for one of `Context.memory`; "carry" for one of the states
        in the mixer's carry, a `TokenStates`, and after them the hidden states; see `WithFurtherKeys`.
    """

    axis: str
    width: int = 0
    norm: bool = False
    rope: bool = False
    source: str = "x"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenStates:
    """Consecutive tokens of each sequence; or, in place of each array, the logical names of its axes.

    Attributes:
      states: `[B, M, D]`, hidden states.
      positions: int32 `[B, M]`, positions of the tokens within their documents.
      segment_ids: int32 `[B, M]`; 0 where there is no token. None for one segment per sequence.
    """

    states: Any
    positions: Any
    segment_ids: Any

    def followed_by(self, tokens: TokenStates) -> TokenStates:
        """The M tokens and the T that follow, with states of the dtype of the latter; all with segment ids."""
        first = dataclasses.replace(self, states=self.states.astype(tokens.states.dtype))
        return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), first, tokens)


@dataclasses.dataclass(frozen=True)
class MixerTraits:
    """Properties that a mixer claims. Contracts test each of them; models and commands require some of them.

    Attributes:
      causal: It can mix under `Causal()`, so that no output depends on later tokens.
      bidirectional: It can mix under `Full()`, so that outputs depend on earlier and later tokens.
      any_length: It mixes sequences of any length; otherwise only of `model.max_len` tokens, at which it is initialised.
      prefix_consistent: Under `Causal()`, the outputs of a prefix equal the first outputs of the whole sequence.
      isolates_segments: Tokens of one segment do not influence those of another.
      any_padding: Outputs do not depend on the amount of padding after the text.
      excludes_padding: Padding, of segment id 0, influences no other token where all other tokens are one segment.
      decodes: It has a cache (`MixerOutput.cache`) and `extend`.
      draws: It reads `MixerInputs.draws`.
    """

    causal: bool = True
    bidirectional: bool = True
    any_length: bool = True
    prefix_consistent: bool = True
    isolates_segments: bool = True
    excludes_padding: bool = True
    any_padding: bool = True
    decodes: bool = True
    draws: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixerInputs:
    """Inputs of a mixer. Fields that the mixer does not list in `needs` may be None.

    Attributes:
      x: Normalised hidden states `[B, T, D]`.
      q: Projected queries `[B, T, N, H]`.
      k: Projected keys `[B, S, K, H]`.
      v: Projected values `[B, S, K, H]`.
      projections: Other projections by name, such as gates, each `[B, T, heads, width]`.
      positions: int32 `[B, T]`, positions of the queries within their documents.
      kv_positions: int32 `[B, S]`, positions of the keys.
      segment_ids: int32 `[B, T]`; tokens of different segments do not attend to each other.
      kv_segment_ids: int32 `[B, S]`, segments of the keys.
      memory: Output of an encoder or a retriever.
      carry: Carry of the tokens that precede x, as `initial_carry` and `MixerOutput.carry` give it; None for none.
      rng: Key for dropout.
      draws: Key for random features and the like, if the mixer claims `MixerTraits.draws`; of the layer and the training step.
      streams: int32 `[B, N]`, a number for each sequence and head; attention dropout depends on it, so that every
          layout over devices drops the same entries.
      ids: int32 `[B, T]`, a number for each token of the batch, on which random numbers depend; None in evaluation. Read by
          feed-forward networks only.
      tokens: int32 `[B, T]`, ids of the words, if a feed-forward network reads them.
      deterministic: True switches dropout off.
      decoding: True where a prompt is read or continued. Read by feed-forward networks only.
      taps: Names of arrays for `MixerOutput.taps`. Read by feed-forward networks only.
      capacity: If given, the mixer also returns a cache of the tokens, with room for this number of tokens per sequence. The
          first tokens of a sequence have a positive segment id, and padding has 0.
    """

    x: Array | None = None
    q: Array | None = None
    k: Array | None = None
    v: Array | None = None
    positions: Array | None = None
    kv_positions: Array | None = None
    segment_ids: Array | None = None
    kv_segment_ids: Array | None = None
    memory: Any = None
    carry: Any = None
    rng: Array | None = None
    draws: Array | None = None
    streams: Array | None = None
    ids: Array | None = None
    tokens: Array | None = None
    projections: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    deterministic: bool = dataclasses.field(default=True, metadata={"static": True})
    decoding: bool = dataclasses.field(default=False, metadata={"static": True})
    taps: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    capacity: int | None = dataclasses.field(default=None, metadata={"static": True})

    def lengths(self) -> Array:
        """Number of tokens of each sequence.

        Returns:
          int32 `[B]`, the number of positive segment ids; T without segment ids.
        """
        assert self.x is not None
        batch, length = self.x.shape[:2]
        if self.segment_ids is None:
            return jnp.full((batch,), length, jnp.int32)
        return jnp.sum(self.segment_ids > 0, axis=1, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixerOutput:
    """Result of a mixer.

    Attributes:
      o: `[B, T, N, H]`, the mixed values before the output projection; or, from a mixer that needs no projections,
          `[B, T, D]`, which is not projected.
      aux: Losses and metrics of the mixer, as (sum, weight).
      statistics: Sums over the tokens, float32, by name; see `statistic_axes`.
      cache: State of the tokens that `extend` reads; None unless `MixerInputs.capacity` is given.
      carry: The carry for the tokens that follow; None unless `MixerInputs.carry` is given.
      taps: Arrays `[B, T, ...]` by name: "gates" `[B, T, E]` of experts, 0 for experts that a token does not use, if
          `MixerInputs.taps` has "routing".
    """

    o: Array
    aux: Aux = dataclasses.field(default_factory=dict)
    statistics: Statistics = dataclasses.field(default_factory=dict)
    cache: Any = None
    carry: Any = None
    taps: Mapping[str, Array] = dataclasses.field(default_factory=dict)


@runtime_checkable
class WithCarry(Protocol):
    """A mixer that carries state from batch to batch. No gradient passes through a carry.

    Attributes:
      carry_axes: Logical axes of the arrays of the carry, a tree like it; the first axis of each is "batch".
    """

    @property
    def carry_axes(self) -> Any: ...

    def initial_carry(self, batch: int, dim: int, dtype: DTypeLike) -> Any:
        """The carry before the first tokens, a tree of arrays `[B, ...]`."""
        ...


@runtime_checkable
class WithFurtherKeys(Protocol):
    """A mixer with a carry that also attends to tokens which it computes itself, such as compressed ones."""

    def further_keys(self, tokens: PyTree) -> Any:
        """Tokens made of those of the carry and of x, whose keys and values follow, by constant parameters; None for none."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossOut:
    """Loss of a batch.

    Attributes:
      sum: float32 scalar, the weighted sum of the tokens' losses in nats.
      weight: float32 scalar, the sum of the tokens' weights.
      aux: Auxiliary losses and metrics of the layers and the output layer, as (sum, weight).
      statistics: Sums over the tokens of the batch, as `Model.auxiliary_loss` reads them.
      carry: The collection "carry" for the next batch; None unless the model was applied with one.
      taps: Logits and states that a distillation compares (`models.prediction.PredictionModel.tapped`); empty unless the
        model's loss was asked for them.
    """

    sum: Any  # arrays, or their shapes where a loss is traced only
    weight: Any
    aux: Aux = dataclasses.field(default_factory=dict)
    statistics: Statistics = dataclasses.field(default_factory=dict)
    carry: Any = None
    taps: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Model(Protocol):
    """A Flax module that a trainer can train.

    `models.shared.model.BaseModel` is the base class of models, with defaults of optional members.

    Attributes:
      config: Its config, a `models.shared.body.ConfigOfModel`.
      model_parallel: A `model_parallel.ModelParallel`, or None for one device.
      remat: Rematerialisation policy of the layers.
      is_normalized: Whether the loss is -log p(label) of a distribution.
      init: As of every Flax module.
      apply: As of every Flax module.
      clone: As of every Flax module.
      training_arrays: Names of the arrays of a batch that only training reads.
      changes_weights: Whether the weights that the model applies are others than its parameters.
    """

    config: Any
    model_parallel: Any
    remat: str
    init: Any
    apply: Any
    clone: Any
    training_arrays: ClassVar[tuple[str, ...]]
    changes_weights: ClassVar[bool]

    @property
    def is_normalized(self) -> bool: ...

    def loss(self, batch: Mapping[str, Array], deterministic: bool = True) -> LossOut:
        """The loss of a batch.

        Args:
          batch: Arrays like those of `example_batch`.
          deterministic: No dropout, and no sampling in the output layer.

        Returns:
          The loss summed over the batch, in nats.
        """
        ...

    def auxiliary_loss(self, statistics: Statistics) -> dict[str, Array]:
        """Auxiliary losses, pure functions of statistics.

        Args:
          statistics: `LossOut.statistics`, summed over the whole batch.

        Returns:
          Name -> float32 scalar. Training adds those whose names end in `_loss` to the mean loss, with their factors in
          `optimizer.aux`; others are metrics.
        """
        ...

    def rows(self, batch: Mapping[str, Array]) -> dict[tuple[str, ...], Array]:
        """Rows of tables that `loss` of this batch looks up.

        Args:
          batch: As for `loss`.

        Returns:
          Path of a table among the parameters -> ids, with repetitions.
        """
        ...

    def example_batch(self, batch_size: int, length: int) -> dict[str, Array]:
        """A batch with the shapes and dtypes of a batch of data.

        Args:
          batch_size: Number of sequences.
          length: Tokens per sequence.

        Returns:
          The batch.
        """
        ...

    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of the arrays of a batch, such as ("batch", "length"), by their names.

        Returns:
          The axes of each array of `example_batch`.
        """
        ...

    def advance(self, buffers: PyTree, statistics: Statistics, step: Array, rng: Array) -> Any:
        """The buffers of the next step, a pure function outside of the gradient. Called if the model has buffers.

        Args:
          buffers: The collection "buffers" of the model.
          statistics: As for `auxiliary_loss`.
          step: Number of steps done, int32.
          rng: Key of the step.

        Returns:
          A tree of arrays like `buffers`.
        """
        ...

    def initial_carry(self, batch_size: int) -> Any:
        """The collection "carry" of empty sequences; None for a model that carries nothing."""
        ...

    def carry_axes(self) -> Any:
        """Logical axes of the arrays of the carry, a tree like it; they begin with "layers" and "batch"."""
        ...

    def check_layout(self, layout: Any) -> None:
        """Checks that the model is trained on a layout over devices; raises InputError if it is not."""
        ...

    def allowed_updates(self, params: PyTree, updates: PyTree, rate: Array) -> Any:
        """Updates of parameters as the model requires, for a learning rate, a float32 scalar."""
        ...

    def plain(self, weights: Mapping[str, Any]) -> tuple[Any, Any]:
        """The Model that is used, and its weights."""
        ...
