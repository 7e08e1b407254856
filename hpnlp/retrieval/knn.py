"""The mixture of a language model and a datastore of its hidden states: its parameters, their file, and the model (kNN-LM)."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from hpnlp.atomic_file import replaced
from hpnlp.data.tokenizers import tokenizer_digest
from hpnlp.models.mixtures.knn_model import KnnModel
from hpnlp.models.variables import weights_digest
from hpnlp.retrieval.datastore import Datastore
from hpnlp.spec import build, parse_one
from hpnlp.types import InputError, Tokenizer

MIXTURES = "mixture.npz"
DEFAULT_K = 32
TUNED, LEARNED = "tuned", "learned"


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """A datastore whose neighbours are mixed with a language model.

    Attributes:
      directory: The datastore.
      mixture: "tuned", "learned", or "linear(weight=0.25,temperature=10.0)".
      k: Number of neighbours; None for that with which the mixtures were fitted.
    """

    directory: str
    mixture: str = TUNED
    k: int | None = None

    def load(
        self, model: Any, weights: PyTree, tokenizer: Tokenizer, run: str | os.PathLike[str]
    ) -> tuple[Datastore, KnnModel, dict[str, Any]]:
        """Reads the datastore.

        Args:
          model: The model of a run.
          weights: Its weights.
          tokenizer: Its tokenizer.
          run: The run's directory, for messages.

        Returns:
          The datastore, the model of the mixture, and its collection "frozen".

        Raises:
          InputError: The datastore is of another model, or as `find_mixture`.
        """
        if not model.is_normalized:
            raise InputError(f"{run}: model.output={model.config.output!r} gives no probabilities to mix with")
        store = Datastore.load(self.directory, "words")
        store.check_run(run, weights_digest(weights), tokenizer_digest(tokenizer))
        k, mixture = find_mixture(store, self.mixture, self.k)
        return store, *with_datastore(model, store, k, mixture)


def linear(weight: float | int = 0.25, temperature: float | int = 1.0) -> dict[str, Any]:
    """A mixture with one weight for all tokens.

    Args:
      weight: Weight of the neighbours, between 0 and 1.
      temperature: Temperature of their squared distances.

    Returns:
      The mixture, see `models.mixtures.knn_model.neighbour_weight`.

    Raises:
      InputError: An argument is out of range.
    """
    if not 0 < weight < 1 or not 0 < temperature < math.inf:
        raise InputError(
            f"linear: weight={weight}, temperature={temperature}: expected a weight between 0 and 1 and a positive temperature"
        )
    return {
        "weight": np.float32(math.log(weight / (1 - weight))),
        "log_temperature": np.float32(math.log(temperature)),
    }


def save_mixtures(directory: Path, k: int, mixtures: Mapping[str, Any]) -> None:
    """Writes mixtures to a datastore.

    Args:
      directory: The datastore.
      k: Number of neighbours that they were fitted with.
      mixtures: TUNED and LEARNED.
    """
    numbers = flatten_dict(dict(mixtures), sep="/")
    arrays: Any = {"k": np.int64(k), **{name: np.asarray(x, np.float32) for name, x in numbers.items()}}
    with replaced(directory / MIXTURES) as file:
        np.savez(file, **arrays)


def find_mixture(datastore: Datastore, spec: str, k: int | None) -> tuple[int, dict[str, Any]]:
    """The mixture of a spec.

    Args:
      datastore: The datastore.
      spec: "tuned", "learned", or "linear(weight=0.25,temperature=10.0)".
      k: Number of neighbours; None for that of the fitted mixtures.

    Returns:
      `(k, mixture)`.

    Raises:
      InputError: The spec is invalid, the datastore has no fitted mixtures, or k is out of range.
    """
    fitted_k, mixtures = _read_mixtures(datastore.directory)
    k = fitted_k if k is None else k
    if not 1 <= k <= datastore.record.count:
        raise InputError(
            f"k={k}: expected 1 to {datastore.record.count}, the number of vectors of {datastore.directory}"
        )
    if spec not in (TUNED, LEARNED):
        return k, build(parse_one(spec, "mixture"), {"linear": linear}, "mixture")
    if spec not in mixtures:
        raise InputError(
            f"{datastore.directory} has no {spec} mixture: build it with hpnlp index build, or pass "
            '--mixture="linear(weight=0.25,temperature=10.0)"'
        )
    return k, mixtures[spec]


def _read_mixtures(directory: Path) -> tuple[int, dict[str, Any]]:
    """`(k, mixtures by name)`, and none if they were not fitted."""
    if not (directory / MIXTURES).exists():
        return DEFAULT_K, {}
    try:
        with np.load(directory / MIXTURES, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return int(arrays.pop("k")), unflatten_dict(arrays, sep="/")
    except Exception as error:  # damaged files raise all kinds of errors in zipfile and numpy
        raise InputError(f"{directory / MIXTURES} is damaged: build the datastore again") from error


def with_datastore(
    model: Any, datastore: Datastore, k: int, mixture: Mapping[str, Any]
) -> tuple[KnnModel, dict[str, Any]]:
    """A model with a datastore.

    Args:
      model: A language model.
      datastore: The datastore.
      k: Number of neighbours.
      mixture: The mixture.

    Returns:
      `(the model, its collection "frozen")`.
    """
    search, state = datastore.index.as_search()
    frozen = {
        "index": dict(state),
        "words": jnp.asarray(datastore.words()),
        "centre": jnp.float32(datastore.record.centre),
        "scale": jnp.float32(datastore.record.scale),
        "mixture": {name: _arrays(value) for name, value in mixture.items()},
    }
    return KnnModel(model, search, k, frozen), frozen


def _arrays(tree: PyTree) -> Any:
    """A tree of numbers as JAX arrays."""
    return {name: _arrays(value) for name, value in tree.items()} if isinstance(tree, Mapping) else jnp.float32(tree)
