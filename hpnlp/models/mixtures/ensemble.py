"""Ensembles of language models, whose probabilities are averaged, for evaluation and generation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from hpnlp.model_interfaces.layer_report import CARRY
from hpnlp.models.shared.model import BaseModel
from hpnlp.models.variables import join, split
from hpnlp.types import InputError, LossOut


def averaged(log_probs: Float[Array, "M *N"]) -> Float[Array, "*N"]:
    """Log of the mean of probabilities.

    Args:
      log_probs: Log-probabilities of each member.

    Returns:
      logsumexp over the members - log M.
    """
    return jax.nn.logsumexp(log_probs, axis=0) - math.log(log_probs.shape[0])


@dataclasses.dataclass(frozen=True)
class EnsembleConfig:
    """Configs of the members; all other attributes are those of the first.

    Attributes:
      members: Configs of the models.
    """

    members: tuple[Any, ...]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "members":
            raise AttributeError(name)
        return getattr(self.members[0], name)

    @property
    def decodes(self) -> bool:
        """Whether all members can continue prompts."""
        return all(config.decodes for config in self.members)

    @property
    def max_len(self) -> int:
        """The longest sequence of any member."""
        return min(config.max_len for config in self.members)

    @property
    def position(self) -> str:
        """Positions, "learned" if those of a member are."""
        kinds = [config.position for config in self.members]
        return "learned" if "learned" in kinds else kinds[0]

    def check_accumulation(self, accumulate: int) -> None:
        """Checks that batches of the members can be divided into parts.

        Args:
          accumulate: Number of parts of a batch.
        """
        for config in self.members:
            config.check_accumulation(accumulate)


@dataclasses.dataclass(frozen=True)
class Ensemble(BaseModel):
    """A Model that predicts the mean of the probabilities of its members, on one device.

    The variables of a member lie under its name in every collection: {"member_0": ...}. Members of equal class, config and
    statistics that read a batch as recurrent networks do are one program over stacked variables.

    Attributes:
      members: Models with `token_states`, `label_losses` and `next_logits`, such as RNN and LM, over the same words.
    """

    members: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.members:
            raise InputError("an ensemble has no members: name at least one run")
        for number, member in enumerate(self.members):
            if not member.is_normalized:
                raise InputError(
                    f"member {number} of the ensemble has model.output={member.config.output!r}, which gives no probabilities "
                    "that could be averaged: leave it out"
                )
            if member.config.vocab != self.members[0].config.vocab:
                raise InputError(
                    f"member {number} of the ensemble has {member.config.vocab} words, and member 0 "
                    f"{self.members[0].config.vocab}: name runs over the same vocabulary"
                )

    @property
    def config(self) -> EnsembleConfig:
        """Configs of the members."""
        return EnsembleConfig(tuple(member.config for member in self.members))

    @property
    def model_parallel(self) -> None:
        """None: an ensemble runs on one device."""
        return None

    @property
    def remat(self) -> str:
        """Rematerialisation policy of the first member."""
        return self.members[0].remat

    @property
    def is_normalized(self) -> bool:
        """Whether the loss is -log p(label): True."""
        return True

    @property
    def names(self) -> list[str]:
        """Names of the members in collections of variables."""
        return [f"member_{number}" for number in range(len(self.members))]

    def clone(self, **fields: Any) -> Ensemble:
        """Clones the members with other values of their fields.

        Args:
          **fields: Fields of the members with other values.

        Returns:
          The ensemble of the clones.
        """
        if fields.get("model_parallel") is not None:
            raise InputError("an ensemble runs on one device: set plan.name='single'")
        return Ensemble(tuple(member.clone(**fields) for member in self.members))

    def init(self, rngs: PyTree[Array], *args: Any, **kwargs: Any) -> Any:
        """Variables of all members, as of every Flax module.

        Args:
          rngs: Key, or keys by name.
          *args: As of the members.
          **kwargs: As of the members.

        Returns:
          Collection -> member -> variables.
        """
        result: dict[str, dict[str, Any]] = {}
        for number, (name, member) in enumerate(zip(self.names, self.members, strict=True)):
            keys = jax.tree.map(lambda key, number=number: jax.random.fold_in(key, number), rngs)
            for collection, tree in member.init(keys, *args, **kwargs).items():
                result.setdefault(collection, {})[name] = tree
        return result

    def apply(
        self, variables: Mapping[str, Any], *args: Any, method: str = "loss", rngs: Mapping[str, Array] | None = None
    ) -> Any:
        """Applies one of the methods `loss`, `log_probs`, `prefill`, `next_logits` and `extend`, as of every Flax module.

        Args:
          variables: Collection -> member -> variables; the carry is that of `initial_carry`.
          *args: Arguments of the method of the members, which are described there.
          method: Name of the method.
          rngs: Keys for dropout.

        Returns:
          The result. States of the members stand side by side in the last axis of hidden states.
        """
        if method not in ("loss", "log_probs", "prefill", "next_logits", "extend"):
            raise InputError(f"an ensemble has no method {method!r}: it is evaluated and continues prompts only")
        of_members = [self._variables(variables, index) for index in range(len(self.members))]
        return getattr(self, f"_{method}")(of_members, *args, **({"rngs": rngs} if method == "loss" else {}))

    def _variables(self, variables: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Variables of a member."""
        name = self.names[index]
        collections = {key: tree[name] for key, tree in variables.items() if key != CARRY and name in tree}
        carry = variables.get(CARRY)
        if carry is not None and name in carry["layers"]:
            collections[CARRY] = {"layers": carry["layers"][name]}
        return collections

    def _loss(
        self,
        variables: Sequence[Any],
        batch: Mapping[str, Array],
        deterministic: bool = True,
        rngs: Mapping[str, Array] | None = None,
    ) -> LossOut:
        """The loss of a batch, and the carry of the members under their names."""
        log_probs, carries = self._label_log_probs(variables, batch, deterministic, rngs or {})
        weights = batch["weights"].astype(jnp.float32)
        total = jnp.where(weights == 0, 0.0, -weights * averaged(log_probs)).sum()
        kept = {name: carry["layers"] for name, carry in zip(self.names, carries, strict=True) if carry is not None}
        return LossOut(total, weights.sum(), {}, {}, {"layers": kept} if kept else None)

    def _label_log_probs(
        self, variables: Sequence[Any], batch: Mapping[str, Array], deterministic: bool, rngs: Mapping[str, Any]
    ) -> tuple[Float[Array, "M B T"], list[Any]]:
        """Log-probabilities of the labels, and carries, of each member."""

        def run(member: Any, collections: Mapping[str, Any], number: Array | int) -> tuple[Array, Any]:
            keys = {name: jax.random.fold_in(key, number) for name, key in rngs.items()}
            h, carry = member.apply(collections, batch, deterministic, method="token_states", rngs=keys)
            weights = {name: tree for name, tree in collections.items() if name != CARRY}
            return -member.apply(weights, h, batch["labels"], method="label_losses"), carry

        if self._is_stackable:
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *variables)
            count = len(self.members)
            log_probs, carry = jax.vmap(lambda tree, number: run(self.members[0], tree, number))(
                stacked, jnp.arange(count)
            )
            return log_probs, [jax.tree.map(lambda x, i=index: x[i], carry) for index in range(count)]
        results = [run(*item) for item in zip(self.members, variables, range(len(self.members)), strict=True)]
        return jnp.stack([log_probs for log_probs, _ in results]), [carry for _, carry in results]

    @property
    def _is_stackable(self) -> bool:
        """Whether the members are one vmapped program."""
        first = self.members[0]
        return first.is_stackable and all(member == first for member in self.members[1:])

    def _log_probs(self, variables: Sequence[Any], batch: Mapping[str, Array]) -> Float[Array, "B T V"]:
        """Log-probabilities of all next words of a batch."""
        states = [
            member.apply(collections, batch, True, method="token_states")[0]
            for member, collections in zip(self.members, variables, strict=True)
        ]
        h = jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in states], axis=-1)
        return self._next_logits(variables, h).reshape(*batch["tokens"].shape, -1)

    def _next_logits(self, variables: Sequence[Any], h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        """Log-probabilities of the tokens that follow."""
        log_probs, start = [], 0
        for member, collections in zip(self.members, variables, strict=True):
            end = start + member.config.dim
            weights = {name: tree for name, tree in collections.items() if name != CARRY}
            log_probs.append(jax.nn.log_softmax(member.apply(weights, h[:, start:end], method="next_logits"), axis=-1))
            start = end
        return averaged(jnp.stack(log_probs))

    def _prefill(self, variables: Sequence[Any], *args: Any) -> tuple[Float[Array, "B D"], Any]:
        """Hidden states of the last tokens of prompts, and the caches of each member."""
        results = [
            member.apply(collections, *args, method="prefill")
            for member, collections in zip(self.members, variables, strict=True)
        ]
        return jnp.concatenate([h for h, _ in results], axis=-1), tuple(caches for _, caches in results)

    def _extend(
        self, variables: Sequence[Any], tokens: Array, positions: Array, caches: PyTree
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Hidden states of new tokens, and the extended caches."""
        results = [
            member.apply(collections, tokens, positions, cache, method="extend")
            for member, collections, cache in zip(self.members, variables, caches, strict=True)
        ]
        return jnp.concatenate([h for h, _ in results], axis=-1), tuple(cache for _, cache in results)

    def initial_carry(self, batch_size: int) -> Any:
        """The carry before the first batch, of each member that has one.

        Args:
          batch_size: Sequences of a batch.

        Returns:
          The carry, or None.
        """
        carries = {
            name: member.initial_carry(batch_size) for name, member in zip(self.names, self.members, strict=True)
        }
        layers = {name: carry["layers"] for name, carry in carries.items() if carry is not None}
        return {"layers": layers} if layers else None

    def carry_axes(self) -> Any:
        """Logical axes of the carry, a tree like it."""
        members = zip(self.names, self.members, strict=True)
        return {"layers": {n: m.carry_axes()["layers"] for n, m in members if m.initial_carry(1) is not None}}

    def example_batch(self, batch_size: int, length: int) -> dict[str, Array]:
        """A batch of zeros, as of the members."""
        return self.members[0].example_batch(batch_size, length)

    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of the arrays of a batch, as of the members."""
        return self.members[0].batch_axes()

    def loss(self, batch: Mapping[str, Array], deterministic: bool = True) -> LossOut:
        """Raises TypeError: the loss is called by `apply`."""
        raise TypeError("call apply(variables, batch, method='loss')")

    def rows(self, batch: Mapping[str, Array]) -> Any:
        """An ensemble trains no rows of tables."""
        raise InputError("an ensemble is not trained: set optimizer.rows=False")


def joined(weights: Sequence[Any]) -> Any:
    """Weights of an ensemble.

    Args:
      weights: Weights of each member, see `models.variables`.

    Returns:
      The weights, in which those of a member are under its name.
    """
    params, buffers = {}, {}
    for number, tree in enumerate(weights):
        member_params, member_buffers = split(nn.meta.unbox(tree))
        params[f"member_{number}"] = member_params
        if member_buffers:
            buffers[f"member_{number}"] = member_buffers
    return join(params, buffers)
