"""The part that all models share: embeddings, positions, a stack of Blocks and a final norm."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from hpnlp import compatibility
from hpnlp.compatibility import Facts
from hpnlp.cost.parts import part
from hpnlp.model_interfaces.branch import Mixer
from hpnlp.model_interfaces.layer_report import CARRY, LayerReport
from hpnlp.model_interfaces.model_parallel import NO_TENSOR_PARALLEL, ModelParallel, TensorParallel
from hpnlp.model_interfaces.ranges import LIMITS
from hpnlp.models.shared.body import ConfigOfModel
from hpnlp.models.shared.model import BaseModel
from hpnlp.models.stacks import layer_statistics
from hpnlp.models.stacks.layer_forms import (
    branch_modules,
    build_mixers,
    changed_networks,
    check_carry,
    check_effects,
    check_length,
    check_reversible,
    common_size,
    fixed_length,
    layer_forms,
    matrix_size,
    projections,
)
from hpnlp.models.stacks.layer_stack import LayerStack, init_layers, layer_axes, layer_rngs, make_blocks, stack_order
from hpnlp.models.stacks.planned_layers import PlannedLayers
from hpnlp.models.variables import BUFFERS
from hpnlp.nn.attention import Context, mixer_period
from hpnlp.nn.block import BlockConfig
from hpnlp.nn.blocks import block_kind
from hpnlp.nn.feed_forward.canonical import canonical_mlp
from hpnlp.nn.layers import NORMS, Embed, dropout
from hpnlp.ops.attention import Full
from hpnlp.ops.helpers.stacks import StackOrder
from hpnlp.spec import lookup, parse, parse_period, shortened
from hpnlp.types import InputError, MixerTraits, Statistics, WordStats, option

DTYPES: dict[str, Any] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}

# Addition of a layer's branches: one after the other to one stream, or each to the stream that the other branch reads.
RESIDUALS = ("plain", "reversible")


@dataclasses.dataclass(frozen=True)
class BackboneConfig(BlockConfig, PlannedLayers, ConfigOfModel):
    """Embeddings, positions and a stack of Blocks."""

    layers: int = option(4, "Number of Blocks L.", least=1, most=LIMITS["layers"])
    form: str = option(
        "block",
        "Forms that the layers take in turn, with the Block fields in which they differ from the model, as in "
        '"block*3,block(heads=2,mlp_dim=64)": all fields of a Block except dim, mixer, dropout, memory_dim and norm_placement.',
    )
    vocab: int = option(0, "Rows V of the embedding table, 0 for the tokenizer's.", least=0, most=LIMITS["vocab"])
    max_len: int = option(0, "Longest sequence that learned positions reach, 0 for data.seq_len.", least=0, most=2**28)
    position_offset: int = option(
        0,
        "Rows of the table of learned positions before that of the first position, which are never read (RoBERTa: 2).",
        least=0,
        most=2**27,
    )
    embed_scale: bool = option(False, "Embeddings of tokens times the square root of D (Vaswani et al. 2017).")
    embed_norm: bool = option(False, "A norm of the sum of the embeddings, before dropout.")
    dtype: str = option("float32", "Dtype of the activations; parameters stay float32.")
    unroll: int = option(
        0,
        "Number of layers in one iteration of the loop over layers, 0 for all; one period of the mixers where "
        "plan.remat recomputes.",
        least=0,
        most=LIMITS["layers"],
    )
    residual: str = option(
        "plain",
        '"plain"; or "reversible", whose backward pass recomputes activations from the end, so that they take the '
        "memory of one layer, in about the time of plan.remat=full. It is another function of the same "
        "parameters, with two streams that begin as the embedding and end as their mean, in float32 whatever the "
        "dtype (`ops.reversible`).",
        among=RESIDUALS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_periods()
        for form in set(self.forms()):
            block_kind(form.block).check_mixer(form, branch_modules(form)["attention"])  # or InputError: unknown entry
        self.networks()  # made and kept now, because the methods of modules cannot make other modules
        check_effects(self.form, self._block())
        projects = self.memory_dim > 0 or any(mixer.needs for mixer in self.mixers())
        for name in ("qk_norm", "joint_qk_norm", "qkv_bias", "out_bias"):
            if getattr(self, name) and not projects:
                raise InputError(
                    f"model.{name}=True has no effect, because model.mixer={self.mixer!r} has no projections: set it to False"
                )
        check_carry(self)
        lookup(DTYPES, self.dtype, "model.dtype")
        if self.position_offset and self.position != "learned":
            raise InputError(
                f"model.position_offset={self.position_offset} has no effect, because model.position={self.position!r} has no "
                "table: set it to 0, or model.position='learned'"
            )
        if self.memory_dim and not self.has_memory:
            raise InputError(
                f"model.memory_dim={self.memory_dim}: this model passes its layers no memory: set it to 0, or choose a "
                "models.shared.decoder.Decoder"
            )
        if self.residual == "reversible":
            check_reversible(self, self.forms())

    def _check_periods(self) -> None:
        """Raises InputError if layers take too many mixers or forms in turn."""
        for field, text in (("model.mixer", self.mixer), ("model.form", self.form)):
            entries = sum(spec.repeat for spec in parse(text, field))  # checked before repeats are written out
            if entries > LIMITS["layers"]:
                raise InputError(
                    f"{field}={shortened(text, 80)} names {entries} layers: expected at most {LIMITS['layers']}; one "
                    "period is enough, as it repeats"
                )
        period = math.lcm(*(len(parse_period(text, field)) for field, text in self.periodic_fields().items()))
        if period > max(self.layers, 1):
            fields = self.periodic_fields()
            shown = " and ".join(f"{field}={text!r}" for field, text in fields.items())
            raise InputError(
                f"{shown} {'repeats' if len(fields) == 1 else 'repeat'} after {period} layers, and "
                f"model.layers={self.layers}: name fewer "
                f"{'mixers' if fields.keys() == {'model.mixer'} else 'entries'}, or add layers"
            )

    def periodic_fields(self) -> dict[str, str]:
        """The fields by which layers differ.

        Returns:
          Field -> value for those of `model.mixer` and `model.form` that have several entries; empty if all layers are alike.
        """
        fields = {"model.mixer": self.mixer, "model.form": self.form}
        return {field: text for field, text in fields.items() if len(parse_period(text, field)) > 1}

    def forms(self) -> tuple[BlockConfig, ...]:
        """The forms that layers take in turn.

        Returns:
          The Block of each layer of one period: the model's own, with the mixer of that layer and the changes of its form.
        """
        return layer_forms(self.form, self._block())

    def _block(self) -> BlockConfig:
        """The model's own Block."""
        return BlockConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(BlockConfig)})

    def stack_order(self) -> StackOrder:
        """The stack that holds the parameters of each layer.

        Returns:
          The order of the stacks under "layers" in the parameters. Forms with equal parameters share a stack.
        """
        return stack_order(self.forms(), self.mask, self.fixed_length() or 1)

    def mixers(self) -> list[Mixer]:
        """The mixers of one period, which layers take in turn.

        Returns:
          Modules of `hpnlp.nn.mixers`, one for each entry of `mixer`.
        """
        return build_mixers(self.mixer, self.dropout)

    def all_mixers(self) -> list[Any]:
        """The mixers of one period, and the convolutions that `block` adds to layers.

        Returns:
          Modules.
        """
        added = [block_kind(form.block).convolutions(form) for form in dict.fromkeys(self.forms())]
        return [*self.mixers(), *(module for modules in added for module in modules)]

    @functools.cached_property
    def traits(self) -> tuple[MixerTraits, ...]:
        """Traits of `mixers`. Computed when the config is made, because a module's methods cannot make other modules."""
        return tuple(mixer.traits for mixer in self.mixers())

    def fixed_length(self) -> int:
        """The length of all sequences if a mixer has a fixed one; see `layer_forms.fixed_length`."""
        return fixed_length(self.mixer, self.traits, self.max_len)

    def needed_length(self, seq_len: int) -> int:
        """Length to which sequences must be padded, so that outputs are those of training.

        Args:
          seq_len: Tokens per sequence in training.

        Returns:
          The length; 0 if the amount of padding makes no difference.
        """
        return self.fixed_length() or (0 if all(traits.any_padding for traits in self.traits) else seq_len)

    @property
    def mask(self) -> Any:
        """The static Mask of the model: the pairs of tokens that may influence each other."""
        return Full()

    @property
    def embedding_size(self) -> int:
        """Features of the embeddings of tokens, which `Backbone.token_features` leads to D features."""
        return self.dim

    @property
    def has_memory(self) -> bool:
        """Whether the model passes its layers a memory, so that `memory_dim` may be over 0."""
        return False

    @property
    def keeps_carry(self) -> bool:
        """Whether the model keeps the carry of its mixers from batch to batch."""
        return False

    @property
    def is_single_stack(self) -> bool:
        """Whether the model is one Backbone with at least one layer, so that all layers' parameters are under "layers"."""
        return self.layers > 0

    def stacks(self) -> dict[str, Any]:
        """The config itself under "", for a model that is one Backbone."""
        return {"": self}

    def canonical(self, values: dict[str, Any]) -> dict[str, Any]:
        """The fields with resolved sizes, and one spelling of mixers and networks of the same function."""
        values |= {"kv_heads": self.kv_head_count, "head_dim": self.head_size, "mlp_dim": self.mlp_size}
        form = changed_networks(parse_period(self.form, "model.form"), canonical_mlp)
        values |= {"mixer": mixer_period(self.mixer), "form": form, "mlp": canonical_mlp(self.mlp)}
        unused = [] if self.position == "learned" else ["max_len", "target_len"]
        unused += [] if self.position == "rope" else ["rope_theta", "rope_scaling"]
        return {name: value for name, value in values.items() if name not in unused}

    def with_networks(self, change: Callable[[str], str]) -> BackboneConfig:
        """The config with the networks of `mlp` and `form` replaced."""
        form = ",".join(map(str, changed_networks(parse(self.form, "model.form"), change)))
        return dataclasses.replace(self, mlp=change(self.mlp), form=form)

    def split_carry(self, carry: Any) -> Any:
        """The carry of the layers by the name of their stack."""
        return self.stack_order().split(carry["layers"])

    def masks(self) -> list[Any]:
        """Masks of the layers of one period.

        Returns:
          The intersection of each mixer's mask with `mask`, in the order of `mixers`.
        """
        return [mixer.within(self.mask) for mixer in self.mixers()]

    def sizes(self) -> dict[str, tuple[int, str]]:
        """Sizes of the logical axes that a mesh may divide.

        Returns:
          Logical axis -> (size, the config field that sets it). Where layers differ, the size is the greatest common divisor
          of theirs.
        """
        forms = self.forms()
        attending = [form for form in forms if projections(form)] or forms
        period, periodic = len(forms), self.periodic_fields()
        return {
            "heads": common_size([form.heads for form in attending], "heads"),
            "kv_heads": common_size([form.kv_head_count for form in attending], "kv_heads"),
            "mlp": common_size([form.mlp_size for form in forms], "mlp_dim"),
            "vocab": (self.vocab, "model.vocab"),
            "layers": (self.layers, "model.layers"),
            # Each stage of a pipeline begins with the first form of a period, so stages hold complete periods.
            "periods": (
                self.layers // period if self.layers % period == 0 else 1,
                " and ".join(periodic) or "model.mixer",
            ),
        } | self.expert_sizes()

    def attention_width(self) -> int:
        """Width of the attention of all layers together.

        Returns:
          The sum of heads x head size over the layers whose mixers have projections.
        """
        widths = [form.heads * form.head_size if projections(form) else 0 for form in self.forms()]
        return sum(widths[layer % len(widths)] for layer in range(self.layers))

    def non_embedding_parameters(self) -> int:
        """Number of weights in the layers' matrices.

        Returns:
          The number, without biases, norms, tables and the mixers' own parameters.
        """
        sizes = [matrix_size(form) for form in self.forms()]
        return sum(sizes[layer % len(sizes)] for layer in range(self.layers))


class Backbone(BaseModel, nn.Module):
    """Embeddings, positions, a stack of Blocks and a final norm: everything of a model but its head.

    Models derive from it, so that their parameters lie side by side: "embed", "positions", "layers", "final_norm" and those of
    the head.

    Attributes:
      config: Sizes and parts of the model.
      stats: Word statistics of the text, for output layers that need them.
      model_parallel: Embedding lookup, layers and loss over several devices, for `loss`; None for one device.
      remat: Rematerialisation policy of the layers, as `Plan.remat`.
      shared_embed: An embedding of another model of which this one is a part; None for an embedding of its own.
    """

    config: Any
    stats: WordStats | None = None
    model_parallel: ModelParallel | None = None
    remat: str = "none"
    shared_embed: Embed | None = None

    def setup(self) -> None:
        c = self.config
        compatibility.check(Facts(residual=c.residual, remat=self.remat))
        self.embed = Embed(c.vocab, c.embedding_size) if self.shared_embed is None else self.shared_embed
        if c.position == "learned":
            self.positions = Embed(c.max_len + c.position_offset, c.dim, axis="positions")
        norm = lookup(NORMS, c.norm, "model.norm")
        if c.embed_norm:
            self.embed_norm = norm(c.norm_eps)
        if self.is_initializing() and c.layers:
            self._init_layers()
        if c.norm_placement != "post":
            self.final_norm = norm(c.norm_eps)

    def _init_layers(self) -> None:
        """Makes the variables of the layers."""
        c, variables = self.config, {}

        def initial_params(rng: jax.Array) -> Any:
            variables.update(init_layers(c.forms(), c.layers, c.mask, c.fixed_length() or 1, rng))
            return variables["params"]

        self.param("layers", initial_params)
        if BUFFERS in variables:
            self.variable(BUFFERS, "layers", lambda: variables[BUFFERS])

    def _layer_variables(self) -> Any:
        """The variables of the layers: stacks by name, or a tuple of one tree per layer, of dicts of collections."""
        params, buffers = (nn.meta.unbox(self.get_variable(name, "layers")) for name in ("params", BUFFERS))
        if isinstance(params, tuple):
            return tuple(
                {"params": layer, BUFFERS: layer_buffers}
                for layer, layer_buffers in zip(params, buffers or ({},) * len(params), strict=True)
            )
        collections = {"params": params, BUFFERS: buffers, CARRY: self.get_variable(CARRY, "layers")}
        collections = {name: tree for name, tree in collections.items() if tree is not None}
        return self.config.stack_order().by_stack(collections)

    def hidden(
        self, tokens: Int[Array, "B T"], context: Context, caches: PyTree = None, added: Array | None = None
    ) -> tuple[Float[Array, "B T D"], Any, LayerReport]:
        """Hidden states of tokens.

        Args:
          tokens: Ids of the tokens.
          context: Positions, segments and mask.
          caches: Caches of the preceding tokens, as an earlier call returned them, or None.
          added: Further embeddings `[B, T, D]`, or None.

        Returns:
          `(hidden states after the final norm, or the last layer's if norms follow additions; caches; report)`.

        Raises:
          InputError: More tokens than learned positions, or another number than a mixer has parameters for.
        """
        c, parallel = self.config, self.model_parallel
        if c.reads_tokens:
            context = dataclasses.replace(context, tokens=tokens)
        x = self._embed(tokens, context, added)
        drops, draws = c.dropout > 0.0, any(traits.draws for traits in (*c.traits, *c.network_traits))
        rng = self.make_rng("dropout") if (drops or draws) and not context.deterministic else None
        rngs = layer_rngs(rng, c.layers, drops, draws)
        x = dropout(x, c.dropout, None if rng is None else jax.random.fold_in(rng, c.layers), context.ids)
        embedded = x
        if c.residual == "reversible":  # the two streams side by side, so that devices send one array
            x = jnp.concatenate([x, x], axis=-1).astype(jnp.float32)
        if self.is_initializing() or not c.layers:
            report = LayerReport()  # the layers' parameters exist by now, and their results are not used
        elif parallel is None:
            x, caches, report = self._run_layers(
                NO_TENSOR_PARALLEL, self._layer_variables(), x, context, rngs, 0, caches
            )
        else:
            axes = layer_axes(c.forms(), c.layers, c.mask, c.fixed_length() or 1)
            x, report = parallel.run_layers(axes, self._run_without_caches, self._layer_variables(), x, context, rngs)
        if context.taps:
            embedding = {"embedding": embedded} if "embedding" in context.taps else {}
            report = dataclasses.replace(report, taps={"layers": report.taps, **embedding})
        if c.residual == "reversible":
            # The mean, as in trax's Reformer; its ReformerLM concatenates the streams, for a head of twice the width.
            x1, x2 = jnp.split(x, 2, axis=-1)
            x = ((x1 + x2) / 2).astype(DTYPES[c.dtype])
        return x if c.norm_placement == "post" else self.final_norm(x), caches, report

    @nn.nowrap
    def reported_statistics(self, report: LayerReport) -> Statistics:
        """The statistics of a batch, from the report of `hidden`; see `layer_statistics.from_report`."""
        return layer_statistics.from_report(self.config, report)

    @nn.nowrap
    def auxiliary_loss(self, statistics: Statistics) -> dict[str, jax.Array]:
        """Auxiliary losses of the layers, see `layer_statistics.auxiliary_loss`."""
        return layer_statistics.auxiliary_loss(self.config, statistics)

    @nn.nowrap
    def advance(self, buffers: PyTree, statistics: Statistics, step: jax.Array, rng: jax.Array) -> Any:
        """Buffers for the next step, see `layer_statistics.advance`."""
        return layer_statistics.advance(self.config, buffers, statistics, step, rng)

    @part("embedding")
    def _embed(self, tokens: jax.Array, context: Context, added: jax.Array | None) -> jax.Array:
        """Embeddings of tokens, with learned positions and `added` added, and normalised if the config says so."""
        c, parallel = self.config, self.model_parallel
        if not self.is_initializing():
            check_length(c.mixer, c.fixed_length(), tokens.shape[1])
        dtype = DTYPES[c.dtype]
        x = (
            self.embed(tokens, dtype)
            if parallel is None
            else parallel.embedding_lookup(self.embed.table, tokens, dtype)
        )
        x = self.token_features(x, context)
        if c.embed_scale:
            x = x * np.asarray(math.sqrt(c.dim), dtype)
        if c.position == "learned":
            if tokens.shape[1] > c.max_len:
                raise InputError(
                    f"{tokens.shape[1]} tokens are more than the model.max_len={c.max_len} learned positions: shorten them, or "
                    "train with a larger model.max_len"
                )
            x = x + self.positions(context.positions + c.position_offset, dtype)
        if added is not None:
            x = x + added.astype(dtype)
        return self.embed_norm(x) if c.embed_norm else x

    def token_features(self, x: Float[Array, "B T E"], context: Context) -> Float[Array, "B T D"]:
        """Features of the tokens, to which positions are added.

        Args:
          x: Embeddings of the tokens, of `config.embedding_size` features.
          context: Segments of the tokens.

        Returns:
          x itself, unless a model overrides this method.
        """
        return x

    def _run_layers(
        self,
        tensor_parallel: TensorParallel,
        params: PyTree,
        x: jax.Array,
        context: Context,
        rngs: Mapping[str, Array],
        chunk: Array | int,
        caches: PyTree = None,
    ) -> tuple[jax.Array, Any, LayerReport]:
        """Runs the layers with these parameters, a chunk of the model's: `(x, caches, report)`."""
        c = self.config
        stack = LayerStack(
            blocks=make_blocks(c.forms(), c.layers, tensor_parallel),
            order=c.stack_order(),
            layers=c.layers,
            unroll=c.unroll,
            dtype=DTYPES[c.dtype],
            tensor_parallel=tensor_parallel,
            remat=self.remat,
        )
        run = stack.run_reversible if c.residual == "reversible" else stack.run_plain
        return run(params, x, context, rngs, chunk, caches)

    def _run_without_caches(self, *args: Any) -> tuple[jax.Array, LayerReport]:
        x, _, report = self._run_layers(*args)
        return x, report
