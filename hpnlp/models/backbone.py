"""The part that all models share: embeddings, positions, a stack of Blocks and a final norm."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.model_parallel import NO_TENSOR_PARALLEL, ModelParallel, TensorParallel
from hpnlp.models.layer_stack import LayerStack
from hpnlp.nn.attention import Context, Memory, mixer_period
from hpnlp.nn.block import Block, BlockConfig
from hpnlp.nn.layers import GATED, NORMS, Embed, dropout
from hpnlp.nn.mixers import MIXERS
from hpnlp.ops.attention import Full
from hpnlp.spec import build, did_you_mean, lookup, parse, shortened
from hpnlp.types import Aux, InputError, Mixer, Model, WordStats, option

DTYPES: dict[str, Any] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}

# Addition of a layer's branches: one after the other to one stream, or each to the stream that the other branch reads.
RESIDUALS = ("plain", "reversible")

# The smallest and largest sizes. The limits are several times those of any published model, and small enough that no
# computation of a plan overflows.
MINIMA = {
    "layers": 1,
    **dict.fromkeys(("kv_heads", "head_dim", "mlp_dim", "vocab", "max_len", "unroll", "memory_dim"), 0),
}
LIMITS = {
    "layers": 4096,
    "dim": 2**18,
    "heads": 2**14,
    "kv_heads": 2**14,
    "head_dim": 2**16,
    "mlp_dim": 2**20,
    "vocab": 2**27,
    "max_len": 2**28,
    "unroll": 4096,
    "memory_dim": 2**18,
}


@dataclasses.dataclass(frozen=True)
class BackboneConfig(BlockConfig):
    """Embeddings, positions and a stack of Blocks.

    Sizes have upper limits, LIMITS.
    """

    layers: int = option(4, "Number of Blocks L.")
    vocab: int = option(0, "Rows V of the embedding table, 0 for the tokenizer's.")
    max_len: int = option(0, "Longest sequence that learned positions reach, 0 for data.seq_len.")
    embed_norm: bool = option(False, "A norm of the sum of the embeddings, before dropout.")
    dtype: str = option("float32", "Dtype of the activations; parameters stay float32.")
    unroll: int = option(
        0,
        "Number of layers in one iteration of the loop over layers, 0 for all; one period of the mixers where "
        "plan.remat recomputes.",
    )
    residual: str = option(
        "plain",
        '"plain"; or "reversible", whose backward pass recomputes activations from the end, so that they take the '
        "memory of one layer, in about the time of plan.remat=full. It is another function of the same "
        "parameters, with two streams that begin as the embedding and end as their mean, in float32 whatever the "
        "dtype (`ops.reversible`).",
    )

    def __post_init__(self) -> None:
        self._check_ranges()
        super().__post_init__()
        period = len(mixer_period(self.mixer))
        if period > self.layers:
            raise InputError(
                f"model.mixer={self.mixer!r} takes {period} layers for one turn, but model.layers={self.layers}: name fewer "
                "mixers, or add layers"
            )
        projects = self.memory_dim > 0 or any(mixer.needs for mixer in self.mixers())
        for name in ("qk_norm", "qkv_bias", "out_bias"):
            if getattr(self, name) and not projects:
                raise InputError(
                    f"model.{name}=True has no effect, because model.mixer={self.mixer!r} has no projections: set it to False"
                )
        lookup(DTYPES, self.dtype, "model.dtype")
        if self.residual not in RESIDUALS:
            raise InputError(f"model.residual={self.residual!r}: {did_you_mean(self.residual, RESIDUALS)}")
        if self.memory_dim and not self.has_memory:
            raise InputError(
                f"model.memory_dim={self.memory_dim}: this model passes its layers no memory: set it to 0, or choose a "
                "models.decoder.Decoder"
            )
        if self.residual == "reversible" and self.memory_dim:
            raise InputError(
                f"model.residual='reversible', model.memory_dim={self.memory_dim}: reversible layers have two branches: set "
                "model.residual='plain'"
            )
        if self.residual == "reversible" and self.norm_placement == "post":
            raise InputError(
                "model.residual='reversible', model.norm_placement='post': a norm of the residual stream has no inverse: set "
                "model.norm_placement='pre', or model.residual='plain'"
            )

    def _check_ranges(self) -> None:
        """Raises InputError for numbers out of range."""
        for name, minimum in MINIMA.items():
            if getattr(self, name) < minimum:
                raise InputError(f"model.{name}={getattr(self, name)}: expected at least {minimum}")
        for name, limit in LIMITS.items():
            if getattr(self, name) > limit:
                raise InputError(f"model.{name}={shortened(getattr(self, name), 40)}: expected at most {limit}")
        for name in ("norm_eps", "rope_theta"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"model.{name}={getattr(self, name)}: expected a finite number over 0")
        # Checked before `mixer_period` writes the repeats out.
        mixers = sum(spec.repeat for spec in parse(self.mixer, "model.mixer"))
        if mixers > LIMITS["layers"]:
            raise InputError(
                f"model.mixer={shortened(self.mixer, 80)} names {mixers} layers: expected at most {LIMITS['layers']}; one "
                "period is enough, as it repeats"
            )

    def mixers(self) -> list[Mixer]:
        """The mixers of one period, which layers take in turn.

        Returns:
          Modules of `hpnlp.nn.mixers`, one for each entry of `mixer`.
        """
        extra = {"dropout": self.dropout, "name": None}
        return [build(spec, MIXERS, "mixer", **extra) for spec in mixer_period(self.mixer)]

    @property
    def mask(self) -> Any:
        """The static Mask of the model: the pairs of tokens that may influence each other."""
        return Full()

    @property
    def has_memory(self) -> bool:
        """Whether the model passes its layers a memory, so that `memory_dim` may be over 0."""
        return False

    def masks(self) -> list[Any]:
        """Masks of the layers of one period.

        Returns:
          The intersection of each mixer's mask with `mask`, in the order of `mixers`.
        """
        return [mixer.within(self.mask) for mixer in self.mixers()]

    def sizes(self) -> dict[str, tuple[int, str]]:
        """Sizes of the logical axes that a mesh may divide.

        Returns:
          Logical axis -> (size, the config field that sets it).
        """
        period = len(mixer_period(self.mixer))
        return {
            "heads": (self.heads, "model.heads"),
            "kv_heads": (self.kv_head_count, "model.kv_heads"),
            "mlp": (self.mlp_size, "model.mlp_dim"),
            "vocab": (self.vocab, "model.vocab"),
            "layers": (self.layers, "model.layers"),
            # Each stage of a pipeline begins with the first mixer of a period, so stages hold complete periods.
            "periods": (self.layers // period if self.layers % period == 0 else 1, "model.mixer"),
        }

    def non_embedding_parameters(self) -> int:
        """Number of weights in the layers' matrices.

        Returns:
          The number, without biases, norms, tables and the mixers' own parameters.
        """
        heads = {"heads": self.heads, "kv_heads": self.kv_head_count}
        mixing = []
        for mixer in self.mixers():
            columns = [heads[need.axis] * (need.width or self.head_size) for need in mixer.needs.values()]
            if columns:
                columns.append(self.heads * self.head_size)  # the output projection
            mixing.append(self.dim * sum(columns))
        mlp = (3 if self.mlp in GATED else 2) * self.dim * self.mlp_size
        reading = 0
        if self.memory_dim:
            reading = 2 * (self.dim * self.heads + self.memory_dim * self.kv_head_count) * self.head_size
        return sum(mixing[layer % len(mixing)] + reading + mlp for layer in range(self.layers))


class Backbone(nn.Module):
    """Embeddings, positions, a stack of Blocks and a final norm: everything of a model but its head.

    Models derive from it, so that their parameters lie side by side: "embed", "positions", "layers", "final_norm" and those of
    the head.

    Attributes:
      config: Sizes and parts of the model.
      stats: Word statistics of the text, for output layers that need them.
      model_parallel: Embedding lookup, layers and loss over several devices, for `loss`; None for one device.
      remat: Rematerialisation policy of the layers, as `Plan.remat`.
    """

    config: Any
    stats: WordStats | None = None
    model_parallel: ModelParallel | None = None
    remat: str = "none"

    def setup(self) -> None:
        c = self.config
        if c.residual == "reversible" and self.remat != "none":
            raise InputError(
                f"plan.remat={self.remat!r}: reversible layers keep nothing that could be recomputed: set plan.remat='none', "
                "or model.residual='plain'"
            )
        self.embed = Embed(c.vocab, c.dim)
        if c.position == "learned":
            self.positions = Embed(c.max_len, c.dim, axis="positions")
        norm = lookup(NORMS, c.norm, "model.norm")
        if c.embed_norm:
            self.embed_norm = norm(c.norm_eps)
        if self.is_initializing():
            self.param("layers", self._init_layers)
        if c.norm_placement == "pre":
            self.final_norm = norm(c.norm_eps)

    def _blocks(self, tensor_parallel: TensorParallel) -> list[Block]:
        """The Block of each mixer. They are no submodules: their parameters are slices of those under "layers"."""
        # Residual branches start small, so that the variance of the stream does not grow with depth (GPT-2, sec. 2.3).
        out_init = nn.initializers.variance_scaling(1.0 / (2 * self.config.layers), "fan_in", "truncated_normal")
        mixers = mixer_period(self.config.mixer)
        return [Block(self.config, out_init, mixer, tensor_parallel, parent=None) for mixer in mixers]

    def _init_layers(self, rng: jax.Array) -> Any:
        """Parameters of all layers, stacked on a first axis with the logical name "layers"."""
        x, ids = jnp.zeros((1, 1, self.config.dim), jnp.float32), jnp.zeros((1, 1), jnp.int32)
        width = self.config.memory_dim
        memory = Memory(jnp.zeros((1, 1, width), jnp.float32), ids) if width else None
        context = Context(ids, None, self.config.mask, memory=memory)
        keys = jax.vmap(lambda i: jax.random.fold_in(rng, i))(jnp.arange(self.config.layers))

        def init_layer(block: Block, key: jax.Array) -> Any:
            return block.init(key, x, context)["params"]

        first, *further = (functools.partial(init_layer, block) for block in self._blocks(NO_TENSOR_PARALLEL))
        if any(jax.eval_shape(init, rng) != jax.eval_shape(first, rng) for init in further):
            raise InputError(
                f"model.mixer={self.config.mixer!r}: the mixers have different parameters, which do not stack: choose mixers "
                "with the same projections and parameters"
            )
        stacked = jax.vmap(first)(keys)
        return jax.tree.map(
            lambda box: box.add_axis(0, {nn.PARTITION_NAME: "layers"}),
            stacked,
            is_leaf=lambda node: isinstance(node, nn.LogicallyPartitioned),
        )

    def hidden(
        self, tokens: Int[Array, "B T"], context: Context, caches: Any = None, added: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, Aux]:
        """Hidden states of tokens.

        Args:
          tokens: Ids of the tokens.
          context: Positions, segments and mask.
          caches: Caches of the preceding tokens, as an earlier call returned them, or None.
          added: Further embeddings `[B, T, D]`, or None.

        Returns:
          `(hidden states after the final norm, or the last layer's if norms follow additions; caches; aux)`.

        Raises:
          InputError: More tokens than learned positions.
        """
        c, parallel = self.config, self.model_parallel
        x = self._embed(tokens, context, added)
        rng = self.make_rng("dropout") if c.dropout > 0.0 and not context.deterministic else None
        x = dropout(x, c.dropout, None if rng is None else jax.random.fold_in(rng, c.layers), context.ids)
        if c.residual == "reversible":  # the two streams side by side, so that devices send one array
            x = jnp.concatenate([x, x], axis=-1).astype(jnp.float32)
        params = nn.meta.unbox(self.get_variable("params", "layers"))
        if self.is_initializing():
            aux = {}  # the layers' parameters exist by now, and their results are not used
        elif parallel is None:
            x, caches, aux = self._run_layers(NO_TENSOR_PARALLEL, params, x, context, rng, 0, caches)
        else:
            x, aux = parallel.run_layers(self._run_without_caches, params, x, context, rng)
        if c.residual == "reversible":
            # The mean, as in trax's Reformer; its ReformerLM concatenates the streams, for a head of twice the width.
            x1, x2 = jnp.split(x, 2, axis=-1)
            x = ((x1 + x2) / 2).astype(DTYPES[c.dtype])
        return self.final_norm(x) if c.norm_placement == "pre" else x, caches, aux

    def _embed(self, tokens: jax.Array, context: Context, added: jax.Array | None) -> jax.Array:
        """Embeddings of tokens, with learned positions and `added` added, and normalised if the config says so."""
        c, parallel = self.config, self.model_parallel
        dtype = DTYPES[c.dtype]
        x = (
            self.embed(tokens, dtype)
            if parallel is None
            else parallel.embedding_lookup(self.embed.table, tokens, dtype)
        )
        if c.position == "learned":
            if tokens.shape[1] > c.max_len:
                raise InputError(
                    f"{tokens.shape[1]} tokens are more than the model.max_len={c.max_len} learned positions: shorten them, or "
                    "train with a larger model.max_len"
                )
            x = x + self.positions(context.positions, dtype)
        if added is not None:
            x = x + added.astype(dtype)
        return self.embed_norm(x) if c.embed_norm else x

    def _run_layers(
        self,
        tensor_parallel: TensorParallel,
        params: Any,
        x: jax.Array,
        context: Context,
        rng: Any,
        first: Any,
        caches: Any = None,
    ) -> tuple[jax.Array, Any, Aux]:
        """Runs the layers with these parameters, of which the first has the index `first`: `(x, caches, aux)`."""
        c = self.config
        stack = LayerStack(
            blocks=self._blocks(tensor_parallel),
            layers=c.layers,
            unroll=c.unroll,
            dtype=DTYPES[c.dtype],
            tensor_parallel=tensor_parallel,
            remat=self.remat,
        )
        run = stack.run_reversible if c.residual == "reversible" else stack.run_plain
        return run(params, x, context, rng, first, caches)

    def _run_without_caches(self, *args: Any) -> tuple[jax.Array, Aux]:
        x, _, aux = self._run_layers(*args)
        return x, aux


def separate_layers(params: Any) -> Any:
    """Splits the stacked parameters of layers into separate arrays.

    For decoding, which reads the parameters for every token: XLA copies a layer out of the stack whenever it is used. The copy
    is negligible beside the products of a batch, but takes three quarters of the time of decoding one token. Layers with
    separate parameters run one by one, whatever `unroll` is.

    Args:
      params: Parameters of a model.

    Returns:
      The parameters, with a tuple of one tree per layer under "layers".
    """
    stack = params["layers"]
    if isinstance(stack, tuple):
        return params
    count = jax.tree.leaves(stack)[0].shape[0]
    return {**params, "layers": tuple(jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(count))}


def axes_of(model: Model) -> Any:
    """Logical axis names of a model's parameters. Allocates nothing.

    Args:
      model: A model.

    Returns:
      A tree like the parameters of tuples of names.
    """
    return axes_and_shapes(model)[0]


def axes_and_shapes(model: Model) -> tuple[Any, Any]:
    """Logical axis names and shapes of a model's parameters. Allocates nothing.

    Args:
      model: A model.

    Returns:
      `(axes, shapes)`: trees like the parameters of tuples of names (None for a parameter without names) and of shapes.
    """
    boxed = jax.eval_shape(lambda: model.init(jax.random.key(0), model.example_batch(1, 8)))["params"]

    def is_boxed(node: Any) -> bool:
        return isinstance(node, nn.LogicallyPartitioned)

    axes = jax.tree.map(lambda node: tuple(node.names) if is_boxed(node) else None, boxed, is_leaf=is_boxed)
    return axes, nn.meta.unbox(boxed)
