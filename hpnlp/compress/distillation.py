"""Distillation: a Model that is trained by the outputs of a frozen teacher.

A `Distillation` wraps the student, a Model of any task that reports what `PredictionModel.tapped` lists. Its teacher is a
frozen variable, or the batch holds the teacher's logits. Evaluations are those of the student alone. Matrices that lead states
of the student to the teacher's width lie under the key "distillation" of the parameters; the share of the steps that are done,
by which losses are scheduled, lies under the same key of the buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from hpnlp.compress.distillation_terms import FIELD, Term
from hpnlp.models.variables import BUFFERS, FROZEN
from hpnlp.ops import distillation as ops
from hpnlp.ops.linear import linear
from hpnlp.types import InputError, LossOut, Statistics

OWN = "distillation"  # key of the matrices and of the schedule's buffer
TEACHER = "teacher"  # key of the teacher among frozen variables
# Arrays of a batch with stored logits of the teacher, and the classes that they belong to.
VALUES, IDS = "teacher_logits", "teacher_ids"
_STATE_LOSSES = {
    "mse": ops.squared_error,
    "feature_map": ops.feature_map_error,
    "cosine": ops.cosine_distance,
}


@dataclasses.dataclass(frozen=True)
class Extras:
    """Variables that a distillation adds to those of the student.

    Attributes:
      projections: Names of matrices, each with (width of the student, width of the teacher).
      is_scheduled: Whether losses depend on the share of the steps that are done.
    """

    projections: tuple[tuple[str, tuple[int, int]], ...] = ()
    is_scheduled: bool = False

    def params(self, key: Any) -> dict[str, Any]:
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
        """Weights of the student with the first of these variables, which training starts from.

        Args:
          weights: Weights of the student.

        Returns:
          The weights.
        """
        buffers = {**weights.get(BUFFERS, {}), **self.buffers()}
        result = {**weights, **nn.meta.unbox(self.params(None))}
        return {**result, BUFFERS: buffers} if buffers else result

    @classmethod
    def of_shapes(cls, weights: Mapping[str, Any]) -> Extras:
        """The variables that are among those of a model.

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
class Distilled:
    """A student with the variables that its distillation added, without a teacher: what a finished run holds.

    Attributes:
      inner: The student.
      extras: The further variables.
    """

    inner: Any
    extras: Extras

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def clone(self, **fields: Any) -> Any:
        """As of every Flax module.

        Args:
          **fields: Fields of the student with other values.

        Returns:
          The wrapped clone.
        """
        return dataclasses.replace(self, inner=self.inner.clone(**fields))

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """Variables of the student and further ones.

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
        """Buffers of the student, as of the student.

        Args:
          buffers: As of the student.
          statistics: As of the student.
          step: As of the student.
          rng: As of the student.

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


@dataclasses.dataclass(frozen=True)
class Distillation(Distilled):
    """A student that is trained by a teacher.

    Attributes:
      teacher: The teacher, a Model for the same batches.
      terms: The losses.
      steps: Steps of the run.
      stored: Number of logits of a label in a batch; 0 to run the teacher.
    """

    teacher: Any = None
    terms: tuple[Term, ...] = ()
    steps: int = 1
    stored: int = 0

    def clone(self, **fields: Any) -> Distillation:
        """As of every Flax module; the teacher is laid out over devices as the student.

        Args:
          **fields: Fields of the student with other values.

        Returns:
          The wrapped clone.
        """
        layout = {name: value for name, value in fields.items() if name == "model_parallel"}
        return dataclasses.replace(self, inner=self.inner.clone(**fields), teacher=self.teacher.clone(**layout))

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
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
        if not self.stored:
            return {**self.teacher.example_batch(batch_size, length), **batch}
        shape = (*batch["weights"].shape, self.stored)
        ids = {IDS: jnp.zeros(shape, jnp.int32)} if self._stores_some else {}
        return {**batch, VALUES: jnp.zeros(shape, jnp.float16), **ids}

    def batch_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Logical axes of the arrays of a batch, by their names."""
        axes = self.inner.batch_axes()
        if not self.stored:
            return {**self.teacher.batch_axes(), **axes}
        return {**axes, **dict.fromkeys(self.training_arrays, (*axes["weights"], None))}

    @property
    def taps(self) -> tuple[str, ...]:
        """What the terms compare, names of `PredictionModel.tapped`."""
        return tuple(sorted(frozenset().union(*(term.taps for term in self.terms))))

    def check_layout(self, layout: Any) -> None:
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
        return (VALUES, *((IDS,) if self._stores_some else ())) if self.stored else ()

    @property
    def _stores_some(self) -> bool:
        """Whether the batch has the largest logits only."""
        return self.stored < self.teacher.config.outputs()[0]

    def apply(
        self, variables: Mapping[str, Any], *args: Any, rngs: Any = None, method: Any = None, **kwargs: Any
    ) -> Any:
        """Applies the student; its loss in training is the sum of the terms.

        Args:
          variables: Variables as of `init`.
          *args: As of the student.
          rngs: Keys by name.
          method: As of every Flax module.
          **kwargs: As of the student.

        Returns:
          The result of the student. In training, `LossOut.sum` is the weighted mean of the terms times the weight of the labels,
          and `aux` has each term as "distill_NAME".
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
        return self._loss(variables, args[0], rngs)

    def _loss(self, variables: Mapping[str, Any], batch: Mapping[str, Array], rngs: Any) -> LossOut:
        """The loss of a batch in training."""
        names = self.inner.batch_axes()
        taps = self.taps
        own_batch = {name: batch[name] for name in names}
        out = self.inner.apply(_without_own(variables), own_batch, False, taps, rngs=rngs, method="loss")
        target = self._target(variables, batch, taps)
        done = variables[BUFFERS][OWN]["done"] if self.extras.is_scheduled else None
        compare = _Comparison(self, out.taps, target, own_batch, variables["params"].get(OWN, {}), done)
        weight = out.weight.astype(jnp.float32)
        total, aux = jnp.zeros(()), {}
        for name, term in term_names(self.terms).items():
            parts = [(out.sum, weight, compare.gate(term, 0, 1))] if term.kind == "labels" else compare(name, term)
            for value, count, gate in parts:
                total = total + term.weight * gate * value / jnp.maximum(count, 1e-30) * weight
            aux[f"distill_{name}"] = (
                sum(value * parts[0][1] / jnp.maximum(n, 1e-30) for value, n, _ in parts),
                parts[0][1],
            )
        return dataclasses.replace(out, sum=total, aux={**out.aux, **aux}, taps={})

    def _target(self, variables: Mapping[str, Any], batch: Mapping[str, Array], taps: tuple[str, ...]) -> Any:
        """What the teacher reports."""
        if self.stored:
            return {name: batch[name] for name in self.training_arrays}
        batch = {name: batch[name] for name in self.teacher.batch_axes()}
        out = self.teacher.apply(variables[FROZEN][TEACHER], batch, True, taps, method="loss")
        return jax.lax.stop_gradient(out.taps)

    def advance(self, buffers: Any, statistics: Statistics, step: Array, rng: Array) -> Any:
        """Buffers of the student, and the share of the steps that are done.

        Args:
          buffers: As of the student.
          statistics: As of the student.
          step: As of the student.
          rng: As of the student.

        Returns:
          A tree like `buffers`.
        """
        result = super().advance(buffers, statistics, step, rng)
        if OWN in result:
            result = {**result, OWN: {"done": (step + 1).astype(jnp.float32) / self.steps}}
        return result


# A part of a term: (sum, number that it is divided by, factor by the schedule).
Part = tuple[Any, Any, Any]


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """Terms of one batch.

    Attributes:
      model: The distillation.
      student: What the student reports.
      teacher: What the teacher reports.
      batch: The student's batch.
      projections: Matrices by the name of their term.
      done: Share of the steps that are done; None without a schedule.
    """

    model: Distillation
    student: Mapping[str, Any]
    teacher: Mapping[str, Any]
    batch: Mapping[str, Any]
    projections: Mapping[str, Any]
    done: Any

    def __call__(self, name: str, term: Term) -> list[Part]:
        """The parts of a term, one for each pair of layers."""
        if term.kind in ("logits", "regression"):
            return [self._of_logits(term)]
        if term.kind == "cosine":
            return [self._of_states(name, "cosine", self.student["last"], self.teacher["last"], self.gate(term, 0, 1))]
        pairs = term.pairs(self.model.teacher.config.layers, self.model.inner.config.layers)
        result = []
        for index, (teacher, student) in enumerate(pairs):
            gate = self.gate(term, index, len(pairs))
            if term.kind == "attention":
                result.append(self._of_attention(term.loss, teacher, student, gate))
            else:
                states = (
                    _state(self.student, self.model.inner.config, student),
                    _state(self.teacher, self.model.teacher.config, teacher),
                )
                result.append(self._of_states(name, term.loss, *states, gate))
        return result

    def gate(self, term: Term, index: int, count: int) -> Any:
        """1 for steps in which a pair of layers of a term counts, otherwise 0."""
        if not term.is_scheduled:
            return 1.0
        begin, end = term.begin, term.end
        if term.progressive:
            part = (end - begin) / count
            begin, end = begin + part * index, begin + part * (index + 1)
        counts = self.done >= begin
        if end < 1.0:  # the share that is done stays below 1
            counts &= self.done < end
        return counts.astype(jnp.float32)

    def _of_logits(self, term: Term) -> Part:
        logits, weights = self.student["logits"], self.batch["weights"].astype(jnp.float32)
        if term.tokens == "all" and weights.ndim == 2:
            weights = (self.batch["segment_ids"] > 0).astype(jnp.float32)
        teacher = self.teacher[VALUES] if self.model.stored else self.teacher["logits"]
        if term.kind == "regression":
            losses = ops.logit_regression(logits, teacher)
        elif IDS in self.teacher:
            losses = ops.top_logit_divergence(logits, teacher, self.teacher[IDS], term.temperature)
        else:
            losses = ops.logit_divergence(logits, teacher, term.temperature)
        return jnp.where(weights == 0, 0.0, weights * losses).sum(), weights.sum(), self.gate(term, 0, 1)

    def _of_states(self, name: str, loss: str, student: Any, teacher: Any, gate: Any) -> Part:
        if name in self.projections:
            student = linear(student.astype(jnp.float32), self.projections[name])
        is_token = self.batch["segment_ids"] > 0
        losses = _STATE_LOSSES[loss](student, teacher)
        return jnp.where(is_token, losses, 0.0).sum(), is_token.sum(dtype=jnp.float32), gate

    def _of_attention(self, loss: str, teacher: int, student: int, gate: Any) -> Part:
        scores, visible = self._scores(self.student, self.model.inner.config, student)
        target, of_teacher = self._scores(self.teacher, self.model.teacher.config, teacher)
        compare = ops.score_error if loss == "scores" else ops.attention_divergence
        return *compare(scores, target, visible & of_teacher), gate

    def _scores(self, tapped: Mapping[str, Any], config: Any, layer: int) -> Any:
        mixers = config.mixers()
        mixer = mixers[(layer - 1) % len(mixers)]
        mask = mixer.within(config.mask)
        arrays = config.stack_order().layer(tapped["layers"], layer - 1)
        return ops.attention_scores(
            arrays["queries"],
            arrays["keys"],
            mask,
            self.batch["segment_ids"],
            None if mask.relative else self.batch["positions"],
            scale=getattr(mixer, "scale", None),
            soft_cap=getattr(mixer, "soft_cap", None),
        )


def term_names(terms: tuple[Term, ...]) -> dict[str, Term]:
    """Names of terms, by which metrics and matrices are called.

    Args:
      terms: The terms.

    Returns:
      Name -> term: its kind, with a number from the second term of a kind on.
    """
    result: dict[str, Term] = {}
    for term in terms:
        count = sum(other.kind == term.kind for other in result.values())
        result[f"{term.kind}_{count + 1}" if count else term.kind] = term
    return result


def extras_of(terms: tuple[Term, ...], student: Any, teacher: Any) -> Extras:
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


def check_terms(terms: tuple[Term, ...], student: Any, teacher: Any) -> None:
    """Checks that both models have what the terms compare.

    Args:
      terms: The losses.
      student: Config of the student.
      teacher: Config of the teacher.

    Raises:
      InputError: A layer is out of range, or has no states or attention to compare.
    """
    for term in terms:
        pairs = term.pairs(teacher.layers, student.layers)
        for who, config, layers in (
            ("teacher", teacher, [t for t, _ in pairs]),
            ("student", student, [s for _, s in pairs]),
        ):
            if any(layers) and config.residual != "plain":
                raise InputError(
                    f"{FIELD}: {term.kind} reads layers of the {who}, whose model.residual={config.residual!r} keeps two "
                    "streams: set model.residual='plain', or leave out the loss"
                )
            if term.kind == "attention":
                _check_attention(who, config, layers)
        if term.kind == "attention":
            for t, s in pairs:
                heads = [form.heads for form in (_form(teacher, t), _form(student, s))]
                if heads[0] != heads[1]:
                    raise InputError(
                        f"{FIELD}: attention compares head by head, and layer {t} of the teacher has {heads[0]} heads, layer "
                        f"{s} of the student {heads[1]}: set model.heads={heads[0]} (and model.head_dim), or leave out the loss"
                    )


def _check_attention(who: str, config: Any, layers: list[int]) -> None:
    """Raises InputError if one of the layers has no queries and keys of its tokens, one for each head."""
    mixers = config.mixers()
    for layer in layers:
        mixer, block = mixers[(layer - 1) % len(mixers)], _form(config, layer).block.partition("(")[0]
        needs = mixer.needs
        has_scores = all(name in needs and needs[name].source == "x" for name in ("q", "k"))
        if not has_scores or block.startswith("evolved"):
            raise InputError(
                f"{FIELD}: attention of layer {layer} of the {who}: model.mixer={config.mixer!r} with model.block={block!r} has "
                "no queries and keys of the layer's tokens to compare: leave out the loss, or choose a mixer such as 'full'"
            )


def _form(config: Any, layer: int) -> Any:
    forms = config.forms()
    return forms[(layer - 1) % len(forms)]


def _state(tapped: Mapping[str, Any], config: Any, layer: int) -> Any:
    """The states that a layer returns; the embeddings for layer 0."""
    if layer == 0:
        return tapped["embedding"]
    return config.stack_order().layer(tapped["layers"], layer - 1)["hidden"]


def _without_own(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the student."""
    params = {name: tree for name, tree in variables["params"].items() if name != OWN}
    result = {name: tree for name, tree in variables.items() if name != FROZEN} | {"params": params}
    if BUFFERS in result:
        buffers = {name: tree for name, tree in result[BUFFERS].items() if name != OWN}
        result = {name: tree for name, tree in result.items() if name != BUFFERS}
        result |= {BUFFERS: buffers} if buffers else {}
    return result


def chosen_layers(kind: str, teacher: int, student: int) -> list[int]:
    """Layers of a teacher that a student starts from, counted from 0.

    Args:
      kind: "alternate" for layers that are spread over the teacher, from the first on; "bottom" for the first ones.
      teacher: Number of layers of the teacher.
      student: Number of layers of the student.

    Returns:
      The layers, one for each of the student.

    Raises:
      InputError: The teacher has fewer layers than the student.
    """
    if student > teacher:
        raise InputError(
            f"distill.init={kind!r}: the student has {student} layers, the teacher {teacher}: lower model.layers, or set "
            "distill.init='none'"
        )
    return [k if kind == "bottom" else k * teacher // student for k in range(student)]


def largest(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Logits as they are stored.

    Args:
      logits: [..., V].
      count: Number of the largest that are stored; V for all.

    Returns:
      `(values [..., count] float16, ids [..., count] int32)`, less the largest logit of the label, on which its distribution does
      not depend; or `(values, None)` for all logits as they are.
    """
    limit = float(np.finfo(np.float16).max)
    logits = np.clip(logits, -limit, limit)
    if count >= logits.shape[-1]:
        return logits.astype(np.float16), None
    ids = np.argpartition(-logits, count - 1, axis=-1)[..., :count].astype(np.int32)
    values = np.take_along_axis(logits, ids, axis=-1)
    return np.maximum(values - values.max(axis=-1, keepdims=True), -limit).astype(np.float16), ids
