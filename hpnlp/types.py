"""Records and protocols that the parts of hpnlp exchange.

Everything here is either an error, a small record of arrays (a pytree), or a protocol. No part needs to import another
part's module to honour a contract: it takes and returns these.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

# What a layer reports beside its result: name -> (sum, weight). Names ending in `_loss` are added to the training loss.
Aux = Mapping[str, tuple[Array, Array]]


class InputError(ValueError):
    """The input is at fault, not the program: the message says what it was, what was expected, and the mend.

    The command line prints it as one line and exits with 2.
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixerInputs:
    """What a mixer may look at. Fields that a mixer does not ask for are None.

    x: normed hidden states `[B, T, D]`. q `[B, T, N, H]`, k and v `[B, S, K, H]`: projected, with RoPE applied where the
    mixer wants it. positions, segment_ids `[B, T]` and their kv_ twins `[B, S]`: int32; tokens of different segments do
    not see each other. memory: what an encoder or a retriever offers. rng: a key for dropout and random features.
    streams `[B, N]`: a number for each row and head, by which dropout tells them apart.
    deterministic: True switches dropout off.
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
    rng: Array | None = None
    streams: Array | None = None
    deterministic: bool = dataclasses.field(default=True, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixerOutput:
    """o: `[B, T, N, H]`, the mixed values before the output projection. aux: statistics and losses of the mixer."""

    o: Array
    aux: Aux = dataclasses.field(default_factory=dict)


def check_method(mixer: Any, name: str, caller: str, fix: str) -> None:
    """Raises InputError unless a mixer's method `name` and its `__call__` come from the same class.

    A subclass that changes `__call__` alone computes another function than the method that it inherits.

    Args:
        mixer: the mixer.
        name: of the method that is about to be called in place of `__call__`.
        caller: what calls the method, for the message.
        fix: another way out, for the message.
    """
    bases = type(mixer).__mro__
    of_call, of_method = (next((base for base in bases if method in vars(base)), None) for method in ("__call__", name))
    if of_method is None:
        raise InputError(f"{type(mixer).__name__} has no `{name}`, which {caller} calls: {fix}")
    if of_call is not of_method:
        called = "none" if of_call is None else of_call.__name__
        raise InputError(
            f"{type(mixer).__name__} takes `{name}` from {of_method.__name__} and `__call__` from {called}, and {caller} "
            f"calls `{name}` alone: define both in one class, or {fix}"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossOut:
    """sum: float32 scalar, the weighted sum of the tokens' losses in nats. weight: the sum of their weights."""

    sum: Array
    weight: Array
    aux: Aux = dataclasses.field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableRows:
    """Some rows of a table, looked up by their ids as the whole table is: `rows[ids]`.

    ids: int32 `[K]`, rising, each once; places left over hold numbers beyond the table. values: `[K, D]`.
    """

    ids: Array
    values: Array

    def find(self, ids: Array | np.ndarray) -> Array:
        """Where among `values` these ids are, int32; K where they are not. Cost: log2 K steps an id."""
        at = jnp.searchsorted(self.ids, ids).astype(jnp.int32)
        there = self.ids.at[at].get(mode="fill", fill_value=-1) == ids
        return jnp.where(there, at, self.ids.shape[0])

    def __getitem__(self, ids: Array | np.ndarray) -> Array:
        """The rows of these ids; NaN for one that is not here."""
        return self.values.at[self.find(ids)].get(mode="fill", fill_value=np.nan)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Zero2Parameter:
    """A parameter that every device holds whole, and of whose gradient each keeps a part (ZeRO-2).

    Arrays, or their layouts. whole: read, and given no gradient. part: the same array, laid out as its gradient is to be.
    """

    full: Any
    shard: Any


@dataclasses.dataclass(frozen=True, eq=False)
class WordStats:
    """How a text uses the ids of a vocabulary. Equal and hashed by what it holds, so that modules may have it for a field.

    counts: int64 `[V]`, how often each id occurs. order: int64 `[V]`, every id once, so that words that the text uses alike
    stand side by side; None where that is not known. (Tuples of so many numbers Flax would walk through at every call.)
    """

    counts: np.ndarray
    order: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("counts", "order"):
            if (value := getattr(self, name)) is not None:
                held = np.array(value, np.int64)
                held.setflags(write=False)
                object.__setattr__(self, name, held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WordStats) and self._held == other._held

    def __hash__(self) -> int:
        return hash(self._held)

    @functools.cached_property
    def _held(self) -> tuple[bytes, bytes]:
        return self.counts.tobytes(), b"" if self.order is None else self.order.tobytes()

    def padded(self, vocab: int) -> WordStats:
        """Of a vocabulary with further ids, which do not occur."""
        beyond = np.arange(len(self.counts), vocab)
        order = None if self.order is None else np.concatenate([self.order, beyond])
        return WordStats(np.pad(self.counts, (0, len(beyond))), order)


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back. Ids are in `[0, vocab_size)`; `bos_id` and `eos_id` are None where there is none."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int
    # Of the text that the vocabulary was made of, where that is known.
    stats: WordStats | None
    # decode(encode(x)) == x for every x that encode accepts, and there is a bos: without one nothing predicts the first
    # token of a document, and bits a byte would count bytes that cost nothing.
    lossless: bool

    def encode(self, text: bytes) -> np.ndarray:
        """int32 ids of one document, without bos and eos. Raises InputError where `text` is not what it needs."""
        ...

    def encode_prompt(self, text: str) -> np.ndarray:
        """As encode, with bos where there is one; raises InputError naming every part that has no id of its own."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The bytes that the ids stand for; special ids stand for nothing."""
        ...

    def save(self, path: str) -> None:
        """Writes `tokenizer.json` at `path` (a file); `hpnlp.data.tokenizers.load` reads it back."""
        ...


class TensorParallel:
    """Division of a Block's branches over the devices of a mesh: which heads and columns a device computes, and the
    collectives around them.

    Logical axis names are "heads" and "mlp". This class is the identity, for one device; `parallel.tensor_parallel` overrides
    it for a mesh.
    """

    # True if no method changes its argument.
    is_identity: ClassVar[bool] = True

    @property
    def regathers(self) -> bool:
        """Whether the backward pass gathers parameters again instead of keeping the result of `whole`."""
        return False

    def local_size(self, name: str, size: int) -> int:
        """Number of the device's heads or columns, of `size` in all."""
        return size

    def local_start(self, name: str, size: int) -> Any:
        """Index of the device's first head or column."""
        return 0

    def gather_tokens(self, x: Array) -> Array:
        """Hidden states of the device's tokens to those that the branch reads."""
        return x

    def reduce_output(self, y: Array, name: str) -> Array:
        """Sum of the devices' partial results `y`, for the device's tokens."""
        return y

    def local_tokens(self, x: Array, axis: int) -> Array:
        """The device's part of an array over all tokens that a branch reads."""
        return x

    def mix(self, mixer: Any, inputs: MixerInputs, mask: Any) -> MixerOutput:
        """`mixer(inputs, mask)` for the device's tokens and heads."""
        return mixer(inputs, mask)

    def remat_policy(self, policy: Any) -> Any:
        """`policy` of `jax.checkpoint` (None saves everything), except that parameters to be gathered again are not saved."""
        return policy

    def gather_parameters(self, params: Any) -> Any:
        """Full parameters of a layer from the device's shards."""
        return params


NO_TENSOR_PARALLEL = TensorParallel()


@dataclasses.dataclass(frozen=True, eq=False)
class ModelParallel:
    """A model's three parts over a mesh, in the place of its own.

    lookup: (table, ids, dtype) -> x. through: (run, stacked parameters, x, context, rng) -> (x, aux), where run is
    (branches, parameters of some layers, x, context, rng, number of the first) -> (x, aux). loss: (output layer, *arguments
    of its loss) -> LossOut. order: length of rows -> (what devices need to know of the order in which
    they are to have the tokens of a row, the places in a row in that order, or None for their own).
    """

    embedding_lookup: Callable[..., Array]
    run_layers: Callable[..., tuple[Array, Aux]]
    loss: Callable[..., LossOut]
    token_order: Callable[..., Any]


class Writer(Protocol):
    """Where metrics go: one call a step with plain floats."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
