"""Terms of a distillation for one batch, and the checks that two models have what the terms compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from hpnlp.compress.distilling.distillation_terms import FIELD, Term
from hpnlp.ops import distillation as ops
from hpnlp.ops.linear import linear
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.models.backbone import BackboneConfig

# Arrays of a batch with stored logits of the teacher, and the classes that they belong to.
VALUES, IDS = "teacher_logits", "teacher_ids"
_STATE_LOSSES = {
    "mse": ops.squared_error,
    "feature_map": ops.feature_map_error,
    "cosine": ops.cosine_distance,
}
# A part of a term: (sum, number that it is divided by, factor by the schedule).
Part = tuple[Any, Any, Any]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Computes the terms of a distillation for one batch.

    Attributes:
      student_config: Config of the student.
      teacher_config: Config of the teacher.
      student: What the student reports.
      teacher: What the teacher reports, or its stored logits.
      batch: The student's batch.
      projections: Matrices by the name of their term.
      done: Share of the steps that are done; None without a schedule.
    """

    student_config: Any
    teacher_config: Any
    student: Mapping[str, Any]
    teacher: Mapping[str, Any]
    batch: Mapping[str, Any]
    projections: Mapping[str, Any]
    done: Any

    def __call__(self, name: str, term: Term) -> list[Part]:
        """The parts of a term, one for each pair of layers."""
        if term.kind in ("logits", "regression"):
            return [self._logit_part(term)]
        if term.kind == "cosine":
            return [self._state_part(name, "cosine", self.student["last"], self.teacher["last"], self.gate(term, 0, 1))]
        pairs = term.pairs(self.teacher_config.layers, self.student_config.layers)
        result = []
        for index, (teacher, student) in enumerate(pairs):
            gate = self.gate(term, index, len(pairs))
            if term.kind == "attention":
                result.append(self._attention_part(term.loss, teacher, student, gate))
            else:
                states = (
                    _state(self.student, self.student_config, student),
                    _state(self.teacher, self.teacher_config, teacher),
                )
                result.append(self._state_part(name, term.loss, *states, gate))
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

    def _logit_part(self, term: Term) -> Part:
        logits, weights = self.student["logits"], self.batch["weights"].astype(jnp.float32)
        if term.tokens == "all" and weights.ndim == 2:
            weights = (self.batch["segment_ids"] > 0).astype(jnp.float32)
        teacher = self.teacher[VALUES] if VALUES in self.teacher else self.teacher["logits"]
        if term.kind == "regression":
            losses = ops.logit_regression(logits, teacher)
        elif IDS in self.teacher:
            losses = ops.top_logit_divergence(logits, teacher, self.teacher[IDS], term.temperature)
        else:
            losses = ops.logit_divergence(logits, teacher, term.temperature)
        return jnp.where(weights == 0, 0.0, weights * losses).sum(), weights.sum(), self.gate(term, 0, 1)

    def _state_part(self, name: str, loss: str, student: Any, teacher: Any, gate: Any) -> Part:
        if name in self.projections:
            student = linear(student.astype(jnp.float32), self.projections[name])
        is_token = self.batch["segment_ids"] > 0
        losses = _STATE_LOSSES[loss](student, teacher)
        return jnp.where(is_token, losses, 0.0).sum(), is_token.sum(dtype=jnp.float32), gate

    def _attention_part(self, loss: str, teacher: int, student: int, gate: Any) -> Part:
        scores, visible = self._scores(self.student, self.student_config, student)
        target, of_teacher = self._scores(self.teacher, self.teacher_config, teacher)
        compare = ops.score_error if loss == "scores" else ops.attention_divergence
        return *compare(scores, target, visible & of_teacher), gate

    def _scores(self, tapped: Mapping[str, Any], config: BackboneConfig, layer: int) -> Any:
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
            **mixer.score_options,
        )


def term_names(terms: tuple[Term, ...]) -> dict[str, Term]:
    """Names of terms, which are also the names of their metrics and matrices.

    Returns:
      Name -> term: its kind, with a number from the second term of a kind on.
    """
    result: dict[str, Term] = {}
    for term in terms:
        count = sum(other.kind == term.kind for other in result.values())
        result[f"{term.kind}_{count + 1}" if count else term.kind] = term
    return result


def check_terms(terms: tuple[Term, ...], student: BackboneConfig, teacher: BackboneConfig) -> None:
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


def _check_attention(who: str, config: BackboneConfig, layers: list[int]) -> None:
    """Raises InputError if one of the layers has no queries and keys of its tokens, one for each head."""
    mixers = config.mixers()
    for layer in layers:
        mixer, block = mixers[(layer - 1) % len(mixers)], _form(config, layer).block.partition("(")[0]
        needs = mixer.needs
        has_scores = all(name in needs and needs[name].source == "x" for name in ("q", "k"))
        if not has_scores or block.startswith("evolved"):
            raise InputError(
                f"{FIELD}: attention of layer {layer} of the {who}: model.mixer={config.mixer!r} with model.block={block!r} "
                "has no queries and keys of the layer's tokens to compare: leave out the loss, or choose a mixer such as 'full'"
            )


def _form(config: BackboneConfig, layer: int) -> Any:
    forms = config.forms()
    return forms[(layer - 1) % len(forms)]


def _state(tapped: Mapping[str, Any], config: BackboneConfig, layer: int) -> Any:
    """The states that a layer returns; the embeddings for layer 0."""
    if layer == 0:
        return tapped["embedding"]
    return config.stack_order().layer(tapped["layers"], layer - 1)["hidden"]


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
      `(values [..., count] float16, ids [..., count] int32)`, less the largest logit of the label, on which its distribution
      does not depend; or `(values, None)` for all logits as they are.
    """
    limit = float(np.finfo(np.float16).max)
    logits = np.clip(logits, -limit, limit)
    if count >= logits.shape[-1]:
        return logits.astype(np.float16), None
    ids = np.argpartition(-logits, count - 1, axis=-1)[..., :count].astype(np.int32)
    values = np.take_along_axis(logits, ids, axis=-1)
    return np.maximum(values - values.max(axis=-1, keepdims=True), -limit).astype(np.float16), ids
