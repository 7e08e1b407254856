"""The function that an exported file holds: token ids to logits, with the weights inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jaxtyping import PyTree

from hpnlp.models import variables
from hpnlp.models.classifiers.hashed_classifier import HashedClassifier
from hpnlp.models.encoder import Encoder
from hpnlp.models.lm import LM
from hpnlp.ops.word_projection import HASH_WORDS
from hpnlp.types import InputError, Model

# Arrays of a batch that are no inputs of the exported function: those of the loss, and positions, which count from 0.
_NOT_EXPORTED = ("labels", "weights", "positions")
BATCH, LENGTH = "batch", "length"  # names of the symbolic sizes of the inputs
# Errors of a model that computes with the number or the length of sequences.
SYMBOLIC_ERRORS = (TypeError, ValueError, NotImplementedError, jax.errors.InconclusiveDimensionOperation)


@dataclasses.dataclass(frozen=True)
class ExportedFunction:
    """A function of arrays of token ids.

    Attributes:
      call: The function. Its arguments are int32 `[B, T]`; it returns float32 logits, `[B, T, V]`, or `[B, C]` of an encoder
        with pooling.
      inputs: Names of the arguments.
      length: T; 0 for any length.
      longest: Largest T; 0 for no limit.
      token_shapes: Name of an argument -> shape of the part of one token, of arguments with more axes.
    """

    call: Callable[..., Any]
    inputs: tuple[str, ...]
    length: int
    longest: int = 0
    token_shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


def logits_function(model: Model, weights: PyTree, length: int) -> ExportedFunction:
    """The logits of a model as a function of its inputs.

    Args:
      model: An LM, an Encoder or a HashedClassifier.
      weights: Weights of the model.
      length: Tokens of a sequence, 0 for any number. An LM takes "tokens"; shorter texts are padded at the end. An Encoder
        takes "tokens", "segment_ids" (1 for text, 0 for padding), and "token_types" if pairs of texts have some; a
        HashedClassifier takes "tokens", the hashes of words `[B, T, 4]`, and "segment_ids".

    Returns:
      The function.

    Raises:
      InputError: Another class of models, or a length that the model does not have.
    """
    if isinstance(model, HashedClassifier):
        inputs = _exported_inputs(model)
        call = _batch_logits(model, weights, inputs)
        return ExportedFunction(call, inputs, length, token_shapes={"tokens": (HASH_WORDS,)})
    if not isinstance(model, LM | Encoder) or model.config.memory_dim:
        raise InputError(
            f"a {type(model).__name__} has no logits of token ids: export a run of task lm, masked_lm, classification, "
            "hashed_classification or tagging"
        )
    max_len, fixed = model.config.max_len, model.config.fixed_length()
    if length < 0 or (model.config.position == "learned" and 0 < max_len < length):
        raise InputError(f"length {length}: expected 1 to {max_len or 'the length of the model'}, or 0 for any length")
    if fixed and length != fixed:
        shown = "any length" if length == 0 else f"length {length}"
        raise InputError(f"{shown}: the model takes sequences of {fixed} tokens only: pass length={fixed}")
    longest = max_len if model.config.position == "learned" else 0
    collections = variables.collections(weights)
    if model.predicts_next_words:
        return ExportedFunction(
            lambda tokens: model.apply(collections, tokens, method="logits"), ("tokens",), length, longest
        )
    inputs = _exported_inputs(model)
    return ExportedFunction(_batch_logits(model, weights, inputs), inputs, length, longest)


def _exported_inputs(model: Model) -> tuple[str, ...]:
    """Names of the arrays of a batch that the logits depend on."""
    return tuple(name for name in model.batch_axes() if name not in _NOT_EXPORTED)


def _batch_logits(model: Any, weights: Any, inputs: Sequence[str]) -> Callable[..., Any]:
    """The logits as a function of the arrays of a batch."""
    collections = variables.collections(weights)

    def call(*arrays: jax.Array) -> Any:
        batch = dict(zip(inputs, arrays, strict=True))
        shape = batch["tokens"].shape[:2]
        positions = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        return model.apply(collections, {**batch, "positions": positions}, method="logits")

    return call


def input_shape(function: ExportedFunction, batch: int) -> tuple[Any, Any]:
    """Shape of the inputs of a function.

    Args:
      function: The function.
      batch: Sequences of a batch, 0 for any number.

    Returns:
      `(B, T)`, where sizes that may be any number are symbols of JAX.
    """
    names = [name for name, size in ((BATCH, batch), (LENGTH, function.length)) if size == 0]
    constraints = [f"{name} >= 1" for name in names]
    if LENGTH in names and function.longest:
        constraints.append(f"{LENGTH} <= {function.longest}")
    symbols = iter(jax.export.symbolic_shape(", ".join(names), constraints=constraints) if names else ())
    return batch or next(symbols), function.length or next(symbols)


def arguments(function: ExportedFunction, shape: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the arguments of a function.

    Args:
      function: The function.
      shape: Result of `input_shape`.

    Returns:
      One for each input.
    """
    further = function.token_shapes
    return [jax.ShapeDtypeStruct((*shape, *further.get(name, ())), jnp.int32) for name in function.inputs]


def unsized_error(function: ExportedFunction, batch: int, error: BaseException) -> InputError:
    """The error of a model that cannot be traced with symbolic sizes.

    Args:
      function: The function.
      batch: Sequences of a batch, 0 for any number.
      error: The error of JAX.

    Returns:
      The error, which names the sizes to fix.
    """
    free = [name for name, size in (("number", batch), ("length", function.length)) if size == 0]
    fixes = [f"{name}=N" for name, size in (("batch", batch), ("length", function.length)) if size == 0]
    reason = str(error).partition("\n")[0]
    return InputError(
        f"the model cannot be exported for sequences of any {' and '.join(free)} ({reason:.200}): pass "
        f"{' or '.join(fixes[::-1])}"
    )


def traced(function: ExportedFunction, batch: int) -> Any:
    """The jaxpr of a function.

    Args:
      function: The function.
      batch: Sequences of a batch, 0 for any number.

    Returns:
      A closed jaxpr.

    Raises:
      InputError: The model computes with a size that may be any number.
    """
    shape = input_shape(function, batch)
    try:
        return jax.make_jaxpr(function.call)(*arguments(function, shape))
    except InputError:
        raise
    except SYMBOLIC_ERRORS as error:
        if batch and function.length:
            raise
        raise unsized_error(function, batch, error) from error
