"""Training with other weights: matrices that are quantized, pruned or dropped in every step, with straight-through gradients.

A `WeightTraining` wraps a Model. It turns parameters into what the layers read right before the model is applied, so that
layers, mixers and output layers do not change. Further parameters (scores, factors) and buffers (shares and thresholds of a
schedule) lie under the key "weights" of these collections.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from hpnlp.compress.matrices import KERNELS, is_table
from hpnlp.compress.training.techniques import WEIGHT_TRAININGS
from hpnlp.compress.training.training_technique import WeightTechnique
from hpnlp.models.mixtures.wrapper import ModelWrapper
from hpnlp.models.variables import BUFFERS
from hpnlp.ops.weights import LowRankWeight, RoundedInputsWeight, dense_tree, factorize
from hpnlp.ops.weights.low_rank import rank_for_share
from hpnlp.spec import build, parse_one
from hpnlp.types import InputError, LossOut, Model, Statistics

OWN = "weights"  # key of the added parameters, buffers and statistics
SCORES, LEFT, RIGHT = "scores", "left", "right"
DROPOUT = "dropout"
_WEIGHT_DROP_STREAM = 0x77656967  # folded into the key of dropout


def with_weight_training(model: Model, text: str, steps: int) -> Any:
    """A model that is trained with other weights.

    Args:
      model: A Model.
      text: `train.weights`, an entry of WEIGHT_TRAININGS with its arguments; "" for the model as it is.
      steps: Steps of the run.

    Returns:
      The model, or a `WeightTraining` of it.

    Raises:
      InputError: Unknown name, or wrong arguments.
    """
    if not text:
        return model
    return WeightTraining(model, build(parse_one(text, "train.weights"), WEIGHT_TRAININGS, "weights", steps=steps))


@dataclasses.dataclass(frozen=True)
class WeightTraining(ModelWrapper):
    """A Model whose kernels go through a technique before it is applied. It has all members of the Model.

    Attributes:
      inner: The Model.
      technique: The technique.
      every: Steps between two computations of the thresholds of a schedule, which sort each matrix.
    """

    technique: WeightTechnique = WeightTechnique()  # noqa: RUF009  (frozen)
    every: int = 8

    def init(self, rngs: PyTree[Array], *args: Any, **kwargs: Any) -> Any:
        """Variables of the Model, with scores among its parameters and thresholds among its buffers.

        Args:
          rngs: As of every Flax module.
          *args: As of the Model.
          **kwargs: As of the Model.

        Returns:
          The variables, in which arrays are boxed with the names of their axes.
        """
        variables = dict(self.inner.init(rngs, *args, **kwargs))
        matrices = _kernels(variables["params"], _is_box)
        if not matrices:
            raise InputError("train.weights: the model has no kernels: leave train.weights empty")
        if self.technique.parameters:
            factors = {path: _boxed_factors(box, self.technique.parameters) for path, box in matrices.items()}
            variables["params"] = {**variables["params"], OWN: _nested({path: x for path, x in factors.items() if x})}
            if not variables["params"][OWN]:
                raise InputError(
                    f"train.weights=low_rank({self.technique.parameters}): the factors would have as many parameters as the "
                    "kernels: lower the share"
                )
        if self.technique.has_scores:
            zeros = {path: {SCORES: jax.tree.map(jnp.zeros_like, box)} for path, box in matrices.items()}
            variables["params"] = {**variables["params"], OWN: _nested(zeros)}
        if self.technique.share is not None:
            lowest = {path: jnp.full(_lead(nn.meta.unbox(box)), -jnp.inf) for path, box in matrices.items()}
            schedule = {"share": jnp.ones(()), "due": jnp.ones(()), "thresholds": _nested(_finite(lowest))}
            variables[BUFFERS] = {**variables.get(BUFFERS, {}), OWN: schedule}
        return variables

    def apply(
        self, variables: Mapping[str, Any], *args: Any, rngs: Mapping[str, Array] | None = None, **kwargs: Any
    ) -> Any:
        """Applies the Model with the matrices of the technique.

        Args:
          variables: Variables as of `init`.
          *args: As of the Model.
          rngs: Keys by name; single weights are dropped by that of "dropout".
          **kwargs: As of the Model.

        Returns:
          The result of the Model; its `statistics` also have the thresholds of a schedule and the penalty of scores.
        """
        params, extra, buffers = _split(variables)
        rng = (rngs or {}).get(DROPOUT)
        rng = None if rng is None else jax.random.fold_in(rng, _WEIGHT_DROP_STREAM)
        matrices = _kernels(params)
        scores = {path: _scores_or_factors(extra, path) for path in matrices}
        thresholds = {path: _at(buffers["thresholds"], path) if buffers else None for path in matrices}
        bound = {
            path: self.technique.bind(
                w, scores[path], thresholds[path], None if rng is None else jax.random.fold_in(rng, index)
            )
            for index, (path, w) in enumerate(matrices.items())
        }
        if bits := self.technique.input_bits:
            bound = {path: RoundedInputsWeight(w, bits) for path, w in bound.items()}
        inner = {**variables, "params": _replaced(params, bound)}
        if BUFFERS in inner:
            inner[BUFFERS] = {name: tree for name, tree in inner[BUFFERS].items() if name != OWN}
            inner = inner if inner[BUFFERS] else {name: tree for name, tree in inner.items() if name != BUFFERS}
        out = self.inner.apply(inner, *args, rngs=rngs or {}, **kwargs)
        if not isinstance(out, LossOut):
            return out
        added = self._statistics(matrices, scores, buffers)
        return dataclasses.replace(out, statistics={**out.statistics, OWN: added}) if added else out

    def auxiliary_loss(self, statistics: Statistics) -> dict[str, Array]:
        """Auxiliary losses of the Model, and "weights_loss", the penalty of the scores.

        Args:
          statistics: As of the Model.

        Returns:
          Name -> float32 scalar.
        """
        sums, inner = _own_statistics(statistics)
        losses = self.inner.auxiliary_loss(inner)
        if "penalty" in sums:
            losses = {**losses, "weights_loss": sums["penalty"] / jnp.maximum(sums["count"], 1.0)}
        return losses

    def advance(self, buffers: PyTree, statistics: Statistics, step: Array, rng: Array) -> Any:
        """Buffers of the Model, and the share and the thresholds for the next step.

        Arguments: see `Model.advance`.

        Returns:
          A tree like `buffers`.
        """
        sums, inner_statistics = _own_statistics(statistics)
        inner = {name: tree for name, tree in buffers.items() if name != OWN}
        result = self.inner.advance(inner, inner_statistics, step, rng) if inner else {}
        if OWN not in buffers:
            return result
        old = buffers[OWN]
        new = jax.tree.map(lambda x: x / jnp.maximum(sums["count"], 1.0), sums["thresholds"])
        kept = jax.tree.map(lambda now, then: jnp.where(old["due"] > 0, now, then), new, old["thresholds"])
        following = step + 1
        due = (following % self.every == 0) | (following >= self.technique.steps - 1)
        share = self.technique.share(following.astype(jnp.float32))
        return {**result, OWN: {"share": share, "due": due.astype(jnp.float32), "thresholds": kept}}

    @property
    def changes_weights(self) -> bool:
        """True: the Model is applied with the matrices of the technique."""
        return True

    def allowed_updates(self, params: PyTree, updates: PyTree, rate: Array) -> Any:
        """Updates of the parameters as the technique changes them.

        Args:
          params: Parameters of this model, before the update.
          updates: A tree like `params`.
          rate: Learning rate of the step, float32 [].

        Returns:
          The updates, see `WeightTechnique.updates`.
        """
        return _replaced(updates, self.technique.updates(self.config, _kernels(params), _kernels(updates), rate))

    def finished(self, weights: Mapping[str, Any]) -> Any:
        """The Model's own weights after the training.

        Args:
          weights: Weights of this model.

        Returns:
          Weights of `inner`, with the matrices that evaluations of this model read.
        """
        collections = {"params": {k: v for k, v in weights.items() if k != BUFFERS}, BUFFERS: weights.get(BUFFERS, {})}
        params, extra, buffers = _split(collections)
        bound = {
            path: self.technique.bind(
                w,
                _scores_or_factors(extra, path),
                _at(buffers["thresholds"], path) if buffers else None,
                None,
            )
            for path, w in _kernels(params).items()
        }
        inner = {name: tree for name, tree in weights.get(BUFFERS, {}).items() if name != OWN}
        bound = dense_tree(bound)  # products of factors
        return {**_replaced(params, bound), **({BUFFERS: inner} if inner else {})}

    def plain(self, weights: Mapping[str, Any]) -> tuple[Any, Any]:
        """The Model without the technique.

        Args:
          weights: Weights of this model.

        Returns:
          The Model as it is used, and its weights.
        """
        return self.inner.plain(jax.jit(self.finished)(weights))

    def _statistics(self, matrices: Mapping[str, Array], scores: Mapping[str, Any], buffers: Any) -> dict[str, Any]:
        """Thresholds if they are due, the penalty, and a count of calls, by which `advance` divides the sums."""
        result: dict[str, Any] = {}
        if buffers:
            ranked = {path: self.technique.ranked(w, scores[path]) for path, w in matrices.items()}

            def compute() -> Any:
                return {path: quantile(jax.lax.stop_gradient(x), 1 - buffers["share"]) for path, x in ranked.items()}

            def skip() -> Any:
                return {path: jnp.zeros(_lead(x)) for path, x in ranked.items()}

            result["thresholds"] = _nested(jax.lax.cond(buffers["due"] > 0, compute, skip))
        penalties: list[Any] = [self.technique.score_penalty(x) for x in scores.values() if x is not None]
        if penalties and penalties[0] is not None:
            result["penalty"] = jnp.stack(penalties).mean()
        return {**result, "count": jnp.ones(())} if result else {}


def with_own(weights: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the initial variables of a `WeightTraining` to the weights of a plain Model.

    Args:
      weights: Weights of the Model.
      shapes: Shapes of the weights of the `WeightTraining`, or of the Model itself.

    Returns:
      The weights, with scores, shares and thresholds as before the first step where the shapes have such.
    """
    result = dict(weights)
    if OWN in shapes:
        first = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[OWN])
        factors = {}
        for path, w in _kernels(weights).items():
            extra = _scores_or_factors(shapes[OWN], path)
            if isinstance(extra, LowRankWeight) and extra.shape == w.shape[-2:]:
                left, right = _factors(w, extra.left.shape[-1])
                factors |= {f"{path}/{LEFT}": left, f"{path}/{RIGHT}": right}
        result[OWN] = _replaced(first, factors)
    extra = shapes.get(BUFFERS, {}).get(OWN)
    if extra is not None:
        lowest = jax.tree.map(lambda x: jnp.full(x.shape, _LOWEST), extra["thresholds"])
        first = {"share": jnp.ones(()), "due": jnp.ones(()), "thresholds": lowest}
        result[BUFFERS] = {**weights.get(BUFFERS, {}), OWN: first}
    return result


def quantile(x: Float[Array, "*layers D F"], share: Array) -> Float[Array, "*layers"]:
    """Quantile of the numbers of each matrix.

    Args:
      x: [..., D, F].
      share: The share, float32 [].

    Returns:
      [...] float32; below all numbers for a share of 0.

    Cost:
      A sort of each matrix.
    """
    flat = jnp.sort(x.astype(jnp.float32).reshape(*x.shape[:-2], -1), axis=-1)
    index = jnp.round(share * flat.shape[-1]).astype(jnp.int32)
    value = jnp.take_along_axis(flat, jnp.full((*flat.shape[:-1], 1), jnp.minimum(index, flat.shape[-1] - 1)), axis=-1)
    return jnp.where(index > 0, value[..., 0], _LOWEST)


_LOWEST = jnp.finfo(jnp.float32).min


def _is_box(node: object) -> bool:
    return isinstance(node, nn.meta.AxisMetadata)


def _kernels(params: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Kernels by path."""
    leaves = jax.tree_util.tree_leaves_with_path({k: v for k, v in params.items() if k != OWN}, is_leaf=is_leaf)
    named = {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}
    return {path: leaf for path, leaf in named.items() if path.split("/")[-1] in KERNELS and not is_table(path)}


def _split(variables: Mapping[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    """(parameters of the Model, own parameters, own buffers)."""
    params = {name: tree for name, tree in variables["params"].items() if name != OWN}
    return params, variables["params"].get(OWN), variables.get(BUFFERS, {}).get(OWN)


def _own_statistics(statistics: Mapping[str, Any]) -> tuple[Any, Any]:
    return statistics.get(OWN, {}), {name: tree for name, tree in statistics.items() if name != OWN}


def _at(tree: PyTree, path: str) -> Any:
    for name in path.split("/"):
        tree = tree[name]
    return tree


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = result
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return result


def _replaced(params: PyTree, values: Mapping[str, Any], prefix: str = "") -> Any:
    if not isinstance(params, Mapping):
        return values.get(prefix, params)
    return {name: _replaced(child, values, f"{prefix}/{name}".lstrip("/")) for name, child in params.items()}


def _scores_or_factors(tree: Any, path: str) -> Any:
    """The scores of a kernel, or its factors as a LowRankWeight; None if it has neither."""
    for name in path.split("/"):
        if tree is None or name not in tree:
            return None
        tree = tree[name]
    return tree[SCORES] if SCORES in tree else LowRankWeight(tree[LEFT], tree[RIGHT])


def _factors(w: Array, rank: int) -> tuple[Array, Array]:
    """The factors of the best approximation of a rank, [..., D, r] and [..., r, F]."""
    function = lambda matrix: factorize(matrix, rank)  # noqa: E731
    factors = jax.vmap(function)(w) if w.ndim == 3 else function(w)
    return factors.left, factors.right


def _boxed_factors(box: nn.LogicallyPartitioned, share: int | float) -> dict[str, Any]:
    """The factors of a boxed kernel, boxed with the names of their axes; empty if they would have as many parameters."""
    *lead, d, f = box.value.shape
    rank = rank_for_share((d, f), share)
    if rank * (d + f) >= d * f:
        return {}
    *names, row, column = box.names
    axes = (*names, row, None), (*names, None, column)
    factors = zip((LEFT, RIGHT), _factors(box.value, rank), axes, strict=True)
    return {name: box.replace(value=value, names=names) for name, value, names in factors}


def _lead(x: Array) -> tuple[int, ...]:
    return x.shape[:-2]


def _finite(tree: PyTree) -> Any:
    return jax.tree.map(lambda x: jnp.maximum(x, _LOWEST), tree)
