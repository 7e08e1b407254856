"""Terms of a distillation: the losses of a student by the logits, hidden states and attention of a teacher, as spec strings.

The states of a layer are numbered from 0, the embeddings that the first layer reads, to L, the output of the last layer;
attention is that of layers 1 to L.

References:
  Hinton et al. 2015, "Distilling the knowledge in a neural network".
  Ba and Caruana 2014, "Do deep nets really need to be deep?".
  Sanh et al. 2019, "DistilBERT, a distilled version of BERT".
  Jiao et al. 2020, "TinyBERT: distilling BERT for natural language understanding".
  Sun et al. 2020, "MobileBERT: a compact task-agnostic BERT for resource-limited devices".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from hpnlp.spec import build, did_you_mean, parse, shortened
from hpnlp.types import InputError

FIELD = "distill.losses"
# Pairs of layers by name; see `layer_pairs`.
LAYER_MAPS = ("uniform", "last", "first")
HIDDEN_LOSSES = ("mse", "feature_map", "cosine")
ATTENTION_LOSSES = ("scores", "kl")
PROJECTIONS = ("auto", "linear", "none")
TOKENS = ("labelled", "all")

Pairs = tuple[tuple[int, int], ...]

# Losses of papers, in terms of the entries of DISTILLATION_LOSSES. TinyBERT trains 10 epochs of its 13 by intermediate layers.
RECIPES: dict[str, str] = {
    "hinton": "logits(temperature=2, weight=0.5),labels(0.5)",
    "regression_only": "regression()",
    "distilbert": "logits(temperature=2, weight=5),labels(2),cosine()",
    "tinybert_intermediate": "attention(),hidden(projection=linear),embedding(projection=linear)",
    "tinybert_prediction": "logits()",
    "tinybert": "attention(end=0.77),hidden(projection=linear, end=0.77),embedding(projection=linear, end=0.77),"
    "logits(begin=0.77)",
    "mobilebert": "hidden(loss=feature_map, weight=100, progressive=True, end=0.5),"
    "attention(loss=kl, progressive=True, end=0.5),logits(weight=0.5, begin=0.5),labels(0.5, begin=0.5)",
}


@dataclasses.dataclass(frozen=True)
class Term:
    """One loss of a distillation.

    Attributes:
      kind: Its name in DISTILLATION_LOSSES.
      weight: Factor of the loss.
      begin: Share of the run's steps after which the term counts.
      end: Share of the steps after which it counts no more.
      progressive: Whether the pairs of layers count one after another, each for an equal part of the steps from begin to end.
      temperature: Of the softmax of logits.
      tokens: "labelled" for labels of a weight over 0, "all" for all tokens but padding.
      layers: Pairs of layers (teacher, student), or one of LAYER_MAPS.
      loss: One of HIDDEN_LOSSES or ATTENTION_LOSSES.
      projection: One of PROJECTIONS: "linear" for a trained matrix that leads the student's states to the teacher's width,
        "auto" for one where the widths differ.
    """

    kind: str
    weight: int | float = 1.0
    begin: int | float = 0.0
    end: int | float = 1.0
    progressive: bool = False
    temperature: int | float = 1.0
    tokens: str = "labelled"
    layers: Any = "uniform"
    loss: str = ""
    projection: str = "none"

    @property
    def taps(self) -> frozenset[str]:
        """Names of `PredictionModel.tapped` that the term reads of both models."""
        if self.kind == "hidden":
            pairs = () if isinstance(self.layers, str) else self.layers
            return frozenset({"hidden"} | ({"embedding"} if any(0 in pair for pair in pairs) else set()))
        names = {"logits": "logits", "regression": "logits", "cosine": "last", "embedding": "embedding"}
        names |= {"attention": "attention"}
        return frozenset({names[self.kind]}) if self.kind in names else frozenset()

    @property
    def is_scheduled(self) -> bool:
        """Whether the term counts in some of the steps only."""
        return self.progressive or self.begin > 0.0 or self.end < 1.0

    def pairs(self, teacher: int, student: int) -> Pairs:
        """Pairs of layers (teacher, student).

        Args:
          teacher: Number of layers of the teacher.
          student: Number of layers of the student.

        Returns:
          The pairs, ((0, 0),) for embeddings; empty for terms without layers.

        Raises:
          InputError: A layer is out of range.
        """
        if self.kind == "embedding":
            return ((0, 0),)
        if self.kind not in ("hidden", "attention"):
            return ()
        if isinstance(self.layers, str):
            return layer_pairs(self.layers, teacher, student)
        least = 1 if self.kind == "attention" else 0
        for t, s in self.layers:
            if not (least <= t <= teacher and least <= s <= student):
                raise InputError(
                    f"{FIELD}: {self.kind} pairs layer {t} of the teacher with layer {s} of the student: expected layers "
                    f"{least} to {teacher} of the teacher, and {least} to {student} of the student"
                )
        return self.layers


def layer_pairs(name: str, teacher: int, student: int) -> Pairs:
    """Pairs of layers (teacher, student), one for each layer of the student.

    Args:
      name: "uniform" spreads the student's layers over the teacher's, the last with the last (for T and S layers, layer
        k of the student is paired with the layer of the teacher next to k T / S); "last" and "first" pair them with the last
        and the first layers of the teacher.
      teacher: Number of layers of the teacher.
      student: Number of layers of the student.

    Returns:
      The pairs, of layers from 1.

    Raises:
      InputError: The teacher has fewer layers than the student.
    """
    if student > teacher:
        raise InputError(
            f"{FIELD}: layers={name} pairs each of the student's {student} layers with one of the teacher, which has "
            f"{teacher}: name the pairs, as in hidden(((4, 2), (8, 4)))"
        )
    numbers = range(1, student + 1)
    if name == "uniform":
        return tuple((math.floor(k * teacher / student + 0.5), k) for k in numbers)
    return tuple((k + (teacher - student if name == "last" else 0), k) for k in numbers)


def _term(kind: str, **fields: Any) -> Term:
    """A term with checked fields."""
    term = Term(kind, **fields)
    if not (0 < term.weight < math.inf):
        raise InputError(f"{FIELD}: {kind} has weight={term.weight}: expected a finite number over 0")
    if not (0 < term.temperature < math.inf):
        raise InputError(f"{FIELD}: {kind} has temperature={term.temperature}: expected a finite number over 0")
    if not 0 <= term.begin < term.end <= 1:
        raise InputError(f"{FIELD}: {kind} has begin={term.begin}, end={term.end}: expected 0 <= begin < end <= 1")
    if term.tokens not in TOKENS:
        raise InputError(f"{FIELD}: {kind} has tokens={term.tokens!r}: {did_you_mean(term.tokens, TOKENS)}")
    known = HIDDEN_LOSSES if kind in ("hidden", "embedding") else ATTENTION_LOSSES
    if term.loss and term.loss not in known:
        raise InputError(f"{FIELD}: {kind} has loss={term.loss!r}: {did_you_mean(term.loss, known)}")
    if term.projection not in PROJECTIONS:
        raise InputError(
            f"{FIELD}: {kind} has projection={term.projection!r}: {did_you_mean(term.projection, PROJECTIONS)}"
        )
    return dataclasses.replace(term, layers=_checked_layers(kind, term.layers))


def _checked_layers(kind: str, layers: str | Pairs) -> str | Pairs:
    if isinstance(layers, str):
        if layers not in LAYER_MAPS:
            raise InputError(f"{FIELD}: {kind} has layers={layers!r}: {did_you_mean(layers, LAYER_MAPS)}")
        return layers
    is_pairs = isinstance(layers, tuple | list) and all(
        isinstance(pair, tuple | list) and len(pair) == 2 and all(type(layer) is int for layer in pair)
        for pair in layers
    )
    if not is_pairs or not layers:
        raise InputError(
            f"{FIELD}: {kind} has layers={shortened(layers, 60)}: expected pairs (teacher's layer, student's layer), as in "
            f"{kind}(((4, 2), (8, 4))), or one of {', '.join(LAYER_MAPS)}"
        )
    return tuple((t, s) for t, s in layers)


def labels(weight: int | float = 1.0, begin: int | float = 0.0, end: int | float = 1.0) -> Term:
    """Entry of DISTILLATION_LOSSES: the task's own loss.

    Args:
      weight: Factor of the loss.
      begin: Share of the steps after which it counts.
      end: Share of the steps after which it counts no more.

    Returns:
      The term.
    """
    return _term("labels", weight=weight, begin=begin, end=end)


def logits(
    temperature: int | float = 1.0,
    weight: int | float = 1.0,
    tokens: str = "labelled",
    begin: int | float = 0.0,
    end: int | float = 1.0,
) -> Term:
    """Entry of DISTILLATION_LOSSES: `ops.distillation.logit_divergence`, the mean over labels or tokens.

    Args:
      temperature: T of both softmaxes.
      weight: As for `labels`.
      tokens: "labelled", or "all" for tokens without labels as well.
      begin: As for `labels`.
      end: As for `labels`.

    Returns:
      The term.
    """
    return _term("logits", temperature=temperature, weight=weight, tokens=tokens, begin=begin, end=end)


def regression(
    weight: int | float = 1.0, tokens: str = "labelled", begin: int | float = 0.0, end: int | float = 1.0
) -> Term:
    """Entry of DISTILLATION_LOSSES: `ops.distillation.logit_regression`, the mean over labels or tokens.

    Args:
      weight: As for `labels`.
      tokens: As for `logits`.
      begin: As for `labels`.
      end: As for `labels`.

    Returns:
      The term.
    """
    return _term("regression", weight=weight, tokens=tokens, begin=begin, end=end)


def cosine(
    weight: int | float = 1.0, projection: str = "auto", begin: int | float = 0.0, end: int | float = 1.0
) -> Term:
    """Entry of DISTILLATION_LOSSES: `ops.distillation.cosine_distance` of states after the final norm, the mean over tokens.

    Args:
      weight: As for `labels`.
      projection: As for `hidden`.
      begin: As for `labels`.
      end: As for `labels`.

    Returns:
      The term.
    """
    return _term("cosine", weight=weight, projection=projection, begin=begin, end=end)


def hidden(
    layers: str | Pairs = "uniform",
    loss: str = "mse",
    projection: str = "auto",
    weight: int | float = 1.0,
    begin: int | float = 0.0,
    end: int | float = 1.0,
    progressive: bool = False,
) -> Term:
    """Entry of DISTILLATION_LOSSES: hidden states of layers, the mean over tokens, summed over pairs of layers.

    Args:
      layers: Pairs (teacher's layer, student's layer), where 0 stands for the embeddings; or uniform, last or first.
      loss: mse for `squared_error`, feature_map for `feature_map_error`, cosine for `cosine_distance` (`ops.distillation`).
      projection: linear for a trained matrix, shared by the pairs, from the student's width to the teacher's; auto for one if
        the widths differ; none for no matrix.
      weight: As for `labels`.
      begin: As for `labels`.
      end: As for `labels`.
      progressive: Whether pairs count one after another.

    Returns:
      The term.
    """
    fields = {"layers": layers, "loss": loss, "projection": projection, "weight": weight}
    return _term("hidden", **fields, begin=begin, end=end, progressive=progressive)


def embedding(
    loss: str = "mse",
    projection: str = "auto",
    weight: int | float = 1.0,
    begin: int | float = 0.0,
    end: int | float = 1.0,
) -> Term:
    """Entry of DISTILLATION_LOSSES: `hidden(((0, 0),))`, with a matrix of its own.

    Args:
      loss: As for `hidden`.
      projection: As for `hidden`.
      weight: As for `labels`.
      begin: As for `labels`.
      end: As for `labels`.

    Returns:
      The term.
    """
    return _term("embedding", loss=loss, projection=projection, weight=weight, begin=begin, end=end)


def attention(
    layers: str | Pairs = "uniform",
    loss: str = "scores",
    weight: int | float = 1.0,
    begin: int | float = 0.0,
    end: int | float = 1.0,
    progressive: bool = False,
) -> Term:
    """Entry of DISTILLATION_LOSSES: attention of layers, head by head, summed over pairs of layers.

    Args:
      layers: As for `hidden`, without embeddings.
      loss: scores for `score_error`, the mean over pairs of tokens that may attend; kl for `attention_divergence`, the mean
        over heads and queries (`ops.distillation`).
      weight: As for `labels`.
      begin: As for `labels`.
      end: As for `labels`.
      progressive: As for `hidden`.

    Returns:
      The term.
    """
    fields = {"layers": layers, "loss": loss, "weight": weight, "begin": begin, "end": end}
    return _term("attention", **fields, progressive=progressive)


DISTILLATION_LOSSES: dict[str, Callable[..., Term]] = {
    "labels": labels,
    "logits": logits,
    "regression": regression,
    "cosine": cosine,
    "hidden": hidden,
    "embedding": embedding,
    "attention": attention,
}


def parse_terms(text: str) -> tuple[Term, ...]:
    """Parses `distill.losses`.

    Args:
      text: A spec string of entries of DISTILLATION_LOSSES, and names of RECIPES.

    Returns:
      The terms.

    Raises:
      InputError: Unknown name, wrong arguments, or no term that has a teacher.
    """
    terms: list[Term] = []
    for spec in parse(text, FIELD):
        if spec.name in RECIPES:
            if spec.args or spec.kwargs or spec.repeat > 1:
                raise InputError(
                    f"{FIELD}: the recipe {spec.name} takes no arguments: write out {RECIPES[spec.name]!r}"
                )
            terms += parse_terms(RECIPES[spec.name])
        elif spec.repeat > 1:
            raise InputError(f"{FIELD}: {spec} is repeated: set weight={spec.repeat} in place of the repeat")
        elif spec.name not in DISTILLATION_LOSSES:
            known = {**DISTILLATION_LOSSES, **RECIPES}
            raise InputError(f"{FIELD}: unknown loss {spec.name!r}: {did_you_mean(spec.name, known)}")
        else:
            terms.append(build(spec, DISTILLATION_LOSSES, "distillation loss"))
    if not any(term.taps for term in terms):
        raise InputError(f"{FIELD}={text!r} has no loss by a teacher: add one, as logits()")
    if sum(term.kind == "labels" for term in terms) > 1:
        raise InputError(f"{FIELD}={text!r} has labels more than once: leave all but one out")
    return tuple(terms)
