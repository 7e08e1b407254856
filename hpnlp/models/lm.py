"""The causal language model: embed, stacked layers, head."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpnlp.nn.attention import Context, alternation
from hpnlp.nn.block import Block, BlockConfig
from hpnlp.nn.layers import GATED, NORMS, Embed, dropout, embed_init, param
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.output import OUTPUTS, is_normalized
from hpnlp.nn.stack import coupled, through, through_reversibly
from hpnlp.ops.attention.masks.patterns import Causal
from hpnlp.parallel import remat
from hpnlp.spec import build, did_you_mean, lookup, parse, parse_one, shortened
from hpnlp.types import NO_TENSOR_PARALLEL, Aux, InputError, LossOut, ModelParallel, TensorParallel, WordStats

DTYPES: dict[str, Any] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}

# How a layer's tensor_parallel add up: one after the other to one stream, or each to the stream that the other reads.
RESIDUALS = ("plain", "reversible")

# The largest sizes: some times what any published model has, and little enough that nothing overflows on the way to a plan.
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
}


@dataclasses.dataclass(frozen=True)
class LMConfig(BlockConfig):
    """A causal language model.

    layers: how many Blocks. vocab: rows of the embedding table, 0 for the tokenizer's. max_len: the longest sequence that
    learned positions reach, 0 for data.seq_len. output: an entry of OUTPUTS. tied: the head shares the embedding table,
    where its rows are words. dtype: what activations are computed in; parameters stay float32. unroll:
    how many layers one step of the loop over layers holds, 0 for all; one turn where anything is computed again.
    residual: "plain"; or "reversible", whose backward pass computes activations again from the end, so that they take the
    memory of one layer, in about the time of plan.remat=full. It is another function of the same parameters: two streams, which
    begin as the embedding and end as their mean, in float32 whatever the dtype (`ops.reversible`). No size is over its entry of
    LIMITS: at most 4096 layers, and a width of 2^18.
    """

    layers: int = 4
    vocab: int = 0
    max_len: int = 0
    output: str = "full"
    tied: bool = True
    dtype: str = "float32"
    unroll: int = 0
    residual: str = "plain"

    def __post_init__(self) -> None:
        least = {"layers": 1, **dict.fromkeys(("kv_heads", "head_dim", "mlp_dim", "vocab", "max_len", "unroll"), 0)}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise InputError(f"model.{name}={getattr(self, name)}: expected at least {bound}")
        for name, limit in LIMITS.items():
            if getattr(self, name) > limit:
                raise InputError(f"model.{name}={shortened(getattr(self, name), 40)}: expected at most {limit}")
        for name in ("norm_eps", "rope_theta"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"model.{name}={getattr(self, name)}: expected a finite number over 0")
        named = sum(spec.repeat for spec in parse(self.mixer, "model.mixer"))
        if named > LIMITS["layers"]:  # before repeats are written out
            raise InputError(
                f"model.mixer={shortened(self.mixer, 80)} names {named} layers: expected at most {LIMITS['layers']}; "
                "a period is enough, as layers take it in turn"
            )
        super().__post_init__()
        period = len(alternation(self.mixer))
        if period > self.layers:
            raise InputError(
                f"model.mixer={self.mixer!r} takes {period} layers for one turn, but model.layers={self.layers}: name fewer "
                "mixers, or add layers"
            )
        lookup(DTYPES, self.dtype, "model.dtype")
        if self.residual not in RESIDUALS:
            raise InputError(f"model.residual={self.residual!r}: {did_you_mean(self.residual, RESIDUALS)}")

    def sizes(self) -> dict[str, tuple[int, str]]:
        """Logical axis -> (size, config field): what a mesh must divide."""
        period = len(alternation(self.mixer))
        return {
            "heads": (self.heads, "model.heads"),
            "kv_heads": (self.kv_head_count, "model.kv_heads"),
            "mlp": (self.mlp_size, "model.mlp_dim"),
            "vocab": (self.vocab, "model.vocab"),
            "layers": (self.layers, "model.layers"),
            # Of mixers that layers take in turn, each stage of a pipeline begins with the first.
            "turns": (self.layers // period if self.layers % period == 0 else 1, "model.mixer"),
        }

    def non_embedding_parameters(self) -> int:
        """Weights of the layers' matrices, the head's table not counted."""
        c = self
        attention = 2 * c.dim * c.head_size * (c.heads + c.kv_head_count)
        return c.layers * (attention + (3 if c.mlp in GATED else 2) * c.dim * c.mlp_size)


class LM(nn.Module):
    """A causal language model over `config.vocab` ids. Every method but `loss` gives activations, not losses.

    A batch is a mapping with tokens, labels, segment_ids, positions `[B, T]` int32 and weights `[B, T]` float32; labels
    are the tokens that follow, segment id 0 is padding. stats: how the text uses the ids, for output layers that ask.
    model_parallel: its parts over several devices, for `loss`. remat: what its layers compute again for gradients, as
    `Plan.remat` says.
    """

    config: LMConfig
    stats: WordStats | None = None
    model_parallel: ModelParallel | None = None
    remat: str = "none"

    @property
    def is_normalized(self) -> bool:
        """Whether the loss is -log p(label) of a distribution over the vocabulary."""
        return is_normalized(self.config.output)

    def setup(self) -> None:
        c = self.config
        if c.residual == "reversible" and self.remat != "none":
            raise InputError(
                f"plan.remat={self.remat!r}: reversible layers keep nothing that could be computed again: set "
                "plan.remat='none', or model.residual='plain'"
            )
        self.embed = Embed(c.vocab, c.dim)
        if c.position == "learned":
            self.positions = Embed(c.max_len, c.dim, axis="positions")
        # Residual tensor_parallel start small, so that the variance of the stream does not grow with depth (GPT-2, sec. 2.3).
        out_init = nn.initializers.variance_scaling(1.0 / (2 * c.layers), "fan_in", "truncated_normal")
        self.block = functools.partial(Block, c, out_init, parent=None)
        self.blocks = tuple(self.block(mixer) for mixer in alternation(c.mixer))
        if self.is_initializing():
            self.param("layers", self._init_layers)
        self.final_norm = lookup(NORMS, c.norm, "model.norm")(c.norm_eps)
        extra = {"vocab": c.vocab, "dim": c.dim, "stats": self.stats}
        self.output = build(parse_one(c.output, "model.output"), OUTPUTS, "output layer", **extra)
        if c.tied and self.output.rows_are != "words":
            raise InputError(
                f"model.output={c.output!r} has no table of words by id that the embedding could share: set model.tied=False"
            )
        if not self.output.rows_are:
            self.table = None
        elif c.tied:
            self.table = self.embed.table
        else:
            self.table = param(self, "head", embed_init, (c.vocab, c.dim), ("vocab", "embed"))

    def _init_layers(self, rng: jax.Array) -> Any:
        """Parameters of all layers, stacked on a first axis that is named `layers`."""
        x = jnp.zeros((1, 1, self.config.dim), jnp.float32)
        context = Context(jnp.zeros((1, 1), jnp.int32), None, Causal())
        keys = jax.vmap(lambda i: jax.random.fold_in(rng, i))(jnp.arange(self.config.layers))
        first, *others = (lambda key, block=block: block.init(key, x, context)["params"] for block in self.blocks)
        if any(jax.eval_shape(other, rng) != jax.eval_shape(first, rng) for other in others):
            raise InputError(
                f"model.mixer={self.config.mixer!r}: the mixers have different parameters, which do not stack: choose mixers "
                "that have none"
            )
        stacked = jax.vmap(first)(keys)
        add_axis = lambda box: box.add_axis(0, {nn.PARTITION_NAME: "layers"})  # noqa: E731
        return jax.tree.map(add_axis, stacked, is_leaf=lambda node: isinstance(node, nn.LogicallyPartitioned))

    def hidden(
        self, tokens: Int[Array, "B T"], context: Context, caches: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, Aux]:
        """`(normed hidden states, caches, aux)` of tokens. Caches come as `nn.stack.through` makes them."""
        c, placed = self.config, self.model_parallel
        dtype = DTYPES[c.dtype]
        x = self.embed(tokens, dtype) if placed is None else placed.embedding_lookup(self.embed.table, tokens, dtype)
        if c.position == "learned":
            if tokens.shape[1] > c.max_len:
                raise InputError(
                    f"{tokens.shape[1]} tokens are more than the model.max_len={c.max_len} positions that it has learned: "
                    "shorten them, or train with a larger model.max_len"
                )
            x = x + self.positions(context.positions, dtype)
        rng = self.make_rng("dropout") if c.dropout > 0.0 and not context.deterministic else None
        x = dropout(x, c.dropout, None if rng is None else jax.random.fold_in(rng, c.layers), context.ids)

        if c.residual == "reversible":  # side by side, as what travels between devices is one array
            x = jnp.concatenate([x, x], axis=-1).astype(jnp.float32)
        params = nn.meta.unbox(self.get_variable("params", "layers"))
        if self.is_initializing():
            aux = {}  # layers have theirs by now, and nobody asks what they would give
        elif placed is None:
            x, caches, aux = self._layers(NO_TENSOR_PARALLEL, params, x, context, rng, 0, caches)
        else:
            run = lambda *given: self._layers(*given)[::2]  # noqa: E731
            x, aux = placed.run_layers(run, params, x, context, rng)
        if c.residual == "reversible":
            # As in trax's Reformer; its ReformerLM has them side by side, for a head of twice the width.
            x1, x2 = jnp.split(x, 2, axis=-1)
            x = ((x1 + x2) / 2).astype(dtype)
        return self.final_norm(x), caches, aux

    def _layers(
        self,
        tensor_parallel: TensorParallel,
        params: Any,
        x: jax.Array,
        context: Context,
        rng: Any,
        first: Any,
        caches: Any = None,
    ) -> tuple[jax.Array, Any, Aux]:
        """Some layers, the first of which is number `first`, with these parameters."""
        c = self.config
        blocks = [self.block(mixer, tensor_parallel) for mixer in alternation(c.mixer)]
        count = len(params) if isinstance(params, tuple) else jax.tree.leaves(params)[0].shape[0]
        unroll = c.unroll or count

        def apply(block: Block, method: str, own: Any, rng: Any, *given: Any) -> Any:
            params, number = own
            rngs = {} if rng is None else {"dropout": jax.random.fold_in(rng, number)}
            return block.apply({"params": tensor_parallel.gather_parameters(params)}, *given, rngs=rngs, method=method)

        if c.residual == "reversible":

            def mix(block: Block, own: Any, x: jax.Array, context: Context, rng: Any, cache: Any = None) -> Any:
                y, cache, aux = apply(block, "mix", own, rng, x.astype(DTYPES[c.dtype]), context, cache)
                return y, (cache, aux)

            def feed(block: Block, own: Any, x: jax.Array, context: Context, rng: Any) -> Any:
                # Asked for by itself, a branch would draw what the other one draws.
                rng = None if rng is None else jax.random.fold_in(rng, c.layers + 1)
                return apply(block, "feed", own, rng, x.astype(DTYPES[c.dtype]), context)

            pairs = [(functools.partial(mix, block), functools.partial(feed, block)) for block in blocks]
            x1, x2 = jnp.split(x, 2, axis=-1)
            if caches is None and context.capacity is None and not isinstance(params, tuple):
                streams, aux = through_reversibly(pairs, (x1, x2), params, count, (context, rng), first)
            else:
                layers = [coupled(pair, (context, rng)) for pair in pairs]
                streams, caches, aux = through(layers, (x1, x2), params, caches, count, unroll, first)
            return jnp.concatenate(streams, axis=-1), caches, aux

        def layer(block: Block, x: jax.Array, slices: tuple[Any, jax.Array, Any]) -> tuple[jax.Array, tuple[Any, Aux]]:
            *own, cache = slices
            x, cache, aux = apply(block, "__call__", own, rng, x, context, cache)
            return x, (cache, aux)

        layers = [functools.partial(layer, block) for block in blocks]
        policy = remat.policy(self.remat)
        if policy is not None or tensor_parallel.regathers:
            policy = tensor_parallel.remat_policy(policy)
            layers = [jax.checkpoint(one, policy=policy, prevent_cse=False) for one in layers]
            unroll = 1  # side by side, XLA would take what the forward pass has made for what is to be made again
        return through(layers, x, params, caches, count, unroll, first)

    def loss(self, batch: Mapping[str, jax.Array], deterministic: bool = True) -> LossOut:
        """The summed loss of a batch in nats, its weight, and what the layers report."""
        order = places = None
        ids = jnp.arange(batch["tokens"].size, dtype=jnp.int32).reshape(batch["tokens"].shape)
        batch = {**batch, "ids": ids}
        if self.model_parallel is not None:
            order, places = self.model_parallel.token_order(batch["tokens"].shape[1])
            batch = batch if places is None else {name: x[:, places] for name, x in batch.items()}
        tokens, ids = batch["tokens"], None if deterministic else batch["ids"]
        context = Context(batch["positions"], batch["segment_ids"], Causal(), deterministic, ids=ids, order=order)
        h, _, aux = self.hidden(tokens, context)
        rng = None if deterministic else self.make_rng("output")
        given = h, batch["labels"], batch["weights"]
        if self.model_parallel is None:
            h, labels, weights = (x.reshape(-1, *x.shape[2:]) for x in given)
            out = self.output.loss(self.table, h, labels, weights, rng)
        else:
            if places is not None and not self.output.merges(rng):
                given = tuple(
                    x[:, np.argsort(places)] for x in given
                )  # samples of each token's own are drawn by its place
            out = self.model_parallel.loss(self.output, self.table, *given, rng)
        return LossOut(out.sum, out.weight, {**aux, **out.aux})

    def rows(self, batch: Mapping[str, jax.Array]) -> dict[tuple[str, ...], Int[Array, " R"]]:
        """The rows that a loss of this batch with these rngs looks up, of each table of which it does not take all.

        Ids, repeated or not, by the table's path among the parameters, where `Rows` of them may stand in its place.
        """
        if self.config.tied:
            raise InputError(
                "optimizer.rows=True trains the rows that a batch looks up, and a table that is the head's too is looked up "
                "whole: set model.tied=False"
            )
        found = {("embed", "table"): batch["tokens"].reshape(-1)}
        labels = jnp.where(batch["weights"] != 0, batch["labels"], 0).reshape(-1)
        ids = self.output.rows(labels, self.make_rng("output"))
        return found if ids is None else {**found, ("head",): ids}

    def logits(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Float32 logits of every next token, for rows that hold one document each."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        h, _, _ = self.hidden(tokens, Context(positions, None, Causal()))
        return self.output.logits(self.table, h.reshape(-1, h.shape[-1])).reshape(*tokens.shape, -1)

    def prefill(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], capacity: int
    ) -> tuple[Float[Array, "B D"], Any]:
        """One full pass over prompts whose first `lengths` tokens count.

        Returns the hidden state of each row's last token, and caches with room for `capacity` tokens a row.
        """
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
        h, caches, _ = self.hidden(tokens, Context(positions, segment_ids, Causal(), capacity=capacity))
        return jnp.take_along_axis(h, (lengths - 1)[:, None, None], axis=1)[:, 0], caches

    def extend(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], caches: Any
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Hidden states of tokens that continue what the caches hold, and the longer caches."""
        h, caches, _ = self.hidden(tokens, Context(positions, None, Causal()), caches)
        return h, caches

    def sample(
        self, h: Float[Array, "B D"], rng: jax.Array, temperature: Any, top_k: int, top_p: Any
    ) -> Int[Array, " B"]:
        """The next token of each row, drawn by the output layer."""
        return self.output.sample(self.table, h, rng, temperature, top_k, top_p)

    def __call__(self, batch: Mapping[str, jax.Array]) -> LossOut:
        return self.loss(batch)


def apart(params: Any) -> Any:
    """The parameters with their stack of layers taken apart, where it is not yet: a tuple of each layer's own.

    For programs that read the parameters over and over: XLA copies a layer out of the stack whenever it is used, which
    is nothing beside the products of a batch, and three quarters of the time where one token is decoded. The layers run
    one by one; `unroll` has no say.
    """
    stack = params["layers"]
    if isinstance(stack, tuple):
        return params
    count = jax.tree.leaves(stack)[0].shape[0]
    return {**params, "layers": tuple(jax.tree.map(lambda leaf: leaf[i], stack) for i in range(count))}  # noqa: B023


def mixers_of(model: LM) -> list[Any]:
    """The mixers that the layers take in turn."""
    return [build(mixer, MIXERS, "mixer") for mixer in alternation(model.config.mixer)]


def masks_of(model: LM) -> list[Any]:
    """The masks of the mixers that the layers take in turn."""
    return [mixer.within(Causal()) for mixer in mixers_of(model)]


def axes_of(model: LM) -> Any:
    """A tree like the parameters' with each array's tuple of logical axis names; allocates nothing."""
    return axes_and_shapes(model)[0]


def axes_and_shapes(model: LM) -> tuple[Any, Any]:
    """Trees like the parameters': each array's tuple of logical axis names, and its shape; allocates nothing."""
    boxed = jax.eval_shape(lambda: model.init(jax.random.key(0), example_batch(1, 8)))["params"]
    names = lambda box: tuple(box.names) if isinstance(box, nn.LogicallyPartitioned) else None  # noqa: E731
    axes = jax.tree.map(names, boxed, is_leaf=lambda node: isinstance(node, nn.LogicallyPartitioned))
    return axes, nn.meta.unbox(boxed)


def example_batch(rows: int, length: int) -> dict[str, jax.Array]:
    """A batch of zeros with the shapes and dtypes of a real one."""
    ints = jnp.zeros((rows, length), jnp.int32)
    return {
        "tokens": ints,
        "labels": ints,
        "segment_ids": jnp.ones_like(ints),
        "positions": ints,
        "weights": jnp.ones((rows, length), jnp.float32),
    }
