"""Measures the training step of an encoder against torch.nn.TransformerEncoder in eager mode, interleaved in one process.

    python experiments/bench/encoder.py [--sizes=base] [--rounds=7]

The model has BERT's layers (norms after additions, LayerNorm, learned positions, biases, GELU), and a classifier of the mean of
the hidden states. Both start from the same weights; unless their first two losses agree, nothing is reported.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from absl import app, flags
from steps import FLAGS, first_losses, our_step, prepare, row_of, torch_step

from hpnlp import measure
from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer

VOCAB, CLASSES = 8192, 32
SIZES = {  # layers, D, heads, T, B
    "base": (6, 384, 6, 256, 16),
    "tiny": (2, 32, 2, 16, 4),
}

flags.DEFINE_list("sizes", ["base"], f"Sizes to measure, of {', '.join(SIZES)}.")


class TorchEncoder(torch.nn.Module):
    """The same model from torch's layers; weights are copied from the Flax parameters."""

    def __init__(self, params: Any, heads: int) -> None:
        super().__init__()
        layers, dim = params["layers"]["mix_norm"]["scale"].shape
        width = params["layers"]["mlp"]["up"]["kernel"].shape[-1]
        layer = torch.nn.TransformerEncoderLayer(dim, heads, width, dropout=0.0, activation="gelu", batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.embed = torch.nn.Embedding(VOCAB, dim)
        self.positions = torch.nn.Embedding(*params["positions"]["table"].shape)
        self.head = torch.nn.Linear(dim, CLASSES)
        values = {
            "embed.weight": params["embed"]["table"],
            "positions.weight": params["positions"]["table"],
            "head.weight": params["head"],
            "head.bias": params["output"]["bias"],
        }
        for i in range(layers):
            layer = jax.tree.map(lambda leaf, i=i: np.asarray(leaf[i]), params["layers"])
            values |= layer_values(f"layers.layers.{i}.", layer)
        self.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in values.items()})

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        h = self.layers(x).mean(dim=1)
        return torch.nn.functional.cross_entropy(self.head(h), labels)


def layer_values(name: str, layer: Any) -> dict[str, np.ndarray]:
    """The parameters of torch.nn.TransformerEncoderLayer, which concatenates the projections. name: of the layer."""
    attention, mlp = layer["attention"], layer["mlp"]
    dense = {"self_attn.out_proj": attention["out"], "linear1": mlp["up"], "linear2": mlp["down"]}
    norms = {"norm1": layer["mix_norm"], "norm2": layer["feed_norm"]}
    return {
        f"{name}self_attn.in_proj_weight": np.concatenate([attention[n]["kernel"].T for n in "qkv"]),
        f"{name}self_attn.in_proj_bias": np.concatenate([attention[n]["bias"] for n in "qkv"]),
        **{f"{name}{module}.weight": values["kernel"].T for module, values in dense.items()},
        **{f"{name}{module}.weight": values["scale"] for module, values in norms.items()},
        **{f"{name}{module}.bias": values["bias"] for module, values in (dense | norms).items()},
    }


def bench(size: str, rounds: int) -> dict[str, Any]:
    layers, dim, heads, length, batch = SIZES[size]
    config = EncoderConfig(
        dim=dim,
        heads=heads,
        layers=layers,
        vocab=VOCAB,
        max_len=length,
        mlp="gelu_exact",
        norm="layer",
        norm_eps=1e-5,
        norm_placement="post",
        position="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        pooling="mean",
        classes=CLASSES,
    )
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup=0, b2=0.999, weight_decay=0.1)
    trainer = make_trainer(Encoder(config), optimizer, Plan(), steps=1000)
    key, rng = jax.random.key(0), np.random.default_rng(0)
    state = trainer.init(key)
    tokens, labels = rng.integers(0, VOCAB, (batch, length)), rng.integers(0, CLASSES, batch)
    data = jax.device_put(
        {
            "tokens": tokens.astype(np.int32),
            "segment_ids": np.ones((batch, length), np.int32),
            "positions": np.tile(np.arange(length, dtype=np.int32), (batch, 1)),
            "labels": labels.astype(np.int32),
            "weights": np.ones(batch, np.float32),
        },
        trainer.batch_sharding,
    )
    torch_model = TorchEncoder(state.params, heads)
    steps = {
        "ours": our_step(trainer, state, data, key),
        "torch": torch_step(torch_model, torch.from_numpy(tokens), torch.from_numpy(labels)),
    }
    losses = first_losses(size, steps)
    times = measure.timeit(steps, rounds=rounds, warmup=2)
    shape = {"size": size, "layers": layers, "dim": dim, "heads": heads, "length": length, "batch": batch}
    return row_of(shape, losses, times, trainer.flops(batch, length))


def main(_: Any) -> None:
    prepare()
    print(measure.write_result("encoder", [bench(size, FLAGS.rounds) for size in FLAGS.sizes], FLAGS.out))


if __name__ == "__main__":
    app.run(main)
