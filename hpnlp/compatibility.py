"""Settings that do not work together, in one table: layers, layouts over devices, rematerialisation, offloading and optimizers.

`RULES` is the table. A place that knows some `Facts` calls `check`, and `hpnlp plan --compatible` prints `table`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpnlp.model_interfaces.layer_report import method_refusal
from hpnlp.types import InputError, MixerTraits


@dataclasses.dataclass(frozen=True)
class Facts:
    """Settings that rules read. With the defaults, no rule applies.

    Attributes:
      mixer: `model.mixer`.
      mixers: The mixers of the layers, and the convolutions that a block adds, as modules.
      traits: Name of a mixer and its traits, for each layer of a period.
      has_carry: Whether a mixer carries state from batch to batch.
      masks: Masks of the layers.
      heads: Number of query heads, and of key heads.
      dropout: `model.dropout`.
      joint_qk_norm: Whether a layer has `model.joint_qk_norm`.
      networks: `model.mlp` of a layer, and the traits of its network.
      predicts_next: Whether the model predicts later tokens from earlier ones.
      encodes: Whether tokens are encoded from both sides.
      labels_tokens: Whether tokens have labels, so that several documents share a sequence.
      has_memory: Whether layers attend to a memory.
      residual: `model.residual`.
      is_single_stack: Whether all layers form one stack.
      periodic: Fields of which layers take several entries in turn, and their values.
      undivided: Logical axis, "layers" or "length", that no plan may divide -> (the reason, other advice for the message).
      not_recomputed: Reason why a model takes no rematerialisation; "" for one that does.
      devices: Logical axis -> number of devices that divide it; 1 for other axes.
      exchange: `plan.exchange`.
      zero: Stage of ZeRO.
      rounds: `plan.rounds`.
      remat: `plan.remat`.
      offload_parameters: `plan.offload_parameters`.
      offload_optimizer: `plan.offload_optimizer`.
      optimizer: `optimizer.name`.
      rows: `optimizer.rows`.
      changes_weights: Whether `train.weights` computes other matrices from the parameters.
    """

    mixer: str = ""
    mixers: Sequence[Any] = ()
    traits: Sequence[tuple[str, MixerTraits]] = ()
    has_carry: bool = False
    masks: Sequence[Any] = ()
    heads: tuple[int, int] = (0, 0)
    dropout: float = 0.0
    joint_qk_norm: bool = False
    networks: Sequence[tuple[str, MixerTraits]] = ()
    predicts_next: bool = False
    encodes: bool = False
    labels_tokens: bool = False
    has_memory: bool = False
    residual: str = "plain"
    is_single_stack: bool = True
    periodic: Mapping[str, str] = dataclasses.field(default_factory=dict)
    undivided: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    not_recomputed: str = ""
    devices: Mapping[str, int] = dataclasses.field(default_factory=dict)
    exchange: str = "ring"
    zero: int = 0
    rounds: int = 1
    remat: str = "none"
    offload_parameters: bool = False
    offload_optimizer: bool = False
    optimizer: str = ""
    rows: bool = False
    changes_weights: bool = False

    def size(self, axis: str) -> int:
        """Number of devices that divide a logical axis."""
        return self.devices.get(axis, 1)

    @property
    def has_ring(self) -> bool:
        """Whether sequences are divided, and keys pass from device to device."""
        return self.size("length") > 1 and self.exchange == "ring"


def _later_tokens(f: Facts) -> str:
    for name, traits in f.traits:
        if f.predicts_next and not (traits.causal and traits.prefix_consistent):
            return (
                f"model.mixer={f.mixer!r}: {name} lets tokens depend on later ones, which a language model "
                "predicts: choose a causal mixer"
            )
    for mlp, traits in f.networks:
        if f.predicts_next and not traits.causal:
            return (
                f"model.mlp={mlp!r} lets tokens depend on later ones, which a language model predicts: choose a "
                "router that chooses experts token by token, as top_k"
            )
    return ""


def _encoders(f: Facts) -> str:
    branches = [(f"model.mixer={f.mixer!r}: {name}", "mixer", traits) for name, traits in f.traits]
    branches += [(f"model.mlp={mlp!r}", "feed-forward network", traits) for mlp, traits in f.networks]
    for subject, branch, traits in branches if f.encodes else ():
        if not traits.bidirectional:
            return (
                f"{subject} mixes with earlier tokens only, and an encoder needs both directions: choose a "
                f"bidirectional {branch}"
            )
        if not traits.excludes_padding:
            return f"{subject} mixes padding with the text: choose a {branch} that isolates segments"
        if f.labels_tokens and not traits.isolates_segments:
            return (
                f"{subject} mixes documents that share a sequence, as they may where tokens have labels: choose a {branch} "
                "that isolates segments"
            )
    return ""


# Fields of the plan that divide logical axes which not all models have.
FIELDS = {"layers": "pipeline", "length": "sequence"}


def _undivided(f: Facts) -> str:
    for axis, (reason, advice) in f.undivided.items():
        if (size := f.size(axis)) > 1:
            return f"plan.{FIELDS[axis]}={size}: {reason}: set plan.{FIELDS[axis]}=1{advice}"
    return ""


def _carry(f: Facts) -> str:
    for axis, field in FIELDS.items():
        if f.has_carry and f.size(axis) > 1:
            return (
                f"plan.{field}={f.size(axis)}: model.mixer={f.mixer!r} carries state from batch to batch, which "
                f"devices that hold parts of the {axis} do not keep: set plan.{field}=1, or choose another mixer"
            )
    return ""


def _without_heads(f: Facts) -> str:
    if f.size("length") == 1 or all(mixer.needs for mixer in f.mixers):
        return ""
    return (
        f"plan.sequence={f.size('length')} divides sequences over devices, and a mixer without heads needs whole "
        "ones: set plan.sequence=1, or choose a model.mixer that has heads"
    )


def _masks_of_heads(f: Facts) -> str:
    if f.size("length") == 1 == f.size("heads") or all(mask.heads is None for mask in f.masks):
        return ""
    return (
        "heads with masks of their own (model.mixer) are not alike on all devices: set plan.tensor=1 and plan.sequence=1, "
        "or choose a mixer with one mask"
    )


def _sums_over_heads(f: Facts) -> str:
    for mixer in f.mixers:
        if f.size("heads") > 1 and not mixer.divides_heads:
            return (
                f"{type(mixer).__name__} (model.mixer) adds up over all heads of a layer, which plan.tensor divides over "
                f"{f.size('heads')} devices: set plan.tensor=1, or choose another mixer"
            )
    return ""


def _ring(f: Facts) -> str:
    return next(filter(None, map(ring_refusal, f.mixers if f.has_ring else ())), "")


def ring_refusal(mixer: Any) -> str:
    """The reason why a mixer cannot run on a ring, which calls `partial`, and `prepare` if there is one, not `__call__`.

    Args:
      mixer: A mixer.

    Returns:
      The message; "" if it can.
    """
    fix = "choose plan.exchange=heads, or plan.sequence=1"
    if mixer.traits.draws:
        return f"{type(mixer).__name__} draws, which a ring does not support: {fix}"
    if refusal := method_refusal(mixer, "partial", "a ring", fix):
        return refusal
    for_state = "a ring, for the statistics and buffers of the device's tokens,"
    return method_refusal(mixer, "prepare", for_state, fix) if mixer.has_state else ""


def _dropout(f: Facts) -> str:
    if not (f.has_ring and f.dropout):
        return ""
    return (
        f"model.dropout={f.dropout} is not dropped in attention on a ring: choose plan.exchange=heads, or "
        "model.dropout=0"
    )


def _heads_for_tokens(f: Facts) -> str:
    if f.size("length") == 1 or f.exchange != "heads":
        return ""
    for count, field in zip(f.heads, ("model.heads", "model.kv_heads"), strict=True):
        if count // f.size("heads") % f.size("length"):
            return (
                f"plan.exchange=heads deals {field}={count} out over plan.sequence={f.size('length')} devices, which "
                "do not divide it: choose plan.exchange=ring, or other sizes"
            )
    return ""


def _routers(f: Facts) -> str:
    for mlp, traits in f.networks:
        if f.size("length") > 1 and not (traits.prefix_consistent and traits.causal):
            return (
                f"plan.sequence={f.size('length')} divides sequences, and model.mlp={mlp!r} needs all tokens of "
                "a sequence, to count them or to choose among them: set plan.sequence=1, or choose a router without a "
                "capacity, as top_k(8,2)"
            )
    return ""


def _joint_norm(f: Facts) -> str:
    if f.size("heads") == 1 or not f.joint_qk_norm:
        return ""
    return (
        f"plan.tensor={f.size('heads')} divides the heads, and model.joint_qk_norm=True normalises all of them "
        "together: set plan.tensor=1, and divide with plan.fsdp"
    )


def _memory(f: Facts) -> str:
    if f.size("length") == 1 or not f.has_memory:
        return ""
    return (
        f"plan.sequence={f.size('length')} divides sequences, and the model's layers attend to a memory: the "
        "memory is not divided: set plan.sequence=1"
    )


def _reversible_stages(f: Facts) -> str:
    if f.residual != "reversible" or f.size("layers") == 1 or (f.zero < 3 and f.rounds == 1):
        return ""
    return (
        "model.residual='reversible': pipeline stages that gather their parameters in the backward pass (ZeRO "
        "3 or plan.rounds over 1) are not reversible: set plan.zero=2 and plan.rounds=1, or model.residual='plain'"
    )


def _offloaded_rows(f: Facts) -> str:
    if not (f.offload_optimizer and f.rows):
        return ""
    return (
        "plan.offload_optimizer=True fetches whole tables, and optimizer.rows=True trains some of their rows: leave "
        "out one of the two"
    )


def _trained_weights(f: Facts) -> str:
    if not f.changes_weights:
        return ""
    for name, is_set in (("plan.zero=2", f.zero == 2), ("plan.offload_parameters=True", f.offload_parameters)):
        if is_set:
            return f"train.weights changes whole matrices, which {name} does not keep: change one of the two"
    return "train.weights and optimizer.rows=True: set one of the two" if f.rows else ""


def _offloaded_parameters(f: Facts) -> str:
    if not f.offload_parameters:
        return ""
    alternative = "or plan.offload_parameters=False"
    if not f.is_single_stack:
        return (
            "plan.offload_parameters=True fetches the layers of one stack one after another, and the model has several stacks: "
            "set plan.offload_parameters=False, and plan.offload_optimizer=True to offload the optimizer's state"
        )
    if f.residual == "reversible":
        return (
            "plan.offload_parameters=True fetches a layer once in a backward pass, and model.residual='reversible' takes each "
            f"branch by itself: set model.residual='plain' and plan.remat='full', {alternative}"
        )
    if f.periodic:
        shown = " and ".join(f"{field}={text!r}" for field, text in f.periodic.items())
        return (
            f"plan.offload_parameters=True fetches one layer at a time, and {shown} alternates several: "
            f"name {'one mixer' if f.periodic.keys() == {'model.mixer'} else 'one entry of each'}, {alternative}"
        )
    if f.optimizer == "adafactor":
        return (
            "plan.offload_parameters=True updates one layer at a time, and optimizer.name='adafactor' updates all layers at "
            f"once: choose another, such as 'adamw8bit', {alternative}"
        )
    return ""


def _not_recomputed(f: Facts) -> str:
    if f.remat == "none" or not f.not_recomputed:
        return ""
    return f"plan.remat={f.remat!r}: {f.not_recomputed}: set plan.remat='none'"


def _recomputed_reversible(f: Facts) -> str:
    if f.residual != "reversible" or f.remat == "none":
        return ""
    return (
        f"plan.remat={f.remat!r}: reversible layers keep nothing that could be recomputed: set plan.remat='none', "
        "or model.residual='plain'"
    )


# Pair of settings -> function that returns the error message where the facts have the pair, and otherwise "".
RULES: dict[str, Callable[[Facts], str]] = {
    "mixers and networks that read later tokens, language models": _later_tokens,
    "mixers and networks that read one direction, padding or other documents, encoders": _encoders,
    "models without stacked layers, divided sequences or layers": _undivided,
    "mixers with a carry, divided sequences or layers": _carry,
    "mixers without heads, divided sequences": _without_heads,
    "masks of single heads, divided heads or sequences": _masks_of_heads,
    "mixers that add up over heads, divided heads": _sums_over_heads,
    "mixers without partial results, a ring": _ring,
    "attention dropout, a ring": _dropout,
    "numbers of heads, an exchange of tokens for heads": _heads_for_tokens,
    "routers with a capacity, divided sequences": _routers,
    "joint norms of queries and keys, divided heads": _joint_norm,
    "memory, divided sequences": _memory,
    "reversible layers, stages that gather parameters": _reversible_stages,
    "row-sparse training, offloaded optimizer state": _offloaded_rows,
    "trained weights, parts of matrices": _trained_weights,
    "offloaded parameters, several layers at once": _offloaded_parameters,
    "models without recomputed layers, rematerialisation": _not_recomputed,
    "reversible layers, rematerialisation": _recomputed_reversible,
}
# Settings that `table` tries one by one: flags -> changes of the facts.
SETTINGS: dict[str, dict[str, Any]] = {
    "--plan.sequence=2": {"devices": {"length": 2}, "exchange": "ring"},
    "--plan.sequence=2 --plan.exchange=heads": {"devices": {"length": 2}, "exchange": "heads"},
    "--plan.tensor=2": {"devices": {"heads": 2}},
    "--plan.pipeline=2": {"devices": {"layers": 2}, "zero": 0, "rounds": 1},
    "--plan.pipeline=2 --plan.rounds=2": {"devices": {"layers": 2}, "zero": 0, "rounds": 2},
    "--plan.remat=full": {"remat": "full"},
    "--plan.offload_parameters=True": {"offload_parameters": True},
    "--plan.offload_optimizer=True": {"offload_optimizer": True},
}


def check(facts: Facts) -> None:
    """Raises InputError with the message of the first rule that refuses the facts."""
    for refusal in RULES.values():
        if message := refusal(facts):
            raise InputError(message)


def table(facts: Facts) -> str:
    """The settings that a model works with, each of them by itself.

    Args:
      facts: Facts of an experiment.

    Returns:
      Lines of text: a setting, and "works" or the message of the rule that refuses it.
    """
    width = max(map(len, SETTINGS))
    lines = []
    for name, changes in SETTINGS.items():
        changed = dataclasses.replace(facts, **changes)
        messages = [message for refusal in RULES.values() if (message := refusal(changed))]
        lines.append(f"{name:{width}}  {messages[0] if messages else 'works'}")
    return "\n".join(lines)
