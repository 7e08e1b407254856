"""Distillation: a Model that is trained by the outputs of a frozen teacher.

A `Distillation` wraps the student, a Model of any task that reports what `PredictionModel.tapped` lists. Its teacher is a
frozen variable, or the batch holds the teacher's logits. Examples without a label count as any other for all terms but that of
the labels, in which their loss is 0. Evaluations are those of the student alone. Matrices that lead states of the student to
the teacher's width lie under the key "distillation" of the parameters; the share of the steps that are done, by which losses
are scheduled, lies under the same key of the buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from hpnlp.compress.distilling.distillation_losses import IDS, VALUES, Comparison, term_names
from hpnlp.compress.distilling.distillation_terms import FIELD, Term
from hpnlp.data.examples.kind import TEACHER_WEIGHTS
from hpnlp.models.mixtures.wrapper import ModelWrapper
from hpnlp.models.variables import BUFFERS, FROZEN
from hpnlp.types import InputError, LossOut, Statistics

if TYPE_CHECKING:
    from hpnlp.parallel.layout import Layout

OWN = "distillation"  # key of the matrices and of the schedule's buffer
TEACHER = "teacher"  # key of the teacher among frozen variables


@dataclasses.dataclass(frozen=True)
class Extras:
    """Variables that a distillation adds to those of the student.

    Attributes:
      projections: Names of matrices, each with (width of the student, width of the teacher).
      is_scheduled: Whether losses depend on the share of the steps that are done.
    """

    projections: tuple[tuple[str, tuple[int, int]], ...] = ()
    is_scheduled: bool = False

    def params(self, key: Array | None) -> dict[str, Any]:
        """First matrices, boxed with the names of their axes.

        Args:
          key: Key, or None for the same numbers in every run.

        Returns:
          A dict with OWN, or an empty one.
        """
        key = jax.random.key(0) if key is None else key
        boxed = {}
        for index, (name, shape) in enumerate(self.projections):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "hidden"))
            boxed[name] = init(jax.random.fold_in(key, index), shape, jnp.float32)
        return {OWN: boxed} if boxed else {}

    def buffers(self) -> dict[str, Any]:
        """First buffers: a dict with OWN, or an empty one."""
        return {OWN: {"done": jnp.zeros(())}} if self.is_scheduled else {}

    def added(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the initial values of these variables to weights of the student.

        Args:
          weights: Weights of the student.

        Returns:
          The weights.
        """
        buffers = {**weights.get(BUFFERS, {}), **self.buffers()}
        result = {**weights, **nn.meta.unbox(self.params(None))}
        return {**result, BUFFERS: buffers} if buffers else result

    @classmethod
    def from_weights(cls, weights: Mapping[str, Any]) -> Extras:
        """Finds the variables that a distillation added among the weights of a model.

        Args:
          weights: Shapes of the model's weights, or the weights.

        Returns:
          The variables, none for a model without a teacher.
        """
        matrices = {name: tuple(x.shape) for name, x in weights.get(OWN, {}).items()}
        return cls(tuple(sorted(matrices.items())), OWN in weights.get(BUFFERS, {}))

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "projections": {name: list(shape) for name, shape in self.projections},
            "is_scheduled": self.is_scheduled,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Extras:
        """The inverse of `to_json`.

        Args:
          values: Its result.

        Returns:
          The variables.
        """
        matrices = {str(name): (int(shape[0]), int(shape[1])) for name, shape in values["projections"].items()}
        return cls(tuple(matrices.items()), bool(values["is_scheduled"]))


@dataclasses.dataclass(frozen=True)
class Distilled(ModelWrapper):
    """A student with the variables that its distillation added, without a teacher: what a finished run holds.

    Attributes:
      inner: The student.
      extras: The added variables.
    """

    extras: Extras = Extras()  # noqa: RUF009  (frozen)

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """Variables of the student with the added ones.

        Args:
          rngs: As of every Flax module.
          *args: As of the student.
          **kwargs: As of the student.

        Returns:
          The variables, in which arrays are boxed with the names of their axes.
        """
        variables = dict(self.inner.init(rngs, *args, **kwargs))
        key = rngs["params"] if isinstance(rngs, Mapping) else rngs
        variables["params"] = {**variables["params"], **self.extras.params(jax.random.fold_in(key, 1))}
        if buffers := self.extras.buffers():
            variables[BUFFERS] = {**variables.get(BUFFERS, {}), **buffers}
        return variables

    def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Applies the student.

        Args:
          variables: Variables as of `init`.
          *args: As of the student.
          **kwargs: As of the student.

        Returns:
          The result of the student.
        """
        return self.inner.apply(_without_own(variables), *args, **kwargs)

    def advance(self, buffers: Any, statistics: Statistics, step: Array, rng: Array) -> Any:
        """Advances the buffers of the student.

        Arguments: see `Model.advance`.

        Returns:
          A tree like `buffers`.
        """
        inner = {name: tree for name, tree in buffers.items() if name != OWN}
        result = self.inner.advance(inner, statistics, step, rng) if inner else {}
        return {**result, OWN: buffers[OWN]} if OWN in buffers else result

    def student_weights(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Weights of the student.

        Args:
          weights: Weights of this model.

        Returns:
          The weights without those of the distillation.
        """
        inner = {name: tree for name, tree in weights.items() if name not in (OWN, BUFFERS, FROZEN)}
        buffers = {name: tree for name, tree in weights.get(BUFFERS, {}).items() if name != OWN}
        return {**inner, BUFFERS: buffers} if buffers else inner

    def plain(self, weights: Mapping[str, Any]) -> tuple[Any, Any]:
        """The student without its distillation.

        Args:
          weights: Weights of this model.

        Returns:
          The student as it is used, and its weights.
        """
        return self.inner.plain(self.student_weights(weights))


@dataclasses.dataclass(frozen=True)
class Distillation(Distilled):
    """A student that is trained by a teacher.

    Attributes:
      teacher: The teacher, a Model for the same batches.
      terms: The losses.
      steps: Steps of the run.
      stored: Number of logits of a label in a batch; 0 to run the teacher.
      unlabelled: Whether examples of a batch may lack labels, so that it has TEACHER_WEIGHTS.
    """

    teacher: Any = None
    terms: tuple[Term, ...] = ()
    steps: int = 1
    stored: int = 0
    unlabelled: bool = False

    def clone(self, **fields: Any) -> Distillation:
        """Clones the student with other values of its fields; the teacher is laid out over devices as the student.

        Args:
          **fields: Fields of the student with other values.

        Returns:
          The wrapped clone.
        """
        layout = {name: value for name, value in fields.items() if name == "model_parallel"}
        return dataclasses.replace(self, inner=self.inner.clone(**fields), teacher=self.teacher.clone(**layout))

    def init(self, rngs: PyTree[Array], *args: Any, **kwargs: Any) -> Any:
        """Variables of `Distilled`, and the teacher as a frozen variable.

        Args:
          rngs: As of every Flax module.
          *args: As of the student.
          **kwargs: As of the student.

        Returns:
          The variables, in which arrays are boxed with the names of their axes.
        """
        variables = super().init(rngs, *args, **kwargs)
        if not self.stored:
            variables[FROZEN] = {TEACHER: dict(self.teacher.init(rngs, self.teacher.example_batch(1, 8)))}
        return variables

    def example_batch(self, batch_size: int, length: int) -> dict[str, Array]:
        """A batch with the shapes and dtypes of a batch of data.

        Args:
          batch_size: Number of sequences.
          length: Tokens per sequence.

        Returns:
          The batch of both models, with stored logits if there are some.
        """
        batch = self.inner.example_batch(batch_size, length)
        if self.unlabelled:
            batch = {**batch, TEACHER_WEIGHTS: batch["weights"]}
        if not self.stored:
            return {**self.teacher.example_batch(batch_size, length), **batch}
        shape = (*batch["weights"].shape, self.stored)
        ids = {IDS: jnp.zeros(shape, jnp.int32)} if self._stores_some else {}
        return {**batch, VALUES: jnp.zeros(shape, jnp.float16), **ids}

    def batch_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Logical axes of the arrays of a batch, by their names."""
        axes = self.inner.batch_axes()
        if self.unlabelled:
            axes = {**axes, TEACHER_WEIGHTS: axes["weights"]}
        if not self.stored:
            return {**self.teacher.batch_axes(), **axes}
        return {**axes, **dict.fromkeys(self._stored_arrays, (*axes["weights"], None))}

    @property
    def taps(self) -> tuple[str, ...]:
        """Names of `PredictionModel.tapped` that the terms compare."""
        return tuple(sorted(frozenset().union(*(term.taps for term in self.terms))))

    def check_layout(self, layout: Layout) -> None:
        """Checks that the teacher runs on a layout over devices.

        Args:
          layout: A `parallel.layout.Layout`.

        Raises:
          InputError: The layout divides layers, sequences, or heads whose attention is compared.
        """
        for field, axis in (("pipeline", "layers"), ("sequence", "length")):
            if layout.size(axis) > 1:
                raise InputError(
                    f"plan.{field}={layout.size(axis)}: a teacher needs all layers and tokens of a sequence on one device: set "
                    f"plan.{field}=1, and divide batches (plan.name=data or zero3)"
                )
        if (tensor := layout.mesh.shape["tensor"]) > 1 and "attention" in self.taps:
            raise InputError(
                f"plan.tensor={tensor} divides heads, and distill.losses compares their attention: set plan.tensor=1, or leave "
                "out the loss"
            )

    @property
    def training_arrays(self) -> tuple[str, ...]:
        """Arrays of a batch that only training reads."""
        return (*self._stored_arrays, *((TEACHER_WEIGHTS,) if self.unlabelled else ()))

    @property
    def _stored_arrays(self) -> tuple[str, ...]:
        """Arrays of a batch with outputs of the teacher."""
        return (VALUES, *((IDS,) if self._stores_some else ())) if self.stored else ()

    @property
    def _stores_some(self) -> bool:
        """Whether the batch has the largest logits only."""
        return self.stored < self.teacher.config.outputs()[0]

    def apply(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: Mapping[str, Array] | None = None,
        method: str | Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Applies the student; its loss in training is the sum of the terms.

        Args:
          variables: Variables as of `init`.
          *args: As of the student.
          rngs: Keys by name.
          method: As of every Flax module.
          **kwargs: As of the student.

        Returns:
          The result of the student. In training, `LossOut.sum` is the weighted sum of the terms, each a mean, times the weight
          of the labels, and `aux` has each term as "distill_NAME". With `unlabelled`, the weight is that of all examples, and
          `aux` lacks the accuracy, which a batch without labels does not have.
        """
        if method == "rows":
            raise InputError(
                "optimizer.rows=True trains the rows that a batch looks up, and a distillation reads all rows of the output "
                "layer: set optimizer.rows=False"
            )
        if method != "loss" or (args[1] if len(args) > 1 else kwargs.get("deterministic", True)):
            if args and isinstance(args[0], Mapping):
                names = self.inner.batch_axes()
                args = ({name: x for name, x in args[0].items() if name in names}, *args[1:])
            return super().apply(variables, *args, rngs=rngs, method=method, **kwargs)
        return self._loss(variables, args[0] if args else kwargs["batch"], rngs)

    def _loss(
        self, variables: Mapping[str, Any], batch: Mapping[str, Array], rngs: Mapping[str, Array] | None
    ) -> LossOut:
        """The loss of a batch in training."""
        names = self.inner.batch_axes()
        taps = self.taps
        own_batch = {name: batch[name] for name in names}
        out = self.inner.apply(_without_own(variables), own_batch, False, taps, rngs=rngs, method="loss")
        target = self._target(variables, batch, taps)
        done = variables[BUFFERS][OWN]["done"] if self.extras.is_scheduled else None
        if self.unlabelled:
            weights = batch[TEACHER_WEIGHTS]
            own_batch["weights"] = weights
            others = {name: value for name, value in out.aux.items() if name != "accuracy"}
            out = dataclasses.replace(out, weight=weights.sum(), aux=others)
        compare = Comparison(
            self.inner.config, self.teacher.config, out.taps, target, own_batch, variables["params"].get(OWN, {}), done
        )
        weight = out.weight.astype(jnp.float32)
        total, aux = jnp.zeros(()), {}
        for name, term in term_names(self.terms).items():
            sums = [(out.sum, weight, compare.gate(term, 0, 1))] if term.kind == "labels" else compare(name, term)
            for value, count, gate in sums:
                total = total + term.weight * gate * value / jnp.maximum(count, 1e-30) * weight
            aux[f"distill_{name}"] = (
                sum(value * sums[0][1] / jnp.maximum(n, 1e-30) for value, n, _ in sums),
                sums[0][1],
            )
        return dataclasses.replace(out, sum=total, aux={**out.aux, **aux}, taps={})

    def _target(self, variables: Mapping[str, Any], batch: Mapping[str, Array], taps: tuple[str, ...]) -> Any:
        """Outputs of the teacher for a batch, computed or stored."""
        if self.stored:
            return {name: batch[name] for name in self._stored_arrays}
        batch = {name: batch[name] for name in self.teacher.batch_axes()}
        out = self.teacher.apply(variables[FROZEN][TEACHER], batch, True, taps, method="loss")
        return jax.lax.stop_gradient(out.taps)

    def advance(self, buffers: Any, statistics: Statistics, step: Array, rng: Array) -> Any:
        """Advances the buffers of the student, and the share of the steps that are done.

        Arguments: see `Model.advance`.

        Returns:
          A tree like `buffers`.
        """
        result = super().advance(buffers, statistics, step, rng)
        if OWN in result:
            result = {**result, OWN: {"done": (step + 1).astype(jnp.float32) / self.steps}}
        return result


def make_extras(terms: tuple[Term, ...], student: Any, teacher: Any) -> Extras:
    """Variables that a distillation adds to the student.

    Args:
      terms: The losses.
      student: Config of the student.
      teacher: Config of the teacher.

    Returns:
      The variables.

    Raises:
      InputError: Widths differ, and a term has no matrix.
    """
    projections = []
    for name, term in term_names(terms).items():
        if term.kind not in ("hidden", "embedding", "cosine"):
            continue
        if term.projection == "linear" or (term.projection == "auto" and student.dim != teacher.dim):
            projections.append((name, (student.dim, teacher.dim)))
        elif student.dim != teacher.dim:
            raise InputError(
                f"{FIELD}: {term.kind} with projection=none compares states of model.dim={student.dim} with the teacher's of "
                f"{teacher.dim}: set projection=linear"
            )
    return Extras(tuple(projections), any(term.is_scheduled for term in terms))


def _without_own(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the variables that the distillation added, and the frozen ones."""
    params = {name: tree for name, tree in variables["params"].items() if name != OWN}
    result = {name: tree for name, tree in variables.items() if name != FROZEN} | {"params": params}
    if BUFFERS in result:
        buffers = {name: tree for name, tree in result[BUFFERS].items() if name != OWN}
        result = {name: tree for name, tree in result.items() if name != BUFFERS}
        result |= {BUFFERS: buffers} if buffers else {}
    return result
