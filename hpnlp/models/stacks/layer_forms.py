"""Layer forms: the Block fields in which the layers of a model differ, `model.form`."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.attention import mixer_period
from hpnlp.nn.block import BlockConfig
from hpnlp.nn.blocks import block_kind
from hpnlp.nn.feed_forward import FeedForward, build_feed_forward, described_network
from hpnlp.nn.mixers import MIXERS
from hpnlp.spec import Spec, build, parse_period
from hpnlp.types import InputError, MixerTraits, Projection

if TYPE_CHECKING:
    from hpnlp.models.backbone import BackboneConfig

# Block fields that are the same in all layers, and the reason.
SHARED: Mapping[str, str] = {
    "dim": "branches of all layers are added to one stream",
    "dropout": "one rate holds for the whole model",
    "memory_dim": "all layers attend to one memory",
    "norm_placement": "the norm after the last layer depends on it",
    "mixer": "model.mixer names the mixer of each layer",
}
# Block fields that have an effect on projections only.
PROJECTION_FIELDS = frozenset(
    ["heads", "kv_heads", "head_dim", "position", "rope_theta", "rope_scaling", "qk_norm", "joint_qk_norm"]
    + ["qkv_bias", "out_bias"]
)


class BlockForm:
    """Entry of FORMS, called with the arguments of "block(...)": returns the Block fields that differ from the model's."""

    __signature__ = inspect.Signature(
        [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=field.type)
            for field in dataclasses.fields(BlockConfig)
            if field.name not in SHARED
        ]
    )

    def __call__(self, **fields: Any) -> dict[str, Any]:
        return fields


FORMS = {"block": BlockForm()}


def layer_forms(text: str, base: BlockConfig) -> tuple[BlockConfig, ...]:
    """The forms that layers take in turn.

    Args:
      text: `model.form`, a spec string such as "block*3,block(heads=2)". Layer i has the entry i % f of its f entries.
      base: The model's Block. Layer i has the entry i % m of its m mixers.

    Returns:
      The Block of each layer of one period, each with one mixer. The period is the least common multiple of f and m.

    Raises:
      InputError: A form has an unknown field, or a value that does not fit.
    """
    mixers, entries = mixer_period(base.mixer), parse_period(text, "model.form")
    forms = [(entry, _changes(entry, text)) for entry in entries]
    period = math.lcm(len(mixers), len(forms))
    return tuple(_form(base, mixers[i % len(mixers)], *forms[i % len(forms)]) for i in range(period))


def changed_networks(entries: Sequence[Spec], change: Callable[[str], str]) -> list[Spec]:
    """Entries of `model.form`, with the result of `change` in place of each feed-forward network."""
    return [
        dataclasses.replace(
            entry, kwargs=tuple((name, change(value) if name == "mlp" else value) for name, value in entry.kwargs)
        )
        for entry in entries
    ]


def check_effects(text: str, base: BlockConfig) -> None:
    """Checks that every field of a form has an effect on one of its layers.

    Args:
      text: As for `layer_forms`.
      base: As for `layer_forms`.

    Raises:
      InputError: A form sets one of PROJECTION_FIELDS, and its mixers have no projections.
    """
    mixers, entries = mixer_period(base.mixer), parse_period(text, "model.form")
    needs = [mixer.needs for mixer in build_mixers(base.mixer)]
    for index, entry in enumerate(entries):
        unread = [name for name, _ in entry.kwargs if name in PROJECTION_FIELDS]
        layers = range(index, math.lcm(len(mixers), len(entries)), len(entries))
        if unread and not base.memory_dim and not any(needs[i % len(mixers)] for i in layers):
            specs = dict.fromkeys(str(mixers[i % len(mixers)]) for i in layers)
            raise InputError(
                f"model.form: {unread[0]} of '{entry}' has no effect, because {', '.join(specs)}, the mixer of these layers, "
                "has no projections: leave it out, or change the order of model.mixer or model.form"
            )


def carries(mixer: str) -> bool:
    """Whether a mixer carries state from batch to batch.

    Args:
      mixer: `model.mixer`.

    Returns:
      True if one of its mixers does.
    """
    return any(entry.carries for entry in build_mixers(mixer))


def check_carry(config: BackboneConfig) -> None:
    """Checks that a model whose mixers carry state from batch to batch can do so.

    Args:
      config: A `models.backbone.BackboneConfig`.

    Raises:
      InputError: A mixer carries state, and the model does not keep a carry or has reversible residuals.
    """
    if not carries(config.mixer):
        return
    if not config.keeps_carry:
        raise InputError(
            f"model.mixer={config.mixer!r} carries state from batch to batch, which {type(config).__name__} does not keep: "
            "choose another mixer, as window(128,0), or task='lm'"
        )
    if config.residual == "reversible":
        raise InputError(
            f"model.mixer={config.mixer!r}, model.residual='reversible': reversible layers do not return the state that the "
            "mixer carries: set model.residual='plain', or choose another mixer"
        )


def check_reversible(config: BlockConfig, forms: Sequence[BlockConfig]) -> None:
    """Checks that layers can have reversible residuals.

    Args:
      config: The model's own Block.
      forms: The forms of the layers.

    Raises:
      InputError: A layer has other branches than a mixer and a feed-forward network, norms of the residual stream, or experts.
    """
    if config.memory_dim:
        raise InputError(
            f"model.residual='reversible', model.memory_dim={config.memory_dim}: reversible layers have two branches: set "
            "model.residual='plain'"
        )
    for form in forms:
        if not block_kind(form.block).has_two_branches:
            raise InputError(
                f"model.residual='reversible', model.block={form.block!r}: reversible layers have two branches: set "
                "model.residual='plain', or choose another block"
            )
        if described_network(form.mlp).expert_count:
            # Recomputed inputs differ by rounding, and a token with two nearly equal logits may then choose another expert.
            raise InputError(
                f"model.residual='reversible', model.mlp={form.mlp!r}: the backward pass recomputes the inputs of routers, "
                "which may then choose other experts: set model.residual='plain' and plan.remat=full"
            )
    if config.norm_placement == "post":
        raise InputError(
            "model.residual='reversible', model.norm_placement='post': a norm of the residual stream has no inverse: set "
            "model.norm_placement='pre', or model.residual='plain'"
        )


def _changes(entry: Spec, text: str) -> dict[str, Any]:
    """Fields in which a form differs from the model's Block."""
    for name, _ in entry.kwargs:
        if name in SHARED:
            raise InputError(f"model.form={text!r} sets {name}, but {SHARED[name]}: set model.{name} instead")
    return build(entry, FORMS, "layer form")


def _form(base: BlockConfig, mixer: Spec, entry: Spec, changes: Mapping[str, Any]) -> BlockConfig:
    """The Block of one layer."""
    try:
        form = dataclasses.replace(base, mixer=str(mixer), **changes)
    except InputError as error:
        raise InputError(f"model.form '{entry}': {error}") from None
    if form.position != base.position and "learned" in (form.position, base.position):
        raise InputError(
            f"model.form '{entry}' and model.position={base.position!r}: learned positions are added to the embedding, for "
            "all layers: choose 'rope' and 'none' for both, or leave position out of the form"
        )
    return block_kind(form.block).resolved(form)


def build_mixers(text: str, dropout: float = 0.0) -> list[Mixer]:
    """The mixers of one period, which layers take in turn.

    Args:
      text: `model.mixer`.
      dropout: Rate of dropout on attention probabilities.

    Returns:
      A module of `hpnlp.nn.mixers` for each entry, without a name.

    Raises:
      InputError: Unknown name, or wrong arguments; a mixer with a rate of dropout of its own.
    """
    specs = mixer_period(text)
    if any("dropout" in dict(spec.kwargs) for spec in specs):
        raise InputError(f"model.mixer={text!r} sets dropout, but {SHARED['dropout']}: set model.dropout instead")
    return [build(spec, MIXERS, "mixer", dropout=dropout, name=None) for spec in specs]


def build_mixer(form: BlockConfig) -> Mixer:
    """The mixer of a form.

    Args:
      form: A form with one mixer.

    Returns:
      A module of `hpnlp.nn.mixers`.
    """
    (mixer,) = build_mixers(form.mixer, form.dropout)
    return mixer


def branch_modules(form: BlockConfig) -> dict[str, Mixer | FeedForward]:
    """The modules of a form whose layers may have statistics and buffers.

    Args:
      form: A form with one mixer.

    Returns:
      The mixer under "attention", and the feed-forward network under "mlp": the names of their branches in a Block.
    """
    return {"attention": build_mixer(form), "mlp": build_feed_forward(form.mlp, hidden=form.mlp_size)}


def fixed_length(mixer: str, traits: Sequence[MixerTraits], max_len: int) -> int:
    """The length of all sequences of a model, if one of its mixers has a fixed length.

    Args:
      mixer: `model.mixer`, for the message.
      traits: Traits of the mixers.
      max_len: `model.max_len`.

    Returns:
      max_len; 0 if all mixers mix sequences of any length.

    Raises:
      InputError: A mixer has a fixed length, and max_len is 0.
    """
    if all(mixer_traits.any_length for mixer_traits in traits):
        return 0
    if not max_len:
        raise InputError(f"model.max_len=0: model.mixer={mixer!r} mixes sequences of one length: set it to that length")
    return max_len


def check_length(mixer: str, fixed: int, length: int) -> None:
    """Checks that a model has parameters for sequences of a length.

    Args:
      mixer: `model.mixer`, for the message.
      fixed: As `fixed_length` returns it.
      length: Tokens per sequence.

    Raises:
      InputError: The sequences have another length.
    """
    if fixed not in (0, length):
        raise InputError(
            f"model.mixer={mixer!r} mixes sequences of model.max_len={fixed} tokens only, and these have {length}: pad or cut "
            f"them, set model.max_len={length} for a new model, or choose a mixer of any length"
        )


def projections(form: BlockConfig) -> Mapping[str, Projection]:
    """The projections that a form's mixer reads.

    Args:
      form: A form with one mixer.

    Returns:
      `Mixer.needs`.
    """
    return build_mixer(form).needs


def matrix_size(form: BlockConfig) -> int:
    """Number of weights in the matrices of one layer.

    Args:
      form: The form of the layer.

    Returns:
      The number, without biases, norms and the mixer's own parameters.
    """
    return block_kind(form.block).matrix_size(form, projections(form))


def common_size(sizes: Sequence[int], field: str) -> tuple[int, str]:
    """The size of an axis in layers of several forms.

    Args:
      sizes: The sizes in each form.
      field: Field of BlockConfig that sets it.

    Returns:
      `(greatest common divisor, name of the field for messages)`.
    """
    alike = len(set(sizes)) == 1
    return math.gcd(*sizes), f"model.{field}" if alike else f"common divisor of {field} in model.form"
