"""A language model mixed with the words that followed the nearest hidden states of a datastore (kNN-LM).

References:
  Khandelwal et al. 2020, "Generalization through memorization: nearest neighbor language models", arXiv 1911.00172.
  Drozdov et al. 2022, "You can't pick your neighbors, or can you?", arXiv 2210.15859, whose weights depend on distances.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.models.mixtures.wrapper import ModelWrapper
from hpnlp.models.variables import FROZEN
from hpnlp.ops.softmax.scored_words import interpolate, label_log_prob, word_distribution
from hpnlp.types import LossOut

FEATURES = 5  # inputs of WeightNetwork
MAX_WEIGHT = 1.0 - 2.0**-20  # a weight of 1 gives words that no neighbour has probability 0, and a loss without bound
ROWS = 512  # hidden states of a search, of which some count in the loss


@runtime_checkable
class Search(Protocol):
    """A search of vectors by their products, such as an entry of `hpnlp.retrieval.index_backends.KINDS`."""

    def search(self, state: PyTree, q: Array, k: int) -> tuple[Array, Array]:
        """`(scores [Q, k], ids [Q, k])` of the largest products; id -1 for none."""
        ...


class WeightNetwork(nn.Module):
    """The weight of the neighbours of each token, from their distances and words."""

    hidden: int = 32

    @nn.compact
    def __call__(self, distances: Float[Array, "N K"], words: Int[Array, "N K"], temperature: Array) -> Array:
        """Logits of the weights.

        Args:
          distances: Squared distances, in increasing order; infinite for none.
          words: Words that followed.
          temperature: Temperature of the distances.

        Returns:
          float32 `[N]`.
        """
        scores = jnp.maximum(-distances / temperature, -50.0)
        shares = jax.nn.softmax(scores, axis=-1)
        of_first = jnp.sum(jnp.where(words == words[:, :1], shares, 0.0), axis=-1)
        entropy = -jnp.sum(shares * jax.nn.log_softmax(scores, axis=-1), axis=-1)
        columns = [scores[:, 0], scores.mean(axis=-1), scores[:, -1], entropy, of_first]
        x = jnp.stack([jnp.sign(c) * jnp.log1p(jnp.abs(c)) for c in columns], axis=-1)
        assert x.shape[-1] == FEATURES
        x = jax.nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(1, kernel_init=nn.initializers.normal(0.01), bias_init=nn.initializers.constant(-1.0))(x)[:, 0]


def neighbour_weight(mixture: Mapping[str, Any], distances: Float[Array, "N K"], words: Int[Array, "N K"]) -> Array:
    """The weight of the neighbours of each token.

    Args:
      mixture: "log_temperature"; and the logit "weight", or "network", the parameters of a WeightNetwork.
      distances: As for `WeightNetwork`.
      words: As for `WeightNetwork`.

    Returns:
      float32 `[N]`, 0 for a token without neighbours, and at most MAX_WEIGHT.
    """
    if "network" in mixture:
        logits = WeightNetwork().apply(
            {"params": mixture["network"]}, distances, words, jnp.exp(mixture["log_temperature"])
        )
    else:
        logits = jnp.broadcast_to(mixture["weight"], distances.shape[:1])
    weight = jnp.minimum(jax.nn.sigmoid(jnp.asarray(logits)), MAX_WEIGHT)
    return jnp.where(jnp.isfinite(distances[:, 0]), weight, 0.0)


def mixed_log_prob(
    mixture: Mapping[str, Any],
    log_prob: Float[Array, " N"],
    distances: Float[Array, "N K"],
    words: Int[Array, "N K"],
    labels: Int[Array, " N"],
) -> Float[Array, " N"]:
    """Log-probabilities of labels under the model and the neighbours.

    Args:
      mixture: As for `neighbour_weight`.
      log_prob: Log-probabilities of the labels under the model.
      distances: As for `WeightNetwork`.
      words: As for `WeightNetwork`.
      labels: Ids of words.

    Returns:
      Log-probabilities.
    """
    scores = -distances / jnp.exp(mixture["log_temperature"])
    return interpolate(log_prob, label_log_prob(scores, words, labels), neighbour_weight(mixture, distances, words))


@dataclasses.dataclass(frozen=True)
class KnnModel(ModelWrapper):
    """A language model whose probabilities are mixed with the words of its k nearest neighbours.

    The datastore is the collection "frozen" of the variables: "index", the state of the search; "words" int32 `[n]`; "centre"
    and "scale", numbers; and "mixture", see `neighbour_weight`. The vectors of the index are keys with two more numbers, so
    that |q|^2 + 2 (centre - score) is the squared distance of a hidden state q and a key, where score is the product with
    (q, scale, scale); see `retrieval.datastore.index_vectors`.

    Attributes:
      inner: A Model with `token_states`, `label_losses` and `next_logits`, such as LM or RNN.
      kind: The search.
      k: Number of neighbours.
      store: The datastore, whose shapes `init` gives.
    """

    kind: Search
    k: int
    store: Any = dataclasses.field(compare=False, repr=False)

    def init(self, rngs: PyTree[Array], *args: Any, **kwargs: Any) -> Any:
        """Initialises the variables of the Model, with zeros for the datastore."""
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.store)
        return {**self.inner.init(rngs, *args, **kwargs), FROZEN: zeros}

    def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the Model; `loss`, `log_probs` and `next_logits` are of the mixture.

        Args:
          variables: The Model's variables, and the datastore.
          *args: Arguments of the method.
          **kwargs: `method`, "loss" by default, and those of the Model's `apply`.

        Returns:
          Result of the method.
        """
        method = kwargs.pop("method", "loss")
        of_inner = {name: tree for name, tree in variables.items() if name != FROZEN}
        store = variables.get(FROZEN)
        if method not in ("loss", "log_probs", "next_logits") or store is None:
            return self.inner.apply(of_inner, *args, method=method, **kwargs)
        if method == "next_logits":
            return self._log_probs(of_inner, store, args[0])
        batch, *further = args
        deterministic = bool(further[0]) if further else True
        h, carry = self.inner.apply(of_inner, batch, deterministic, method="token_states", **kwargs)
        flat = h.reshape(-1, h.shape[-1])
        if method == "log_probs":
            return self._log_probs(of_inner, store, flat).reshape(*h.shape[:2], -1)
        losses = self.inner.apply(of_inner, h, batch["labels"], method="label_losses")
        weights = batch["weights"].astype(jnp.float32).reshape(-1)
        distances, words = self._neighbours_where(store, flat, weights != 0)
        labels = jnp.asarray(batch["labels"]).reshape(-1)
        log_prob = mixed_log_prob(store["mixture"], -losses.reshape(-1), distances, words, labels)
        return LossOut(jnp.where(weights == 0, 0.0, -weights * log_prob).sum(), weights.sum(), {}, {}, carry)

    def neighbours(
        self, store: Mapping[str, Any], h: Float[Array, "N D"]
    ) -> tuple[Float[Array, "N K"], Int[Array, "N K"]]:
        """The neighbours of hidden states.

        Args:
          store: The datastore.
          h: Hidden states.

        Returns:
          `(squared distances in increasing order, infinite for none; words)`.
        """
        q = h.astype(jnp.float32)
        norms = jnp.broadcast_to(store["scale"], (len(q), 2))
        with jax.default_matmul_precision("highest"):  # distances are small differences of large products
            scores, ids = self.kind.search(store["index"], jnp.concatenate([q, norms], axis=1), self.k)
        squares = jnp.sum(jnp.square(q), axis=1, keepdims=True)
        distances = jnp.maximum(squares + 2.0 * (store["centre"] - scores), 0.0)
        return jnp.where(ids >= 0, distances, jnp.inf), store["words"][jnp.maximum(ids, 0)].astype(jnp.int32)

    def _neighbours_where(self, store: Mapping[str, Any], h: Array, is_wanted: Array) -> tuple[Array, Array]:
        """`neighbours` of some hidden states; of the others, a search is left out where ROWS of them come together."""
        count = len(h)
        order = jnp.argsort(~is_wanted, stable=True)
        rows = jnp.pad(h[order], ((0, -count % ROWS), (0, 0))).reshape(-1, ROWS, h.shape[1])

        def none(rows: Array) -> tuple[Array, Array]:
            return jnp.full((ROWS, self.k), jnp.inf), jnp.zeros((ROWS, self.k), jnp.int32)

        def part(number: Array) -> tuple[Array, Array]:
            is_read = number * ROWS < is_wanted.sum()
            return jax.lax.cond(is_read, lambda x: self.neighbours(store, x), none, rows[number])

        neighbours = jax.lax.map(part, jnp.arange(len(rows)))
        distances, words = (x.reshape(-1, self.k)[jnp.argsort(order)] for x in neighbours)
        return distances, words

    def _log_probs(
        self, variables: Mapping[str, Any], store: Mapping[str, Any], h: Float[Array, "N D"]
    ) -> Float[Array, "N V"]:
        """Log-probabilities of all words."""
        log_prob = jax.nn.log_softmax(self.inner.apply(variables, h, method="next_logits"), axis=-1)
        distances, words = self.neighbours(store, h)
        scores = -distances / jnp.exp(store["mixture"]["log_temperature"])
        weight = neighbour_weight(store["mixture"], distances, words)
        shares = word_distribution(scores, words, log_prob.shape[-1])
        return interpolate(log_prob, jnp.log(shares), jnp.broadcast_to(weight[:, None], shares.shape))
