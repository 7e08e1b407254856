"""Bodies of other tasks' models, from which runs start (`models.shared.body`): comparison, and copy of their parameters."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from hpnlp.models import variables
from hpnlp.models.shared.body import BodyStart, ConfigOfModel
from hpnlp.models.variables import BUFFERS
from hpnlp.training.starts import upcycling
from hpnlp.training.starts.architecture import differing_fields
from hpnlp.types import InputError

TYPES = "token_types"
OUTPUT_FIELDS = ("transform", "output", "tied")
OUTPUT_PARAMS = ("transform", "head", "output")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A stack of a model, and the stack of another model whose body it starts from.

    Attributes:
      start: Their names, and the parts that start from the source.
      config: Config of the stack.
      source: Config of the other model's stack.
    """

    start: BodyStart
    config: Any
    source: Any

    @property
    def fields(self) -> list[str]:
        """Fields of the stack's config that must equal those of the source."""
        head = [name for name in self.config.head_fields if not (self.start.pooling and name == "pooling")]
        names = [field.name for field in dataclasses.fields(self.config) if field.name not in head]
        return [name for name in names if not (self.upcycled and name in upcycling.FIELDS)]

    @property
    def params(self) -> tuple[str, ...]:
        """Names of the parameters that start from those of the source."""
        pooling = ("pool",) if self.start.pooling else ()
        values = [[*(getattr(c, name) for name in OUTPUT_FIELDS), c.outputs()] for c in (self.config, self.source)]
        output = OUTPUT_PARAMS if self.start.output and values[0] == values[1] else ()
        return (*self.config.body_params, *pooling, *output)

    @property
    def upcycled(self) -> list[int]:
        """Layers whose experts start as copies of MLPs."""
        return upcycling.upcycled_layers(self.config, self.source)

    @property
    def adds_types(self) -> bool:
        """Whether the embedding of the source's first token type, which every token has, is added to those of positions."""
        return self.source.token_types > 0 and not self.config.token_types and self.source.position == "learned"


def find_starts(config: type[ConfigOfModel], source: ConfigOfModel) -> tuple[BodyStart, ...]:
    """Finds the stacks of a class of models that may start from another model.

    Args:
      config: Class of the model's config.
      source: Config of the other model.

    Returns:
      The entry of `ConfigOfModel.starts`; empty if there is none.
    """
    return config.starts.get(source.body, ())


def find_pairs(model: Any, source: Any, directory: Path) -> list[Pair]:
    """Finds the stacks that start from those of a model of another task.

    Args:
      model: Config of the model.
      source: Config of the other model.
      directory: Directory of the other model, for messages.

    Returns:
      A pair for each stack that starts from one of the source.

    Raises:
      InputError: One of the models has a second tower, and the other does not.
    """
    starts, stacks, others = find_starts(type(model), source), model.stacks(), source.stacks()
    used = [start for start in starts if start.stack in stacks]
    if {start.source for start in used} != {start.source for start in starts} & others.keys():
        raise InputError(
            f"train.init_from={directory} has model.shared={source.shared}, and this model model.shared={model.shared}: set "
            f"--model.shared={source.shared}"
        )
    return [Pair(start, stacks[start.stack], others[start.source]) for start in used]


def check(pairs: Sequence[Pair], model: Any, directory: Path, accept_changes: bool) -> str:
    """Checks that bodies compute the same as those that they start from.

    Args:
      pairs: Result of `find_pairs`.
      model: Config of the model.
      directory: Directory of the other model, for messages.
      accept_changes: Allow differences of fields that leave the parameters' shapes as they are.

    Returns:
      The differences that were accepted, as text; "" for none.

    Raises:
      InputError: The bodies differ; the message names every field that does, both values, and the fix.
    """
    known = {field.name for field in dataclasses.fields(model)}
    differing, fixes, accepted = [], [], []
    for pair in pairs:
        names = differing_fields(pair.config, pair.source, pair.fields)
        if pair.source.token_types and pair.source.token_types != pair.config.token_types:
            names += [TYPES] if TYPES in known or pair.config.token_types or not pair.adds_types else []
        for name in names:
            value, of_source = getattr(pair.config, name), getattr(pair.source, name)
            field = pair.start.fields.get(name, name)
            differing.append(f"model.{field} is {value!r}, in the source {of_source!r}")
            fixes.append(_fix(name, field, value, of_source, field in known))
        if pair.upcycled:
            accepted.append(upcycling.check(pair.config, pair.source, pair.upcycled, accept_changes))
    differences = "; ".join(dict.fromkeys(differing))
    if differences and not accept_changes:
        raise InputError(
            f"train.init_from={directory} has another body ({differences}): {', '.join(dict.fromkeys(fixes))}; fields that no "
            "flag sets, hpnlp train takes from there"
        )
    return "; ".join(filter(None, (differences, *dict.fromkeys(accepted))))


def _fix(name: str, field: str, value: Any, of_source: Any, is_known: bool) -> str:
    """The fix for a field of a stack that differs, which the field `field` of the model sets."""
    if not is_known:
        return f"name a source with model.{name}={value!r}, as models of this task have no such field"
    if name == "vocab" and value > of_source:
        return f"train the source with --model.vocab={value}, or set --model.vocab={of_source}"
    return f"set {shlex.quote(f'--model.{field}={of_source}')}"


def with_bodies(weights: PyTree, source: PyTree, pairs: Sequence[Pair]) -> tuple[Any, str]:
    """Copies the bodies of another model.

    Args:
      weights: Initial weights of the model.
      source: Weights of the other model.
      pairs: Result of `find_pairs`, checked.

    Returns:
      `(the weights, a text with the names of the parameters that were copied and of those that are initial ones)`.
    """
    copied = []
    for pair in pairs:
        start, target = pair.start, _stack_weights(weights, pair.start.stack)
        prefix = f"{start.stack}." if start.stack else ""
        body = _body(_stack_weights(source, start.source), target, pair)
        if start.embed and "embed" not in target:
            weights = {**weights, start.embed: body.pop("embed")}
            copied.append(start.embed)
        body = {name: tree for name, tree in body.items() if name in target}
        copied += [f"{prefix}{name}" for name in body if name != BUFFERS]
        weights = _with_stack(weights, start.stack, {**target, **_with_first_type(target, body), **body})
    upcycled = max(len(pair.upcycled) for pair in pairs)
    return weights, _listed(weights, copied) + f"; MLPs became experts in {upcycled} layers" * bool(upcycled)


def _body(source: Mapping[str, Any], target: Mapping[str, Any], pair: Pair) -> dict[str, Any]:
    """Parameters of a body, and the buffers of the target stack with the source's buffers of the layers."""
    if pair.upcycled:
        source = upcycling.upcycled(source, target, pair.config, pair.source, pair.upcycled)
    body = {name: source[name] for name in pair.params if name in source}
    if pair.adds_types:
        first = body.pop(TYPES)["table"][:1]
        body["positions"] = {"table": body["positions"]["table"] + first}
    if "layers" in source.get(BUFFERS, {}) and "layers" in target.get(BUFFERS, {}):
        body[BUFFERS] = {**target[BUFFERS], "layers": source[BUFFERS]["layers"]}
    return body


def _with_first_type(target: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Embeddings of token types with 0 for the first type, if the body has none: texts of that type alone read as before."""
    if TYPES not in target or TYPES in body:
        return {}
    return {TYPES: {"table": target[TYPES]["table"].at[0].set(0.0)}}


def _stack_weights(weights: PyTree, stack: str) -> dict[str, Any]:
    """Parameters and buffers of a stack."""
    params, buffers = variables.split(weights)
    return variables.join(params[stack], (buffers or {}).get(stack)) if stack else variables.join(params, buffers)


def _with_stack(weights: Any, stack: str, changed: Any) -> dict[str, Any]:
    """Replaces the parameters and buffers of a stack."""
    if not stack:
        return changed
    (params, buffers), (of_stack, new) = variables.split(weights), variables.split(changed)
    return variables.join({**params, stack: of_stack}, {**buffers, stack: new} if buffers and new else buffers)


def _listed(weights: Mapping[str, Any], copied: Sequence[str]) -> str:
    """Names of the parameters that were copied, and of all others; a stack that was copied as a whole is named once."""
    shown, initial = [], []
    for name, tree in variables.split(weights)[0].items():
        inner = [f"{name}.{key}" for key in tree] if any(path.startswith(f"{name}.") for path in copied) else [name]
        kept = [path for path in inner if path in copied]
        shown += [name] if kept == inner else kept
        initial += [path for path in inner if path not in copied]
    return f"copied: {', '.join(shown)}; initialised: {', '.join(initial) or 'nothing'}"
