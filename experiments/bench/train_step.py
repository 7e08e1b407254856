"""Measures the training step against the same model in torch eager and in plain Flax, interleaved in one process.

    python experiments/bench/train_step.py [--sizes=small,demo] [--rounds=7]

The model has GPT-2's shape (LayerNorm, learned positions, biases, tanh GELU, tied head), for which torch has fused kernels.
The step of hpnlp is the one that the training loop calls: segment ids, clipping by global norm, AdamW, metrics, the check for
non-finite gradients. All three start from the same weights; unless their first two losses agree, nothing is reported.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from absl import app, flags
from steps import FLAGS, first_losses, our_step, prepare, row_of, torch_step

from hpnlp import measure
from hpnlp.models.lm import LM, LMConfig
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer

VOCAB = 264
SIZES = {  # layers, D, heads, T, B
    "small": (4, 192, 6, 256, 16),
    "narrow": (2, 128, 4, 256, 8),
    "long": (2, 192, 6, 1024, 4),
    "wide": (2, 512, 8, 256, 8),
}

flags.DEFINE_list("sizes", list(SIZES), f"Sizes to measure, of {', '.join(SIZES)}.")


class TorchLM(torch.nn.Module):
    """The same model in torch; weights are copied from the Flax parameters."""

    def __init__(self, params: Any, heads: int) -> None:
        super().__init__()
        self.heads = heads
        flat = {
            jax.tree_util.keystr(path, simple=True, separator="_"): np.array(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        }
        self.layers = next(leaf.shape[0] for name, leaf in flat.items() if name.startswith("layers"))
        for name, leaf in flat.items():
            for index, array in enumerate(leaf) if name.startswith("layers") else [("", leaf)]:
                # torch's Linear holds [out, in]
                matrix = array.T.copy() if name.endswith("kernel") else array
                self.register_parameter(f"{name}{index}", torch.nn.Parameter(torch.from_numpy(np.array(matrix))))
        for index in range(self.layers):  # torch users fuse the three projections
            for kind in ("kernel", "bias"):
                projections = [self._parameters.pop(f"layers_attention_{n}_{kind}{index}") for n in "qkv"]
                self.register_parameter(
                    f"qkv_{kind}{index}", torch.nn.Parameter(torch.cat([p.data for p in projections]))
                )

    def norm(self, x: torch.Tensor, name: str, layer: int) -> torch.Tensor:
        p = self._parameters
        return F.layer_norm(x, x.shape[-1:], p[f"layers_{name}_scale{layer}"], p[f"layers_{name}_bias{layer}"])

    def linear(self, x: torch.Tensor, name: str, layer: int) -> torch.Tensor:
        p = self._parameters
        return F.linear(x, p[f"layers_{name}_kernel{layer}"], p[f"layers_{name}_bias{layer}"])

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        p = self._parameters
        rows, length = tokens.shape
        x = F.embedding(tokens, p["embed_table"]) + p["positions_table"][:length]
        dim = x.shape[-1]
        for i in range(self.layers):
            qkv = F.linear(self.norm(x, "mix_norm", i), p[f"qkv_kernel{i}"], p[f"qkv_bias{i}"])
            q, k, v = (y.view(rows, length, self.heads, -1).transpose(1, 2) for y in qkv.chunk(3, dim=-1))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.linear(o.transpose(1, 2).reshape(rows, length, dim), "attention_out", i)
            hidden = self.linear(self.norm(x, "feed_norm", i), "mlp_up", i)
            x = x + self.linear(F.gelu(hidden, approximate="tanh"), "mlp_down", i)
        x = F.layer_norm(x, (dim,), p["final_norm_scale"], p["final_norm_bias"])
        return F.cross_entropy(F.linear(x, p["embed_table"]).view(-1, VOCAB), labels.reshape(-1))


class FlaxLM(nn.Module):
    """The same model as most would write it: layers of Flax, attention of jax.nn, loss of optax."""

    layers: int
    dim: int
    heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        rows, length = tokens.shape
        embed = nn.Embed(VOCAB, self.dim, name="embed")
        x = embed(tokens) + nn.Embed(length, self.dim, name="positions")(jnp.arange(length))[None]
        for i in range(self.layers):
            h = nn.LayerNorm(epsilon=1e-5, name=f"mix_norm{i}")(x)
            q, k, v = (
                nn.Dense(self.dim, name=f"{n}{i}")(h).reshape(rows, length, self.heads, -1) for n in ("q", "k", "v")
            )
            o = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(rows, length, self.dim)
            x = x + nn.Dense(self.dim, name=f"out{i}")(o)
            h = nn.LayerNorm(epsilon=1e-5, name=f"feed_norm{i}")(x)
            x = x + nn.Dense(self.dim, name=f"down{i}")(nn.gelu(nn.Dense(4 * self.dim, name=f"up{i}")(h)))
        logits = embed.attend(nn.LayerNorm(epsilon=1e-5, name="final_norm")(x))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def flax_params(params: Any) -> Any:
    """The parameters of `LM` under the names of FlaxLM."""
    layers, out = params["layers"], {}
    for i in range(layers["mix_norm"]["scale"].shape[0]):
        layer = jax.tree.map(lambda leaf: leaf[i], layers)  # noqa: B023
        out |= {f"{name}{i}": layer[name] for name in ("mix_norm", "feed_norm")}
        out |= {f"{name}{i}": layer["attention"][name] for name in ("q", "k", "v", "out")}
        out |= {f"{name}{i}": layer["mlp"][name] for name in ("up", "down")}
    embeds = {name: {"embedding": params[name]["table"]} for name in ("embed", "positions")}
    return out | embeds | {"final_norm": params["final_norm"]}


def bench(size: str, rounds: int) -> dict[str, Any]:
    layers, dim, heads, length, batch = SIZES[size]
    config = LMConfig(
        dim=dim,
        heads=heads,
        layers=layers,
        vocab=VOCAB,
        max_len=length,
        mlp="gelu",
        norm="layer",
        norm_eps=1e-5,
        position="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup=0, b2=0.999, weight_decay=0.1)
    trainer = make_trainer(LM(config), optimizer, Plan(), steps=1000)
    key = jax.random.key(0)
    state = trainer.init(key)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (batch, length + 1))
    integers = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "segment_ids": 1, "positions": np.arange(length)}
    data = {
        name: np.ascontiguousarray(np.broadcast_to(values, (batch, length)), np.int32)
        for name, values in integers.items()
    }
    data["weights"] = np.ones((batch, length), np.float32)
    data = jax.device_put(data, trainer.batch_sharding)
    tokens, labels = (torch.from_numpy(np.asarray(data[name], np.int64)) for name in ("tokens", "labels"))
    torch_model = TorchLM(state.params, heads)

    flax_model, tx = FlaxLM(layers, dim, heads), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    params = jax.tree.map(jnp.copy, flax_params(state.params))

    @jax.jit
    def flax_step(params: Any, opt_state: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: flax_model.apply({"params": p}, data["tokens"], data["labels"]))(
            params
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    held = [(params, tx.init(params))]

    def plain_flax() -> jax.Array:
        params, opt_state, loss = flax_step(*held[0])
        held[0] = params, opt_state
        return loss

    steps = {
        "ours": our_step(trainer, state, data, key),
        "torch": torch_step(torch_model, tokens, labels),
        "flax": plain_flax,
    }
    losses = first_losses(size, steps)
    times = measure.timeit(steps, rounds=rounds, warmup=2)
    shape = {"size": size, "layers": layers, "dim": dim, "heads": heads, "length": length, "batch": batch}
    return row_of(shape, losses, times, trainer.flops(batch, length))


def main(_: Any) -> None:
    prepare()
    rows = [bench(size, FLAGS.rounds) for size in FLAGS.sizes]
    print(measure.write_result("train_step", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
